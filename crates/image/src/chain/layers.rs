//! A chain of layers, and the walk down them.

use super::both_sides::BothSides;
use super::exchange::change_log::ChangeLog;
use super::exchange::lease::Over;
use super::give_up::{GiveUp, LateCalls};
use super::layer::Layer;
use super::lower_map::{Known, LowerMap};
use super::mapping::Plain;
use super::memory_bitmap::MemoryBitmaps;
use super::place::Place;
use super::table_cache::{Hits, TableCacheStats, lower_map};
use block::{CacheStats, Extent, IoError, IoErrorKind, IoResult, Mapped, MetaIo, PastEnd};
use memory::BufferAccount;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What belongs to a disk, whatever its chain.
pub(crate) struct Constants {
    pub(crate) read_only: bool,
    pub(crate) serial: String,
    pub(crate) volatile_cache: AtomicBool,
    /// The user's limit of memory for tables, over all layers.
    pub(crate) table_cache: TableCacheSetting,
    /// Writes refused because they would have made a guessed raw image look like another format.
    pub(crate) refused_headers: AtomicU64,
    /// Set when data were given up that guests have written. The next flush fails then.
    pub(crate) has_lost: AtomicBool,
    pub(crate) hits: Hits,
}

/// The user's limit of memory for tables, in bytes. It changes only while no queue submits.
pub(crate) struct TableCacheSetting(AtomicU64);

impl TableCacheSetting {
    /// Stands for no limit.
    const NONE: u64 = u64::MAX;

    pub(crate) fn new(bytes: Option<u64>) -> Self {
        Self(AtomicU64::new(bytes.unwrap_or(Self::NONE)))
    }

    pub(crate) fn bytes(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|bytes| *bytes != Self::NONE)
    }

    pub(crate) fn set(&self, bytes: Option<u64>) {
        self.0.store(bytes.unwrap_or(Self::NONE), Ordering::Release);
    }
}

/// The layers of a disk, until the next exchange. Immutable but for the mappings' own state. All that begins on a chain
/// ends on it; see [`super::exchange`].
pub(crate) struct Chain {
    /// Top first; never empty.
    pub(crate) layers: Vec<Arc<Layer>>,
    pub(crate) size_bytes: u64,
    /// Requests must end here: the size of the disk, or 0 if every request is to fail.
    limit_bytes: u64,
    pub(crate) disk: Arc<Constants>,
    /// Whether a writable layer was guessed to be raw: a guest must not turn it into another format.
    pub(crate) guessed_raw: bool,
    /// Whether writes are checked before they begin: they are refused, or noted.
    pub(crate) looks_at_writes: bool,
    /// The merged answers of the layers below the top one, if several have tables.
    below: Option<LowerMap>,
    /// Set while requests that began on the chain before may still write to the layer below the top one.
    handover: Option<Arc<Over>>,
    /// Notes what is written.
    pub(crate) log: Option<ChangeLog>,
    /// Bitmaps of the top layer that note it, too.
    bitmaps: Option<Arc<MemoryBitmaps>>,
    /// Another chain that gets all writes, too.
    pub(crate) both: Option<OtherChain>,
}

/// The chain that is going to take over, and what its disk keeps until then.
pub(crate) struct OtherChain {
    pub(crate) next: Arc<Chain>,
    pub(crate) sides: BothSides,
}

impl Chain {
    /// Makes a chain of these layers, top first.
    pub(crate) fn new(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        let below = lower_map(&layers, disk.table_cache.bytes());
        Self { below, ..Self::plain(layers, disk) }
    }

    /// Makes a chain that does not merge the answers of its lower layers.
    pub(crate) fn plain(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        let top = layers.first();
        let size_bytes = top.map_or(0, |top| top.size_bytes);
        // This includes a layer that may be the top again: data from above it go there then.
        let guessed_raw = layers.iter().any(|layer| layer.writable && layer.guessed && !layer.mapping.has_tables());
        let disk = Arc::clone(disk);
        let bitmaps = top.map(|top| &top.memory_bitmaps).filter(|bitmaps| bitmaps.is_recording()).cloned();
        let looks_at_writes = disk.read_only || bitmaps.is_some();
        let limit_bytes = size_bytes;
        Self {
            layers,
            size_bytes,
            limit_bytes,
            disk,
            guessed_raw,
            looks_at_writes,
            below: None,
            handover: None,
            log: None,
            bitmaps,
            both: None,
        }
    }

    /// Makes a chain whose second layer still gets writes of earlier requests. Until those are over, nothing of that
    /// layer is remembered or copied.
    pub(crate) fn handing_over(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>, over: Arc<Over>) -> Self {
        Self { handover: Some(over), ..Self::plain(layers, disk) }
    }

    /// Makes a chain of these layers that is handing over if this one is.
    pub(crate) fn with_layers(&self, layers: Vec<Arc<Layer>>) -> Self {
        match &self.handover {
            Some(over) => Self::handing_over(layers, &self.disk, Arc::clone(over)),
            None => Self::new(layers, &self.disk),
        }
    }

