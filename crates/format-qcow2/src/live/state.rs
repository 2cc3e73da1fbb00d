//! What all queues share, and how slow operations take turns.
//!
//! Everything that changes metadata happens under one mutex, in one step that is never suspended. A step that misses
//! something (a table in memory, room, a range that another write holds) changes nothing more, says what it needs, and
//! is tried again from the start once that is there.

use crate::layout::entry::{BadEntry, Table, decode_l1};
use crate::layout::geometry::Geometry;
use crate::layout::header::{HEADER_SECTOR_BYTES, Header};
use crate::live::bitmap_tracking::BitmapTracking;
use crate::live::flush_queue::FlushQueue;
use crate::live::free_runs::{FreeRuns, Run};
use crate::live::in_flight_ops::InFlightOps;
use crate::live::metadata_map::{MetadataMap, Owner, TableBits};
use crate::live::refcounts::{Absent, Refcounts};
use block::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, PoisonError};
use block::{Epochs, IoError, IoErrorKind, IoResult, MetaIo, SliceBook, SliceCache, WaitList};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Something that a step cannot do without.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// A slice of an L2 table in memory.
    Slice(u64),
    /// A refcount block in memory.
    Block(u64),
    /// Zeroed space behind the end of the file.
    Extension,
    /// The header says that this image has been written to by us.
    HeaderReady,
    /// Guest clusters that another write is allocating.
    Idle(Range<u64>),
    /// Dirty tables written, so that there is room for others.
    Flush,
    /// The header says that refcounts may be stale.
    DirtyBit,
}

/// Why a step did not get to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    Need(Need),
    Fail(IoError),
}

impl From<IoError> for Stop {
    fn from(error: IoError) -> Self {
        Self::Fail(error)
    }
}

pub(crate) type Step<T> = Result<T, Stop>;

/// How often one step is tried again after a flush where no space was left: operations in flight may still keep some.
const RECLAIMS_MAX: u32 = 4;

/// Host clusters whose reference is gone from the tables in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) clusters: Range<u64>,
    /// Operations resolved until then may still use them.
    pub(crate) epoch: u64,
    /// The table that lies there. It is guarded until then: the file may still lead to it, or its copy not be made yet.
    pub(crate) table: Option<Owner>,
    /// The clusters are barred until then: a write resolved before may ask late whether it may overwrite them.
    pub(crate) barred: bool,
}

/// What a slice of an L2 table that was never written holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FreshTable {
    Zeros,
    /// A copy of the table at this offset, which stays untouched until the new one is published.
    CopyOf(u64),
}

/// Where new space comes from.
#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) free: FreeRuns,
    /// Free, but being punched out of the file: not to be handed out.
    pub(crate) quarantine: FreeRuns,
    /// Host clusters from here on were never handed out. This only grows, unless space that was kept turns out not to
    /// be used.
    pub(crate) frontier: u64,
    /// Host clusters from the frontier up to here read as zeros, also after a power cut.
    pub(crate) zeroed_end: u64,
    /// Up to here, a flush has made that durable.
    pub(crate) blank_end: u64,
    /// Nothing at or behind the frontier has a refcount.
    pub(crate) settled: bool,
    /// Whether the file can be made longer with zeros.
    pub(crate) can_extend: bool,
    /// Host clusters below have been looked at for free ones, up to the frontier at the time.
    pub(crate) scanned_end: u64,
    pub(crate) scan_limit: u64,
    /// The next are looked at when the frontier is here.
    pub(crate) next_scan: u64,
    /// Clusters in front of this are handed out first: the file is to end here.
    pub(crate) ceiling: Option<u64>,
    /// Kept for compressed clusters: found free, and not counted yet.
    pub(crate) for_packed: Range<u64>,
}

impl Space {
    /// Clusters without a refcount may be handed out, but for those that are being punched, or kept for something.
    pub(crate) fn found_free(&mut self, clusters: Range<u64>) {
        let kept = self.for_packed.clone();
        let before = clusters.start..clusters.end.min(kept.start);
        let behind = clusters.start.max(kept.end)..clusters.end;
        let parts = if kept.is_empty() { [clusters, 0..0] } else { [before, behind] };
        for Range { start, end } in parts {
            for gap in self.quarantine.gaps(start, end.saturating_sub(start)) {
                self.free.add(gap);
            }
        }
    }

