//! The state that all queues share, and how slow operations take turns.
//!
//! All metadata change under one mutex, in steps that are never suspended. A step may miss something: a table in
//! memory, room, or a range that another write holds. Then it changes nothing more and names its need. Once that is
//! met, the step is tried again from the start.

use crate::layout::entry::{BadEntry, Table, decode_l1};
use crate::layout::geometry::Geometry;
use crate::layout::header::{HEADER_SECTOR_BYTES, Header};
use crate::live::bitmap_tracking::BitmapTracking;
use crate::live::flush_queue::FlushQueue;
use crate::live::free_runs::{FreeRuns, Run};
use crate::live::metadata_map::{MetadataMap, Owner, TableBits};
use crate::live::refcounts::{Absent, Refcounts};
use block::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, PoisonError};
use block::{Epochs, InFlightOps, IoError, IoErrorKind, IoResult, MetaIo, SliceBook, SliceCache, WaitList};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Something that a step needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// A slice of an L2 table has to be in memory.
    Slice(u64),
    /// A refcount block has to be in memory.
    Block(u64),
    /// Zeroed space is needed behind the end of the file.
    Extension,
    /// The header has to be made ready for our first write.
    HeaderReady,
    /// No other write may be allocating these guest clusters.
    Idle(Range<u64>),
    /// Dirty tables have to be written, to make room for others.
    Flush,
    /// The header has to say that refcounts may be stale.
    DirtyBit,
}

/// The reason why a step did not end.
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

/// How often a step that found no space is tried again after a flush: operations in flight may still hold some.
const RECLAIMS_MAX: u32 = 4;

/// Host clusters that lost a reference in the tables in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) clusters: Range<u64>,
    /// Operations resolved up to this epoch may still use them.
    pub(crate) epoch: u64,
    /// The kind of table in the clusters. They stay guarded until they are decremented: the file may still refer to the
    /// table, or its copy may be pending.
    pub(crate) table: Option<Owner>,
    /// Whether the clusters stay barred until they are decremented: a write resolved before may ask late whether it may
    /// overwrite them.
    pub(crate) barred: bool,
}

/// The content of an L2 table that was never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FreshTable {
    Zeros,
    /// A copy of the table at this offset, which stays untouched until the new one is published.
    CopyOf(u64),
}

/// The sources of new space.
#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) free: FreeRuns,
    /// Free space that is being punched out of the file, so it must not be handed out.
    pub(crate) quarantine: FreeRuns,
    /// Host clusters from here on were never handed out. This only grows, unless space that was set aside turns out not
    /// to be used.
    pub(crate) frontier: u64,
    /// Host clusters from the frontier to here read as zeros, even after a power cut.
    pub(crate) zeroed_end: u64,
    /// Host clusters to here read as zeros, and a flush has made that durable.
    pub(crate) blank_end: u64,
    /// Whether nothing at or behind the frontier has a refcount.
    pub(crate) settled: bool,
    /// Whether the file can be made longer with zeros.
    pub(crate) can_extend: bool,
    /// The scan has read the refcounts of the clusters below this one. It ends at `scan_limit`.
    pub(crate) scanned_end: u64,
    pub(crate) scan_limit: u64,
    /// The frontier at which the next step of the scan is due.
    pub(crate) next_scan: u64,
    /// Clusters in front of this one are handed out first: the file is to end here.
    pub(crate) ceiling: Option<u64>,
    /// Clusters set aside for compressed clusters: found free, and not counted yet.
    pub(crate) for_packed: Range<u64>,
}

impl Space {
    /// Adds clusters without a refcount to the free ones, except those that are being punched or are set aside.
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

    /// Releases the clusters set aside for compressed clusters.
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
    /// Whether the bit is set in the file, durably. It stays so until `wanted` is cleared.
    pub(super) set: bool,
    /// Whether refcounts may be postponed once the bit is set.
    pub(super) wanted: bool,
}

/// Everything that the mutex protects.
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
    /// The first guest cluster of a move that has not begun to copy. A write to one of its clusters cancels the move.
    pub(crate) tentative: Option<u64>,
    /// Needs that are being met.
    pub(crate) busy: HashSet<Need>,
    /// Clusters that wait for the flush which makes their unlinking durable.
    pub(crate) unlinked: Vec<Freed>,
    /// How many clusters were unlinked since the last flush.
    pub(crate) unlinked_clusters: u64,
    /// Clusters that are durably unlinked, or were never linked. They are decremented once their epoch is over.
    pub(crate) retired: Vec<Freed>,
    pub(crate) flushes: FlushQueue,
    pub(crate) dirty: DirtyBit,
    /// Whether something that changed tables refer to must become durable before them.
    pub(crate) needs_order: bool,
    pub(crate) header_sector: [u8; HEADER_SECTOR_BYTES],
    /// The places of the tables; collected on first use.
    pub(crate) tables: Option<MetadataMap>,
    /// Whether these include the tables of snapshots.
    pub(crate) snapshots_known: bool,
    /// Whether the storage has the header that was read at open.
    pub(crate) header_settled: bool,
}

impl State {
    /// Whether the file has everything that memory has.
    pub(crate) fn is_all_written(&self) -> bool {
        let rest = !self.refcounts.has_dirty() && self.unlinked.is_empty() && self.retired.is_empty();
        self.is_mapping_written() && rest
    }

    /// Whether the file has the whole mapping that memory has. A running flush may still have to make it durable.
    pub(crate) fn is_mapping_written(&self) -> bool {
        !self.book.has_dirty() && self.l1_dirty.is_empty() && self.fresh_tables.is_empty()
    }