    /// Makes a chain that notes what is written.
    pub(crate) fn noting(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        let chain = Self::new(layers, disk);
        Self { log: Some(ChangeLog::new(chain.size_bytes)), looks_at_writes: true, ..chain }
    }

    /// Makes a chain whose writes also go to another chain.
    pub(crate) fn on_both_sides(
        layers: Vec<Arc<Layer>>,
        disk: &Arc<Constants>,
        next: &Arc<Chain>,
        give_up: Option<Arc<GiveUp>>,
        late: Option<Arc<LateCalls>>,
    ) -> Self {
        let sides = BothSides::with(next.size_bytes, give_up, late);
        Self {
            both: Some(OtherChain { next: Arc::clone(next), sides }),
            looks_at_writes: true,
            ..Self::new(layers, disk)
        }
    }

    /// Makes a chain on which every request that touches data fails.
    pub(crate) fn dead(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        Self { limit_bytes: 0, ..Self::plain(layers, disk) }
    }

    /// Whether it is such a chain.
    pub(crate) fn is_dead(&self) -> bool {
        self.limit_bytes < self.size_bytes
    }

    /// Returns the account of buffer memory that requests use.
    pub(crate) fn buffers(&self) -> &BufferAccount {
        self.layers.first().map_or(&BufferAccount::UNLIMITED, |top| top.file.buffers())
    }

    /// Whether the layer below the top one may still change, so that it has to be flushed too.
    pub(crate) fn is_handing_over(&self) -> bool {
        self.handover.is_some()
    }

    /// Returns the layers that may have in memory what guests have written, the lowest first, with their places in the
    /// chain. A former top that could not be made durable is one of them.
    pub(crate) fn unclosed(&self) -> impl Iterator<Item = (usize, &Arc<Layer>)> {
        let count = match self.disk.read_only || self.is_dead() {
            true => 0,
            false if self.is_handing_over() => 2,
            false => 1,
        };
        self.layers.iter().take(count).enumerate().rev()
    }

    /// Looks at a guest's flush before it begins. It fails on a dead chain, and once after data were given up: guests learn
    /// of that.
    pub(crate) fn look_at_flush(&self) -> IoResult {
        let has_lost = &self.disk.has_lost;
        let fails = self.is_dead() || (has_lost.load(Ordering::Relaxed) && has_lost.swap(false, Ordering::Relaxed));
        if fails { Err(IoError::EIO) } else { Ok(()) }
    }

    /// Whether an overwrite in the top layer can be made durable by itself, as a write with FUA. Such a write also
    /// covers what was not flushed before. That must not lie in two layers.
    #[inline]
    pub(crate) fn is_durable_in_place(&self) -> bool {
        self.handover.is_none() && self.layers.first().is_some_and(|top| top.mapping.is_mapping_durable())
    }

    /// Waits until the layers below the top one change no more, so that they can be copied.
    pub(crate) async fn below_is_quiet(&self) {
        if let Some(over) = &self.handover {
            over.wait().await;
        }
    }

