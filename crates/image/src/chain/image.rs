//! An open image: the chain, and its control plane.

use crate::chain::layer::Layer;
use crate::chain::lower_map::{Known, LowerMap};
use crate::chain::mapping::Plain;
use crate::chain::queue::ImageQueue;
use crate::chain::table_cache::{Hits, TableCacheStats};
use crate::open::file_name::FileName;
use crate::open::guess::Format;
use block::{
    Disk, DiskInfo, DiskListener, DiskQueue, Error, ErrorKind, Extent, IoError, IoErrorKind, IoResult, Listeners,
    Mapped, MetaIo, PastEnd, ReactorCtx, Result, Topology, block_on,
};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// What all queues of an image share. Immutable but for the mappings' own state and the cache type.
pub(crate) struct Chain {
    /// Top first; never empty.
    pub(crate) layers: Vec<Layer>,
    pub(crate) size_bytes: u64,
    pub(crate) read_only: bool,
    /// The top layer was taken for raw by guess only: a guest must not turn it into something else.
    pub(crate) guessed_raw: bool,
    /// How often it tried.
    pub(crate) refused_headers: AtomicU64,
    pub(crate) volatile_cache: AtomicBool,
    pub(crate) serial: String,
    /// What the layers below the top one say, where there are several with tables.
    pub(crate) below: Option<LowerMap>,
    pub(crate) hits: Hits,
}

/// A place in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) layer: usize,
    pub(crate) extent: Extent,
    pub(crate) length_bytes: u64,
}

impl Chain {
    /// Each time that their number has doubled: a guest must not fill the log.
    pub(crate) fn log_refused_header(&self, offset: u64) {
        let times = self.refused_headers.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if times.is_power_of_two() {
            tracing::warn!(
                times,
                "refused a guest write at offset {offset} that would make a raw disk look like another format; \
                 say format=raw to allow it"
            );
        }
    }

    pub(crate) fn top(&self) -> IoResult<&Layer> {
        self.layers.first().ok_or(IoError::EIO)
    }

