//! Virtqueues and virtio-blk, as virtio 1.2 lays them out: where a guest's request enters, and where its end leaves.
//!
//! * [`blk`]: feature bits, configuration space, request header, status.
//! * [`ring_access`]: the fields of a ring in memory that somebody else changes; the only module with `unsafe`.
//! * [`device_ring`]: the device's half of a ring: chains out, used entries in, notifications as few as possible. Split
//!   rings; packed ones are in [`packed_device_ring`].
//! * [`request`]: chains to block requests and back.
//! * [`fault`]: what a driver did wrong when its queue stops.
//! * [`driver_ring`]: the driver's half of a ring, split or packed.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

pub mod blk;
pub mod device_ring;
pub mod driver_ring;
#[cfg(test)]
mod event_model_tests;
pub mod fault;
pub mod packed_device_ring;
pub mod request;
pub mod ring_access;

pub use device_ring::{DeviceRing, RingFeatures, SplitDeviceRing};
pub use fault::{FaultReason, RingFault};
pub use packed_device_ring::PackedDeviceRing;
pub use request::{BlkQueue, Request, RequestLimits};
