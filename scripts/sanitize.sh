#!/usr/bin/env bash
# Builds the native cores with sanitizers, beside those that run, and puts them through their tests.
#
#   scripts/sanitize.sh address|thread             a minute or so: stress, and the core's tests in Python
#   scripts/sanitize.sh address|thread SECONDS     stress alone, for so long over each transport
#
# address includes undefined behaviour and leaks. libfabric itself is not instrumented. The stress is
# tests/native/fabric_stress.cpp, and group_stress.cpp for the collectives of an engine's ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

KIND="${1:-}"
SECONDS_EACH="${2:-}"
case "$KIND" in
address)
    RUNTIME=libasan.so
    TESTS=(tests/unit/test_fabric_{auto,devices,domains,engine,errors,faults,life,local,placement,processes,transfers}.py)
    ;;
thread)
    # What is left to Python here are two processes and misuse; the threads are the stress's. Not over shm: that of
    # libfabric 1.17 spins for ever in a write if its peer was stopped while it held their lock, which is likely here.
    export BATON_TEST_FABRICS=tcp,local
    RUNTIME=libtsan.so
    TESTS=(tests/unit/test_fabric_{engine,errors,local,processes}.py)
    ;;
*)
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
    ;;
esac

BUILD="build/sanitize-$KIND"
REPORTS="$BUILD/reports"
NATIVE="$BUILD/libs/baton_fabric/native"
PATH="$PWD/.venv/bin:$PATH"
say() { printf '\033[1m==>\033[0m %s\n' "$*"; }

say "building the native core with the $KIND sanitizer"
cmake -S . -B "$BUILD" -G Ninja -DBATON_SANITIZE="$KIND" -DCMAKE_BUILD_TYPE=None \
    -DPython_EXECUTABLE="$PWD/.venv/bin/python" >"$BUILD.log" 2>&1 || { cat "$BUILD.log" >&2 && exit 1; }
ninja -C "$BUILD" --quiet fabric_stress group_stress _native

# Reports go to files, so that those of child processes are seen too.
rm -rf "$REPORTS" && mkdir -p "$REPORTS"
LOG="log_path=$PWD/$REPORTS/report"
SUPPRESSIONS="suppressions=$PWD/scripts/sanitized"
export ASAN_OPTIONS="$LOG:fast_unwind_on_malloc=0" UBSAN_OPTIONS="$LOG:print_stacktrace=1"
export LSAN_OPTIONS="$SUPPRESSIONS/leaks.supp:print_suppressions=0"
export TSAN_OPTIONS="$LOG:$SUPPRESSIONS/races.supp:history_size=4"

status=0
for transport in local tcp auto; do
    say "stress over $transport"
    "$NATIVE/fabric_stress" "$transport" "${SECONDS_EACH:-6}" || status=1
done

say "stress of the ranks' collectives"
"$BUILD/libs/baton_engine/native/group_stress" "${SECONDS_EACH:-6}" || status=1

if [ -z "$SECONDS_EACH" ]; then
    say "${TESTS[*]}"
    # The interpreter itself loses memory at its end. Exceptions are found only by a sanitizer that is loaded after the
    # C++ library that throws them.
    preload="$(g++ -print-file-name="$RUNTIME") $(g++ -print-file-name=libstdc++.so.6)"
    BATON_NATIVE="$(echo "$PWD/$NATIVE"/_native.*.so)" PYTHONPATH="$PWD/scripts/sanitized" PYTHONMALLOC=malloc \
        ASAN_OPTIONS="$LOG:detect_leaks=0" LD_PRELOAD="$preload" \
        .venv/bin/python -m pytest -q -p no:cacheprovider "${TESTS[@]}" || status=1
fi

if compgen -G "$REPORTS/*" >/dev/null; then
    cat "$REPORTS"/* >&2
    status=1
fi
exit "$status"
