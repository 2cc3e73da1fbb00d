//! What a hostile guest puts into its rings.

use super::dice::Dice;
use super::ground::{Desc, Ground, INDIRECT, NEXT, Ring, WRITE, chained, header};
use super::session::Haunted;
use super::wire::{Wire, code, words32};
use std::io;
use std::time::{Duration, Instant};

/// Where the buffers of requests begin, a mebibyte a queue; rings and tables lie below.
pub(crate) const DATA: u64 = 1 << 20;
/// Where indirect tables begin: one of this many bytes a slot.
pub(crate) const TABLES: u64 = 1 << 19;
const TABLE_BYTES: u64 = 512;
/// Descriptors that one request has for itself.
const PER_SLOT: u16 = 8;
/// An honest request is answered before, however busy the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const READ: u32 = 0;
const WRITE_DATA: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// One ring in a guest's hands.
pub(crate) struct Requests {
    pub(crate) ring: Ring,
    free: Vec<u16>,
    disk_sectors: u64,
}

impl Requests {
    pub(crate) fn new(ring: Ring, disk_sectors: u64) -> Self {
        let free = (0..ring.size / PER_SLOT).map(|slot| slot * PER_SLOT).collect();
        Self { ring, free, disk_sectors }
    }

    fn put_request(&self, ground: &Ground, dice: &mut Dice, head: u16) {
        let slot = head / PER_SLOT;
        let buffers = request(ground, dice, (self.ring.index, slot), self.disk_sectors);
        if dice.percent(50) {
            let table = table_of(self.ring.index, slot);
            ground.write(table, &chained(&buffers));
            let length = 16 * buffers.len() as u32;
            self.ring.put(ground, head, Desc { address: table, length, flags: INDIRECT, next: 0 });
        } else {
            let last = buffers.len() - 1;
            for (index, (address, length, writable)) in buffers.into_iter().enumerate() {
                let flags = if index == last { 0 } else { NEXT } | if writable { WRITE } else { 0 };
                let at = head + index as u16;
                self.ring.put(ground, at, Desc { address, length, flags, next: at + 1 });
            }
        }
    }
}

/// Where the indirect table of a request of a queue lies.
pub(crate) fn table_of(queue: u32, slot: u16) -> u64 {
    TABLES + (u64::from(queue) << 16) + u64::from(slot) * TABLE_BYTES
}

/// Writes a request of a queue and a slot that keeps the rules, whatever it asks for. Returns its buffers: their addresses
/// and lengths, and whether the server may write there.
pub(crate) fn request(
    ground: &Ground,
    dice: &mut Dice,
    (queue, slot): (u32, u16),
    disk_sectors: u64,
) -> Vec<(u64, u32, bool)> {
    let page = DATA + (u64::from(queue) << 20) + u64::from(slot) * 0x1_0000;
    let kind = dice.pick(&[READ, READ, READ, WRITE_DATA, WRITE_DATA, FLUSH, GET_ID, DISCARD, WRITE_ZEROES, 99]);
    let sector = match dice.percent(80) {
        true => dice.below(disk_sectors),
        false => dice.edge(disk_sectors),
    };
    ground.write(page, &header(kind, sector));
    let is_out = matches!(kind, WRITE_DATA | DISCARD | WRITE_ZEROES);
    let length = match kind {
        FLUSH => 0,
        GET_ID => 20 + dice.below(3) as u32 - 1,
        DISCARD | WRITE_ZEROES => 16 * (1 + dice.below(17)) as u32,
        _ if dice.percent(90) => 512 * (1 + dice.below(64)) as u32,
        _ => 1 + dice.below(40_000) as u32,
    };
    if matches!(kind, DISCARD | WRITE_ZEROES) {
        for range in 0..u64::from(length / 16) {
            put_range(ground, dice, page + 0x1000 + 16 * range, disk_sectors);
        }
    }
    let mut buffers = vec![(page, 16, false)];
    if dice.percent(10) {
        buffers = vec![(page, 5, false), (page + 5, 11, false)];
    }
    if length > 0 {
        let cut = if dice.percent(30) { dice.below(u64::from(length)) as u32 } else { 0 };
        let parts = [(page + 0x1000, cut, !is_out), (page + 0x1000 + u64::from(cut), length - cut, !is_out)];
        buffers.extend(parts.into_iter().filter(|(_, length, _)| *length > 0));
    }
    buffers.push((page + 16, 1, true));
    buffers
}

fn put_range(ground: &Ground, dice: &mut Dice, at: u64, disk_sectors: u64) {
    let mut bytes = dice.edge(disk_sectors).to_le_bytes().to_vec();
    let sectors = if dice.percent(70) { dice.below(4096) } else { dice.edge(1 << 21) };
    bytes.extend((sectors as u32).to_le_bytes());
    bytes.extend((if dice.percent(80) { dice.below(2) as u32 } else { dice.next() as u32 }).to_le_bytes());
    ground.write(at, &bytes);
}