    /// Checks a write before it begins, and notes it.
    #[cold]
    pub(crate) fn look_at_write(&self, offset: u64, length_bytes: u64) -> IoResult {
        if self.disk.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly));
        }
        if let Some(log) = &self.log {
            log.note(offset, length_bytes);
        }
        self.note_in_bitmaps(offset, length_bytes);
        Ok(())
    }

    /// Notes what will be written to the top layer, by a guest or by a copy to it.
    pub(crate) fn note_in_bitmaps(&self, offset: u64, length_bytes: u64) {
        if let Some(bitmaps) = &self.bitmaps {
            bitmaps.note(offset, length_bytes);
        }
    }

    /// Logs a refused header each time their number has doubled: a guest must not fill the log.
    pub(crate) fn log_refused_header(&self, offset: u64) {
        let times = self.disk.refused_headers.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if times.is_power_of_two() {
            tracing::warn!(
                times,
                "refused a guest write at offset {offset} that would make a raw disk look like another format; \
                 say format=raw to allow it"
            );
        }
    }

    pub(crate) fn top(&self) -> IoResult<&Arc<Layer>> {
        self.layers.first().ok_or(IoError::EIO)
    }

    pub(crate) fn layer(&self, index: usize) -> IoResult<&Arc<Layer>> {
        self.layers.get(index).ok_or(IoError::EIO)
    }

    /// Returns where the first part of the range lies; `None` if a layer has to read a table.
    #[inline]
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Option<Place> {
        let Some(below) = &self.below else { return self.ask(0, offset, length_bytes) };
        let mut walk = Walk::new(offset, length_bytes);
        let Some((top, inside)) = self.layers.first().and_then(|top| Some((top, walk.enter(top)?))) else {
            return Some(walk.nowhere());
        };
        if let Some(place) = walk.take(0, top.mapping.lookup(offset, inside)?) {
            return Some(place);
        }
        match below.lookup(offset, walk.length_bytes) {
            Known::At(place) => Some(place),
            Known::Ask => self.ask(1, offset, walk.length_bytes),
            Known::Nothing => {
                self.learn(1, offset);
                self.ask(1, offset, walk.length_bytes)
            }
        }
    }

    /// Answers most reads, in few steps. Returns the layer whose file holds the whole range in one piece, the offset
    /// there, and what a read behind the file's end means. `None` if [`Chain::lookup`] has to be asked.
    #[inline]
    pub(crate) fn lookup_data(&self, offset: u64, length_bytes: u64) -> Option<(usize, u64, PastEnd)> {
        let found = |index: usize, place| Some((index, place, self.layers.get(index)?.mapping.past_end(place)));
        if let Plain::Data(place) = self.layers.first()?.mapping.lookup_plain(offset, length_bytes)? {
            return found(0, place);
        }
        if let Some(below) = &self.below {
            let (layer, place) = below.lookup_data(offset, length_bytes)?;
            return found(layer, place);
        }
        let base = self.layers.get(1)?;
        let inside = offset.saturating_add(length_bytes) <= base.size_bytes;
        match inside.then(|| base.mapping.lookup_plain(offset, length_bytes))?? {
            Plain::Data(place) => found(1, place),
            Plain::Unallocated => None,
        }
    }

    /// As [`Chain::lookup`], asking each layer from `first` on.
    fn ask(&self, first: usize, offset: u64, length_bytes: u64) -> Option<Place> {
        let mut walk = Walk::new(offset, length_bytes);
        for (index, layer) in self.layers.iter().enumerate().skip(first) {
            let Some(inside) = walk.enter(layer) else { break };
            if let Some(place) = walk.take(index, layer.mapping.lookup(offset, inside)?) {
                return Some(place);
            }
        }
        Some(walk.nowhere())
    }

    /// As [`Chain::lookup`], but reads tables as needed.
    pub(crate) async fn resolve(&self, metas: &[MetaIo], offset: u64, length_bytes: u64) -> IoResult<Place> {
        let mut walk = Walk::new(offset, length_bytes);
        for (index, layer) in self.layers.iter().enumerate() {
            let Some(inside) = walk.enter(layer) else { break };
            let meta = metas.get(index).ok_or(IoError::EIO)?;
            if let Some(place) = walk.take(index, layer.mapping.resolve(meta, offset, inside).await?) {
                self.learn(index, offset);
                return Ok(place);
            }
            // If the merged map knows the answer, the layers below need not read their tables.
            if index == 0
                && let Some(Known::At(place)) = self.below.as_ref().map(|below| below.lookup(offset, walk.length_bytes))
            {
                return Ok(place);
            }
        }
        self.learn(1, offset);
        Ok(walk.nowhere())
    }

    /// Stores the answer of the layers below the top one in the merged map, while their tables are in memory. `found`
    /// is the layer that decided.
    fn learn(&self, found: usize, offset: u64) {
        if let Some(below) = self.below.as_ref().filter(|_| found > 0) {
            below.learn(offset, |start, length| self.ask(1, start, length));
        }
    }

    pub(crate) fn cache_stats(&self) -> TableCacheStats {
        let mut stats = TableCacheStats { hits: self.disk.hits.sum(), ..TableCacheStats::default() };
        let mut add = |cache: CacheStats| {
            stats.evictions = stats.evictions.saturating_add(cache.evicted);
            stats.used_bytes = stats.used_bytes.saturating_add(cache.used_bytes);
            stats.limit_bytes = stats.limit_bytes.saturating_add(cache.limit_bytes);
        };
        self.below.iter().for_each(|below| add(below.stats()));
        self.layers.iter().filter_map(|layer| layer.mapping.cache_stats()).for_each(add);
        stats.misses = self.layers.iter().map(|layer| layer.mapping.slices_read()).sum();
        stats
    }

    /// Refuses a range outside the disk.
    #[inline]
    pub(crate) fn check_range(&self, offset: u64, length_bytes: u64) -> IoResult {
        match offset.checked_add(length_bytes) {
            Some(end) if end <= self.limit_bytes => Ok(()),
            _ => Err(IoError::new(IoErrorKind::OutOfRange)),
        }
    }
}

/// A walk down a chain: the range that the layers so far leave to those below.
struct Walk {
    offset: u64,
    length_bytes: u64,
}

impl Walk {
    fn new(offset: u64, length_bytes: u64) -> Self {
        Self { offset, length_bytes }
    }

    /// Returns how much of the range lies inside `layer`; `None` if the layer ends before it. Such a layer also cuts
    /// off everything below: a layer is never read past its own end.
    #[inline]
    fn enter(&self, layer: &Layer) -> Option<u64> {
        let inside = layer.size_bytes.saturating_sub(self.offset).min(self.length_bytes);
        (inside > 0).then_some(inside)
    }

    #[inline]
    fn take(&mut self, layer: usize, mapped: Mapped) -> Option<Place> {
        self.length_bytes = mapped.length_bytes;
        match mapped.extent {
            Extent::Backing => None,
            extent => Some(Place { layer, extent, length_bytes: mapped.length_bytes }),
        }
    }

    fn nowhere(&self) -> Place {
        Place { layer: 0, extent: Extent::Zero, length_bytes: self.length_bytes }
    }
}
