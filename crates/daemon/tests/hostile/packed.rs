//! What a hostile guest puts into its packed rings.

use super::dice::Dice;
use super::ground::{Ground, INDIRECT, NEXT, WRITE, header};
use super::requests::{DATA, PATIENCE, READ, TABLES, request, table_of};
use super::session::Haunted;
use super::wire::{Wire, code, words32, words64};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

/// Descriptor flags of a packed ring.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Where a new ring begins: both places are the first one, in the first turn.
const NEW: u32 = 0x8000_8000;
/// The most descriptors of one request.
const PER_ID: u16 = 8;

/// A place in the ring, and whether its turn is an odd one.
type Place = (u16, bool);

/// One packed ring in a guest's hands.
pub(crate) struct PackedRequests {
    index: u32,
    size: u16,
    ring: u64,
    avail: Place,
    used: Place,
    /// How many descriptors the server has of each request; zero for what it does not have.
    chains: Vec<u16>,
    disk_sectors: u64,
    kick: OwnedFd,
    call: OwnedFd,
}

impl PackedRequests {
    pub(crate) fn new(index: u32, size: u16, ring: u64, disk_sectors: u64) -> Self {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let chains = vec![0; usize::from(size / PER_ID)];
        let (kick, call) = (event(), event());
        Self { index, size, ring, avail: (0, true), used: (0, true), chains, disk_sectors, kick, call }
    }

    fn step(&self, (index, odd): Place, count: u16) -> Place {
        let sum = u32::from(index) + u32::from(count);
        let size = u32::from(self.size);
        if sum >= size { (((sum - size) % size) as u16, !odd) } else { (sum as u16, odd) }
    }

    /// Puts one descriptor at the next place and makes it available, right or wrong.
    fn put(&mut self, ground: &Ground, address: u64, length: u32, id: u16, flags: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes.extend((flags | if self.avail.1 { AVAIL } else { USED }).to_le_bytes());
        ground.write(self.ring + 16 * u64::from(self.avail.0), &bytes);
        self.avail = self.step(self.avail, 1);
    }

    /// Offers a request that keeps the rules as `id`.
    fn offer(&mut self, ground: &Ground, dice: &mut Dice, id: u16) {
        let buffers = request(ground, dice, (self.index, id), self.disk_sectors);
        let count = if dice.percent(50) {
            let table = table_of(self.index, id);
            for (at, (address, length, writable)) in (0_u64..).zip(&buffers) {
                let mut bytes = address.to_le_bytes().to_vec();
                bytes.extend(length.to_le_bytes());
                bytes.extend(id.to_le_bytes());
                bytes.extend(if *writable { WRITE } else { 0 }.to_le_bytes());
                ground.write(table + 16 * at, &bytes);
            }
            self.put(ground, table, 16 * buffers.len() as u32, id, INDIRECT);
            1
        } else {
            let last = buffers.len() - 1;
            for (at, (address, length, writable)) in buffers.iter().enumerate() {
                let flags = if at == last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
                self.put(ground, *address, *length, id, flags);
            }
            buffers.len() as u16
        };
        if let Some(chain) = self.chains.get_mut(usize::from(id)) {
            *chain = count;
        }
    }

    fn tell(&self) {
        // Full if nobody reads it, which has told them already.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    fn take_used(&mut self, ground: &Ground) {
        for _ in 0..self.size {
            let at = self.ring + 16 * u64::from(self.used.0);
            let flags = ground.read_u16(at + 14);
            if (flags & AVAIL != 0) != self.used.1 || (flags & USED != 0) != self.used.1 {
                return;
            }
            let id = usize::from(ground.read_u16(at + 12));
            let count = self.chains.get_mut(id).map_or(0, std::mem::take);
            assert!(count > 0, "the server gives {id} back, which it does not have");
            self.used = self.step(self.used, count);
        }
    }
}

impl Haunted for PackedRequests {
    fn start(&mut self, wire: &Wire) -> io::Result<()> {
        let base = |(index, odd): Place| u32::from(index) | u32::from(odd) << 15;
        let base = base(self.avail) | base(self.used) << 16;
        wire.tell(code::SET_VRING_NUM, &words32(&[self.index, u32::from(self.size)]), &[])?;
        wire.tell(code::SET_VRING_BASE, &words32(&[self.index, base]), &[])?;
        let driver_event = self.ring + 16 * u64::from(self.size);
        let mut body = words32(&[self.index, 0]);
        body.extend(words64(&[self.ring, driver_event + 4, driver_event, 0]));
        wire.tell(code::SET_VRING_ADDR, &body, &[])?;
        let index = words64(&[u64::from(self.index)]);
        wire.tell(code::SET_VRING_CALL, &index, &[self.call.as_fd()])?;
        wire.tell(code::SET_VRING_KICK, &index, &[self.kick.as_fd()])?;
        wire.tell(code::SET_VRING_ENABLE, &words32(&[self.index, 1]), &[])
    }

