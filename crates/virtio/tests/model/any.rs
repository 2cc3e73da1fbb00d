//! A driver of either layout, for tests that run over both.

use super::packed::PackedDriver;
use super::{Driver, Guest};
use std::collections::HashMap;

/// A buffer: address, length, and whether the device writes to it.
type Buffer = (u64, u32, bool);

/// The driver's view of a ring. A chain's first descriptor stands for it in a split ring, and its id in a packed one.
pub enum AnyDriver<'a> {
    Split(Driver<'a>),
    Packed { driver: PackedDriver<'a>, chains: HashMap<u16, Vec<Buffer>>, offered: Vec<u16> },
}

impl<'a> AnyDriver<'a> {
    /// A ring at the beginning of guest memory.
    pub fn new(guest: &'a Guest, size: u16, packed: bool) -> Self {
        Self::at(guest, size, 0, packed)
    }

    /// A ring somewhere else.
    pub fn at(guest: &'a Guest, size: u16, ring: u64, packed: bool) -> Self {
        match packed {
            false => Self::Split(Driver::at(guest, size, ring)),
            true => {
                let driver = PackedDriver::at(guest, size, ring);
                Self::Packed { driver, chains: HashMap::new(), offered: Vec::new() }
            }
        }
    }

    pub fn guest(&self) -> &'a Guest {
        match self {
            Self::Split(driver) => driver.guest,
            Self::Packed { driver, .. } => driver.guest,
        }
    }

    /// Where its parts lie: the table, what the driver writes, what the device writes.
    pub fn addresses(&self) -> [u64; 3] {
        match self {
            Self::Split(driver) => [driver.table, driver.avail, driver.used],
            Self::Packed { driver, .. } => [driver.ring, driver.driver_event, driver.device_event],
        }
    }

    pub fn put_chain(&mut self, indices: &[u16], buffers: &[Buffer]) {
        match self {
            Self::Split(driver) => driver.put_chain(indices, buffers),
            Self::Packed { chains, .. } => drop(chains.insert(indices[0], buffers.to_vec())),
        }
    }

    pub fn offer(&mut self, head: u16) {
        match self {
            Self::Split(driver) => driver.offer(head),
            Self::Packed { offered, .. } => offered.push(head),
        }
    }

    pub fn publish(&mut self) {
        match self {
            Self::Split(driver) => driver.publish(),
            Self::Packed { driver, chains, offered } => {
                offered.drain(..).for_each(|head| driver.offer(head, &chains[&head]));
            }
        }
    }

    /// Offers `buffers` through a table at `address`.
    pub fn put_indirect(&mut self, head: u16, address: u64, buffers: &[Buffer]) {
        match self {
            Self::Split(driver) => {
                driver.put_indirect(head, address, buffers);
                driver.offer(head);
            }
            Self::Packed { driver, .. } => driver.offer_indirect(head, address, buffers),
        }
    }

    /// Wants to be told of the next buffer that the device uses.
    pub fn want_next(&mut self) {
        match self {
            Self::Split(driver) => driver.set_used_event(driver.used_index),
            Self::Packed { driver, .. } => driver.set_event(2, driver.used),
        }
    }

    /// Begins anew with a clean ring at the same place.
    pub fn reset(&mut self) {
        let [ring, ..] = self.addresses();
        let (guest, size, packed) = match self {
            Self::Split(driver) => (driver.guest, driver.size, false),
            Self::Packed { driver, .. } => (driver.guest, driver.size, true),
        };
        guest.write(ring, &[0; 0x1000]);
        *self = Self::at(guest, size, ring, packed);
    }

    /// Where the ring goes on, as the protocol says it.
    pub fn position(&self) -> u32 {
        match self {
            Self::Split(driver) => driver.avail_index.into(),
            Self::Packed { driver, .. } => {
                let half = u32::from(driver.avail.0) | u32::from(driver.avail.1) << 15;
                half | half << 16
            }
        }
    }

    /// Takes what the device has used: heads and lengths.
    pub fn take_used(&mut self) -> Vec<(u32, u32)> {
        match self {
            Self::Split(driver) => driver.take_used(),
            Self::Packed { driver, .. } => {
                driver.take_used().into_iter().map(|(id, length, _)| (id.into(), length)).collect()
            }
        }
    }
}
