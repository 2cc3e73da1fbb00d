//! A checker of histories: the writes of a disk's guests, sector by sector, and the data that each of them may read.
//!
//! Each write gives its sectors a unique stamp. A read of a sector must return the last write acknowledged before the
//! read began, or one in flight meanwhile. After a crash, a sector may hold the last write that a flush covered, or any
//! write that was not replaced when that flush began.

use crate::dice::{fill_seeded, mix};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SECTOR: usize = block::SECTOR_BYTES as usize;

/// A change of a sector. Stamp 0 stands for zeros.
#[derive(Debug, Clone, Copy)]
struct Change {
    stamp: u64,
    begun: u64,
    ended: Option<u64>,
}

struct State {
    clock: u64,
    /// The changes of each sector, in the order in which they began. The initial contents count as zeros.
    sectors: Vec<Vec<Change>>,
    /// Changes acknowledged before this moment are durable.
    flushed: u64,
}

/// The history of a disk that held zeros. Shared by all who write to it and read from it.
pub struct SectorHistory(Mutex<State>);

/// A write that has begun. One that never ends stays in flight: readers may or may not see it.
#[derive(Debug, Clone, Copy)]
pub struct BegunWrite {
    stamp: u64,
    first: u64,
    count: u64,
}

/// A moment of a history.
#[derive(Debug, Clone, Copy)]
pub struct Moment(u64);

impl SectorHistory {
    /// Makes the history of a disk of zeros, with this number of sectors.
    #[must_use]
    pub fn new(sectors: usize) -> Self {
        let first = Change { stamp: 0, begun: 0, ended: Some(0) };
        Self(Mutex::new(State { clock: 0, sectors: vec![vec![first]; sectors], flushed: 0 }))
    }

    /// Makes the history of a disk with these bytes: each sector is one that [`bytes_of`] returned, or zeros.
    #[must_use]
    pub fn holding(bytes: &[u8]) -> Self {
        let history = Self::new(bytes.len() / SECTOR);
        let mut state = history.lock();
        for (sector, bytes) in bytes.chunks(SECTOR).enumerate() {
            let stamp = stamp_of(sector as u64, bytes).unwrap_or(0);
            state.clock = state.clock.max(stamp);
            state.sectors[sector][0].stamp = stamp;
        }
        drop(state);
        history
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.lock().sectors.len() as u64
    }

    /// Notes that a write is about to be submitted.
    pub fn begin_write(&self, first: u64, count: u64) -> BegunWrite {
        self.begin(first, count, false)
    }

    /// Notes that a write of zeros is about to be submitted.
    pub fn begin_zeroes(&self, first: u64, count: u64) -> BegunWrite {
        self.begin(first, count, true)
    }

    fn begin(&self, first: u64, count: u64, zeroes: bool) -> BegunWrite {
        let mut state = self.lock();
        state.clock += 1;
        let (begun, stamp) = (state.clock, if zeroes { 0 } else { state.clock });
        for sector in first..first + count {
            state.sectors[sector as usize].push(Change { stamp, begun, ended: None });
        }
        BegunWrite { stamp: begun, first, count }
    }

    /// Notes that the write was acknowledged.
    pub fn end_write(&self, write: BegunWrite) {
        let mut state = self.lock();
        state.clock += 1;
        let now = state.clock;
        for sector in write.first..write.first + write.count {
            let mut changes = state.sectors[sector as usize].iter_mut().rev();
            if let Some(change) = changes.find(|change| change.begun == write.stamp) {
                change.ended = Some(now);
            }
        }
    }

    /// Returns the moment at which a read or a flush begins.
    pub fn now(&self) -> Moment {
        let mut state = self.lock();
        state.clock += 1;
        Moment(state.clock)
    }

    /// Notes that a flush that began at this moment was acknowledged.
    pub fn end_flush(&self, begun: Moment) {
        let mut state = self.lock();
        state.flushed = state.flushed.max(begun.0);
    }

    /// Whether a read that began at `since` and ends now may return these bytes.
    pub fn check_read(&self, first: u64, bytes: &[u8], since: Moment) -> Result<(), String> {
        let state = self.lock();
        bytes.chunks(SECTOR).zip(first..).try_for_each(|(bytes, sector)| state.explains(sector, bytes, since.0))
    }

    /// Whether the disk may have held these bytes at one moment between these two.
    pub fn check_moment(&self, first: u64, bytes: &[u8], since: Moment, until: Moment) -> Result<(), String> {
        self.check_read(first, bytes, since)?;
        let state = self.lock();
        for (bytes, sector) in bytes.chunks(SECTOR).zip(first..) {
            let mut before = state.sectors[sector as usize].iter().filter(|change| change.begun < until.0);
            let stamp = stamp_of(sector, bytes);
            if stamp.is_some_and(|stamp| !before.any(|change| change.stamp == stamp)) {
                return Err(format!("sector {sector} holds write {stamp:?}, which began after {}", until.0));
            }
        }
        Ok(())
    }