    fn restart(&mut self, wire: &Wire, dice: &mut Dice) -> io::Result<()> {
        let base = wire.ask(code::GET_VRING_BASE, &words32(&[self.index, 0]))?;
        let base = base.get(4..8).map_or(NEW, |bytes| u32::from_ne_bytes(bytes.try_into().unwrap()));
        let place = |bits: u32| ((bits & 0x7fff) as u16 % self.size, bits & 0x8000 != 0);
        (self.avail, self.used) = (place(base), place(base >> 16));
        if dice.percent(80) { self.start(wire) } else { Ok(()) }
    }

    fn honest_burst(&mut self, ground: &Ground, dice: &mut Dice) -> u64 {
        let free: Vec<u16> = (0..).zip(&self.chains).filter(|(_, count)| **count == 0).map(|(id, _)| id).collect();
        let count = 1 + dice.below(free.len() as u64);
        let mut offered = 0;
        for id in free.into_iter().take(count as usize) {
            self.offer(ground, dice, id);
            offered += 1;
        }
        self.tell();
        offered
    }

    fn await_all(&mut self, ground: &Ground) {
        let begun = Instant::now();
        loop {
            self.take_used(ground);
            let left = self.chains.iter().filter(|count| **count > 0).count();
            if left == 0 {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{left} honest requests in a packed ring are not answered");
            let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let _ = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&limit));
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
    }

    fn break_rules(&mut self, ground: &Ground, dice: &mut Dice) -> u64 {
        let id = dice.below(self.chains.len() as u64) as u16;
        match dice.below(10) {
            // An id that no buffer can have.
            0 => self.put(ground, DATA, 16, dice.edge(u64::from(self.size)) as u16, 0),
            1 => {
                // Places that were skipped, or a turn that was.
                let skipped = dice.below(u64::from(self.size)) as u16;
                self.avail = self.step(self.avail, skipped);
                self.avail.1 ^= dice.percent(50);
                self.offer(ground, dice, id);
            }
            2 => {
                // A chain without an end: as long as the ring, or longer.
                for _ in 0..self.size + dice.below(4) as u16 {
                    self.put(ground, DATA, 16, id, NEXT);
                }
            }
            3 => {
                // A table in a table, one that goes on behind its end, or one of no length.
                let mut inner = TABLES.to_le_bytes().to_vec();
                inner.extend(32_u32.to_le_bytes());
                inner.extend(id.to_le_bytes());
                inner.extend(dice.pick(&[INDIRECT, NEXT, NEXT | INDIRECT, WRITE | INDIRECT]).to_le_bytes());
                ground.write(TABLES, &inner);
                let flags = dice.pick(&[INDIRECT, INDIRECT | NEXT, INDIRECT | WRITE]);
                let length = dice.pick(&[0, 1, 16, 17, 32, 16 * 1024, 16 * 1025, u32::MAX]);
                self.put(ground, TABLES, length, id, flags);
            }
            4 => {
                // Twice in flight.
                self.offer(ground, dice, id);
                self.offer(ground, dice, id);
            }
            5 => {
                // All of the ring's own memory is garbage.
                let length = usize::from(self.size) * 16 + 8;
                ground.write(self.ring, &dice.bytes(length));
            }
            6 => {
                // A buffer that is the ring itself: what is read lands there.
                ground.write(DATA, &header(READ, 0));
                self.put(ground, DATA, 16, id, NEXT);
                self.put(ground, self.ring, 512, id, NEXT | WRITE);
                self.put(ground, DATA + 16, 1, id, WRITE);
            }
            _ => {
                for _ in 0..1 + dice.below(4) {
                    let (address, length) = (dice.edge(ground.length), dice.edge(512) as u32);
                    let (id, flags) = (dice.next() as u16, dice.next() as u16);
                    self.put(ground, address, length, id, flags & !(AVAIL | USED));
                }
            }
        }
        self.tell();
        1
    }
}
