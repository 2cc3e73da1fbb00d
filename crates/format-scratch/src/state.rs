//! The changing state of an overlay, under one lock that is never held across an await.

use crate::free_pages::FreePages;
use crate::index::{Index, Part};
use crate::index_memory::Taken;
use crate::layout::{MAX_DATA_PAGES, PAGE_BYTES, TABLE_WORDS, index_pages};
use crate::space::Space;
use crate::unwritten::{Kept, Unwritten};
use block::{Epochs, FileOp, InFlightOps, IoError, IoErrorKind, IoResult, MetaIo, WaitList};
use memory::IoBuf;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The pages that are reserved at once: few enough to take no noticeable time.
const DATA_STEP_PAGES: u64 = 1024;
pub(crate) const INDEX_STEP_PAGES: u64 = 16;
/// Space is reserved ahead when fewer pages than this are left. So writes and maps go on while the host finds space.
const LOW_PAGES: u64 = DATA_STEP_PAGES / 2;
/// No space is reserved ahead while this much is free in pieces that are too short, or waits for requests in flight.
const UNUSABLE_PAGES_MAX: u64 = 4096;
/// How far a guest that frees and writes without flushing can make the data of a kept overlay grow: 64 MiB, or this
/// part of the disk if that is more. Beyond that it waits for a flush.
const RETIRED_PAGES_MAX: u64 = (64 << 20) / PAGE_BYTES;
const RETIRED_PART_OF_DISK: u64 = 8;
/// The most retired runs that become free under one lock. After a flush there may be very many.
const RUNS_A_TURN: usize = 256;
/// How often an attempt without space flushes, to reuse freed pages.
const RECLAIMS_MAX: u32 = 4;

/// The used and the reserved pages of a file. More are reserved than used.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    pub(crate) used: u64,
    pub(crate) reserved: u64,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Pages of the disk that are being written for the first time: start -> end of each run.
    pub(crate) in_flight: BTreeMap<u64, u64>,
    pub(crate) data: Reserved,
    /// Reserved pages of the index. Its used pages are tables.
    pub(crate) index_reserved: u64,
    pub(crate) tables: u64,
    /// Numbers below `tables` that an earlier opening used, and that a power cut left without an owner.
    pub(crate) free_tables: Vec<u64>,
    pub(crate) free: FreePages,
    /// Freed pages of the data: the epoch, the number of the change, the pages. They are free once the epoch is over
    /// and, in a kept overlay, the change is durable. Epochs and changes only grow.
    retired: VecDeque<(u64, u64, Range<u64>)>,
    /// The number of retired pages.
    retired_pages: u64,
    /// The most retired pages that may wait for a flush before the data grow.
    retired_pages_max: u64,
    /// Whether a map found no space since space was last reserved.
    missed: bool,
    /// Whether space could not be reserved ahead. Then only writes that need it ask for more.
    is_full: bool,
    /// Whether a reservation is under way.
    growing: bool,
    /// Whether data behind the used pages may be left from an earlier opening.
    pub(crate) has_stale_data: bool,
    /// The changes that a kept overlay has not written to its file.
    pub(crate) unwritten: Unwritten,
    /// The memory that the index of a kept overlay has.
    pub(crate) index_memory: Option<Taken>,
}

/// The file that needs more space, and the pages it must then have, at least and at best.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    which: Which,
    reserved: u64,
    least: u64,
    best: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Data,
    Index,
}

/// The result of an attempt.
pub(crate) enum Step<T> {
    Done(T),
    /// Try again when something has ended.
    Wait,
    /// Try again when there is space.
    Need(Need),
    /// Try again after a flush, which frees pages.
    Flush,
    Fail(IoError),
}

/// An overlay, shared with its allocations.
pub(crate) struct Inner {
    pub(crate) size_bytes: u64,
    pub(crate) index: Index,
    pub(crate) epochs: Epochs,
    pub(crate) idle: WaitList,
    state: Mutex<State>,
    /// [`State::is_short`], for those who do not hold the lock.
    is_short: AtomicBool,
    spaces: Spaces,
    /// Writes of the index of a kept overlay by flushes, and reservations in its files. Those of dropped tasks still happen.
    pub(crate) index_writes: Arc<InFlightOps>,
    reservations: Arc<InFlightOps>,
    /// Set if the overlay outlives its process.
    pub(crate) kept: Option<Kept>,
}

/// The way in which space in the two files is reserved.
pub(crate) enum Spaces {
    /// Through these, for the index and for the data.
    Given([Arc<dyn Space>; 2]),
    /// Through operations on the files.
    OfFiles,
}

