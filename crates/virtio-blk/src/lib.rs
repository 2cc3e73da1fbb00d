//! A virtio-blk device over a [`block::Disk`], for any transport. A monitor that has its guest's memory and its rings
//! serves a disk with this crate alone. `export-vhost-user` adds a socket.
//!
//! The way in is `ring (pop a batch) -> parse -> disk queue (submit)`. The way out is `harvest -> used ring -> at most
//! one notification a batch`.
//!
//! * [`Device`]: a disk as its guest sees it: features, configuration space, cache type. Its queues share it.
//! * `DeviceQueue`: one virtqueue on one reactor, the data path; generic over the layout of the ring.
//! * [`Transport`]: connects a queue with its driver; [`EventFds`] is the one for KVM.
//! * [`RunningQueue`]: starts, changes and stops a queue from a thread other than its reactor's.
//!
//! `examples/monitor` is the shortest use of them.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod device;
mod queue;
mod running;
mod shown;
mod transport;
mod write_cache;

pub use block::meter::{Counter, KindLatency, LATENCY_BUCKETS, LatencyHistogram, QueueLatency, RingStats};
pub use device::{Device, DeviceOptions, MAX_QUEUE_SIZE, MAX_QUEUES};
pub use queue::{Halt, QueueSetup, StoppedQueue, open_poller};
pub use running::{RunningQueue, StoppingQueue};
pub use shown::Overrides;
pub use transport::{EventFds, Transport};
