//! An ATA disk at I/O ports, for people who write monitors: programmed I/O as ATA/ATAPI-6 (INCITS 361-2002) has it.
//!
//! * [`Channel`]: a [`pio::Device`] with up to two drives. It has IDENTIFY DEVICE, READ and WRITE SECTORS and MULTIPLE
//!   with 28-bit and 48-bit addresses, READ VERIFY, FLUSH CACHE, SET FEATURES, and the mandatory power commands.
//!   Sectors move through the bus's data windows.
//! * [`Sectors`]: the storage of a drive. [`DiskSectors`] is any [`block::Disk`], reached through a reactor.
//!
//! A command runs to its end within the guest's access: the caller of the bus, as the guest's processor, waits for the
//! disk. A sector at a time is slow on any storage, so reads fetch up to 64 KiB ahead within their command.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod channel;
mod disk_sectors;
mod drive;
mod identify;
mod registers;
mod sectors;
mod transfer;

pub use channel::{Channel, ChannelPorts};
pub use disk_sectors::DiskSectors;
pub use drive::Drive;
pub use registers::{command, status};
pub use sectors::Sectors;
