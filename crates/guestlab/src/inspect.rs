//! The part of a guest's script that looks at a disk as its kernel shows it, and sees what happens to it.

/// Functions of the script: `inspect DISK` is the work. Perl asks the kernel; every Debian has it.
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
    while [ $round -lt 20 ]; do
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

# The host makes it larger, and the kernel tells its listeners.
grow() {
    echo "#!$bb sh" > $scratch/event
    echo "echo \"$mark fact name=$1 event=\$RESIZE-\$DEVNAME\"" >> $scratch/event
    echo "[ \"\$RESIZE\" != 1 ] || : > $scratch/resized" >> $scratch/event
    $bb chmod +x $scratch/event
    $bb uevent $scratch/event &
    listener=$!
    $bb sleep 0.3
    say "step resize $1"
    waited=0
    until [ -e $scratch/resized ]; do
        [ $waited -lt 100 ] || fail "$1: nobody told of its new size"
        waited=$((waited + 1))
        $bb sleep 0.1
    done
    $bb kill $listener
    fact $1 "sectors=$($bb cat /sys/block/$1/size)"
}

inspect() {
    for key in logical_block_size physical_block_size minimum_io_size optimal_io_size max_segments max_segment_size \
        discard_granularity discard_max_bytes write_zeroes_max_bytes; do
        fact $1 "$key=$($bb cat /sys/block/$1/queue/$key)"
    done
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
    say "step discarded $1"
    rebind_under_load $1
    grow $1
}
"##;
