#!/usr/bin/env bash
# Runs a command in an emulated machine that has an RDMA device: Soft-RoCE on one end of a veth pair.
#
#   scripts/rdma/guest.sh COMMAND...    its output on stdout, its exit code
#
# The machine sees this one's files, read-only, and this checkout at the same path; /tmp, /run and /dev/shm are its own.
# It is QEMU with Debian's kernel, both installed or unpacked when missing, and needs neither KVM nor root, but for the
# installation. BATON_RDMA_SECONDS limits it (default 590), BATON_RDMA_MEMORY is its memory (default 2G), BATON_RDMA_NICE
# its niceness (default 0), BATON_RDMA_CPU its processor (default Nehalem).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CHECKOUT="$(cd "$HERE/../.." && pwd)"
WORK="$CHECKOUT/build/rdma"
SECONDS_LIMIT="${BATON_RDMA_SECONDS:-590}"
MEMORY="${BATON_RDMA_MEMORY:-2G}"
PATH="$PATH:/usr/sbin:/sbin"

# What the guest's modules are for: the shared files, the veth pair, Soft-RoCE, and verbs for processes.
MODULES=(virtio_pci 9pnet_virtio 9p veth crc32_generic rdma_rxe ib_uverbs rdma_ucm)

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

[ "$#" -gt 0 ] || fail "usage: $0 COMMAND..."
mkdir -p "$WORK"

# --- what is needed on this machine ---------------------------------------------------------------------------------
as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

missing_packages() {
    command -v qemu-system-x86_64 >/dev/null || echo qemu-system-x86
    busybox --list 2>/dev/null | grep -qx insmod && file_is_static "$(command -v busybox)" || echo busybox-static
    command -v rdma >/dev/null || echo iproute2
    command -v cpio >/dev/null || echo cpio
    command -v depmod >/dev/null || echo kmod
    command -v xz >/dev/null || echo xz-utils
    # libfabric brings libibverbs, but not the driver that speaks to Soft-RoCE.
    compgen -G '/usr/lib/*/libibverbs/librxe-*' >/dev/null || echo ibverbs-providers
}

file_is_static() { ! ldd "$1" >/dev/null 2>&1; }

read -r -a MISSING <<<"$(missing_packages | tr '\n' ' ')"
if [ "${#MISSING[@]}" -gt 0 ]; then
    command -v apt-get >/dev/null || fail "please install by hand, as there is no apt-get here: ${MISSING[*]}"
    say "installing system packages: ${MISSING[*]}"
    as_root apt-get update -qq >&2
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${MISSING[@]}" >&2
fi

# --- kernel ---------------------------------------------------------------------------------------------------------
# Unpacked from the package and not installed: this machine goes on booting what it boots. (The cloud flavour of the
# kernel has no Soft-RoCE.)
if [ ! -f "$WORK/release" ]; then
    package="$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }')"
    if [ -z "$package" ]; then
        as_root apt-get update -qq >&2
        package="$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')"
    fi
    [ -n "$package" ] || fail "apt knows no linux-image-amd64"
    say "unpacking the kernel of $package (70 MB)"
    release="${package#linux-image-}"
    rm -rf "$WORK/kernel"
    mkdir -p "$WORK/kernel"
    (cd "$WORK/kernel" && apt-get download -q "$package" >&2)
    dpkg-deb -x "$WORK"/kernel/*.deb "$WORK/kernel"
    depmod -b "$WORK/kernel" "$release"
    rm -rf "$WORK/modules"
    mkdir "$WORK/modules"
    number=100 # their names tell the order in which to insert them
    while read -r module; do
        case "$module" in
        *.xz) xz -dc "$module" >"$WORK/modules/$number-$(basename "$module" .xz)" ;;
        *) cp "$module" "$WORK/modules/$number-$(basename "$module")" ;;
        esac
        number=$((number + 1))
    done < <(for module in "${MODULES[@]}"; do
        modprobe -d "$WORK/kernel" -S "$release" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
    cp "$WORK/kernel/boot/vmlinuz-$release" "$WORK/vmlinuz"
    rm -rf "$WORK/kernel"
    printf '%s\n' "$release" >"$WORK/release"
fi

# --- initramfs ------------------------------------------------------------------------------------------------------
ROOT="$WORK/initramfs"
rm -rf "$ROOT"
mkdir -p "$ROOT"/{bin,dev,proc,sys,host}
cp "$(command -v busybox)" "$ROOT/bin/busybox"
cp -r "$WORK/modules" "$ROOT/modules"
cp "$HERE/init.sh" "$ROOT/init"
chmod +x "$ROOT/init"
(cd "$ROOT" && find . | cpio -o -H newc --quiet) >"$WORK/initramfs.cpio"

# --- run ------------------------------------------------------------------------------------------------------------
EXCHANGE="$(mktemp -d)"
trap 'rm -rf "$EXCHANGE"' EXIT
quoted() { printf "'%s'" "${1//\'/\'\\\'\'}"; }
printf '%s' "$CHECKOUT" >"$EXCHANGE/checkout"
{
    printf 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n'
    printf 'cd %s &&' "$(quoted "$CHECKOUT")"
    for word in "$@"; do printf ' %s' "$(quoted "$word")"; done
    printf '\n'
} >"$EXCHANGE/command"
date +%s >"$EXCHANGE/time"

# Nehalem is the least that numpy's wheels run on; wider vectors are only slower to emulate.
set +e
timeout --foreground "$SECONDS_LIMIT" nice -n "${BATON_RDMA_NICE:-0}" qemu-system-x86_64 \
    -machine pc -accel tcg,tb-size=256 -cpu "${BATON_RDMA_CPU:-Nehalem}" -smp 1 -m "$MEMORY" \
    -nodefaults -no-user-config -no-reboot -display none -serial stdio -monitor none \
    -kernel "$WORK/vmlinuz" -initrd "$WORK/initramfs.cpio" \
    -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nowatchdog rcupdate.rcu_cpu_stall_suppress=1" \
    -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
    -virtfs "local,path=$CHECKOUT,mount_tag=checkout,security_model=none,readonly=on,multidevs=remap" \
    -virtfs "local,path=$EXCHANGE,mount_tag=exchange,security_model=none" \
    </dev/null | sed -u 's/\r$//'
ended="${PIPESTATUS[0]}"
set -e
[ "$ended" -ne 124 ] || fail "the guest was stopped after $SECONDS_LIMIT s"
[ "$ended" -eq 0 ] || fail "qemu ended with $ended"
[ -f "$EXCHANGE/status" ] || fail "the guest ended without a result"
exit "$(cat "$EXCHANGE/status")"