    /// Whether a flush may free space.
    pub(crate) fn has_unlinked(&self) -> bool {
        !self.unlinked.is_empty() || !self.retired.is_empty()
    }

    /// Returns the first range in flight that overlaps `range`.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let (first, end) = self.in_flight.range(..range.end).next_back()?;
        if *end <= range.start {
            return None;
        }
        // If several ranges overlap, any of them may be waited for first.
        Some(*first..*end)
    }

    /// Gives up a move that overlaps `range`, if it has not begun to copy. Returns whether it did.
    pub(crate) fn give_way(&mut self, range: &Range<u64>) -> bool {
        let Some(first) = self.tentative else { return false };
        let is_in_the_way = first < range.end && self.in_flight.get(&first).is_some_and(|end| *end > range.start);
        if is_in_the_way {
            self.in_flight.remove(&first);
            self.tentative = None;
        }
        is_in_the_way
    }

    /// Returns the first guest cluster in flight at or behind `cluster`.
    pub(crate) fn next_in_flight(&self, cluster: u64) -> u64 {
        self.in_flight.range(cluster..).next().map_or(u64::MAX, |(first, _)| *first)
    }
}

/// An open image.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) read_only: bool,
    /// Whether refcounts may be postponed, under the dirty bit.
    pub(crate) lazy: bool,
    pub(crate) header: Header,
    pub(crate) geometry: Geometry,
    pub(crate) can_grow: bool,
    pub(crate) can_discard: bool,
    pub(crate) discard_zeroes: bool,
    /// The length in clusters of a file that cannot grow.
    pub(crate) file_clusters: u64,
    pub(crate) l1: Box<[AtomicU64]>,
    pub(crate) slices: SliceCache,
    /// See [`more_than_data`](crate::layout::entry::more_than_data).
    pub(crate) more_than_data: u64,
    /// How many slices were read from the file.
    pub(crate) slices_read: AtomicU64,
    pub(crate) epochs: Epochs,
    pub(crate) state: Mutex<State>,
    /// Woken when a load has ended or failed.
    pub(crate) loaded: WaitList,
    /// Woken when an allocation ends.
    pub(crate) idle: WaitList,
    /// Woken when a flush ends.
    pub(crate) flushed: WaitList,
    /// Writes of tables and of the header in flight.
    pub(crate) table_writes: Arc<InFlightOps>,
    /// Operations in flight that extend the file.
    pub(crate) extensions: Arc<InFlightOps>,
    /// The bitmaps that note writes, if the image is open for writing and has any.
    pub(crate) tracking: Option<Box<BitmapTracking>>,
    /// Set while the header needs no change before a write, and all tables are known.
    pub(crate) header_ready: AtomicBool,
    /// Whether the file durably has the whole mapping of the tables in memory. Cleared before an entry changes, and set
    /// only by our own flushes. It is not set at open: the file's tables may be only in the host's cache, written by a
    /// process that was killed.
    pub(crate) mapping_is_durable: AtomicBool,
    pub(crate) complained: AtomicBool,
    /// Whether the guard has found that the image contradicts itself. Every request then fails.
    pub(crate) stopped: AtomicBool,
    /// Whether setting the corrupt bit was tried.
    pub(crate) marked: AtomicBool,
    /// Says where tables may lie, for the path without a lock.
    pub(crate) table_bits: TableBits,
    pub(crate) skipped_barriers: AtomicU32,
}

impl Inner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the error for damage in the image. It is logged only once, but returned each time.
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

    /// Returns the L2 table of an L1 entry.
    pub(crate) fn table(&self, l1_index: u64) -> Result<Option<Table>, BadEntry> {
        let entry = usize::try_from(l1_index).ok().and_then(|index| self.l1.get(index)).ok_or(BadEntry)?;
        decode_l1(entry.load(Ordering::Acquire), &self.geometry)
    }

    pub(crate) fn table_or_complain(&self, l1_index: u64) -> IoResult<Option<Table>> {
        self.table(l1_index).map_err(|_| self.corrupt(format_args!("L1 entry {l1_index} is invalid")))
    }

    /// Returns what a step needs if the refcount of a used cluster is not available.
    pub(crate) fn stop_for(&self, absent: Absent) -> Stop {
        match absent {
            Absent::NotLoaded(block) => Stop::Need(Need::Block(block)),
            Absent::NoBlock(block) => {
                Stop::Fail(self.corrupt(format_args!("refcount block {block} is missing, but clusters in it are used")))
            }
            Absent::Corrupt(block) => Stop::Fail(self.corrupt(format_args!("refcount table entry {block} is invalid"))),
        }
    }

    /// Returns the refcount of a cluster that a table refers to. It is at least one, or the image is damaged.
    pub(crate) fn refcount_in_use(&self, state: &mut State, cluster: u64) -> Step<u64> {
        match state.refcounts.get(cluster) {
            Ok(0) => {
                Err(Stop::Fail(self.corrupt(format_args!("host cluster {cluster} is used, but its refcount is 0"))))
            }
            Ok(count) => Ok(count),
            Err(absent) => Err(self.stop_for(absent)),
        }
    }

    /// Tries `step` under the mutex until it ends. Meets its needs in between.
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
                // The flush marks the image corrupt and fails.
                let _ = self.flush(io).await;
            }
            return Err(error);
        }
    }
}

/// Returns `None` where a refcount block is missing; a run of clusters ends there. A step that needed more blocks at
/// once than memory holds would begin anew for ever.
pub(crate) fn unless_block_missing<T>(found: Step<T>) -> Step<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(Stop::Need(Need::Block(_))) => Ok(None),
        Err(stop) => Err(stop),
    }
}