    /// Lets go of what was kept for compressed clusters.
    pub(crate) fn release_packed(&mut self) {
        let Range { start, end } = std::mem::take(&mut self.for_packed);
        if start == end {
            return;
        }
        if end == self.frontier {
            self.frontier = start;
        } else {
            self.free.add(Run { first: start, count: end.saturating_sub(start), zeroed: false });
        }
    }
}

/// The dirty bit of an image with lazy refcounts.
#[derive(Debug, Default)]
pub(crate) struct DirtyBit {
    /// It is set in the file, durably, and stays so until `wanted` is taken back.
    pub(super) set: bool,
    /// Refcounts may be postponed once it is set.
    pub(super) wanted: bool,
}

/// What the mutex guards.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) book: SliceBook,
    pub(crate) l1_dirty: BTreeSet<usize>,
    pub(crate) l1_writing: BTreeSet<usize>,
    /// L2 tables (by L1 index) whose clusters hold garbage until the next flush has written them.
    pub(crate) fresh_tables: HashMap<u64, FreshTable>,
    pub(crate) refcounts: Refcounts,
    pub(crate) space: Space,
    /// Guest clusters that are being allocated: first -> end.
    pub(crate) in_flight: BTreeMap<u64, u64>,
    /// The first of the guest clusters of a move that has not begun to copy: whoever wants one of them gives the move up.
    pub(crate) tentative: Option<u64>,
    /// What is being loaded.
    pub(crate) busy: HashSet<Need>,
    /// Waits for the flush that makes its unlinking durable.
    pub(crate) unlinked: Vec<Freed>,
    /// How many clusters were added to it since the last flush.
    pub(crate) unlinked_clusters: u64,
    /// Unlinked for good (or never linked): decremented once its epoch is over.
    pub(crate) retired: Vec<Freed>,
    pub(crate) flushes: FlushQueue,
    pub(crate) dirty: DirtyBit,
    /// Something that changed tables lead to must be durable before they are.
    pub(crate) needs_order: bool,
    pub(crate) header_sector: [u8; HEADER_SECTOR_BYTES],
    /// Where the tables lie; collected on first use.
    pub(crate) tables: Option<MetadataMap>,
    /// Those of snapshots are among them.
    pub(crate) snapshots_known: bool,
}

impl State {
    /// Whether the file says all that memory does.
    pub(crate) fn is_all_written(&self) -> bool {
        let rest = !self.refcounts.has_dirty() && self.unlinked.is_empty() && self.retired.is_empty();
        self.is_mapping_written() && rest
    }

    /// Whether the file says all that memory does of where data lie. A flush that is running may still have to make it
    /// durable.
    pub(crate) fn is_mapping_written(&self) -> bool {
        !self.book.has_dirty() && self.l1_dirty.is_empty() && self.fresh_tables.is_empty()
    }

    /// Whether there is space that a flush may free.
    pub(crate) fn has_unlinked(&self) -> bool {
        !self.unlinked.is_empty() || !self.retired.is_empty()
    }

    /// The first range in flight that overlaps `range`.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let (first, end) = self.in_flight.range(..range.end).next_back()?;
        if *end <= range.start {
            return None;
        }
        // Several may overlap. It does not matter which one is waited for first.
        Some(*first..*end)
    }

    /// Gives up a move that has not begun to copy, and is in the way.
    pub(crate) fn give_way(&mut self, range: &Range<u64>) -> bool {
        let Some(first) = self.tentative else { return false };
        let is_in_the_way = first < range.end && self.in_flight.get(&first).is_some_and(|end| *end > range.start);
        if is_in_the_way {
            self.in_flight.remove(&first);
            self.tentative = None;
        }
        is_in_the_way
    }

    /// The first guest cluster in flight at or behind `cluster`.
    pub(crate) fn next_in_flight(&self, cluster: u64) -> u64 {
        self.in_flight.range(cluster..).next().map_or(u64::MAX, |(first, _)| *first)
    }
}

