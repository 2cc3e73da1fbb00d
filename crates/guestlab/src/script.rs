//! The guest's script, which is its first process.
//!
//! It reports to the host in lines that begin with [`MARK`]; everything else on the console is for people. The words
//! that it quotes are ours: paths without blanks, and numbers.

use crate::grow;
use crate::inspect;
use crate::options::{GuestOptions, GuestWork, MeasureJob};
use crate::tools::GuestTools;
use std::fmt::Write;
use std::path::Path;

/// Begins each line that the host reads.
pub(crate) const MARK: &str = "@ringdisk ";

/// Parameters for the guest's kernel. If a loaded host leaves the guest no time, that is no fault of the disk, and the
/// guest's kernel should not report it.
pub(crate) const QUIET_WATCHDOGS: [&str; 2] = ["rcupdate.rcu_cpu_stall_suppress=1", "nowatchdog"];

/// Paths in the guest.
pub(crate) struct Places<'a> {
    /// An empty directory in the guest's root, for file systems of its own.
    pub(crate) scratch: &'a str,
    /// Modules to load before the disks appear, in order, as patterns of the shell.
    pub(crate) modules: &'a str,
}

/// Returns the whole script.
pub(crate) fn init(options: &GuestOptions, tools: &GuestTools, places: &Places<'_>) -> String {
    let busybox = tools.busybox.display();
    let mut script = format!("#!{busybox} sh\n");
    let mut set = |name: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(script, "{name}='{value}'");
    };
    set("bb", &busybox);
    set("mke2fs", &tools.mke2fs.display());
    set("fio", &tools.fio.display());
    set("mark", &MARK.trim_end());
    set("scratch", &places.scratch);
    set("modules", &places.modules);
    let mut disks = DISK_NAMES.get(..options.sockets.len()).unwrap_or(&DISK_NAMES).to_vec();
    disks.extend(options.nbd.as_ref().map(|_| NBD_DISK));
    set("nbd_client", &tools.nbd_client.as_deref().unwrap_or_else(|| Path::new("")).display());
    set("nbd_port", &options.nbd.as_ref().map_or(0, |nbd| nbd.port));
    set("nbd_export", &options.nbd.as_ref().map_or("", |nbd| nbd.export.as_str()));
    set("disks", &disks.join(" "));
    set("worked", &disks.get(..disks.len().saturating_sub(options.only_measured)).unwrap_or_default().join(" "));
    let (work, measure_seconds, measure_mib, fio_mib) = match options.work {
        GuestWork::Fill { measure_seconds, measure_mib, fio_mib } => ("fill", measure_seconds, measure_mib, fio_mib),
        GuestWork::CheckAgain => ("check", 0, 0, 0),
        GuestWork::Inspect { .. } => ("inspect", 0, 0, 0),
        GuestWork::MakeTree { .. } => ("make_tree", 0, 0, 0),
        GuestWork::CopyTree => ("copy_tree", 0, 0, 0),
        GuestWork::Grow { .. } => ("grow_under_load", 0, 0, 0),
        GuestWork::WorkUntilGrown { fio_mib } => ("work_until_grown", 0, 0, fio_mib),
        GuestWork::Measure { seconds, mib, .. } => (":", seconds, mib, 0),
    };
    set("work", &work);
    set("measure_seconds", &measure_seconds);
    set("measure_mib", &measure_mib);
    set("fio_mib", &fio_mib);
    let jobs = match &options.work {
        GuestWork::Measure { jobs, .. } => jobs.clone(),
        _ => MeasureJob::usual(),
    };
    let jobs = jobs.iter().map(|MeasureJob { rw, block_kib, depth }| format!("{rw}:{block_kib}k:{depth}"));
    set("jobs", &jobs.collect::<Vec<_>>().join(" "));
    if let GuestWork::MakeTree { mib } = options.work {
        set("tree_mib", &mib);
    }
    let mut functions = "";
    if let GuestWork::Grow { until_bytes } = options.work {
        set("until_sectors", &(until_bytes / 512));
        functions = grow::FUNCTIONS;
    }
    if let GuestWork::Inspect { rebinds, toggles, suspends, resets } = options.work {
        set("rebinds", &rebinds);
        set("toggles", &toggles);
        set("suspends", &suspends);
        set("resets", &resets);
        functions = inspect::FUNCTIONS;
    }
    script.push_str(functions);
    script.push_str(BODY);
    script
}

/// The disk of an NBD server.
const NBD_DISK: &str = "nbd0";

/// The most disks of a guest.
pub(crate) const DISK_NAMES: [&str; 8] = ["vda", "vdb", "vdc", "vdd", "vde", "vdf", "vdg", "vdh"];

