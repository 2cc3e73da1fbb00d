//! An ATA disk at I/O ports, for people who write monitors: programmed I/O according to ATA/ATAPI-6 (INCITS 361-2002).
//!
//! * [`Channel`]: a [`pio::Device`] with up to two drives. It executes IDENTIFY DEVICE, READ and WRITE SECTORS and
//!   MULTIPLE with 28-bit and 48-bit addresses, READ VERIFY, FLUSH CACHE, SET FEATURES, and the power commands that
//!   every drive has. Sectors move through the bus's data windows.
//! * [`Sectors`]: the storage of a drive. [`DiskSectors`] stores on any [`block::Disk`], through a reactor.
//!
//! A command ends within the guest's access: the caller of the bus waits for the disk, as the guest's processor does.
//! Single sectors are slow on any storage, so a read fetches up to 64 KiB ahead within its command.
//!
//! ```no_run
//! # use {block as ringdisk_block, pio as ringdisk_pio};
//! use ringdisk_ata::{Channel, ChannelPorts, DiskSectors, Drive};
//! use ringdisk_block::{Disk, ReactorHandle};
//! use ringdisk_pio::{Bus, DeviceId};
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! /// Gives the guest of `bus` its first disk.
//! fn attach(bus: &mut Bus, disk: Arc<dyn Disk>, reactor: Arc<dyn ReactorHandle>) -> Result<DeviceId, Box<dyn Error>> {
//!     let drive = Drive::new(DiskSectors::open(disk, reactor)?)?;
//!     let channel = Channel::new(Some(drive), None);
//!     Ok(bus.attach(Box::new(channel), &ChannelPorts::PRIMARY.regions())?)
//! }
//! ```
//!
//! `examples/real_mode` is a whole monitor, with KVM.

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