impl State {
    pub(crate) fn is_in_flight(&self, pages: &Range<u64>) -> bool {
        let before = self.in_flight.range(..pages.end).next_back();
        before.is_some_and(|(_, end)| *end > pages.start)
    }

    /// Gives the part a table if it has none. `None` if it has one now; otherwise the reason why not yet.
    pub(crate) fn table_for(&mut self, index: &Index, part: u64) -> Option<Step<()>> {
        if matches!(index.part(part), Part::Table(_)) {
            return None;
        }
        let free = self.free_tables.last().copied();
        let table = free.unwrap_or(self.tables);
        let needed = index_pages(index.header_pages, table.saturating_add(1));
        if needed > self.index_reserved {
            let mut best = self.index_reserved.max(needed).saturating_add(INDEX_STEP_PAGES);
            if let Some(memory) = &mut self.index_memory
                && !memory.grow_to(best)
            {
                if !memory.grow_to(needed) {
                    memory.log_full();
                    return Some(Step::Fail(IoError::new(IoErrorKind::NoSpace)));
                }
                best = needed;
            }
            return Some(self.need(Which::Index, self.index_reserved, needed, best));
        }
        match index.give_table(part, table) {
            Some(changed) => {
                match free {
                    Some(_) => drop(self.free_tables.pop()),
                    None => self.tables = self.tables.saturating_add(1),
                }
                self.unwritten.note(changed);
                None
            }
            None => Some(Step::Fail(IoError::EIO)),
        }
    }

    fn need(&mut self, which: Which, reserved: u64, least: u64, best: u64) -> Step<()> {
        if self.growing {
            return Step::Wait;
        }
        self.growing = true;
        Step::Need(Need { which, reserved, least, best })
    }

    /// Takes the pages that were retired first, if they are free by now and `wanted` accepts them.
    fn take_retired(&mut self, epochs: &Epochs, wanted: impl FnOnce(&Range<u64>) -> bool) -> Option<Range<u64>> {
        let (epoch, change, run) = self.retired.front()?;
        if !wanted(run) || *change > self.unwritten.durable || !epochs.is_over(*epoch) {
            return None;
        }
        let (_, _, run) = self.retired.pop_front()?;
        self.retired_pages = self.retired_pages.saturating_sub(run.end.saturating_sub(run.start));
        Some(run)
    }

    /// Whether a flush would let pages be free, once their epochs are over.
    fn waits_for_flush(&self) -> bool {
        self.retired.front().is_some_and(|(_, change, _)| *change > self.unwritten.durable)
    }

    /// Asks for a flush, or waits for the one that is under way.
    fn flush_first(&self) -> Step<()> {
        if self.unwritten.is_flushing { Step::Wait } else { Step::Flush }
    }

    /// Takes exactly `count` contiguous pages that were used and are free.
    fn take_free(&mut self, epochs: &Epochs, count: u64) -> Option<Range<u64>> {
        // Maps of one size are often overwritten by others of that size.
        let fits = |run: &Range<u64>| run.end.saturating_sub(run.start) == count;
        if let Some(run) = self.take_retired(epochs, fits).or_else(|| self.free.take_whole(count)) {
            return Some(run);
        }
        for _ in 0..RUNS_A_TURN {
            let Some(run) = self.take_retired(epochs, |_| true) else { break };
            self.free.add(run);
        }
        self.free.take_whole(count)
    }

    /// Takes exactly `count` contiguous pages of data that are reserved already. Also returns whether they were never
    /// used.
    pub(crate) fn take_data_at_hand(&mut self, epochs: &Epochs, count: u64) -> Option<(Range<u64>, bool)> {
        if let Some(run) = self.take_free(epochs, count) {
            return Some((run, false));
        }
        let Reserved { used, reserved } = self.data;
        let end = used.checked_add(count).filter(|end| *end <= reserved);
        self.missed |= end.is_none();
        let end = end?;
        self.data.used = end;
        Some((used..end, !self.has_stale_data))
    }

    /// Whether space should be reserved ahead.
    pub(crate) fn is_short(&self) -> bool {
        let Reserved { used, reserved } = self.data;
        let unusable = self.free.pages().saturating_add(self.retired_pages);
        let at_hand = reserved.saturating_sub(used).saturating_add(unusable);
        !self.is_full
            && !self.growing
            && reserved < MAX_DATA_PAGES
            && unusable < UNUSABLE_PAGES_MAX
            && (self.missed || at_hand < LOW_PAGES)
    }

