//! A chain of layers, and the walk down them.

use super::both_sides::BothSides;
use super::exchange::board::Over;
use super::exchange::change_log::ChangeLog;
use super::give_up::GiveUp;
use super::layer::Layer;
use super::lower_map::{Known, LowerMap};
use super::mapping::Plain;
use super::table_cache::{Hits, lower_map};
use block::{Extent, IoError, IoErrorKind, IoResult, Mapped, MetaIo, PastEnd};
use memory::BufferAccount;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What belongs to a disk, whatever chain it has.
pub(crate) struct Constants {
    pub(crate) read_only: bool,
    pub(crate) serial: String,
    pub(crate) volatile_cache: AtomicBool,
    /// The memory for tables that the user gives, over all layers.
    pub(crate) table_cache: TableCacheSetting,
    /// How often a guest tried to make a guessed raw image look like another format.
    pub(crate) refused_headers: AtomicU64,
    pub(crate) hits: Hits,
}

/// The memory for tables that the user gives. It changes only while no queue submits.
pub(crate) struct TableCacheSetting(AtomicU64);

impl TableCacheSetting {
    /// What stands for no limit of the user's.
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

/// The layers that a disk consists of for a while, immutable but for the mappings' own state. All that begins on a chain
/// ends on it; see [`super::exchange`].
pub(crate) struct Chain {
    /// Top first; never empty.
    pub(crate) layers: Vec<Arc<Layer>>,
    pub(crate) size_bytes: u64,
    /// The end of what may be used: the size of the disk, or 0 where nothing may be.
    limit_bytes: u64,
    pub(crate) disk: Arc<Constants>,
    /// The layer that is written to was taken for raw by guess only: a guest must not turn it into something else.
    pub(crate) guessed_raw: bool,
    /// Writes have to be looked at before they begin: they are refused, or noted.
    pub(crate) looks_at_writes: bool,
    /// What the layers below the top one say, where there are several with tables.
    below: Option<LowerMap>,
    /// Set while requests that began on the chain before may still write to the layer below the top one.
    handover: Option<Arc<Over>>,
    /// Where what is written is noted.
    pub(crate) log: Option<ChangeLog>,
    /// Another chain that gets all writes, too.
    pub(crate) both: Option<BothSides>,
}

/// A place in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) layer: usize,
    pub(crate) extent: Extent,
    pub(crate) length_bytes: u64,
}

impl Chain {
    /// The chain of these layers, top first.
    pub(crate) fn new(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        let below = lower_map(&layers, disk.table_cache.bytes());
        Self { below, ..Self::plain(layers, disk) }
    }

