//! An open image: its control plane.

use super::exchange::board::Board;
use super::extents::Extents;
use super::layer::Layer;
use super::layers::Chain;
use super::queue::ImageQueue;
use super::table_cache::TableCacheStats;
use crate::file_name::FileName;
use crate::guess::Format;
use block::{
    Disk, DiskInfo, DiskListener, DiskQueue, Error, ErrorKind, Extent, File, Lifetime, Listeners, MetaIo, ReactorCtx,
    ReadMap, Result, Runs, StatusQuery, Topology, WriteMap, block_on,
};
use memory::BufferAccount;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

/// An open image, shared by its queues. Its chain of layers may be exchanged while it serves: see
/// [`crate::put_overlay`].
pub struct Image {
    pub(crate) board: Arc<Board>,
    pub(crate) listeners: Listeners,
    /// The disk's properties when it was opened. Guests know them, so a new chain changes only the size.
    opened_as: DiskInfo,
    /// Former descriptors of files that were opened anew. They hold the files' locks.
    pub(crate) locked_by: Mutex<Vec<Arc<dyn File>>>,
    /// Such files of layers that are open for writing, with the locks of readers: nobody writes before they have a
    /// writer's.
    pub(crate) locked_to_read: Mutex<Vec<Arc<dyn File>>>,
}

impl Image {
    pub(crate) fn new(chain: Chain) -> Self {
        let opened_as = info_of(&chain);
        Self {
            board: Board::new(chain),
            listeners: Listeners::default(),
            opened_as,
            locked_by: Mutex::default(),
            locked_to_read: Mutex::default(),
        }
    }

    /// Returns the chain on which requests begin at present.
    pub(crate) fn chain(&self) -> Arc<Chain> {
        self.board.chain()
    }

    /// Returns the account of buffer memory that the disk's requests use. Files of layers that are added later use the
    /// same one.
    #[must_use]
    pub fn buffers(&self) -> BufferAccount {
        self.chain().buffers().clone()
    }

    /// Returns the names of the chain's files, top first. An external data file follows its image.
    pub fn file_names(&self) -> impl Iterator<Item = FileName> + use<> {
        self.layer_file_names().flat_map(|(own, data)| std::iter::once(own).chain(data))
    }

    /// Returns the names of the layers' own files, top first: the image's, and its external data file's if it has one.
    pub fn layer_file_names(&self) -> impl Iterator<Item = (FileName, Option<FileName>)> + use<> {
        let chain = self.chain();
        let names =
            chain.layers.iter().map(|layer| (layer.name.clone(), layer.data.as_ref().map(|data| data.name.clone())));
        names.collect::<Vec<_>>().into_iter()
    }

    /// Returns the names of the files that hold the layers' data, as the user and the images gave them, top first.
    pub fn said_file_names(&self) -> impl Iterator<Item = FileName> + use<> {
        let chain = self.chain();
        let names = chain.layers.iter().map(|layer| layer.data.as_ref().map_or(&layer.said, |data| &data.said).clone());
        names.collect::<Vec<_>>().into_iter()
    }

    /// Returns the names of the layers' own files as the user and the images gave them, top first. Layers are opened
    /// again by these names, because relative names in the images start from there.
    pub fn said_image_names(&self) -> impl Iterator<Item = FileName> + use<> {
        let chain = self.chain();
        chain.layers.iter().map(|layer| layer.said.clone()).collect::<Vec<_>>().into_iter()
    }

    /// Returns how an image that is to rest on this layer names it in its header. 0 is the top layer; `None` if there
    /// is no such layer. Fails if the layer has no name that a header can keep.
    pub fn layer_in_header(&self, index: usize) -> Result<Option<format_qcow2::Backing>> {
        self.chain().layers.get(index).map(|layer| layer.in_header()).transpose()
    }

    /// Returns the formats of the chain's layers, top first.
    pub fn formats(&self) -> impl Iterator<Item = Format> + use<> {
        let chain = self.chain();
        chain.layers.iter().map(|layer| layer.format()).collect::<Vec<_>>().into_iter()
    }

    /// Returns the formats of the chain's layers as the user and the images gave them, top first. `None` if a format
    /// was guessed: whoever lets a guest's bytes into the layer has to guess again.
    pub fn said_formats(&self) -> impl Iterator<Item = Option<Format>> + use<> {
        let chain = self.chain();
        chain.layers.iter().map(|layer| (!layer.guessed).then(|| layer.format())).collect::<Vec<_>>().into_iter()
    }

