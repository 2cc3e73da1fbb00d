//! A disk in memory that can fail, and the registers of a channel as a guest's driver uses them.

#![allow(dead_code)]

use block::{DiskInfo, IoError, IoResult, Topology};
use pio::{Bus, DeviceId, Width};
use ringdisk_ata::{Channel, ChannelPorts, Drive, Sectors, status};
use std::ops::Range;
use std::sync::{Arc, Mutex};

pub(crate) const PORTS: ChannelPorts = ChannelPorts::PRIMARY;
pub(crate) const DATA: u16 = 0x1f0;

#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    /// Bytes that can neither be read nor written.
    pub(crate) bad: Range<u64>,
    pub(crate) flushes: usize,
    pub(crate) reads: usize,
    pub(crate) volatile: bool,
}

#[derive(Clone)]
pub(crate) struct MemorySectors {
    pub(crate) memory: Arc<Mutex<Memory>>,
    pub(crate) read_only: bool,
}

impl MemorySectors {
    /// A disk of so many sectors, each with contents of its own.
    pub(crate) fn new(sectors: usize, seed: u64) -> Self {
        let mut bytes = vec![0; sectors * 512];
        testkit::fill_seeded(seed, &mut bytes);
        let memory = Memory { bytes, volatile: true, ..Memory::default() };
        Self { memory: Arc::new(Mutex::new(memory)), read_only: false }
    }

    pub(crate) fn sector(&self, lba: usize) -> Vec<u8> {
        self.memory.lock().unwrap().bytes[lba * 512..][..512].to_vec()
    }

    fn access<T>(&self, offset: u64, length: usize, then: impl FnOnce(&mut Memory, Range<usize>) -> T) -> IoResult<T> {
        let mut memory = self.memory.lock().unwrap();
        let range = offset..offset + length as u64;
        if range.start < memory.bad.end && memory.bad.start < range.end {
            return Err(IoError::EIO);
        }
        Ok(then(&mut memory, offset as usize..offset as usize + length))
    }
}

impl Sectors for MemorySectors {
    fn info(&self) -> DiskInfo {
        let memory = self.memory.lock().unwrap();
        DiskInfo {
            size_bytes: memory.bytes.len() as u64,
            logical_block_bytes: 512,
            topology: Topology::default(),
            read_only: self.read_only,
            volatile_cache: memory.volatile,
            discard: false,
            discard_granularity_bytes: 0,
            write_zeroes: false,
            serial: "RD-0007".to_owned(),
        }
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> IoResult {
        self.access(offset, into.len(), |memory, range| {
            memory.reads += 1;
            into.copy_from_slice(&memory.bytes[range]);
        })
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> IoResult {
        self.access(offset, from.len(), |memory, range| memory.bytes[range].copy_from_slice(from))
    }

    fn flush(&mut self) -> IoResult {
        self.memory.lock().unwrap().flushes += 1;
        Ok(())
    }

    fn set_volatile_cache(&mut self, volatile: bool) {
        self.memory.lock().unwrap().volatile = volatile;
    }
}

/// A guest's driver at a channel.
pub(crate) struct Guest {
    pub(crate) bus: Bus,
    pub(crate) channel: DeviceId,
}

impl Guest {
    pub(crate) fn new(first: Option<Drive>, second: Option<Drive>, windows: bool) -> Self {
        let mut bus = Bus::new();
        bus.set_windows(windows);
        let channel = bus.attach(Box::new(Channel::new(first, second)), &PORTS.regions()).unwrap();
        Self { bus, channel }
    }

    pub(crate) fn of(disk: &MemorySectors) -> Self {
        Self::new(Some(Drive::new(disk.clone()).unwrap()), None, true)
    }

    pub(crate) fn out(&mut self, register: u16, value: u8) {
        self.bus.write(PORTS.command + register, Width::Byte, value.into());
    }

    pub(crate) fn register(&mut self, register: u16) -> u8 {
        self.bus.read(PORTS.command + register, Width::Byte) as u8
    }

    pub(crate) fn control(&mut self, value: u8) {
        self.bus.write(PORTS.control, Width::Byte, value.into());
    }

    pub(crate) fn status(&mut self) -> u8 {
        self.register(7)
    }

    pub(crate) fn interrupt(&self) -> bool {
        self.bus.interrupt(self.channel)
    }

    /// A command with a 28-bit address, for the first drive.
    pub(crate) fn command(&mut self, command: u8, lba: u32, count: u8) {
        let [low, mid, high, top] = lba.to_le_bytes();
        self.out(2, count);
        self.out(3, low);
        self.out(4, mid);
        self.out(5, high);
        self.out(6, 0xe0 | top);
        self.out(7, command);
    }

    /// A command with a 48-bit address.
    pub(crate) fn command_ext(&mut self, command: u8, lba: u64, count: u16) {
        let (lba, count) = (lba.to_le_bytes(), count.to_le_bytes());
        for (register, upper, lower) in
            [(2, count[1], count[0]), (3, lba[3], lba[0]), (4, lba[4], lba[1]), (5, lba[5], lba[2])]
        {
            self.out(register, upper);
            self.out(register, lower);
        }
        self.out(6, 0xe0);
        self.out(7, command);
    }

    pub(crate) fn read(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.bus.read_string(DATA, Width::Word, &mut bytes);
        bytes
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.bus.write_string(DATA, Width::Dword, bytes);
    }

    pub(crate) fn wants_data(&mut self) -> bool {
        self.status() & (status::BSY | status::DRQ | status::ERR) == status::DRQ
    }

    pub(crate) fn is_idle(&mut self) -> bool {
        self.status() & (status::BSY | status::DRQ | status::ERR | status::DF) == 0
    }
}
