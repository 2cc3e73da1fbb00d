//! Virtqueues and virtio-blk, as virtio 1.2 lays them out: where a guest's request enters, and where its end leaves.
//!
//! * [`blk`]: feature bits, configuration space, request header, status.
//! * [`ring_access`]: the fields of a ring in memory that somebody else changes; the only module with `unsafe`.
//! * [`driver_ring`]: the driver's half of a split ring.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

pub mod blk;
pub mod driver_ring;
pub mod ring_access;