impl Haunted for Requests {
    fn start(&mut self, wire: &Wire) -> io::Result<()> {
        self.ring.start(wire)
    }

    fn restart(&mut self, wire: &Wire, dice: &mut Dice) -> io::Result<()> {
        let base = wire.ask(code::GET_VRING_BASE, &words32(&[self.ring.index, 0]))?;
        self.ring.avail_index = base.get(4..6).map_or(0, |bytes| u16::from_ne_bytes(bytes.try_into().unwrap()));
        if dice.percent(80) { self.ring.start(wire) } else { Ok(()) }
    }

    fn honest_burst(&mut self, ground: &Ground, dice: &mut Dice) -> u64 {
        let count = 1 + dice.below(self.free.len() as u64);
        let mut offered = 0;
        for _ in 0..count {
            let Some(head) = self.free.pop() else { break };
            self.put_request(ground, dice, head);
            self.ring.offer(ground, head);
            offered += 1;
        }
        self.ring.kick(ground);
        offered
    }

    fn await_all(&mut self, ground: &Ground) {
        let begun = Instant::now();
        let all = usize::from(self.ring.size / PER_SLOT);
        while self.free.len() < all {
            let used = self.ring.take_used(ground);
            if used.is_empty() {
                assert!(begun.elapsed() < PATIENCE, "{} honest requests are not answered", all - self.free.len());
                self.ring.wait(100);
            }
            self.free.extend(used);
        }
    }

    fn break_rules(&mut self, ground: &Ground, dice: &mut Dice) -> u64 {
        let head = dice.below(u64::from(self.ring.size)) as u16;
        match dice.below(10) {
            0 => self.ring.offer(ground, dice.edge(u64::from(self.ring.size)) as u16),
            1 => self.ring.avail_index = self.ring.avail_index.wrapping_add(dice.next() as u16),
            2 => {
                // A chain that leads back to itself.
                let next = dice.below(u64::from(self.ring.size)) as u16;
                self.ring.put(ground, head, Desc { address: DATA, length: 16, flags: NEXT, next });
                self.ring.put(ground, next, Desc { address: DATA, length: 16, flags: NEXT, next: head });
                self.ring.offer(ground, head);
            }
            3 => {
                // A table in a table, or one that goes on behind its end.
                let flags = dice.pick(&[INDIRECT, NEXT, NEXT | INDIRECT, WRITE | INDIRECT]);
                let inner = Desc { address: TABLES, length: 32, flags, next: dice.next() as u16 };
                ground.write(TABLES, &inner.bytes());
                let flags = dice.pick(&[INDIRECT, INDIRECT | NEXT, INDIRECT | WRITE]);
                let length = dice.pick(&[0, 1, 16, 17, 32, 16 * 1024, 16 * 1025, u32::MAX]);
                self.ring.put(ground, head, Desc { address: TABLES, length, flags, next: head });
                self.ring.offer(ground, head);
            }
            4 => {
                // Twice in flight.
                self.put_request(ground, dice, head / PER_SLOT * PER_SLOT);
                self.ring.offer(ground, head / PER_SLOT * PER_SLOT);
                self.ring.offer(ground, head / PER_SLOT * PER_SLOT);
            }
            5 => {
                // All of the ring's own memory is garbage.
                let length = usize::from(self.ring.size) * 26;
                ground.write(self.ring.table, &dice.bytes(length));
                self.ring.avail_index = ground.read_u16(self.ring.avail + 2);
            }
            6 => {
                // A buffer that is the ring itself: what is read lands there.
                ground.write(DATA, &header(READ, 0));
                self.ring.put(ground, 0, Desc { address: DATA, length: 16, flags: NEXT, next: 1 });
                let length = u32::from(self.ring.size) * 16 / 512 * 512;
                let into = Desc { address: self.ring.table, length: length.max(512), flags: NEXT | WRITE, next: 2 };
                self.ring.put(ground, 1, into);
                self.ring.put(ground, 2, Desc { address: DATA + 16, length: 1, flags: WRITE, next: 0 });
                self.ring.offer(ground, 0);
            }
            _ => {
                for _ in 0..1 + dice.below(4) {
                    let address = dice.edge(ground.length);
                    let length = dice.edge(512) as u32;
                    let desc = Desc { address, length, flags: dice.next() as u16 & 7, next: dice.next() as u16 };
                    let index = dice.below(u64::from(self.ring.size)) as u16;
                    self.ring.put(ground, index, desc);
                    self.ring.offer(ground, index);
                }
            }
        }
        self.ring.kick(ground);
        1
    }
}