    /// Asks for more space of the data.
    fn need_data(&mut self, count: u64) -> Step<()> {
        let reserved = self.data.reserved;
        let best = reserved.saturating_add(DATA_STEP_PAGES.max(count)).min(MAX_DATA_PAGES);
        self.need(Which::Data, reserved, reserved.saturating_add(1), best)
    }

    /// Asks for a whole step of space ahead, or none, unless a reservation is under way.
    pub(crate) fn need_ahead(&mut self) -> Option<Need> {
        if !self.is_short() {
            return None;
        }
        match self.need_data(DATA_STEP_PAGES) {
            Step::Need(need) => Some(Need { least: need.best, ..need }),
            _ => None,
        }
    }

    /// Takes at most `count` contiguous pages of data. Also returns whether they were never used.
    pub(crate) fn take_data(&mut self, epochs: &Epochs, count: u64) -> Result<(Range<u64>, bool), Step<()>> {
        if let Some(run) = self.take_free(epochs, count) {
            return Ok((run, false));
        }
        let Reserved { used, reserved } = self.data;
        if used < reserved {
            let end = used.saturating_add(count).min(reserved);
            self.data.used = end;
            return Ok((used..end, !self.has_stale_data));
        }
        if let Some(run) = self.free.take_part(count) {
            return Ok((run, false));
        }
        let is_at_end = reserved >= MAX_DATA_PAGES;
        if (is_at_end || self.retired_pages > self.retired_pages_max) && self.waits_for_flush() {
            return Err(self.flush_first());
        }
        if is_at_end {
            return Err(Step::Fail(IoError::new(IoErrorKind::NoSpace)));
        }
        Err(self.need_data(count))
    }

    /// Forgets all data, and the space for them.
    pub(crate) fn forget_data(&mut self) {
        (self.data, self.free) = (Reserved::default(), FreePages::default());
        self.retired.clear();
        self.retired_pages = 0;
    }

    /// Retires pages of the data: requests that begin now cannot find them any more.
    pub(crate) fn retire(&mut self, epochs: &Epochs, runs: impl IntoIterator<Item = Range<u64>>) {
        let (epoch, change) = (epochs.retire(), self.unwritten.change);
        for run in runs {
            self.retired_pages = self.retired_pages.saturating_add(run.end.saturating_sub(run.start));
            self.retired.push_back((epoch, change, run));
        }
    }
}