    /// Whether a crash may have left these bytes. All former guests are gone.
    pub fn check_survivors(&self, first: u64, bytes: &[u8]) -> Result<(), String> {
        let state = self.lock();
        bytes.chunks(SECTOR).zip(first..).try_for_each(|(bytes, sector)| state.explains(sector, bytes, state.flushed))
    }
}

impl State {
    fn explains(&self, sector: u64, bytes: &[u8], since: u64) -> Result<(), String> {
        let changes = &self.sectors[sector as usize];
        let outdated = |ended: u64| {
            let replaced = |later: &&Change| later.begun > ended && later.ended.is_some_and(|end| end < since);
            changes.iter().rev().take_while(|later| later.begun > ended).find(replaced).copied()
        };
        let Some(stamp) = stamp_of(sector, bytes) else {
            // Parts of two writes may be seen while one of them is in flight.
            return match changes.iter().rev().any(|change| change.ended.is_none_or(|end| end >= since)) {
                true => Ok(()),
                false => Err(format!("sector {sector} is torn, or holds what nobody wrote to it")),
            };
        };
        let mut replaced = None;
        for change in changes.iter().rev().filter(|change| change.stamp == stamp) {
            match change.ended.and_then(outdated) {
                None => return Ok(()),
                Some(later) => replaced = Some(later),
            }
        }
        Err(match replaced {
            Some(later) => format!("sector {sector} is old: it holds write {stamp}, and {later:?} came before {since}"),
            None => format!("sector {sector} holds write {stamp}, which did not write there"),
        })
    }
}

/// Returns the bytes of a write.
#[must_use]
pub fn bytes_of(write: BegunWrite) -> Vec<u8> {
    let mut bytes = vec![0; write.count as usize * SECTOR];
    for (bytes, sector) in bytes.chunks_mut(SECTOR).zip(write.first..) {
        fill_sector(sector, write.stamp, bytes);
    }
    bytes
}

fn fill_sector(sector: u64, stamp: u64, bytes: &mut [u8]) {
    let (head, rest) = bytes.split_at_mut(8);
    head.copy_from_slice(&stamp.to_le_bytes());
    fill_seeded(mix(stamp, sector), rest);
}

/// Returns the stamp of a whole sector; `None` if the bytes are not those of one write.
fn stamp_of(sector: u64, bytes: &[u8]) -> Option<u64> {
    let stamp = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let mut expected = vec![0; bytes.len()];
    if stamp != 0 {
        fill_sector(sector, stamp, &mut expected);
    }
    (bytes == expected).then_some(stamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_returns_the_last_acknowledged_write_or_one_in_flight_and_nothing_else() {
        let history = SectorHistory::new(8);
        let one = history.begin_write(2, 2);
        assert!(history.check_read(2, &[0; 1024], history.now()).is_ok(), "the write may not have happened yet");
        assert!(history.check_read(2, &bytes_of(one), history.now()).is_ok(), "it may have happened");
        let early = history.now();
        history.end_write(one);
        assert!(history.check_read(2, &[0; 512], early).is_ok(), "the read began before the write ended");
        assert!(history.check_read(2, &[0; 512], history.now()).unwrap_err().contains("old"));
        let two = history.begin_write(3, 1);
        history.end_write(two);
        assert!(history.check_read(2, &bytes_of(one), history.now()).unwrap_err().contains("sector 3 is old"));
        assert!(history.check_read(4, &bytes_of(two), history.now()).is_err(), "bytes of another place");
        let mut torn = bytes_of(two);
        torn[300] ^= 1;
        assert!(history.check_read(3, &torn, history.now()).unwrap_err().contains("torn"));
        let zeroes = history.begin_zeroes(3, 1);
        assert!(history.check_read(3, &torn, history.now()).is_ok(), "parts, while a write is in flight");
        history.end_write(zeroes);
        assert!(history.check_read(3, &bytes_of(two), history.now()).unwrap_err().contains("old"));
    }

    #[test]
    fn a_flush_keeps_what_was_acknowledged_before_it_began() {
        let history = SectorHistory::new(1);
        let one = history.begin_write(0, 1);
        history.end_write(one);
        let flush = history.now();
        let two = history.begin_write(0, 1);
        history.end_write(two);
        assert!(history.check_survivors(0, &[0; 512]).is_ok(), "nothing is durable yet");
        history.end_flush(flush);
        assert!(history.check_survivors(0, &[0; 512]).is_err());
        assert!(history.check_survivors(0, &bytes_of(one)).is_ok());
        assert!(history.check_survivors(0, &bytes_of(two)).is_ok());
    }
}
