//! A bus of x86 I/O ports, for people who write monitors. It stands beside the path of virtio: a guest's `in` and `out`
//! enter here.
//!
//! * [`Bus`]: `in` and `out` of one, two and four bytes, and their string forms.
//! * [`Device`]: a device that answers at some ports ([`Region`]).
//! * [`Window`]: data that a device lends to the bus. The bus moves the words between it and the guest by itself, and
//!   calls the device only when the last byte has moved. So a sector costs its device one call, not 256.
//! * [`Link`]: what a device may do with the bus during a call: open and close its window, raise its interrupt.
//! * [`Shelf`]: a small device with numbered items of bytes, each read through a window.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod bus;
mod device;
mod shelf;
mod slot;
mod width;
mod window;

pub use bus::{AttachError, Bus, DeviceId, Region};
pub use device::Device;
pub use shelf::{SHELF_PORTS, Shelf, shelf_region};
pub use slot::Link;
pub use width::Width;
pub use window::{Direction, Window};
