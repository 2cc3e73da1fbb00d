//! The part of a guest's script that inspects a disk as its kernel shows it. It also tests events such as sleep, resets
//! and changes of the cache.

/// Functions of the script; `inspect DISK` does the work. Perl makes the kernel's calls; every Debian has it.
pub(crate) const FUNCTIONS: &str = r##"
fact() { say "fact name=$1 $2"; }

# What the kernel answers to an ioctl, or the error's number.
ask_kernel() {
    /usr/bin/perl -e 'open F, "<", $ARGV[0] or die; $b = "\0" x 512; $r = ioctl(F, hex $ARGV[1], $b);
        print $r ? join("-", unpack($ARGV[2], $b)) : "errno-" . ($! + 0)' /dev/$1 $2 $3
}

# Its driver goes and comes back while somebody reads. What it says of the requests that this ends is no fault.
rebind_under_load() {
    device=$($bb basename $($bb readlink -f /sys/block/$1/device))
    driver=/sys/bus/virtio/drivers/virtio_blk
    round=0
    while [ $round -lt $rebinds ]; do
        $bb dd if=/dev/$1 of=/dev/null bs=64k count=100000 2> /dev/null &
        echo $device > $driver/unbind || fail "$1: cannot unbind"
        wait $!
        echo $device > $driver/bind || fail "$1: cannot bind"
        round=$((round + 1))
    done
    $bb dmesg -c > /dev/null
    $bb dd if=/dev/$1 of=/dev/null bs=1M count=8 2> /dev/null || fail "$1: cannot read after it was bound"
    fact $1 "bound=$round"
}

# Waits until /sys/block/DISK/size is no longer what it was, and sets `size`.
next_size() {
    waited=0
    until [ -e /sys/block/$1/size ] && [ "$($bb cat /sys/block/$1/size)" != $2 ]; do
        [ $waited -lt 100 ] || fail "$1: it still has $2 sectors"
        waited=$((waited + 1))
        $bb sleep 0.1
    done
    size=$($bb cat /sys/block/$1/size)
}

# The host makes it larger while its driver is away.
grow_unbound() {
    before=$($bb cat /sys/block/$1/size)
    device=$($bb basename $($bb readlink -f /sys/block/$1/device))
    echo $device > $driver/unbind || fail "$1: cannot unbind"
    say "step unbound $1"
    $bb sleep 1
    echo $device > $driver/bind || fail "$1: cannot bind"
    next_size $1 $before
    fact $1 "sectors_after_bind=$size"
}

# The host makes it larger, and the kernel tells its listeners.
grow() {
    echo "#!$bb sh" > $scratch/event
    echo "echo \"$mark fact name=$1 event=\$RESIZE-\$DEVNAME\"" >> $scratch/event
    echo "[ \"\$RESIZE\" != 1 ] || : > $scratch/resized" >> $scratch/event
    $bb chmod +x $scratch/event
    $bb uevent $scratch/event &
    listener=$!
    $bb sleep 0.3
    $fio --name=load --filename=/dev/$1 --thread --minimal --size=16M --rw=randrw --bsrange=4k-64k --direct=1 \
        --ioengine=libaio --iodepth=8 --time_based --runtime=600 > $scratch/grow 2>&1 &
    loader=$!
    $bb sleep 0.5
    say "step resize $1"
    waited=0
    until [ -e $scratch/resized ]; do
        [ $waited -lt 100 ] || fail "$1: nobody told of its new size"
        waited=$((waited + 1))
        $bb sleep 0.1
    done
    $bb kill $listener
    $bb kill -0 $loader || { $bb cat $scratch/grow; fail "$1: the load ended while it grew"; }
    load_ends $1
    fact $1 "sectors=$($bb cat /sys/block/$1/size)"
}

# Data go to the file system all the time, and a marker is on the disk before the load begins: how often it booted. After
# so many writes there is a flush.
load_begins() {
    ($fio --name=load --directory=$scratch/$1 --thread --minimal --size=8M --rw=randwrite --bsrange=4k-64k --direct=1 \
        --ioengine=libaio --iodepth=16 --fsync=${2:-20} --time_based --runtime=600 > $scratch/load 2>&1) &
    loader=$!
    $bb sleep 0.5
}

load_ends() {
    $bb kill $loader
    wait $loader
    $bb killall fio 2> /dev/null
    while $bb pidof fio > /dev/null; do $bb sleep 0.1; done
}

