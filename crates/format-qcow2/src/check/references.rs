//! How often each host cluster is referred to, and which clusters hold tables: what a check counts.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// References are counted in pieces of this many clusters.
const CHUNK_BITS: u32 = 12;

/// Counts of references, by host cluster.
#[derive(Debug)]
pub(crate) struct References {
    /// Places in `counts`.
    chunks: BTreeMap<u64, usize>,
    counts: Vec<Vec<u32>>,
    chunks_max: usize,
    /// The chunk looked at last, and its place: neighbours follow each other.
    last: Cell<Option<(u64, usize)>>,
}

impl Default for References {
    fn default() -> Self {
        Self { chunks: BTreeMap::new(), counts: Vec::new(), chunks_max: usize::MAX, last: Cell::new(None) }
    }
}

impl References {
    fn index(cluster: u64) -> usize {
        (cluster as usize) & (1usize << CHUNK_BITS).saturating_sub(1)
    }

    fn place_of(&self, chunk: u64) -> Option<usize> {
        if let Some((last, place)) = self.last.get()
            && last == chunk
        {
            return Some(place);
        }
        let place = self.chunks.get(&chunk).copied()?;
        self.last.set(Some((chunk, place)));
        Some(place)
    }

    /// At most so much memory from now on: what does not fit is not counted.
    pub(crate) fn set_memory_bytes(&mut self, bytes: usize) {
        // Four bytes a count.
        self.chunks_max = bytes.wrapping_shr(CHUNK_BITS.saturating_add(2)).max(1);
    }

    /// Whether something may not have been counted.
    pub(crate) fn is_full(&self) -> bool {
        self.chunks.len() >= self.chunks_max
    }

    /// One more, but not more than `max`: false if that is so many already.
    pub(crate) fn count(&mut self, cluster: u64, max: u32) -> bool {
        let chunk = cluster >> CHUNK_BITS;
        let place = match self.place_of(chunk) {
            Some(place) => place,
            None if self.is_full() => return true,
            None => {
                self.counts.push(vec![0; 1usize << CHUNK_BITS]);
                let place = self.counts.len().saturating_sub(1);
                self.chunks.insert(chunk, place);
                place
            }
        };
        match self.counts.get_mut(place).and_then(|counts| counts.get_mut(Self::index(cluster))) {
            Some(count) if *count < max => *count = count.saturating_add(1),
            _ => return false,
        }
        true
    }

    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let counts = self.place_of(cluster >> CHUNK_BITS).and_then(|place| self.counts.get(place));
        counts.and_then(|counts| counts.get(Self::index(cluster))).map_or(0, |count| u64::from(*count))
    }

    /// The end of the piece that `cluster` is counted in, and whether anything in it is.
    pub(crate) fn piece(&self, cluster: u64) -> (u64, bool) {
        let chunk = cluster >> CHUNK_BITS;
        (chunk.saturating_add(1).wrapping_shl(CHUNK_BITS), self.chunks.contains_key(&chunk))
    }

    /// The clusters of a range that are referred to, in order, with their counts.
    pub(crate) fn used(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let last = range.end.saturating_sub(1).max(range.start) >> CHUNK_BITS;
        let chunks = self.chunks.range(range.start >> CHUNK_BITS..=last);
        let all = chunks.flat_map(|(chunk, place)| {
            let first = chunk << CHUNK_BITS;
            let counts = self.counts.get(*place).map_or(&[][..], Vec::as_slice);
            counts.iter().enumerate().map(move |(index, count)| (first.saturating_add(index as u64), u64::from(*count)))
        });
        all.filter(move |(cluster, count)| *count > 0 && range.contains(cluster))
    }

    /// Behind the last piece in which anything is counted.
    pub(crate) fn end(&self) -> u64 {
        self.chunks.last_key_value().map_or(0, |(chunk, _)| chunk.saturating_add(1).wrapping_shl(CHUNK_BITS))
    }
}

/// A kind of table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    L1 = 1,
    L2 = 2,
    /// Any other: the header, refcounts, snapshots.
    Other = 4,
}

/// Something else than a table lies there, too.
const SHARED: u8 = 8;

/// What one host cluster holds, going by what leads there.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    /// The kinds of tables, as bits.
    kinds: u8,
    /// References that mean a table.
    tables: u32,
}

/// Which clusters hold tables, and of which kinds.
#[derive(Debug, Default)]
pub(crate) struct Kinds(HashMap<u64, Held>);

impl Kinds {
    /// Notes a reference to a table.
    pub(crate) fn add(&mut self, kind: Kind, clusters: Range<u64>) {
        for cluster in clusters {
            let held = self.0.entry(cluster).or_default();
            held.kinds |= kind as u8;
            held.tables = held.tables.saturating_add(1);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Once all references are counted: finds the clusters that something else than tables leads to as well. A reference
    /// that could not be counted may have been to data.
    pub(crate) fn find_shared(&mut self, references: &References, uncounted: &BTreeSet<u64>) {
        for (cluster, held) in &mut self.0 {
            if references.get(*cluster) != u64::from(held.tables) || uncounted.contains(cluster) {
                held.kinds |= SHARED;
            }
        }
    }

    /// Whether an entry in this cluster may be changed: everything that leads there takes it for an L1 table, or
    /// everything takes it for an L2 table. A cluster that is data for somebody is never rewritten.
    pub(crate) fn may_change(&self, cluster: u64) -> bool {
        self.0.get(&cluster).is_some_and(|held| held.kinds == Kind::L1 as u8 || held.kinds == Kind::L2 as u8)
    }
}
