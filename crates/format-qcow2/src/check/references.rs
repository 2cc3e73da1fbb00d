//! Counts how often each host cluster is referred to, and notes which clusters hold tables.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// Bits of a cluster's number within a piece: references are counted in pieces of 4096 clusters.
const CHUNK_BITS: u32 = 12;

/// The most clusters in use that a piece lists. With more, the piece has a count for each cluster.
const LISTED_MAX: usize = 512;
/// Roughly the bytes of a piece beside its counts.
const CHUNK_BYTES: usize = 96;
const ENTRY_BYTES: usize = size_of::<(u16, u32)>();
const COUNTED_BYTES: usize = size_of::<u32>() << CHUNK_BITS;

/// The counts of one piece. Tables may refer to places far apart: then most pieces have few clusters in use.
#[derive(Debug)]
enum Chunk {
    /// Clusters in use, in order, and their counts.
    Listed(Vec<(u16, u32)>),
    /// A count for each cluster.
    Counted(Vec<u32>),
}

impl Chunk {
    fn get(&self, index: usize) -> u32 {
        match self {
            Self::Listed(list) => {
                let found = list.binary_search_by_key(&index, |(cluster, _)| usize::from(*cluster));
                found.ok().and_then(|at| list.get(at)).map_or(0, |(_, count)| *count)
            }
            Self::Counted(counts) => counts.get(index).copied().unwrap_or(0),
        }
    }

    /// Returns the count of a cluster, and how many more bytes the piece takes now.
    fn count_mut(&mut self, index: usize) -> (Option<&mut u32>, usize) {
        let mut more_bytes = 0usize;
        if let Self::Listed(list) = self
            && list.len() >= LISTED_MAX
        {
            let mut counts = vec![0; 1usize << CHUNK_BITS];
            for (cluster, count) in list.iter() {
                if let Some(counted) = counts.get_mut(usize::from(*cluster)) {
                    *counted = *count;
                }
            }
            *self = Self::Counted(counts);
            more_bytes = COUNTED_BYTES.saturating_sub(LISTED_MAX.saturating_mul(ENTRY_BYTES));
        }
        match self {
            Self::Counted(counts) => (counts.get_mut(index), more_bytes),
            Self::Listed(list) => {
                let at = match list.binary_search_by_key(&index, |(cluster, _)| usize::from(*cluster)) {
                    Ok(at) => at,
                    Err(at) => {
                        list.insert(at, (index as u16, 0));
                        more_bytes = ENTRY_BYTES;
                        at
                    }
                };
                (list.get_mut(at).map(|(_, count)| count), more_bytes)
            }
        }
    }
}

/// Counts of references, by host cluster.
#[derive(Debug)]
pub(crate) struct References {
    /// Maps a piece's number to its index in `counts`.
    chunks: BTreeMap<u64, usize>,
    counts: Vec<Chunk>,
    used_bytes: usize,
    bytes_max: usize,
    /// The piece that was used last, and its index: neighbours mostly follow each other.
    last: Cell<Option<(u64, usize)>>,
}

impl Default for References {
    fn default() -> Self {
        Self {
            chunks: BTreeMap::new(),
            counts: Vec::new(),
            used_bytes: 0,
            bytes_max: usize::MAX,
            last: Cell::new(None),
        }
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

    /// Limits the memory of the counts. References beyond it are not counted.
    pub(crate) fn set_memory_bytes(&mut self, bytes: usize) {
        self.bytes_max = bytes.max(1);
    }

    /// Whether something may be missing from the counts.
    pub(crate) fn is_full(&self) -> bool {
        self.used_bytes >= self.bytes_max
    }

    /// Returns about how many bytes the counts take.
    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Counts `times` more references to a cluster, up to `max` in all. Returns how many were too many.
    pub(crate) fn count(&mut self, cluster: u64, times: u32, max: u32) -> u32 {
        let chunk = cluster >> CHUNK_BITS;
        if self.is_full() {
            return 0;
        }
        let place = match self.place_of(chunk) {
            Some(place) => place,
            None => {
                self.counts.push(Chunk::Listed(Vec::new()));
                let place = self.counts.len().saturating_sub(1);
                self.chunks.insert(chunk, place);
                self.used_bytes = self.used_bytes.saturating_add(CHUNK_BYTES);
                place
            }
        };
        let Some(chunk) = self.counts.get_mut(place) else { return times };
        let (count, more_bytes) = chunk.count_mut(Self::index(cluster));
        self.used_bytes = self.used_bytes.saturating_add(more_bytes);
        let Some(count) = count else { return times };
        let fits = times.min(max.saturating_sub(*count));
        *count = count.saturating_add(fits);
        times.saturating_sub(fits)
    }

    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let counts = self.place_of(cluster >> CHUNK_BITS).and_then(|place| self.counts.get(place));
        counts.map_or(0, |counts| u64::from(counts.get(Self::index(cluster))))
    }

