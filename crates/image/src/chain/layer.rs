//! One layer of a chain: its files, and the mapping that says where the guest's bytes lie.

use super::closed_edit::ClosedEdit;
use super::mapping::Mapping;
use super::memory_bitmap::MemoryBitmaps;
use crate::file_name::FileName;
use crate::guess::Format;
use block::{Error, ErrorKind, File, FileInfo, FileQueue, IoError, MetaIo, ReactorCtx, Result, block_on};
use format_qcow2::{Backing, Bitmap, BitmapBits, EditWatch, ResizeOptions, Snapshot};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

/// The external data file of a layer.
pub(crate) struct DataFile {
    /// Canonical name.
    pub(crate) name: FileName,
    /// The name that the image gives, completed by the name that the user gave the image.
    pub(crate) said: FileName,
    pub(crate) file: Arc<dyn File>,
}

/// A layer's files and its mapping.
pub(crate) struct Layer {
    /// Canonical name.
    pub(crate) name: FileName,
    /// As the user or the layer above named it, for tools that show it.
    pub(crate) said: FileName,
    /// Whether the files are open for writing: the layer is the top, was the top, or may be the top again.
    pub(crate) writable: bool,
    /// Whether the format was guessed.
    pub(crate) guessed: bool,
    pub(crate) file: Arc<dyn File>,
    pub(crate) data: Option<DataFile>,
    pub(crate) mapping: Mapping,
    pub(crate) size_bytes: u64,
    /// Bitmaps of a raw layer. Persistent ones belong to the mapping.
    pub(crate) memory_bitmaps: Arc<MemoryBitmaps>,
    /// See [`Layer::has_empty_clusters`].
    pub(crate) empty_clusters: OnceLock<bool>,
}

impl Layer {
    /// Returns a layer with the same files and another mapping. No request is in flight.
    pub(crate) fn with_mapping(&self, mapping: Mapping) -> Self {
        let data = self.data.as_ref();
        let data = data.map(|DataFile { name, said, file }| DataFile {
            name: name.clone(),
            said: said.clone(),
            file: Arc::clone(file),
        });
        Self {
            name: self.name.clone(),
            said: self.said.clone(),
            writable: self.writable,
            guessed: self.guessed,
            file: Arc::clone(&self.file),
            data,
            size_bytes: mapping.size_bytes(),
            memory_bitmaps: self.bitmaps_of_size(mapping.size_bytes()),
            empty_clusters: OnceLock::new(),
            mapping,
        }
    }

    /// Its bitmaps in memory for another size. Whoever makes it larger has checked that; somebody else may have, too.
    fn bitmaps_of_size(&self, size_bytes: u64) -> Arc<MemoryBitmaps> {
        if self.memory_bitmaps.is_empty() {
            return Arc::clone(&self.memory_bitmaps);
        }
        match self.memory_bitmaps.check_size(size_bytes) {
            Ok(()) => Arc::new(self.memory_bitmaps.of_size(size_bytes)),
            Err(error) => {
                tracing::warn!("'{}' has {size_bytes} bytes now, and lost its bitmaps: {error}", self.name);
                Arc::default()
            }
        }
    }

    /// Describes the layer in a line: format, file, and the engine that serves it.
    pub(crate) fn describe(&self) -> String {
        format!("{} '{}': {}", self.format(), self.name, self.file_info().engine)
    }

    /// Returns the error for an operation on this layer that failed.
    pub(crate) fn failed(&self, what: &str, error: IoError) -> Error {
        Error::with_source(ErrorKind::Io, format!("'{}': {what}", self.name), error)
    }

    /// Writes what is still in memory and flushes, with calls that block. Nobody writes to the layer meanwhile.
    pub(crate) async fn close(&self) -> Result<()> {
        self.close_by(&self.open_blocking()?).await
    }

    /// As [`Layer::close`], through `io`.
    pub(crate) async fn close_by(&self, io: &MetaIo) -> Result<()> {
        let what = if self.mapping.has_tables() { "cannot write its tables" } else { "cannot flush it" };
        self.mapping.close(io).await.map_err(|error| self.failed(what, error))
    }

    /// Call it when another mapping takes this one's place, before anything changes, while no request is in flight. Whoever
    /// still looks at the layer without a request fails, or asks the next chain.
    pub(crate) fn end_promises(&self) {
        if let Some(epochs) = self.mapping.epochs() {
            epochs.close();
        }
    }

    /// Makes what was written durable, with calls that block.
    pub(crate) async fn flush(&self) -> Result<()> {
        self.flush_by(&self.open_blocking()?).await
    }

    /// As [`Layer::flush`], through `io`.
    pub(crate) async fn flush_by(&self, io: &MetaIo) -> Result<()> {
        self.mapping.flush(io).await.map_err(|error| self.failed("cannot flush it", error))
    }

    /// Makes durable what any process has written to the layer's files, with calls that block. Tables that are still in
    /// memory stay there.
    pub(crate) fn sync_files(&self) -> Result<()> {
        let files = [Some(&self.file), self.data.as_ref().map(|data| &data.file)];
        files.into_iter().flatten().try_for_each(|file| {
            let synced = block_on(MetaIo::new(file.open_blocking()?).flush());
            synced.map_err(|error| self.failed("cannot make durable what was written to it before", error))
        })
    }

    /// Changes the size of the layer. The layer is closed and nobody uses it.
    pub(crate) async fn resize_closed(&self, options: &ResizeOptions, watch: &mut EditWatch<'_>) -> Result<()> {
        self.look_before_edit(watch).await?;
        self.resize_looked_at(options, watch).await
    }