/// Every busybox program is called by the path of busybox. Otherwise its shell runs its own programs through
/// `/proc/self/exe`. In a User Mode Linux that still sees the host's `/proc`, that is the kernel itself.
const BODY: &str = r#"
say() { echo "$mark $*"; }
fail() {
    $bb dmesg | $bb tail -n 15
    say "failed $*"
    $bb poweroff -f
    $bb sleep 1000
}

$bb mount -t proc proc /proc || fail "cannot mount /proc"
$bb mount -t sysfs sysfs /sys || fail "cannot mount /sys"
# Some kernels mount it themselves.
$bb grep -q ' /dev devtmpfs ' /proc/mounts || $bb mount -t devtmpfs devtmpfs /dev || fail "cannot mount /dev"
$bb mount -t tmpfs tmpfs $scratch || fail "cannot mount a tmpfs"

release=$($bb uname -r)
for module in $(eval echo "$modules"); do
    case $module in
        *.xz) $bb xz -dc "$module" > $scratch/module.ko; $bb insmod $scratch/module.ko || fail "cannot load $module" ;;
        *) $bb insmod "$module" || fail "cannot load $module" ;;
    esac
done
say "kernel release=$release cpus=$($bb nproc)"

# The host is 10.0.2.2 in a network in user space.
if [ $nbd_port -ne 0 ]; then
    $bb ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up || fail "there is no network"
    $nbd_client -N $nbd_export 10.0.2.2 $nbd_port /dev/nbd0 || fail "nbd-client cannot connect"
fi

for disk in $disks; do
    waited=0
    until [ -b /dev/$disk ]; do
        [ $waited -lt 100 ] || fail "the disk $disk did not appear"
        waited=$((waited + 1))
        $bb sleep 0.1
    done
    queue=/sys/block/$disk/queue
    say "disk name=$disk sectors=$($bb cat /sys/block/$disk/size) queues=$($bb ls /sys/block/$disk/mq | $bb wc -l)" \
        "block=$($bb cat $queue/logical_block_size) discard=$($bb cat $queue/discard_max_bytes)" \
        "zeroes=$($bb cat $queue/write_zeroes_max_bytes) cache=$($bb cat $queue/write_cache | $bb tr ' ' -)" \
        "packed=$($bb cut -c35 /sys/block/$disk/device/features)" \
        "serial=$($bb cat /sys/block/$disk/serial)"
done

# How often the queues of all disks have interrupted any processor.
interrupts() {
    $bb awk '/req/ { for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) sum += $i } END { print sum + 0 }' /proc/interrupts
}

