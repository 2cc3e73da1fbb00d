//! Writes that go to two chains: the one that guests use, and the one that is going to take its place.
//!
//! A copy of a disk that is written to may never end: guests may write faster than the copy goes. So for the last part
//! of the copy, each write goes to both chains: first to the one that guests read, then to the other. From then on,
//! what is left to copy only shrinks.
//!
//! * Overlapping writes exclude each other, and so do copies of the same range: both chains get them in one order.
//! * A guest may change its buffer while its write is in flight. So its bytes are copied first, and both chains get the
//!   copy.
//! * A flush covers both. So what guests know to be durable is durable in both, and the other chain can take over at any
//!   moment, without a flush while guests wait.
//! * A discard writes zeros, because what a discard leaves is not the same in all formats.
//! * If the other chain fails, or hangs and is given up, guests do not notice: the copy has failed, not the disk. Once
//!   a record may name the other chain ([`BothSides::decide`]), its failures are reported to guests.
//! * A write to the other chain that was given up is dropped if nobody uses that chain afterwards. If that chain has layers
//!   of the disk, the write goes on in a task of its own, and whoever copies waits for it ([`LateCalls`]).

mod writing;

use crate::chain::exchange::change_log::ChangeLog;
use crate::chain::give_up::{GiveUp, LateCalls, given_up};
use block::sync::{AtomicU64, Mutex, MutexGuard, Ordering, PoisonError};
use block::{IoError, IoResult, RangeGuard, RangeLocks, ReactorCtx, WaitList};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes copied out of guests' memory at the same time, over all queues.
const ROOM_BYTES: u64 = 8 << 20;

/// The state of the other chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It gets all writes, and guests do not depend on it.
    Follows,
    /// It lacks some writes, and gets no more.
    HasFailed(IoError),
    /// It gets all writes, and each has to succeed.
    Decides,
}

/// What a disk keeps, for all its queues, while its writes go to two chains.
pub(crate) struct BothSides {
    /// The bytes of the chain that is going to take over.
    size_bytes: u64,
    /// Ends guests' waits for the other chain if its storage hangs and guests do not depend on it.
    give_up: Option<Arc<GiveUp>>,
    /// Where the other chain's layers are the disk's own: what is not waited for any more.
    late: Option<Arc<LateCalls>>,
    locks: RangeLocks,
    /// Ranges in which the two chains may differ, because a write reached only one of them.
    differs: ChangeLog,
    standing: Mutex<Standing>,
    used_bytes: Mutex<u64>,
    freed: WaitList,
    /// How long each write waits before it begins.
    delay_us: AtomicU64,
    waited_us: AtomicU64,
    longest_us: AtomicU64,
}

impl BothSides {
    pub(crate) fn with(size_bytes: u64, give_up: Option<Arc<GiveUp>>, late: Option<Arc<LateCalls>>) -> Self {
        Self {
            give_up,
            late,
            locks: RangeLocks::default(),
            differs: ChangeLog::new(size_bytes),
            size_bytes,
            standing: Mutex::new(Standing::Follows),
            used_bytes: Mutex::new(0),
            freed: WaitList::default(),
            delay_us: AtomicU64::new(0),
            waited_us: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
        }
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error that left the other chain incomplete, if there was one.
    pub(crate) fn failure(&self) -> Option<IoError> {
        match *self.standing() {
            Standing::HasFailed(error) => Some(error),
            Standing::Follows | Standing::Decides => None,
        }
    }

    /// From here on, a write succeeds only if it succeeds on both chains. Refused if the other chain has failed.
    pub(crate) fn decide(&self) -> IoResult {
        let standing = &mut *self.standing();
        if let Standing::HasFailed(error) = *standing {
            return Err(error);
        }
        *standing = Standing::Decides;
        Ok(())
    }

    /// Undoes [`BothSides::decide`]: guests do not depend on the other chain any more.
    pub(crate) fn follow(&self) {
        {
            let standing = &mut *self.standing();
            if *standing == Standing::Decides {
                *standing = Standing::Follows;
            }
        }
        // Guests that were not allowed to end their waits look again.
        if let Some(give_up) = &self.give_up {
            give_up.tidy();
        }
    }

    /// What the other chain says, or an error where that is given up.
    async fn of_other(&self, ctx: &dyn ReactorCtx, call: impl Future<Output = IoResult> + 'static) -> IoResult {
        match &self.late {
            None => self.or_end(call).await,
            Some(late) => self.or_end(LateCalls::run(late, ctx, call)).await,
        }
    }

    async fn or_end<T>(&self, call: impl Future<Output = IoResult<T>>) -> IoResult<T> {
        GiveUp::or_end(self.give_up.as_deref(), || self.part(), call).await
    }

    /// Has the other chain get nothing more, unless guests depend on it.
    fn part(&self) -> bool {
        let standing = &mut *self.standing();
        if *standing == Standing::Follows {
            *standing = Standing::HasFailed(given_up());
        }
        *standing != Standing::Decides
    }

    /// What a write waits for so that both sides get it; `None` where the other side lacks something, or is given up: then
    /// nobody else needs to wait either.
    async fn unless_apart<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        if self.failure().is_some() {
            return None;
        }
        self.or_end(async { Ok(wait.await) }).await.ok()
    }

    /// Turns the other chain's result into the guest's. A failure that guests need not see is kept as
    /// [`Standing::HasFailed`].
    fn answer(&self, result: IoResult) -> IoResult {
        let Err(error) = result else { return Ok(()) };
        let standing = &mut *self.standing();
        if *standing == Standing::Decides {
            return Err(error);
        }
        *standing = Standing::HasFailed(error);
        Ok(())
    }

    /// Keeps guests from writing to a range while it is copied.
    pub(crate) async fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        self.locks.lock(range).await
    }

    /// Takes the ranges that were written to one chain only, so that they have to be copied again.
    pub(crate) fn take_differences(&self) -> Vec<Range<u64>> {
        self.differs.take_ranges(self.size_bytes)
    }

    /// Sets how long each write waits before it begins.
    pub(crate) fn set_delay(&self, delay: Duration) {
        self.delay_us.store(micros(delay), Ordering::Relaxed);
    }

    pub(crate) fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_us.load(Ordering::Relaxed))
    }

    /// Returns how long writes have waited in all because of the delay, and the longest time that the other chain added
    /// to one write.
    pub(crate) fn waits(&self) -> (Duration, Duration) {
        let of = |count: &AtomicU64| Duration::from_micros(count.load(Ordering::Relaxed));
        (of(&self.waited_us), of(&self.longest_us))
    }

    /// Waits until so many more bytes may be copied out of guests' memory.
    async fn room(&self, bytes: u64) -> Room<'_> {
        let take = || {
            let mut used = self.used_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            let after = used.saturating_add(bytes);
            (*used == 0 || after <= ROOM_BYTES).then(|| *used = after)
        };
        self.freed.until(take).await;
        Room { both: self, bytes }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

struct Room<'a> {
    both: &'a BothSides,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut used = self.both.used_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(self.bytes);
        drop(used);
        self.both.freed.wake_all();
    }
}

/// A range that one chain has and the other may lack. If dropped before both have it, the range is noted.
struct OneSided<'a> {
    both: &'a BothSides,
    range: Range<u64>,
    is_even: bool,
}

impl Drop for OneSided<'_> {
    fn drop(&mut self) {
        if !self.is_even {
            let Range { start, end } = self.range;
            self.both.differs.note(start, end.saturating_sub(start));
        }
    }
}
