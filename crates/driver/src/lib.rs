//! The guest side: a virtio-blk driver over vhost-user, itself a Disk.
