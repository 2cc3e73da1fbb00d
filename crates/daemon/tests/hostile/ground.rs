//! A hostile guest's memory, and its rings: everything is written byte for byte, right or wrong.

use super::wire::{Wire, code, words32, words64};
use memory::{IoBuf, Mapping, Window};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// The name of the files behind guests' memory: nothing of this name may be left in the end.
pub(crate) const FILE_NAME: &str = "hostile-guest";

/// Memory that is shared with the server. Offsets here are guest physical addresses there, unless regions say otherwise.
pub(crate) struct Ground {
    pub(crate) file: OwnedFd,
    mapping: Arc<Mapping>,
    pub(crate) length: u64,
}

impl Ground {
    pub(crate) fn new(length: u64) -> Self {
        let (file, mapping) = Mapping::anonymous_file(c"hostile-guest", length as usize).unwrap();
        Self { file, mapping: Arc::new(mapping), length }
    }

    fn at(&self, offset: u64, length: usize) -> Window {
        IoBuf::in_mapping(&self.mapping, offset as usize, length, Box::new(())).unwrap().whole()
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.at(offset, bytes.len()).copy_from_slice(0, bytes);
    }

    pub(crate) fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        self.at(offset, length).to_vec()
    }

    pub(crate) fn read_u16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(offset, 2).try_into().unwrap())
    }

    /// Shares all of it as one region.
    pub(crate) fn share(&self, wire: &Wire) -> io::Result<()> {
        let mut body = words32(&[1, 0]);
        body.extend(words64(&[0, self.length, 0, 0]));
        wire.tell(code::SET_MEM_TABLE, &body, &[self.file.as_fd()])
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Desc {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Desc {
    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut bytes = self.address.to_le_bytes().to_vec();
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.next.to_le_bytes());
        bytes
    }
}

/// The bytes of a table in which each descriptor leads to the next.
pub(crate) fn chained(buffers: &[(u64, u32, bool)]) -> Vec<u8> {
    let last = buffers.len() - 1;
    let entry = |(index, (address, length, writable)): (usize, &(u64, u32, bool))| {
        let flags = if index == last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
        Desc { address: *address, length: *length, flags, next: index as u16 + 1 }.bytes()
    };
    buffers.iter().enumerate().flat_map(entry).collect()
}

/// A request's header.
pub(crate) fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

/// One split ring in a [`Ground`].
pub(crate) struct Ring {
    pub(crate) index: u32,
    pub(crate) size: u16,
    pub(crate) table: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    pub(crate) avail_index: u16,
    pub(crate) used_index: u16,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
}

impl Ring {
    /// Bytes that a ring takes.
    pub(crate) fn bytes(size: u16) -> u64 {
        (u64::from(size) * 26 + 64).next_multiple_of(4096)
    }

    pub(crate) fn new(index: u32, size: u16, at: u64) -> Self {
        let avail = at + u64::from(size) * 16;
        let used = (avail + 6 + 2 * u64::from(size)).next_multiple_of(4);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self { index, size, table: at, avail, used, avail_index: 0, used_index: 0, kick: event(), call: event() }
    }

    /// Sets it up and starts it.
    pub(crate) fn start(&self, wire: &Wire) -> io::Result<()> {
        wire.tell(code::SET_VRING_NUM, &words32(&[self.index, u32::from(self.size)]), &[])?;
        wire.tell(code::SET_VRING_BASE, &words32(&[self.index, u32::from(self.avail_index)]), &[])?;
        let mut body = words32(&[self.index, 0]);
        body.extend(words64(&[self.table, self.used, self.avail, 0]));
        wire.tell(code::SET_VRING_ADDR, &body, &[])?;
        let index = words64(&[u64::from(self.index)]);
        wire.tell(code::SET_VRING_CALL, &index, &[self.call.as_fd()])?;
        wire.tell(code::SET_VRING_KICK, &index, &[self.kick.as_fd()])?;
        wire.tell(code::SET_VRING_ENABLE, &words32(&[self.index, 1]), &[])
    }

    pub(crate) fn put(&self, ground: &Ground, index: u16, desc: Desc) {
        ground.write(self.table + 16 * u64::from(index % self.size), &desc.bytes());
    }

    /// Puts a head into the available ring; [`Ring::kick`] shows it.
    pub(crate) fn offer(&mut self, ground: &Ground, head: u16) {
        let slot = u64::from(self.avail_index % self.size);
        ground.write(self.avail + 4 + 2 * slot, &head.to_le_bytes());
        self.avail_index = self.avail_index.wrapping_add(1);
    }

    pub(crate) fn kick(&self, ground: &Ground) {
        ground.write(self.avail + 2, &self.avail_index.to_le_bytes());
        // Full if nobody reads it, which has told them already.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// The heads that have come back.
    pub(crate) fn take_used(&mut self, ground: &Ground) -> Vec<u16> {
        let end = ground.read_u16(self.used + 2);
        let mut heads = Vec::new();
        while self.used_index != end && heads.len() < usize::from(self.size) {
            heads.push(ground.read_u16(self.used + 4 + 8 * u64::from(self.used_index % self.size)));
            self.used_index = self.used_index.wrapping_add(1);
        }
        // Tell at the next one.
        ground.write(self.avail + 4 + 2 * u64::from(self.size), &self.used_index.to_le_bytes());
        heads
    }

    /// Sleeps until the server tells something, or for a while.
    pub(crate) fn wait(&self, milliseconds: i64) {
        let limit = Timespec { tv_sec: 0, tv_nsec: milliseconds * 1_000_000 };
        let _ = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&limit));
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }
}