/// One open image.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) read_only: bool,
    /// Refcounts may be postponed, under the dirty bit.
    pub(crate) lazy: bool,
    pub(crate) header: Header,
    pub(crate) geometry: Geometry,
    pub(crate) can_grow: bool,
    pub(crate) can_discard: bool,
    pub(crate) discard_zeroes: bool,
    /// Clusters of a file that cannot grow.
    pub(crate) file_clusters: u64,
    pub(crate) l1: Box<[AtomicU64]>,
    pub(crate) slices: SliceCache,
    /// See [`more_than_data`](crate::layout::entry::more_than_data).
    pub(crate) more_than_data: u64,
    /// Slices that were read from the file.
    pub(crate) slices_read: AtomicU64,
    pub(crate) epochs: Epochs,
    pub(crate) state: Mutex<State>,
    /// Woken when something that was being loaded is there, or could not be loaded.
    pub(crate) loaded: WaitList,
    /// Woken when an allocation ends.
    pub(crate) idle: WaitList,
    /// Woken when a flush ends.
    pub(crate) flushed: WaitList,
    /// Writes to tables and the header that are in flight.
    pub(crate) table_writes: Arc<InFlightOps>,
    /// Operations that make the file longer and are in flight.
    pub(crate) extensions: Arc<InFlightOps>,
    /// Bitmaps that are kept up to date, if the image is open for writing and has any.
    pub(crate) tracking: Option<Box<BitmapTracking>>,
    /// Set while the header needs no change before the image is written to, and all tables are known.
    pub(crate) header_ready: AtomicBool,
    /// The file durably says all that the tables in memory say of where data lie. Cleared before an entry changes, and
    /// set only by our own flushes. It is not set at open: what the file says then may be only in the host's cache,
    /// left there by a process that was killed.
    pub(crate) mapping_is_durable: AtomicBool,
    pub(crate) complained: AtomicBool,
    /// The guard has found that the image contradicts itself: every request fails from now on.
    pub(crate) stopped: AtomicBool,
    /// The corrupt bit has been seen to.
    pub(crate) marked: AtomicBool,
    /// Where tables may lie, for the path without a lock.
    pub(crate) table_bits: TableBits,
    pub(crate) skipped_barriers: AtomicU32,
}

impl Inner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Damage found in the image: told once to a person, each time to the guest.
    pub(crate) fn corrupt(&self, what: std::fmt::Arguments<'_>) -> IoError {
        if !self.complained.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "'{}': {what}; requests that need it fail. Check the image with 'qemu-img check' (more damage is not \
                 reported)",
                self.name
            );
        }
        IoError::new(IoErrorKind::Corrupt)
    }

    /// The L2 table that maps the guest clusters of an L1 entry.
    pub(crate) fn table(&self, l1_index: u64) -> Result<Option<Table>, BadEntry> {
        let entry = usize::try_from(l1_index).ok().and_then(|index| self.l1.get(index)).ok_or(BadEntry)?;
        decode_l1(entry.load(Ordering::Acquire), &self.geometry)
    }

    pub(crate) fn table_or_complain(&self, l1_index: u64) -> IoResult<Option<Table>> {
        self.table(l1_index).map_err(|_| self.corrupt(format_args!("L1 entry {l1_index} is invalid")))
    }

    /// What a missing refcount means for a cluster that is in use.
    pub(crate) fn stop_for(&self, absent: Absent) -> Stop {
        match absent {
            Absent::NotLoaded(block) => Stop::Need(Need::Block(block)),
            Absent::NoBlock(block) => {
                Stop::Fail(self.corrupt(format_args!("refcount block {block} is missing, but clusters in it are used")))
            }
            Absent::Corrupt(block) => Stop::Fail(self.corrupt(format_args!("refcount table entry {block} is invalid"))),
        }
    }

    /// The refcount of a cluster that a table names: at least one, or the image is damaged.
    pub(crate) fn refcount_in_use(&self, state: &mut State, cluster: u64) -> Step<u64> {
        match state.refcounts.get(cluster) {
            Ok(0) => {
                Err(Stop::Fail(self.corrupt(format_args!("host cluster {cluster} is used, but its refcount is 0"))))
            }
            Ok(count) => Ok(count),
            Err(absent) => Err(self.stop_for(absent)),
        }
    }

    /// Tries `step` under the mutex until it gets to its end.
    pub(crate) async fn run<T>(&self, io: &MetaIo, mut step: impl FnMut(&mut State) -> Step<T>) -> IoResult<T> {
        let mut tries_left = RECLAIMS_MAX;
        loop {
            let stopped = step(&mut self.lock());
            let error = match stopped {
                Ok(value) => return Ok(value),
                Err(Stop::Fail(error)) => error,
                Err(Stop::Need(need)) => match self.satisfy(io, need).await {
                    Ok(()) => continue,
                    Err(error) => error,
                },
            };
            if error.kind() == IoErrorKind::NoSpace && tries_left > 0 && self.lock().has_unlinked() {
                tries_left = tries_left.saturating_sub(1);
                self.flush(io).await?;
                continue;
            }
            if self.is_stopped() {
                // It marks the image and fails.
                let _ = self.flush(io).await;
            }
            return Err(error);
        }
    }
}
