//! A guest and its driver, written from the specification alone: bytes at offsets, no code shared with the crate.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)]

pub mod any;
pub mod packed;

use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec, Window};
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub const GUEST_BYTES: usize = 1 << 20;
/// The guest has two regions that touch, so that a buffer may cross them.
pub const SECOND_REGION: u64 = (GUEST_BYTES / 2) as u64;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Guest memory at physical address zero.
pub struct Guest {
    /// The file behind it, as a monitor shares it.
    pub file: OwnedFd,
    mapping: Arc<Mapping>,
    pub memory: Arc<GuestMemory>,
}

impl Guest {
    pub fn new() -> Self {
        let (file, mapping) = Mapping::anonymous_file(c"guest", GUEST_BYTES).unwrap();
        let mapping = Arc::new(mapping);
        let half = GUEST_BYTES / 2;
        let region = |start: usize| {
            let at = start as u64;
            let spec = RegionSpec::new(at, half as u64).with(|region| region.file_offset = at);
            GuestRegion::of_mapping(spec, Arc::clone(&mapping), start).unwrap()
        };
        let memory = Arc::new(GuestMemory::new(vec![region(0), region(half)]).unwrap());
        Self { file, mapping, memory }
    }

    pub fn at(&self, address: u64, length: usize) -> Window {
        IoBuf::in_mapping(&self.mapping, address as usize, length, Box::new(())).unwrap().whole()
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.at(address, bytes.len()).copy_from_slice(0, bytes);
    }

    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        self.at(address, length).to_vec()
    }

    pub fn read_u16(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.read(address, 2).try_into().unwrap())
    }

    pub fn read_u32(&self, address: u64) -> u32 {
        u32::from_le_bytes(self.read(address, 4).try_into().unwrap())
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Desc {
    pub address: u64,
    pub length: u32,
    pub flags: u16,
    pub next: u16,
}

impl Desc {
    pub fn bytes(self) -> Vec<u8> {
        let mut bytes = self.address.to_le_bytes().to_vec();
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.next.to_le_bytes());
        bytes
    }
}

/// The driver's view of one split ring.
pub struct Driver<'a> {
    pub guest: &'a Guest,
    pub size: u16,
    pub table: u64,
    pub avail: u64,
    pub used: u64,
    pub avail_index: u16,
    pub used_index: u16,
}

impl<'a> Driver<'a> {
    /// A ring at the beginning of guest memory: everything from 64 KiB on is free for buffers (sizes up to 1024).
    pub fn new(guest: &'a Guest, size: u16) -> Self {
        Self::at(guest, size, 0)
    }

    /// A ring somewhere else.
    pub fn at(guest: &'a Guest, size: u16, table: u64) -> Self {
        let avail = table + u64::from(size) * 16;
        let used = (avail + 6 + 2 * u64::from(size)).next_multiple_of(4);
        Self { guest, size, table, avail, used, avail_index: 0, used_index: 0 }
    }

    pub fn put_desc(&self, index: u16, desc: Desc) {
        self.guest.write(self.table + 16 * u64::from(index), &desc.bytes());
    }

    /// Links `buffers` through descriptors `indices`.
    pub fn put_chain(&self, indices: &[u16], buffers: &[(u64, u32, bool)]) {
        for (at, (index, (address, length, writable))) in indices.iter().zip(buffers).enumerate() {
            let last = at + 1 == buffers.len();
            let flags = if last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let next = if last { 0 } else { indices[at + 1] };
            self.put_desc(*index, Desc { address: *address, length: *length, flags, next });
        }
    }

    /// Writes a table of `buffers` at `address` and points descriptor `head` to it.
    pub fn put_indirect(&self, head: u16, address: u64, buffers: &[(u64, u32, bool)]) {
        for (index, (buffer, length, writable)) in buffers.iter().enumerate() {
            let last = index + 1 == buffers.len();
            let flags = if last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let next = if last { 0 } else { index as u16 + 1 };
            let desc = Desc { address: *buffer, length: *length, flags, next };
            self.guest.write(address + 16 * index as u64, &desc.bytes());
        }
        let length = 16 * buffers.len() as u32;
        self.put_desc(head, Desc { address, length, flags: INDIRECT, next: 0 });
    }

    /// Puts `head` into the available ring; [`Driver::publish`] shows it.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.avail_index % self.size);
        self.guest.write(self.avail + 4 + 2 * slot, &head.to_le_bytes());
        self.avail_index = self.avail_index.wrapping_add(1);
    }

    pub fn publish(&self) {
        self.guest.write(self.avail + 2, &self.avail_index.to_le_bytes());
    }

    pub fn set_avail_flags(&self, flags: u16) {
        self.guest.write(self.avail, &flags.to_le_bytes());
    }

    pub fn set_used_event(&self, event: u16) {
        self.guest.write(self.avail + 4 + 2 * u64::from(self.size), &event.to_le_bytes());
    }

    pub fn avail_event(&self) -> u16 {
        self.guest.read_u16(self.used + 4 + 8 * u64::from(self.size))
    }

    pub fn used_flags(&self) -> u16 {
        self.guest.read_u16(self.used)
    }

    /// Takes what the device has used: heads and lengths.
    pub fn take_used(&mut self) -> Vec<(u32, u32)> {
        let end = self.guest.read_u16(self.used + 2);
        let mut taken = Vec::new();
        while self.used_index != end {
            let at = self.used + 4 + 8 * u64::from(self.used_index % self.size);
            taken.push((self.guest.read_u32(at), self.guest.read_u32(at + 4)));
            self.used_index = self.used_index.wrapping_add(1);
        }
        taken
    }
}
