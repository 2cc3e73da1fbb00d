//! Virtqueues and virtio-blk, as virtio 1.2 lays them out. A guest's request enters here, and its end leaves here.
//!
//! * [`blk`]: feature bits, configuration space, request header, status.
//! * [`ring_access`]: the fields of a ring in memory that the other side changes; the only module with `unsafe`.
//! * [`device_ring`]: the device's half of a split ring: chains out, used entries in, as few notifications as possible.
//!   For packed rings, see [`packed_device_ring`].
//! * [`request`]: from chains to block requests and back.
//! * [`fault`]: why a queue stopped.
//! * [`driver_ring`]: the driver's half of a ring, split or packed.
//!
//! ```
//! use ringdisk_virtio::blk::{RequestHeader, Status, request_type};
//!
//! // The header of a write to byte 4096, and the status byte of its end.
//! let header = RequestHeader { kind: request_type::OUT, priority: 0, sector: 8 };
//! assert_eq!(RequestHeader::from_bytes(header.to_bytes()), header);
//! assert_eq!(Status::from_byte(1), Status::IoErr);
//! ```

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
