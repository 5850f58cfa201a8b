# Boot systemd as the first process of namespaces of its own, on a copy of this system that is gone
# afterwards: nothing outside is changed. Run by machine.py, in a mount namespace of its own:
#     machine.sh DIRECTORY PYTHON-PREFIX PACKAGES SMGD UNITS
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root" "$1/cgroup"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
export R="$1/root"

mkdir -p "$R/opt/python" "$R/opt/smgd/bin" "$R/opt/smgd/packages" "$R/opt/units"
mount --bind "$2" "$R/opt/python"
mount --bind "$3" "$R/opt/smgd/packages"
mkdir "$R/opt/smgd/source"
cp -r "$4" "$R/opt/smgd/source/smgd"
cp -r "$5/." "$R/opt/units"
chmod -R go+rX "$R/opt/smgd/source" "$R/opt/units"
# The interpreter's own library, where it was found by a path that is hidden now.
mkdir -p "$R/etc/ld.so.conf.d"
echo /opt/python/lib > "$R/etc/ld.so.conf.d/000-python.conf"
# These would reach beyond the namespaces, or are slow and of no use here.
for unit in systemd-sysctl systemd-modules-load systemd-udevd systemd-udev-trigger \
    systemd-remount-fs systemd-networkd systemd-resolved systemd-timesyncd; do
    ln -sf /dev/null "$R/etc/systemd/system/$unit.service"
done
for name in run tmp; do mount -t tmpfs -o mode=1777 tmpfs "$R/$name"; done

# A control group of our own below the one that we are in.
mount -t cgroup2 cgroup2 "$1/cgroup"
above="$1/cgroup$(sed -n "s/^0:://p" /proc/self/cgroup)"
group="$above/smgd-test-$$"
mkdir "$group"
echo $$ > "$group/cgroup.procs"

unshare --mount --propagation private --cgroup --pid --net --ipc --uts --fork --kill-child \
    bash -e -c '
    mount -t proc proc "$R/proc"
    mount -t sysfs -o ro sysfs "$R/sys"
    mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 tmpfs "$R/dev"
    for name in null zero full random urandom tty; do
        touch "$R/dev/$name"
        mount --bind "/dev/$name" "$R/dev/$name"
    done
    mkdir "$R/dev/pts" "$R/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$R/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
    ln -s pts/ptmx "$R/dev/ptmx"
    ln -s /proc/self/fd "$R/dev/fd"
    chroot "$R" ldconfig
    cd "$R"
    mkdir -p old
    pivot_root . old
    umount -l /old
    exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --unit=basic.target --log-target=journal
' </dev/null >/dev/null 2>&1 || true

echo $$ > "$above/cgroup.procs"
find "$group" -depth -type d -exec rmdir {} +