    /// As [`Layer::resize_closed`]. Its references are not looked at, which takes long in a large image: that was done, or
    /// the layer was in use and has just been closed.
    pub(crate) async fn resize_looked_at(&self, options: &ResizeOptions, watch: &mut EditWatch<'_>) -> Result<()> {
        let io = self.open_blocking()?;
        self.mapping.resize_looked_at(&io, self.file.as_ref(), &self.name.to_string(), options, watch).await
    }

    /// Refuses a layer whose refcounts deny data that are there. Nobody writes to it meanwhile.
    pub(crate) async fn look_before_edit(&self, watch: &mut EditWatch<'_>) -> Result<()> {
        let io = self.open_blocking()?;
        self.mapping.look_before_writing(&io, self.file.as_ref(), &self.name.to_string(), watch).await
    }

    /// Refuses `edit` if the layer's format cannot store what it changes.
    pub(crate) fn refuse_edit(&self, edit: &ClosedEdit) -> Result<()> {
        self.mapping.refuse_edit(&self.name, edit)
    }

    /// Changes the layer durably. The layer is closed and nobody uses it. A power cut leaves it before or after the
    /// change.
    pub(crate) async fn edit_closed(&self, edit: &ClosedEdit) -> Result<()> {
        self.mapping.edit_closed(&self.open_blocking()?, &*self.file, &self.name, edit).await
    }

    /// Takes or deletes an internal snapshot durably. The layer is closed and nobody writes to it; guests read it meanwhile.
    /// Returns what became free, for [`Layer::give_back`].
    pub(crate) async fn change_snapshots_beside_readers(
        &self,
        edit: &ClosedEdit,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Range<u64>>> {
        let (io, watch) = (self.open_blocking()?, &mut |_, _| go_on());
        self.mapping.change_snapshots_beside_readers(&io, &*self.file, &self.name, edit, watch).await
    }

    /// Gives back to the host what a change has freed. Nobody reads it any more, and nobody writes to the layer.
    pub(crate) async fn give_back(&self, freed: &[Range<u64>]) {
        let Ok(io) = self.open_blocking() else { return };
        for range in freed.iter().filter(|_| self.file.info().can_discard) {
            // Only space is lost.
            let _ = io.discard(range.start, range.end.saturating_sub(range.start)).await;
        }
    }

    /// Records another backing file, or none, durably. The layer is closed and nobody uses it.
    pub(crate) async fn set_backing(&self, backing: Option<&Backing>) -> Result<()> {
        self.mapping.set_backing(&self.open_blocking()?, &*self.file, &self.name.to_string(), backing).await
    }

    /// Reads the persistent bitmaps from the file.
    pub(crate) async fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        self.mapping.bitmaps(&self.open_blocking()?, &self.name.to_string()).await
    }

    /// Returns a bitmap's bits, from the file where they are persistent.
    pub(crate) async fn read_bitmap(&self, bitmap: &str) -> Result<BitmapBits> {
        if let Some(found) = self.memory_bitmaps.find(bitmap) {
            return Ok(found.bits());
        }
        self.mapping.read_bitmap(&self.open_blocking()?, &self.name.to_string(), bitmap).await
    }

    /// Reads the internal snapshots from the file.
    pub(crate) async fn internal_snapshots(&self) -> Result<Vec<Snapshot>> {
        self.mapping.snapshots(&self.open_blocking()?, &self.name.to_string()).await
    }

    /// How the header of an image that rests on this layer names it: by its whole path, because the two may lie in
    /// different directories.
    pub(crate) fn in_header(&self) -> Result<Backing> {
        let file = self.name.in_header().ok_or_else(|| {
            let what = "has no name that an image could keep in its header: it is no file and no server's, or its name \
                        has a password or a query";
            Error::new(ErrorKind::Unsupported, format!("'{}' {what}", self.name))
        })?;
        Ok(Backing { file: file.into_owned(), format: Some(self.format().to_string()) })
    }

    pub(crate) fn format(&self) -> Format {
        self.mapping.format()
    }

    /// Whether many clusters take no space in the file, because only their tables were made in advance. Looking for
    /// holes in the data then pays. Found out once, as qemu-img does.
    pub(crate) async fn has_empty_clusters(&self, io: &MetaIo) -> bool {
        if let Some(found) = self.empty_clusters.get() {
            return *found;
        }
        let found = self.mapping.has_empty_clusters(io, &*self.file).await;
        *self.empty_clusters.get_or_init(|| found)
    }

    /// Returns the file that holds the guest's data.
    pub(crate) fn data_file(&self) -> &Arc<dyn File> {
        self.data.as_ref().map_or(&self.file, |data| &data.file)
    }

    /// Returns the properties of the file that holds the guest's data.
    pub(crate) fn file_info(&self) -> &FileInfo {
        self.data_file().info()
    }

    /// Opens the layer's files on a reactor: the guest's data, and the tables.
    pub(crate) fn open_queues(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<(Rc<dyn FileQueue>, MetaIo)> {
        let file = self.file.open_queue(ctx)?;
        let meta = MetaIo::new(Rc::clone(&file));
        let Some(data) = &self.data else { return Ok((file, meta)) };
        let data = data.file.open_queue(ctx)?;
        Ok((Rc::clone(&data), meta.with_data(data)))
    }

    /// Opens the tables for calls that block.
    pub(crate) fn open_blocking(&self) -> Result<MetaIo> {
        let meta = MetaIo::of_file(&*self.file)?;
        match &self.data {
            Some(data) => Ok(meta.with_data(data.file.open_blocking()?)),
            None => Ok(meta),
        }
    }
}
