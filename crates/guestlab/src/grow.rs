//! The part of a guest's script that works on a disk while the host makes it larger, and reports each size.

/// A function of the script: `grow_under_load DISK` does the work. Each pass of fio writes a part of the disk and reads
/// it back.
pub(crate) const FUNCTIONS: &str = r##"
grow_under_load() {
    (
        passes=0
        until [ -e $scratch/$1.stop ]; do
            $fio --name=load --filename=/dev/$1 --thread --minimal --size=16M --io_size=4M --rw=randwrite --direct=1 \
                --bsrange=4k-64k --ioengine=libaio --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1 \
                --randseed=$passes --fsync=32 > $scratch/$1.load 2>&1 || exit 1
            passes=$((passes + 1))
        done
        echo $passes > $scratch/$1.passes
    ) &
    load=$!
    (last=0
    sizes=0
    while [ $last -lt $until_sectors ] && $bb kill -0 $load 2> /dev/null; do
        now=$($bb cat /sys/block/$1/size)
        if [ $now -ne $last ]; then
            say "step $1 has $now sectors"
            sizes=$((sizes + 1))
            last=$now
        fi
        $bb sleep 0.02
    done
    echo $sizes > $scratch/$1.sizes)
    : > $scratch/$1.stop
    wait $load || { $bb cat $scratch/$1.load; fail "$1: fio found wrong data or errors"; }
    say "fact name=$1 passes=$($bb cat $scratch/$1.passes)"
    say "fact name=$1 sizes=$($bb cat $scratch/$1.sizes)"
}
"##;
