//! The vhost-user front end: serves a [`block::Disk`] as a virtio-blk device on a Unix socket.
//!
//! The device itself, with the data path, is in `virtio-blk`. This crate has the wire session that sets it up and takes
//! it down.
//!
//! * [`Export`]: a socket, and a thread that speaks the protocol with one peer at a time.
//! * `session`: the setup that the peer has made. `wire`: its messages; this is the only file that names the `vhost`
//!   crate. `own_messages`: messages that the crate does not handle.
//! * `queue_fds`: the descriptors through which a queue and its peer notify each other. `notifier` writes to them, and
//!   `watched_call` interrupts a write that waits.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_block::{Disk, ReactorHandle, Result};
//! use ringdisk_export_vhost_user::{Export, ExportOptions};
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! fn serve(disk: Arc<dyn Disk>, reactors: Vec<Arc<dyn ReactorHandle>>) -> Result<Export> {
//!     let mut options = ExportOptions::default();
//!     options.max_queues = 4;
//!     Export::listen(Path::new("/run/disk.sock"), disk, reactors, options)
//! }
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod export;
mod memory_table;
mod notifier;
mod own_messages;
mod pace;
mod queue_fds;
mod running_rings;
mod session;
mod session_events;
mod socket;
mod takeover;
mod watched_call;
mod wire;

pub use export::{Export, ExportOptions, Surrender};
pub use socket::ListenSocket;
pub use virtio::blk::Geometry;
pub use virtio_blk::{KindLatency, LATENCY_BUCKETS, LatencyHistogram, Overrides, QueueLatency, RingStats};
