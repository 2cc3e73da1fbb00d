#!/bin/sh
# The commands that made the images beside this file (qemu-img 7.2). Each holds the disk `content` of
# crates/image/tests/golden.rs. Run in an empty directory with that disk as source.raw.
set -eu
convert() { qemu-img convert -f raw -O qcow2 "$@"; }

convert -o compat=0.10,cluster_size=4k source.raw version-2.qcow2
convert -o cluster_size=512,refcount_bits=1 source.raw refcounts-of-1-bit.qcow2
convert -o cluster_size=4k,refcount_bits=64 source.raw refcounts-of-64-bits.qcow2
convert -c -o cluster_size=4k source.raw zlib.qcow2
convert -c -o cluster_size=4k,compression_type=zstd source.raw zstd.qcow2
convert -o cluster_size=16k,extended_l2=on source.raw extended-l2.qcow2
convert -c -o cluster_size=16k,extended_l2=on source.raw extended-l2-zlib.qcow2
convert -o cluster_size=4k,data_file=external.data source.raw external.qcow2
convert -o cluster_size=4k,data_file=external-raw.data,data_file_raw=on source.raw external-raw.qcow2
convert -o cluster_size=4k,preallocation=metadata source.raw preallocated.qcow2
convert -o cluster_size=4k,lazy_refcounts=on source.raw lazy.qcow2

# Not closed: the dirty bit is set.
cp lazy.qcow2 lazy-dirty.qcow2
qemu-io -f qcow2 -c 'discard 0 4k' -c 'write -s source.raw 0 4k' -c abort lazy-dirty.qcow2 || true

# Two internal snapshots with other contents.
cp zlib.qcow2 snapshots.qcow2
qemu-img snapshot -c one snapshots.qcow2
qemu-io -f qcow2 -c 'write -P 7 100k 50k' snapshots.qcow2
qemu-img snapshot -c two snapshots.qcow2
qemu-img snapshot -a one snapshots.qcow2

# Two bitmaps; the enabled one knows of a write.
convert -o cluster_size=4k source.raw bitmaps.qcow2
qemu-img bitmap --add -g 4k bitmaps.qcow2 enabled
qemu-img bitmap --add --disable -g 64k bitmaps.qcow2 disabled
dd if=source.raw of=part.raw bs=4k skip=16 count=2 status=none
qemu-io -f qcow2 -c 'write -s part.raw 64k 8k' bitmaps.qcow2

# An overlay that has a part of the disk and the rest below it.
convert -o cluster_size=4k source.raw base.qcow2
qemu-io -f qcow2 -c 'write -P 9 64k 32k' base.qcow2
qemu-img create -q -f qcow2 -o cluster_size=16k,extended_l2=on -b base.qcow2 -F qcow2 overlay.qcow2
dd if=source.raw of=part.raw bs=4k skip=16 count=8 status=none
qemu-io -f qcow2 -c 'write -s part.raw 64k 32k' overlay.qcow2
rm part.raw