    /// The same without a memory of what the layers below say.
    pub(crate) fn plain(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        let top = layers.first();
        let size_bytes = top.map_or(0, |top| top.size_bytes);
        // Also of a layer that may be the top again: what is on top of it goes there then.
        let guessed_raw = layers.iter().any(|layer| layer.writable && layer.guessed && !layer.mapping.has_tables());
        let disk = Arc::clone(disk);
        let looks_at_writes = disk.read_only;
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
            both: None,
        }
    }

    /// A chain whose second layer is still written to by requests that began before: nothing is remembered of it, nothing
    /// copied from it until they are over.
    pub(crate) fn handing_over(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>, over: Arc<Over>) -> Self {
        Self { handover: Some(over), ..Self::plain(layers, disk) }
    }

    /// A chain that notes what is written.
    pub(crate) fn noting(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        let chain = Self::new(layers, disk);
        Self { log: Some(ChangeLog::new(chain.size_bytes)), looks_at_writes: true, ..chain }
    }

    /// A chain whose writes go to another one, too.
    pub(crate) fn on_both_sides(
        layers: Vec<Arc<Layer>>,
        disk: &Arc<Constants>,
        next: &Arc<Chain>,
        give_up: Option<Arc<GiveUp>>,
    ) -> Self {
        let both = Some(BothSides::with(Arc::clone(next), give_up));
        Self { both, looks_at_writes: true, ..Self::new(layers, disk) }
    }

    /// A chain on which every request fails that touches data.
    pub(crate) fn dead(layers: Vec<Arc<Layer>>, disk: &Arc<Constants>) -> Self {
        Self { limit_bytes: 0, ..Self::plain(layers, disk) }
    }

    /// Whether it is such a chain.
    pub(crate) fn is_dead(&self) -> bool {
        self.limit_bytes < self.size_bytes
    }

    /// Whose part of the memory for buffers requests use.
    pub(crate) fn buffers(&self) -> &BufferAccount {
        self.layers.first().map_or(&BufferAccount::UNLIMITED, |top| top.file.buffers())
    }

    /// Whether the layer below the top one may still change, and has to be flushed too.
    pub(crate) fn is_handing_over(&self) -> bool {
        self.handover.is_some()
    }

    /// Whether a write that overwrites a place of the top layer is durable by itself: as one that says so it takes along
    /// what was not flushed before, so not while that may lie in two layers.
    #[inline]
    pub(crate) fn is_durable_in_place(&self) -> bool {
        self.handover.is_none() && self.layers.first().is_some_and(|top| top.mapping.is_mapping_durable())
    }

    /// Waits until what lies below the top layer changes no more, so that it can be copied.
    pub(crate) async fn below_is_quiet(&self) {
        if let Some(over) = &self.handover {
            over.wait().await;
        }
    }

    /// Looks at a write before it begins.
    #[cold]
    pub(crate) fn look_at_write(&self, offset: u64, length_bytes: u64) -> IoResult {
        if self.disk.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly));
        }
        if let Some(log) = &self.log {
            log.note(offset, length_bytes);
        }
        Ok(())
    }

    /// Each time that their number has doubled: a guest must not fill the log.
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

    /// Where the first part of the range lies; `None` if some layer has to read a table.
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

    /// The answer that most reads get, in few steps: in which layer's file all of the range lies in one piece, where, and
    /// what a read means behind the file's end. `None` says nothing.
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

    /// As [`Chain::lookup`], asking layer after layer from `first` on.
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

    /// As [`Chain::lookup`], reading tables as needed.
    pub(crate) async fn resolve(&self, metas: &[MetaIo], offset: u64, length_bytes: u64) -> IoResult<Place> {
        let mut walk = Walk::new(offset, length_bytes);
        for (index, layer) in self.layers.iter().enumerate() {
            let Some(inside) = walk.enter(layer) else { break };
            let meta = metas.get(index).ok_or(IoError::EIO)?;
            if let Some(place) = walk.take(index, layer.mapping.resolve(meta, offset, inside).await?) {
                self.learn(index, offset);
                return Ok(place);
            }
            // The layers below are asked only if what they say is not known yet, so their tables need not be read.
            if index == 0
                && let Some(Known::At(place)) = self.below.as_ref().map(|below| below.lookup(offset, walk.length_bytes))
            {
                return Ok(place);
            }
        }
        self.learn(1, offset);
        Ok(walk.nowhere())
    }

    /// Keeps what the layers below the top one say, now that their tables are in memory. `found` is the layer that
    /// decided.
    fn learn(&self, found: usize, offset: u64) {
        if let Some(below) = self.below.as_ref().filter(|_| found > 0) {
            below.learn(offset, |start, length| self.ask(1, start, length));
        }
    }

    pub(crate) fn lower_map(&self) -> Option<&LowerMap> {
        self.below.as_ref()
    }

    /// Refuses what lies outside the disk.
    #[inline]
    pub(crate) fn check_range(&self, offset: u64, length_bytes: u64) -> IoResult {
        match offset.checked_add(length_bytes) {
            Some(end) if end <= self.limit_bytes => Ok(()),
            _ => Err(IoError::new(IoErrorKind::OutOfRange)),
        }
    }
}

/// One walk down a chain: how much of the range the layers seen so far left to those below.
struct Walk {
    offset: u64,
    length_bytes: u64,
}

impl Walk {
    fn new(offset: u64, length_bytes: u64) -> Self {
        Self { offset, length_bytes }
    }

    /// How much of the rest lies inside `layer`; `None` where the layer ends before (everything below is cut off too:
    /// a layer is never read past its own end).
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