# Its cache is switched again and again while data are written and flushed.
toggle_under_load() {
    [ $toggles -gt 0 ] || return
    load_begins $1 1
    round=0
    while [ $round -lt $toggles ]; do
        kind=back
        [ $((round % 2)) -eq 1 ] || kind=through
        echo "write $kind" > /sys/block/$1/cache_type || fail "$1: the cache cannot be switched under load"
        [ "$($bb cat /sys/block/$1/cache_type)" = "write $kind" ] || fail "$1: the cache is not write-$kind"
        $bb sleep 0.02
        round=$((round + 1))
    done
    $bb kill -0 $loader || { $bb cat $scratch/load; fail "$1: the load ended while the cache was switched"; }
    load_ends $1
    check_files $1 "after its cache was switched"
    fact $1 "toggled=$round"
}

# The machine sleeps, its clock wakes it, and the load goes on.
suspend() {
    round=0
    while [ $round -lt $suspends ]; do
        load_begins $1
        before=$($bb cat /sys/block/$1/size)
        [ $round -gt 0 ] || say "step sleeping $1"
        echo 0 > /sys/class/rtc/rtc0/wakealarm
        echo +3 > /sys/class/rtc/rtc0/wakealarm || fail "$1: no alarm"
        echo mem > /sys/power/state || fail "$1: the machine does not sleep"
        $bb kill -0 $loader || { $bb cat $scratch/load; fail "$1: the load ended in the sleep"; }
        [ $round -gt 0 ] || { next_size $1 $before; fact $1 "sectors_after_sleep=$size"; }
        load_ends $1
        check_files $1 "after a sleep"
        round=$((round + 1))
    done
    [ $suspends -eq 0 ] || fact $1 "slept=$round"
}

# Every boot comes here: the first makes files, the next ones find them whole, and the host resets all but the last.
survive() {
    boots=0
    if $bb mount -t ext4 /dev/$1 $scratch/$1 2> /dev/null; then
        check_files $1 "after a reset"
        boots=$($bb cat $scratch/$1/boots)
    else
        $mke2fs -q -F -t ext4 /dev/$1 || fail "$1: mke2fs failed"
        mount_disk $1
        write_files $1
        toggle_under_load $1
        suspend $1
    fi
    if [ $boots -lt $resets ]; then
        echo $((boots + 1)) > $scratch/$1/boots
        $bb sync
        load_begins $1
        say "step reset $1"
        $bb sleep 1000
    fi
    unmount_disk $1
    [ $resets -eq 0 ] || fact $1 "resets=$boots"
}

inspect() {
    # After a reset there is a file system, and nothing to look at again.
    if [ $((suspends + resets)) -gt 0 ] && $bb mount -t ext4 /dev/$1 $scratch/$1 2> /dev/null; then
        unmount_disk $1
        survive $1
        return
    fi
    for key in logical_block_size physical_block_size minimum_io_size optimal_io_size max_segments max_segment_size \
        discard_granularity discard_max_bytes write_zeroes_max_bytes max_discard_segments fua write_cache; do
        fact $1 "$key=$($bb cat /sys/block/$1/queue/$key | $bb tr ' ' -)"
    done
    # These are the kernel's own: no limit in bytes of a whole request, and at most as many requests as fit into the ring.
    [ "$($bb cat /sys/block/$1/queue/max_hw_sectors_kb)" -ge 1048576 ] || fail "$1: a request's length has a limit"
    [ "$($bb cat /sys/block/$1/queue/nr_requests)" -ge 32 ] || fail "$1: it takes few requests"
    fact $1 "alignment_offset=$($bb cat /sys/block/$1/alignment_offset)"
    # HDIO_GETGEO: heads, sectors, cylinders.
    fact $1 "geometry=$(ask_kernel $1 301 CCS)"
    fact $1 "sg_io=$(ask_kernel $1 2285 L)"
    for kind in through back; do
        echo "write $kind" > /sys/block/$1/cache_type || fail "$1: the cache cannot be switched"
        fact $1 "cache_type_$kind=$($bb cat /sys/block/$1/cache_type | $bb tr ' ' -)"
    done
    $bb dd if=/dev/urandom of=/dev/$1 bs=1M count=32 oflag=direct 2> /dev/null || fail "$1: cannot write"
    say "step written $1"
    $bb blkdiscard -o 0 -l 33554432 /dev/$1 || fail "$1: cannot discard"
    # An image gives space back after a flush: before, a power cut could bring the old tables back.
    $bb dd if=/dev/null of=/dev/$1 conv=fsync,notrunc 2> /dev/null || fail "$1: cannot flush"
    say "step discarded $1"
    rebind_under_load $1
    grow_unbound $1
    grow $1
    [ $((toggles + suspends + resets)) -eq 0 ] || survive $1
}
"##;