impl Inner {
    pub(crate) fn new(size_bytes: u64, index: Index, spaces: Spaces, kept: Option<Kept>) -> Self {
        let (unwritten, index_memory) = (Unwritten::new(kept.is_some()), kept.as_ref().map(|_| Taken::default()));
        let retired_pages_max = RETIRED_PAGES_MAX.max(size_bytes / PAGE_BYTES / RETIRED_PART_OF_DISK);
        let state = State { unwritten, index_memory, retired_pages_max, ..State::default() };
        Self {
            size_bytes,
            index,
            epochs: Epochs::default(),
            idle: WaitList::default(),
            state: Mutex::new(state),
            is_short: AtomicBool::new(false),
            spaces,
            index_writes: Arc::default(),
            reservations: Arc::default(),
            kept,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Call it when space was taken or found, before the lock is given up.
    pub(crate) fn note_space(&self, state: &State) {
        self.is_short.store(state.is_short(), Ordering::Relaxed);
    }

    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Reserves space ahead, if little is left. Failing is no error: a request that needs the space will report it.
    pub(crate) async fn reserve_ahead(&self, io: &MetaIo) {
        if !self.is_short() {
            return;
        }
        let need = {
            let mut state = self.lock();
            let need = state.need_ahead();
            self.note_space(&state);
            need
        };
        if let Some(need) = need
            && self.reserve(io, need).await.is_err()
        {
            let mut state = self.lock();
            state.is_full = true;
            self.note_space(&state);
        }
    }

    /// Returns the pages of a range, which is not empty and lies in the disk.
    pub(crate) fn pages_of(offset: u64, length_bytes: u64) -> Range<u64> {
        offset / PAGE_BYTES..offset.saturating_add(length_bytes).div_ceil(PAGE_BYTES)
    }

    pub(crate) fn part_of(page: u64) -> u64 {
        page / TABLE_WORDS
    }

    /// Makes attempts until one succeeds or fails. Reserves space and flushes in between.
    pub(crate) async fn run<T>(&self, io: &MetaIo, mut attempt: impl FnMut(&mut State) -> Step<T>) -> IoResult<T> {
        let mut tries_left = RECLAIMS_MAX;
        loop {
            // The latest durable change that the attempt saw.
            let mut durable = 0;
            let mut ready = || {
                if self.index.is_lost() {
                    return Some(Err(IoError::EIO));
                }
                let mut state = self.lock();
                durable = state.unwritten.durable;
                match attempt(&mut state) {
                    Step::Wait => None,
                    Step::Done(value) => Some(Ok(Ok(value))),
                    Step::Need(need) => Some(Ok(Err(Some(need)))),
                    Step::Flush => Some(Ok(Err(None))),
                    Step::Fail(error) => Some(Err(error)),
                }
            };
            // The attempt borrows only from this frame.
            let need = match self.idle.until(&mut ready).await? {
                Ok(value) => return Ok(value),
                Err(need) => need,
            };
            let Some(need) = need else {
                self.reclaim(io, durable).await?;
                continue;
            };
            if let Err(error) = self.reserve(io, need).await {
                let is_full = error.kind() == IoErrorKind::NoSpace && need.which == Which::Data;
                if !is_full || tries_left == 0 || !self.reclaim(io, durable).await? {
                    return Err(error);
                }
                tries_left = tries_left.saturating_sub(1);
            }
        }
    }

    /// Flushes if that frees pages. Returns whether there was a flush since the change with this number was the latest
    /// durable one.
    async fn reclaim(&self, io: &MetaIo, durable: u64) -> IoResult<bool> {
        if self.lock().waits_for_flush() {
            // Rare, so it takes no room in each request's task.
            Box::pin(self.flush(io)).await?;
        }
        Ok(self.lock().unwritten.durable > durable)
    }

    /// Records durably in the header that this many pages of a kept overlay's index are zeroed. The zeros become
    /// durable first.
    async fn believe(&self, io: &MetaIo, pages: u64) -> IoResult {
        let kept = self.kept.as_ref().ok_or(IoError::EIO)?;
        io.flush().await?;
        let page = kept.header.encode("", pages).map_err(|_| IoError::EIO)?;
        let write = FileOp::Write { offset: 0, data: IoBuf::from_aligned(page).whole(), fua: false };
        self.reservations.start(io.queue(), write).await?;
        io.flush().await
    }

    /// Reserves space outside the reactor: the best size, or if there is less, the least.
    pub(crate) async fn reserve(&self, io: &MetaIo, need: Need) -> IoResult {
        let growing = Growing(self);
        let Need { which, reserved, least, best } = need;
        let halfway = least.saturating_add(best.saturating_sub(least) / 16);
        let ends = [best, halfway, least];
        let end = match &self.spaces {
            Spaces::Given(spaces) => {
                let [index, data] = spaces;
                let space = Arc::clone(if which == Which::Data { data } else { index });
                let up_to = move |end: u64| space.reserve(bytes(reserved), bytes(end.saturating_sub(reserved)));
                io.queue().compute(move || first_that_works(ends, up_to)).await??
            }
            Spaces::OfFiles => {
                let queue = if which == Which::Data { io.data().ok_or(IoError::EIO)? } else { io.queue() };
                // One whose task was dropped may still zero the same space.
                self.reservations.over().await;
                let mut found = Err(IoError::new(IoErrorKind::NoSpace));
                let mut tried = None;
                for end in ends {
                    if tried.replace(end) == Some(end) {
                        continue;
                    }
                    let (offset, length) = (bytes(reserved), bytes(end.saturating_sub(reserved)));
                    let zeroes = FileOp::WriteZeroes { offset, length, may_unmap: false };
                    found = self.reservations.start(queue, zeroes).await.map(|()| end);
                    if found.is_ok() {
                        break;
                    }
                }
                let end = found?;
                if which == Which::Index {
                    self.believe(io, end).await?;
                }
                end
            }
        };
        let mut state = self.lock();
        match which {
            Which::Data => {
                state.data.reserved = end;
                (state.missed, state.is_full) = (false, false);
                self.note_space(&state);
            }
            Which::Index => state.index_reserved = end,
        }
        drop(state);
        drop(growing);
        Ok(())
    }
}

fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(PAGE_BYTES)
}

/// Returns the first of the ends up to which space can be reserved. Ends that are the same are tried once.
fn first_that_works(ends: [u64; 3], up_to: impl Fn(u64) -> IoResult) -> IoResult<u64> {
    let [best, halfway, least] = ends;
    let up_to = |end: u64| up_to(end).map(|()| end);
    let after = |failed: u64, end: u64| move |error| if end == failed { Err(error) } else { up_to(end) };
    up_to(best).or_else(after(best, halfway)).or_else(after(halfway, least))
}

/// Held while space is being reserved, even if the task that waits for it is dropped.
struct Growing<'a>(&'a Inner);

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.growing = false;
        self.0.note_space(&state);
        drop(state);
        self.0.idle.wake_all();
    }
}
