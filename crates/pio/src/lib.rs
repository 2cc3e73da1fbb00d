//! A bus of x86 I/O ports, for people who write monitors. It is beside the path of virtio: a guest's `in` and `out`
//! enter here.
//!
//! * [`Bus`]: `in` and `out` of one, two and four bytes, and their string forms.
//! * [`Device`]: answers at some ports ([`Region`]).
//! * [`Window`]: data that a device lends to the bus. The bus moves the words between the window and the guest, and
//!   calls the device only when the last byte has moved. So a sector costs its device one call, not 256.
//! * [`Link`]: lets a device act on the bus while it is called: open and close its window, raise its interrupt.
//! * [`Shelf`]: a small device with numbered items, whose bytes are read through a window.
//!
//! ```
//! use ringdisk_pio::{Bus, Shelf, Width, shelf_region};
//!
//! let mut bus = Bus::new();
//! let tables = Shelf::new(vec![b"first".to_vec(), b"second".to_vec()]);
//! bus.attach(Box::new(tables), &shelf_region(0x510))?;
//!
//! // What the guest does: it chooses an item, then reads it with a string instruction.
//! bus.write(0x510, Width::Byte, 1);
//! let mut bytes = [0; 6];
//! bus.read_string(0x511, Width::Byte, &mut bytes);
//! assert_eq!(&bytes, b"second");
//! # Ok::<(), ringdisk_pio::AttachError>(())
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod bus;
mod device;
mod link;
mod shelf;
mod slot;
mod width;
mod window;

pub use bus::{AttachError, Bus, DeviceId, Region};
pub use device::Device;
pub use link::Link;
pub use shelf::{SHELF_PORTS, Shelf, shelf_region};
pub use width::Width;
pub use window::{Direction, Window};