    /// Returns the first cluster of the next piece with references, behind the piece of `cluster`.
    pub(crate) fn next_piece(&self, cluster: u64) -> Option<u64> {
        let next = self.chunks.range((cluster >> CHUNK_BITS).saturating_add(1)..).next();
        next.map(|(chunk, _)| chunk.wrapping_shl(CHUNK_BITS))
    }

    /// Returns the end of the piece of `cluster`, and whether it has any references.
    pub(crate) fn piece(&self, cluster: u64) -> (u64, bool) {
        let chunk = cluster >> CHUNK_BITS;
        (chunk.saturating_add(1).wrapping_shl(CHUNK_BITS), self.chunks.contains_key(&chunk))
    }

    /// Returns the clusters of a range with references, in order, with their counts.
    pub(crate) fn used(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let last = range.end.saturating_sub(1).max(range.start) >> CHUNK_BITS;
        let chunks = self.chunks.range(range.start >> CHUNK_BITS..=last);
        let all = chunks.flat_map(|(chunk, place)| {
            let first = chunk << CHUNK_BITS;
            let counted = move |(index, count): (u64, u32)| (first.saturating_add(index), u64::from(count));
            let (listed, counts) = match self.counts.get(*place) {
                Some(Chunk::Listed(list)) => (list.as_slice(), &[][..]),
                Some(Chunk::Counted(counts)) => (&[][..], counts.as_slice()),
                None => (&[][..], &[][..]),
            };
            let listed = listed.iter().map(|(index, count)| (u64::from(*index), *count));
            let counts = counts.iter().enumerate().map(|(index, count)| (index as u64, *count));
            listed.chain(counts).map(counted)
        });
        all.filter(move |(cluster, count)| *count > 0 && range.contains(cluster))
    }

    /// Returns the end of the last piece with references.
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
    /// Any other table: the header, refcounts, snapshots.
    Other = 4,
}

/// Marks a table whose cluster something else refers to as well.
const SHARED: u8 = 8;

/// What refers to a host cluster.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    /// The kinds of tables, as bits.
    kinds: u8,
    /// References that name a table.
    tables: u32,
}

/// The clusters that hold tables, and the tables' kinds.
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

    /// Returns about how many bytes they take.
    pub(crate) fn used_bytes(&self) -> usize {
        self.0.len().saturating_mul(32)
    }

    /// Finds the clusters of tables that something else also refers to. Call it when all references are counted. A
    /// reference that could not be counted may have been to data.
    pub(crate) fn find_shared(&mut self, references: &References, uncounted: &BTreeSet<u64>) {
        for (cluster, held) in &mut self.0 {
            if references.get(*cluster) != u64::from(held.tables) || uncounted.contains(cluster) {
                held.kinds |= SHARED;
            }
        }
    }

    /// Whether an entry in this cluster may be changed: everything that refers to the cluster must take it for an L1
    /// table, or everything for an L2 table. A cluster that anything takes for data is never rewritten.
    pub(crate) fn may_change(&self, cluster: u64) -> bool {
        self.0.get(&cluster).is_some_and(|held| held.kinds == Kind::L1 as u8 || held.kinds == Kind::L2 as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_far_apart_takes_little_memory() {
        let mut references = References::default();
        let far = |index: u64| index << (CHUNK_BITS + 3);
        for index in 0..10_000 {
            assert_eq!(references.count(far(index), 3, u32::MAX), 0);
        }
        assert!(references.used_bytes() < 10_000 * 200, "{} bytes", references.used_bytes());
        assert_eq!((references.get(far(9)), references.get(far(9) + 1)), (3, 0));
        assert_eq!(references.next_piece(far(9)), Some(far(10)));
    }

    #[test]
    fn a_piece_counts_the_same_however_full_it_is() {
        let mut references = References::default();
        let clusters = 1 << CHUNK_BITS;
        // Every cluster, far from in order.
        let all = (0..clusters).map(|index| index * 1021 % clusters);
        for (done, cluster) in all.enumerate() {
            let times = cluster as u32 % 5 + 1;
            assert_eq!(references.count(cluster, times, 3), times.saturating_sub(3), "cluster {cluster}");
            if done.is_power_of_two() {
                let used = references.used(0..clusters).collect::<Vec<_>>();
                assert_eq!(used.len(), done + 1);
                assert!(used.is_sorted() && used.contains(&(cluster, u64::from(times.min(3)))));
            }
        }
        assert!((0..clusters).all(|cluster| references.get(cluster) == (cluster % 5 + 1).min(3)));
    }
}
