//! Virtqueues (device and driver half) and virtio-blk layouts.