    /// Whether reactors copy all bytes themselves. Requests in flight at the same time then gain nothing.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.chain().layers.iter().all(|layer| layer.file_info().in_memory)
    }

    /// Returns how many layers below the top are open for writing: former tops, which may be tops again.
    #[must_use]
    pub fn former_tops(&self) -> usize {
        self.chain().layers.iter().skip(1).take_while(|layer| layer.writable).count()
    }

    /// Returns the files of the chain that are open for writing, by device and inode.
    #[must_use]
    pub fn written_files(&self) -> Vec<(u64, u64)> {
        let chain = self.chain();
        let written = chain.layers.iter().filter(|layer| layer.writable);
        written
            .flat_map(|layer| [Some(&layer.file), layer.data.as_ref().map(|data| &data.file)])
            .flatten()
            .filter_map(|file| file.identity())
            .collect()
    }

    /// Gives up what is in flight, as far as the files can do so ([`block::File::cancel`]).
    pub fn cancel(&self) {
        for layer in &self.chain().layers {
            let files = [Some(&layer.file), layer.data.as_ref().map(|data| &data.file)];
            files.into_iter().flatten().for_each(|file| {
                file.cancel();
            });
        }
    }

    /// Returns the format of the top layer.
    #[must_use]
    pub fn format(&self) -> Option<Format> {
        self.formats().next()
    }

    /// Returns the top layer's header if the layer is qcow2.
    #[must_use]
    pub fn qcow2_header(&self) -> Option<format_qcow2::Header> {
        self.chain().layers.first()?.mapping.header().cloned()
    }

    /// Describes each layer in a line: format, file, and the engine that serves it.
    #[must_use]
    pub fn describe_layers(&self) -> Vec<String> {
        self.chain().layers.iter().map(|layer| layer.describe()).collect()
    }

    /// Returns the state and the counters of the tables in memory, over all layers.
    #[must_use]
    pub fn cache_stats(&self) -> TableCacheStats {
        self.chain().cache_stats()
    }

    /// For benchmarks: looks up the first part of a range as requests do, and returns its place as a number to compare.
    #[doc(hidden)]
    pub fn lookups_for_bench(&self) -> impl Fn(u64, u64) -> Option<u64> + use<> {
        let chain = self.chain();
        move |offset, length_bytes| {
            let place = chain.lookup(offset, length_bytes)?;
            match place.extent {
                Extent::Data { offset, .. } => Some(offset.wrapping_add(place.layer as u64)),
                _ => Some(u64::MAX),
            }
        }
    }

    /// For benchmarks: reads all tables that lookups need.
    #[doc(hidden)]
    pub fn warm_up_for_bench(&self) -> Result<()> {
        let chain = self.chain();
        let queues = chain.layers.iter().map(|layer| Ok(MetaIo::new(layer.file.open_blocking()?)));
        let metas = queues.collect::<Result<Vec<_>>>()?;
        let mut at = 0;
        while at < chain.size_bytes {
            let left = chain.size_bytes.saturating_sub(at);
            let place = block_on(chain.resolve(&metas, at, left));
            let place = place.map_err(|error| Error::with_source(ErrorKind::Io, "cannot read the tables", error))?;
            at = at.saturating_add(place.length_bytes.max(1));
        }
        Ok(())
    }

    /// For tests of the tests: leaves out an ordering barrier of the top layer's format.
    #[doc(hidden)]
    pub fn skip_barrier_for_test(&self, barrier: format_qcow2::Barrier) {
        if let Some(top) = self.chain().layers.first() {
            top.mapping.skip_barrier(barrier);
        }
    }

    /// For tests of the tests: makes one queue stay on its old chain for the next `count` chains.
    #[doc(hidden)]
    pub fn miss_chains_for_test(&self, count: u64) {
        self.board.miss_chains_for_test(count);
    }

    /// For tests: holds the lock of the top layer's format while `meanwhile` runs.
    #[doc(hidden)]
    pub fn hold_lock_for_test<T>(&self, meanwhile: impl FnOnce() -> T) -> T {
        let chain = self.chain();
        let _held = chain.layers.first().and_then(|top| top.mapping.hold_lock());
        meanwhile()
    }

    /// Returns the size of the disk below the top layer; `None` if there is none.
    #[must_use]
    pub fn backing_bytes(&self) -> Option<u64> {
        self.chain().layers.get(1).map(|layer| layer.size_bytes)
    }

    /// Whether a cluster of the top layer can be marked as zero. Versions of qcow2 before 3 cannot.
    #[must_use]
    pub fn can_say_zero(&self) -> bool {
        self.chain().layers.first().is_some_and(|top| top.mapping.can_say_zero())
    }

    /// Whether the top layer can be emptied, so that the layer below shows through. This depends on the format.
    #[must_use]
    pub fn can_reveal(&self) -> bool {
        self.chain().layers.first().is_some_and(|top| top.mapping.can_reveal())
    }

    /// Makes the top layer forget whole clusters of a range, so that the layer below shows. Blocks. Durable only when
    /// the image is closed. No queue may be open.
    pub fn reveal(&self, offset: u64, length_bytes: u64) -> Result<()> {
        let chain = self.chain();
        let Some(top) = chain.layers.first().filter(|top| top.mapping.can_reveal()) else {
            return Err(Error::new(ErrorKind::Unsupported, "an image without tables cannot be emptied"));
        };
        let io = top.open_blocking()?;
        let what = format!("cannot empty at byte {offset}");
        block_on(top.mapping.reveal(&io, offset, length_bytes)).map_err(|error| top.failed(&what, error))
    }

    /// Gives the space of a kept scratch overlay that holds nothing back to the host. Blocks. The image is closed, and no
    /// queue is open.
    pub fn give_back_if_empty(&self) -> Result<()> {
        let chain = self.chain();
        let top = chain.layers.first().filter(|top| !chain.disk.read_only && top.mapping.can_stage());
        let Some(top) = top else { return Ok(()) };
        let given_back = block_on(top.mapping.give_back_if_empty(&top.open_blocking()?));
        given_back.map_err(|error| top.failed("cannot give its space back", error))
    }

    /// Says that no guest uses the disk any more, and that none will. A job that keeps two chains the same until one of
    /// them is surely on record then leaves both as they are.
    pub fn ends(&self) {
        self.board.ends();
    }

    /// As [`Image::close`], for a newly made image: also cuts the file off behind its last cluster.
    pub fn close_new(&self) -> Result<()> {
        self.close()?;
        let chain = self.chain();
        let Some(top) = chain.layers.first().filter(|_| !chain.disk.read_only) else { return Ok(()) };
        let io = top.open_blocking()?;
        block_on(top.mapping.trim(&io)).map_err(|error| top.failed("cannot cut to its length", error))
    }

    /// Writes what is still in memory and flushes. Blocks. Call it when no queue is open any more. Waits for an
    /// exchange of the chain that is under way.
    pub fn close(&self) -> Result<()> {
        let _turn = block_on(self.board.turn());
        // A former top that could not be made durable gets another try.
        self.chain().unclosed().try_for_each(|(_, layer)| block_on(layer.close()))
    }
}

