//! The driver of a packed ring, written from the specification alone (virtio 1.2, 2.8).

use super::Guest;
use std::collections::HashMap;

/// Descriptor flags of a packed ring, by bit.
pub const AVAIL: u16 = 1 << 7;
pub const USED: u16 = 1 << 15;

/// The driver's view of one packed ring.
pub struct PackedDriver<'a> {
    pub guest: &'a Guest,
    pub size: u16,
    pub ring: u64,
    pub driver_event: u64,
    pub device_event: u64,
    pub avail: (u16, bool),
    pub used: (u16, bool),
    /// Descriptors of each buffer that the device has.
    chains: HashMap<u16, u16>,
}

impl<'a> PackedDriver<'a> {
    /// A ring at the beginning of guest memory, all zero.
    pub fn new(guest: &'a Guest, size: u16) -> Self {
        Self::at(guest, size, 0)
    }

    /// A ring somewhere else.
    pub fn at(guest: &'a Guest, size: u16, ring: u64) -> Self {
        let driver_event = ring + u64::from(size) * 16;
        guest.write(ring, &vec![0; usize::from(size) * 16 + 8]);
        let (avail, used) = ((0, true), (0, true));
        Self { guest, size, ring, driver_event, device_event: driver_event + 4, avail, used, chains: HashMap::new() }
    }

    fn step(&self, (index, wrap): (u16, bool), count: u16) -> (u16, bool) {
        let sum = u32::from(index) + u32::from(count);
        match sum >= u32::from(self.size) {
            true => ((sum - u32::from(self.size)) as u16, !wrap),
            false => (sum as u16, wrap),
        }
    }

    pub fn put(&self, index: u16, address: u64, length: u32, id: u16, flags: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        self.guest.write(self.ring + 16 * u64::from(index), &bytes);
    }

    /// What makes a descriptor at the next place available.
    pub fn available(&self) -> u16 {
        if self.avail.1 { AVAIL } else { USED }
    }

    /// Puts one descriptor at the next place and makes it available, right or wrong.
    pub fn put_next(&mut self, address: u64, length: u32, id: u16, flags: u16) {
        self.put(self.avail.0, address, length, id, flags | self.available());
        self.avail = self.step(self.avail, 1);
    }

    /// Makes `buffers` available as `id`, which stands in the last descriptor only.
    pub fn offer(&mut self, id: u16, buffers: &[(u64, u32, bool)]) {
        for (at, (address, length, writable)) in buffers.iter().enumerate() {
            let last = at + 1 == buffers.len();
            let flags = if last { 0 } else { super::NEXT } | if *writable { super::WRITE } else { 0 };
            self.put_next(*address, *length, if last { id } else { 0xdead }, flags);
        }
        self.chains.insert(id, buffers.len() as u16);
    }

    /// Makes `buffers` available through a table at `table`.
    pub fn offer_indirect(&mut self, id: u16, table: u64, buffers: &[(u64, u32, bool)]) {
        for (at, (address, length, writable)) in (0_u64..).zip(buffers) {
            let flags = if *writable { super::WRITE } else { 0 };
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            // The id means nothing here.
            bytes.extend(0xbeef_u16.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            self.guest.write(table + 16 * at, &bytes);
        }
        self.put_next(table, 16 * buffers.len() as u32, id, super::INDIRECT);
        self.chains.insert(id, 1);
    }

    /// Takes what the device has used: ids, lengths, and whether something was written.
    pub fn take_used(&mut self) -> Vec<(u16, u32, bool)> {
        let mut taken = Vec::new();
        loop {
            let at = self.ring + 16 * u64::from(self.used.0);
            let flags = self.guest.read_u16(at + 14);
            if (flags & AVAIL != 0) != self.used.1 || (flags & USED != 0) != self.used.1 {
                return taken;
            }
            let id = self.guest.read_u16(at + 12);
            taken.push((id, self.guest.read_u32(at + 8), flags & super::WRITE != 0));
            let count = self.chains.remove(&id).expect("the device uses a buffer that it does not have");
            self.used = self.step(self.used, count);
        }
    }

    /// When the driver wants to be told: 0 always, 1 never, 2 at a position.
    pub fn set_event(&self, flags: u16, (index, wrap): (u16, bool)) {
        let bits = index | u16::from(wrap) << 15;
        self.guest.write(self.driver_event, &[bits.to_le_bytes(), flags.to_le_bytes()].concat());
    }

    /// What the device wants to be told: position, flags.
    pub fn device_event(&self) -> ((u16, bool), u16) {
        let bits = self.guest.read_u16(self.device_event);
        ((bits & 0x7fff, bits & 0x8000 != 0), self.guest.read_u16(self.device_event + 2))
    }
}
