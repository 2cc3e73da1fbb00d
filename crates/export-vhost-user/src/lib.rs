//! The vhost-user front end: serves a [`block::Disk`] as a virtio-blk device on a Unix socket.
//!
//! A request enters here: `ring (pop a batch) -> parse -> disk queue (submit)`, and leaves here: `harvest -> used ring ->
//! at most one notification a batch`.
//!
//! * [`Export`]: a socket, and a thread that speaks the protocol with one peer at a time.
//! * `session`: what that peer has set up; `wire`: its messages (the only file that names the `vhost` crate; `own_messages`
//!   are those that the crate does not do).
//! * `ring_poller`: the data path: one ring on one reactor.
//! * `device`: what the guest is offered, and how a disk looks in virtio-blk's configuration space.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod counters;
mod device;
mod export;
mod memory_table;
mod notifier;
mod own_messages;
mod ring_control;
mod ring_poller;
mod session;
mod socket;
mod wire;

pub use counters::RingStats;
pub use export::{Export, ExportOptions};