    pub(crate) fn layer(&self, index: usize) -> IoResult<&Layer> {
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

    /// Refuses what lies outside the disk.
    #[inline]
    pub(crate) fn check_range(&self, offset: u64, length_bytes: u64) -> IoResult {
        match offset.checked_add(length_bytes) {
            Some(end) if end <= self.size_bytes => Ok(()),
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

/// An open image, shared by its queues.
pub struct Image {
    pub(crate) chain: Arc<Chain>,
    pub(crate) listeners: Listeners,
}

impl Image {
    /// The names of the files of the chain, top first, external data files behind their images.
    pub fn file_names(&self) -> impl Iterator<Item = &FileName> {
        self.layer_file_names().flat_map(|(own, data)| std::iter::once(own).chain(data))
    }

    /// The names of the layers' own files, top first: of the image, and of its external data file if it has one.
    pub fn layer_file_names(&self) -> impl Iterator<Item = (&FileName, Option<&FileName>)> {
        self.chain.layers.iter().map(|layer| (&layer.name, layer.data.as_ref().map(|data| &data.name)))
    }

    /// The names of the files in which the layers' data lie, as the user and the images gave them, top first.
    pub fn said_file_names(&self) -> impl Iterator<Item = &FileName> {
        self.chain.layers.iter().map(|layer| layer.data.as_ref().map_or(&layer.said, |data| &data.said))
    }

    /// The names of the layers' own files as the user and the images gave them, top first: by these they are opened again,
    /// because what they name lies beside them.
    pub fn said_image_names(&self) -> impl Iterator<Item = &FileName> {
        self.chain.layers.iter().map(|layer| &layer.said)
    }

    /// The formats of the layers of the chain, top first.
    pub fn formats(&self) -> impl Iterator<Item = Format> {
        self.chain.layers.iter().map(Layer::format)
    }

    /// The formats of the layers of the chain as the user and the images gave them, top first; `None` where it was
    /// guessed, and has to be guessed again by whoever lets a guest's bytes into the layer.
    pub fn said_formats(&self) -> impl Iterator<Item = Option<Format>> {
        self.chain.layers.iter().map(|layer| (!layer.guessed).then(|| layer.format()))
    }

    /// Whether reactors copy all its bytes themselves: requests in flight at the same time gain nothing then.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.chain.layers.iter().all(|layer| layer.file_info().in_memory)
    }

    /// The format of the top layer.
    #[must_use]
    pub fn format(&self) -> Option<Format> {
        self.chain.layers.first().map(Layer::format)
    }

    /// The top layer's header, where that is qcow2.
    #[must_use]
    pub fn qcow2_header(&self) -> Option<&format_qcow2::Header> {
        self.chain.layers.first()?.mapping.header()
    }

    /// One line a layer: format, file and what serves it.
    #[must_use]
    pub fn describe_layers(&self) -> Vec<String> {
        let line = |layer: &Layer| format!("{} '{}': {}", layer.format(), layer.name, layer.file_info().engine);
        self.chain.layers.iter().map(line).collect()
    }

    /// What the tables in memory are and did so far, over all layers.
    #[must_use]
    pub fn cache_stats(&self) -> TableCacheStats {
        self.chain.cache_stats()
    }

    /// Where the first part of a range lies, as requests look it up, as a number to compare: for benchmarks.
    #[doc(hidden)]
    #[must_use]
    pub fn look_up_for_bench(&self, offset: u64, length_bytes: u64) -> Option<u64> {
        let place = self.chain.lookup(offset, length_bytes)?;
        match place.extent {
            Extent::Data { offset, .. } => Some(offset.wrapping_add(place.layer as u64)),
            _ => Some(u64::MAX),
        }
    }

    /// Reads all tables that lookups need: for benchmarks.
    #[doc(hidden)]
    pub fn warm_up_for_bench(&self) -> Result<()> {
        let queues = self.chain.layers.iter().map(|layer| Ok(MetaIo::new(layer.file.open_blocking()?)));
        let metas = queues.collect::<Result<Vec<_>>>()?;
        let mut at = 0;
        while at < self.chain.size_bytes {
            let left = self.chain.size_bytes.saturating_sub(at);
            let place = block_on(self.chain.resolve(&metas, at, left));
            let place = place.map_err(|error| Error::with_source(ErrorKind::Io, "cannot read the tables", error))?;
            at = at.saturating_add(place.length_bytes.max(1));
        }
        Ok(())
    }

    /// For tests of the tests: leaves an ordering barrier of the top layer's format out.
    #[doc(hidden)]
    pub fn skip_barrier_for_test(&self, barrier: format_qcow2::Barrier) {
        if let Some(top) = self.chain.layers.first() {
            top.mapping.skip_barrier(barrier);
        }
    }

    /// For tests: the lock of the top layer's format, until what this returns is dropped.
    #[doc(hidden)]
    pub fn hold_lock_for_test(&self) -> Option<impl Drop + '_> {
        self.chain.layers.first()?.mapping.hold_lock()
    }

    /// The size of the disk that the top layer rests on; `None` where it rests on nothing.
    #[must_use]
    pub fn backing_bytes(&self) -> Option<u64> {
        self.chain.layers.get(1).map(|layer| layer.size_bytes)
    }

    /// Whether the top layer can be emptied: it is of a format in which the layer below shows through.
    #[must_use]
    pub fn can_reveal(&self) -> bool {
        self.chain.layers.first().is_some_and(|top| top.mapping.can_reveal())
    }

    /// Makes the top layer forget whole clusters of a range, so that what lies below shows. Blocks; not durable before
    /// the image is closed. No queue may be open.
    pub fn reveal(&self, offset: u64, length_bytes: u64) -> Result<()> {
        if !self.can_reveal() {
            return Err(Error::new(ErrorKind::Unsupported, "a raw image cannot be emptied"));
        }
        let failed = |error: IoError| {
            let name = self.chain.layers.first().map(|layer| layer.name.to_string()).unwrap_or_default();
            Error::with_source(ErrorKind::Io, format!("cannot empty '{name}' at byte {offset}"), error)
        };
        let top = self.chain.top().map_err(failed)?;
        let io = top.open_blocking()?;
        block_on(top.mapping.reveal(&io, offset, length_bytes)).map_err(failed)
    }

    /// As [`Image::close`], of an image that was made new: nothing is left behind its last cluster.
    pub fn close_new(&self) -> Result<()> {
        self.close()?;
        let Some(top) = self.chain.layers.first().filter(|_| !self.chain.read_only) else { return Ok(()) };
        let io = top.open_blocking()?;
        let failed =
            |error| Error::with_source(ErrorKind::Io, format!("cannot cut '{}' to its length", top.name), error);
        block_on(top.mapping.trim(&io)).map_err(failed)
    }

    /// Writes what is still in memory and flushes. Call it when no queue is open any more; blocks.
    pub fn close(&self) -> Result<()> {
        if self.chain.read_only {
            return Ok(());
        }
        let failed = |what: &str, error: IoError| {
            let name = self.chain.layers.first().map(|layer| layer.name.to_string()).unwrap_or_default();
            Error::with_source(ErrorKind::Io, format!("cannot {what} '{name}'"), error)
        };
        let top = self.chain.top().map_err(|error| failed("close", error))?;
        let io = top.open_blocking()?;
        let what = if top.mapping.has_tables() { "write the tables of" } else { "flush" };
        block_on(top.mapping.close(&io)).map_err(|error| failed(what, error))
    }
}

impl Disk for Image {
    fn info(&self) -> DiskInfo {
        let chain = &self.chain;
        let writable = !chain.read_only;
        let mut info = DiskInfo {
            size_bytes: chain.size_bytes,
            logical_block_bytes: block::SECTOR_BYTES as u32,
            topology: Topology::default(),
            read_only: chain.read_only,
            volatile_cache: chain.volatile_cache.load(Ordering::Acquire),
            discard: false,
            discard_granularity_bytes: 0,
            write_zeroes: writable,
            serial: chain.serial.clone(),
        };
        let Some(top) = chain.layers.first() else { return info };
        let file = top.file_info();
        info.topology.physical_block_bytes = file.offset_alignment_bytes.max(info.logical_block_bytes);
        match top.mapping.cluster_bytes() {
            None => {
                info.discard = writable && file.can_discard;
                info.discard_granularity_bytes = file.offset_alignment_bytes.max(info.logical_block_bytes);
            }
            Some(cluster_bytes) => {
                info.discard = writable;
                info.discard_granularity_bytes = cluster_bytes;
                info.topology.optimal_io_bytes = cluster_bytes;
            }
        }
        info
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(ImageQueue::open(&self.chain, ctx)?))
    }

    fn set_volatile_cache(&self, volatile: bool) {
        if let (false, Some(top)) = (volatile, self.chain.layers.first()) {
            // The next durable write takes along what the guest has not flushed.
            top.mapping.flush_with_next_write();
        }
        if self.chain.volatile_cache.swap(volatile, Ordering::AcqRel) != volatile {
            self.listeners.notify(|| self.info());
        }
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.listeners.subscribe(listener);
    }
}