# Rates of the bare disk; what was never written is written first.
measure() {
    on="--filename=/dev/$1 --thread --ioengine=libaio --direct=1 --size=${measure_mib}M --minimal"
    $fio --name=fill $on --rw=write --bs=1M --iodepth=4 > /dev/null || fail "$1: fio cannot fill it"
    for cell in $jobs; do
        rest=${cell#*:}
        say "step measuring $1: ${cell%%:*}"
        before=$(interrupts)
        $fio --name=${cell%%:*} $on --rw=${cell%%:*} --bs=${rest%%:*} --iodepth=${rest##*:} \
            --time_based --runtime=$measure_seconds > $scratch/$1.measured || fail "$1: fio failed on ${cell%%:*}"
        say "measured name=$1 interrupts=$(($(interrupts) - before)) terse=$($bb tail -n 1 $scratch/$1.measured | $bb tr ' ' -)"
    done
}

# Reads everything back from the disk, not from memory.
check_files() {
    echo 3 > /proc/sys/vm/drop_caches
    (cd $scratch/$1/data && $bb sha256sum -c -s ../sums) || fail "$1: wrong data in a file ($2)"
    say "checked name=$1 files=$($bb wc -l < $scratch/$1/sums) kib=$($bb du -sk $scratch/$1/data | $bb cut -f1)"
}

mount_disk() { $bb mount -t ext4 /dev/$1 $scratch/$1 || fail "$1: cannot mount it"; }
unmount_disk() { $bb umount $scratch/$1 || fail "$1: cannot unmount it"; }

write_files() {
    source=$scratch/$1.source
    $bb mkdir -p $source/small
    number=0
    while [ $number -lt 21 ]; do
        $bb dd if=/dev/urandom of=$source/file$number bs=64k count=$(((number % 7 + 1) * 3)) 2> /dev/null
        number=$((number + 1))
    done
    while [ $number -lt 200 ]; do
        echo "$1 $number" > $source/small/file$number
        number=$((number + 1))
    done
    (cd $source && $bb sha256sum file* small/*) > $scratch/$1.sums
    $bb cp -r $source $scratch/$1/data || fail "$1: cannot write files"
    $bb cp $scratch/$1.sums $scratch/$1/sums || fail "$1: cannot write files"
    $bb rm -r $source
    $bb sync
}

# Direct and cached writers side by side, each with its own file, each block read back and checked.
verify_with_fio() {
    $bb mkdir $scratch/$1/fio
    $fio --directory=$scratch/$1/fio --thread --group_reporting --minimal --size=${fio_mib}M --numjobs=2 --end_fsync=1 \
        --verify=crc32c --verify_fatal=1 --do_verify=1 \
        --name=direct --rw=randwrite --bsrange=4k-64k --direct=1 --ioengine=libaio --iodepth=16 \
        --name=cached --rw=randwrite --bsrange=1k-32k --ioengine=psync --fsync=100 \
        > $scratch/$1.fio 2>&1 || { $bb cat $scratch/$1.fio; fail "$1: fio found wrong data or errors"; }
    say "fio name=$1 terse=$($bb tail -n 1 $scratch/$1.fio | $bb tr ' ' -)"
    $bb rm -r $scratch/$1/fio
}

fill() {
    say "step making a file system on $1"
    $mke2fs -q -F -t ext4 /dev/$1 || fail "$1: mke2fs failed"
    mount_disk $1
    say "step writing files on $1"
    write_files $1
    check_files $1 "first reading"
    say "step writing and verifying with fio on $1"
    verify_with_fio $1
    if [ "$($bb cat /sys/block/$1/queue/discard_max_bytes)" -gt 0 ]; then
        trimmed=$($bb fstrim -v $scratch/$1 | $bb tr -dc ' 0-9' | $bb awk '{print $NF}')
        [ "${trimmed:-0}" -gt 0 ] || fail "$1: fstrim failed"
        say "trimmed name=$1 bytes=$trimmed"
    fi
    unmount_disk $1
    mount_disk $1
    check_files $1 "after trimming and mounting again"
    unmount_disk $1
    say "fact name=$1 sectors=$($bb cat /sys/block/$1/size)"
}

# A MiB a directory: half of it is one file.
make_tree() {
    say "step making a tree on $1"
    $mke2fs -q -F -t ext4 /dev/$1 || fail "$1: mke2fs failed"
    mount_disk $1
    number=0
    while [ $number -lt $tree_mib ]; do
        directory=$scratch/$1/tree/$number
        $bb mkdir -p $directory
        $bb dd if=/dev/urandom of=$directory/large bs=512k count=1 2> /dev/null || fail "$1: cannot write files"
        for length in 256 128 64 32 16 8 4 4; do
            $bb dd if=/dev/urandom of=$directory/$length-$number bs=${length}k count=1 2> /dev/null
        done
        number=$((number + 1))
    done
    $bb sync
    unmount_disk $1
}

copy_tree() {
    mount_disk $1
    $bb sync
    echo 3 > /proc/sys/vm/drop_caches
    say "step copying a tree on $1"
    begun=$($bb cut -d' ' -f1 /proc/uptime)
    $bb cp -r $scratch/$1/tree $scratch/$1/copy || fail "$1: cannot copy the tree"
    $bb sync
    ended=$($bb cut -d' ' -f1 /proc/uptime)
    say "fact name=$1 copy-ms=$(echo "$begun $ended" | $bb awk '{ print int(($2 - $1) * 1000) }')"
    echo 3 > /proc/sys/vm/drop_caches
    $bb diff -r $scratch/$1/tree $scratch/$1/copy > /dev/null || fail "$1: the copy differs from the tree"
    unmount_disk $1
}

work_until_grown() {
    say "step making a file system on $1"
    $mke2fs -q -F -t ext4 /dev/$1 || fail "$1: mke2fs failed"
    mount_disk $1
    write_files $1
    say "step $1 is at work"
    first=$($bb cat /sys/block/$1/size)
    passes=0
    while [ $passes -eq 0 ] || [ "$($bb cat /sys/block/$1/size)" -eq $first ]; do
        verify_with_fio $1
        passes=$((passes + 1))
    done
    say "fact name=$1 passes=$passes"
    check_files $1 "at the end"
    unmount_disk $1
    mount_disk $1
    check_files $1 "mounted again"
    unmount_disk $1
}

check() {
    say "step reading files on $1"
    mount_disk $1
    check_files $1 "after a restart"
    unmount_disk $1
}

# One process a disk, at once; each says that it came to its end.
for disk in $disks; do
    [ $measure_seconds -eq 0 ] || measure $disk
done
for disk in $worked; do
    $bb mkdir $scratch/$disk
    ($work $disk && : > $scratch/$disk.done) &
done
wait
for disk in $worked; do
    [ -e $scratch/$disk.done ] || fail "$disk: the work was not done"
done
if $bb dmesg | $bb grep -E 'I/O error|EXT4-fs error|EXT4-fs warning|hung task|Call Trace'; then
    fail "the guest's kernel complained"
fi
[ $nbd_port -eq 0 ] || $nbd_client -d /dev/nbd0 || fail "nbd-client cannot disconnect"
say "end"
$bb poweroff -f
$bb sleep 1000
"#;
