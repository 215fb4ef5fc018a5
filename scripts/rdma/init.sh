#!/bin/busybox sh
# The guest's first and only program (see guest.sh): modules, the shared files, Soft-RoCE, the command, power off.
/bin/busybox --install -s /bin
export PATH=/bin

die() {
    echo "guest: $*"
    poweroff -f
}

mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
for module in /modules/*; do insmod "$module" || die "no $module"; done

share="trans=virtio,version=9p2000.L,msize=512000"
# The files do not change while the guest runs, so what was read once need not be asked for again.
mount -t 9p -o "$share,ro,cache=loose" root /host || die "the machine's files cannot be mounted"
cd /host || die "no /host"
mount -t proc none proc
mount -t sysfs none sys
mount -t configfs none sys/kernel/config
mount -t devtmpfs none dev
for directory in tmp run var/tmp; do
    [ ! -d "$directory" ] || mount -t tmpfs none "$directory"
done
mkdir -p dev/shm dev/pts run/exchange
mount -t tmpfs none dev/shm
mount -t devpts none dev/pts
mount -t 9p -o "$share" exchange run/exchange || die "no place for the result"
date -s "@$(cat run/exchange/time)" >/dev/null

# The checkout may lie where the guest has files of its own.
checkout="/host$(cat run/exchange/checkout)"
[ -d "$checkout" ] || mkdir -p "$checkout" || die "no $checkout"
mount -t 9p -o "$share,ro,cache=loose" checkout "$checkout" || die "the checkout cannot be mounted"

chroot /host /bin/sh -e <<'SETUP' || die "no RDMA device"
PATH=/usr/sbin:/usr/bin:/sbin:/bin
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 10.77.0.1/24 dev v0
ip link set v0 up
ip link set v1 up
rdma link add rxe0 type rxe netdev v0
SETUP

chroot /host /bin/sh /run/exchange/command
echo $? >/host/run/exchange/status
sync
poweroff -f