/// Returns the disk's properties with this chain.
fn info_of(chain: &Chain) -> DiskInfo {
    let writable = !chain.disk.read_only;
    let mut info = DiskInfo {
        size_bytes: chain.size_bytes,
        logical_block_bytes: block::SECTOR_BYTES as u32,
        topology: Topology::default(),
        read_only: chain.disk.read_only,
        volatile_cache: chain.disk.volatile_cache.load(Ordering::Acquire),
        discard: false,
        discard_granularity_bytes: 0,
        write_zeroes: writable,
        serial: chain.disk.serial.clone(),
    };
    let Some(top) = chain.layers.first() else { return info };
    let file = top.file_info();
    info.topology.physical_block_bytes = file.offset_alignment_bytes.max(info.logical_block_bytes);
    match top.mapping.cluster_bytes() {
        None => {
            // Offsets on the disk are offsets in the file, so the file's topology holds.
            let physical = info.topology.physical_block_bytes;
            info.topology = top.file.topology();
            info.topology.physical_block_bytes = info.topology.physical_block_bytes.max(physical);
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

impl Disk for Image {
    fn info(&self) -> DiskInfo {
        let chain = self.chain();
        let volatile_cache = chain.disk.volatile_cache.load(Ordering::Acquire);
        DiskInfo { size_bytes: chain.size_bytes, volatile_cache, ..self.opened_as.clone() }
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(ImageQueue::open(&self.board, ctx)?))
    }

    fn lifetime(&self) -> Option<Lifetime> {
        self.chain().layers.first().and_then(|top| top.file.lifetime())
    }

    fn overwrites_in_place(&self) -> bool {
        let is_plain = |only: &Layer| only.mapping.cluster_bytes().is_none() && only.file.overwrites_in_place();
        matches!(self.chain().layers.as_slice(), [only] if is_plain(only))
    }

    fn may_pin_memory(&self) -> bool {
        // Files without direct I/O take memory at any address.
        let is_direct = |layer: &Arc<Layer>| layer.file_info().memory_alignment_bytes > 1;
        self.chain().layers.iter().any(is_direct)
    }

    fn set_volatile_cache(&self, volatile: bool) {
        let chain = self.chain();
        if let (false, Some(top)) = (volatile, chain.layers.first()) {
            // The next durable write also flushes what the guest has not flushed.
            top.mapping.flush_with_next_write();
        }
        if chain.disk.volatile_cache.swap(volatile, Ordering::AcqRel) != volatile {
            self.listeners.notify(|| self.info());
        }
    }

    fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        Ok(Box::new(Extents::of(&self.board, query)?))
    }

    fn map_read(&self, offset: u64, length_bytes: usize) -> Option<ReadMap> {
        self.chain().map_read(offset, length_bytes)
    }

    fn map_write(&self, offset: u64, length_bytes: usize) -> Option<WriteMap> {
        self.chain().map_write(offset, length_bytes)
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.listeners.subscribe(listener);
    }
}
