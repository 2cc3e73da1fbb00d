//! One layer of a chain: a file, and where its guest's bytes lie in it.

use super::mapping::Mapping;
use crate::file_name::FileName;
use crate::guess::Format;
use block::{Error, ErrorKind, File, FileInfo, FileQueue, IoError, MetaIo, ReactorCtx, Result};
use format_qcow2::{EditWatch, ResizeOptions};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

/// The file in which a layer keeps its guest's data, where that is another than its tables'.
pub(crate) struct DataFile {
    /// Canonical name.
    pub(crate) name: FileName,
    /// As the image names it, from where the user named the image.
    pub(crate) said: FileName,
    pub(crate) file: Arc<dyn File>,
}

/// A file and where its guest bytes lie.
pub(crate) struct Layer {
    /// Canonical name.
    pub(crate) name: FileName,
    /// As the user or the layer above named it, for tools that show it.
    pub(crate) said: FileName,
    /// The files were opened for writing: the layer is the top one, was it, or may be again.
    pub(crate) writable: bool,
    /// The format was not said by anybody.
    pub(crate) guessed: bool,
    pub(crate) file: Arc<dyn File>,
    pub(crate) data: Option<DataFile>,
    pub(crate) mapping: Mapping,
    pub(crate) size_bytes: u64,
    /// See [`Layer::has_empty_clusters`].
    pub(crate) empty_clusters: OnceLock<bool>,
}

impl Layer {
    /// The same files with another mapping.
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
            empty_clusters: OnceLock::new(),
            mapping,
        }
    }

    /// One line: format, file and what serves it.
    pub(crate) fn describe(&self) -> String {
        format!("{} '{}': {}", self.format(), self.name, self.file_info().engine)
    }

    /// The error for something that failed with this layer.
    pub(crate) fn failed(&self, what: &str, error: IoError) -> Error {
        Error::with_source(ErrorKind::Io, format!("'{}': {what}", self.name), error)
    }

    /// Writes what is still in memory and flushes, by calls that block. Nobody writes to the layer meanwhile.
    pub(crate) async fn close(&self) -> Result<()> {
        self.close_by(&self.open_blocking()?).await
    }

    /// As [`Layer::close`], by these calls.
    pub(crate) async fn close_by(&self, io: &MetaIo) -> Result<()> {
        let what = if self.mapping.has_tables() { "cannot write its tables" } else { "cannot flush it" };
        self.mapping.close(io).await.map_err(|error| self.failed(what, error))
    }

    /// Makes what was written durable, by calls that block.
    pub(crate) async fn flush(&self) -> Result<()> {
        self.flush_by(&self.open_blocking()?).await
    }

    /// As [`Layer::flush`], by these calls.
    pub(crate) async fn flush_by(&self, io: &MetaIo) -> Result<()> {
        self.mapping.flush(io).await.map_err(|error| self.failed("cannot flush it", error))
    }

    /// Changes the size of the layer, which is closed and which nobody uses.
    pub(crate) async fn resize_closed(&self, options: &ResizeOptions, watch: &mut EditWatch<'_>) -> Result<()> {
        let io = self.open_blocking()?;
        self.mapping.resize_closed(&io, self.file.as_ref(), &self.name.to_string(), options, watch).await
    }

    pub(crate) fn format(&self) -> Format {
        self.mapping.format()
    }

    /// Whether many of its clusters take no space in the file, because only their tables were made in advance. Then it pays
    /// to look for holes where data should be. Found out once, as qemu-img does it.
    pub(crate) async fn has_empty_clusters(&self, io: &MetaIo) -> bool {
        if let Some(found) = self.empty_clusters.get() {
            return *found;
        }
        let found = match (self.mapping.qcow2(), self.file.length_bytes(), self.file.allocated_bytes()) {
            (Some(qcow2), Ok(length), Ok(Some(allocated))) => qcow2.has_empty_clusters(io, length, allocated).await,
            _ => false,
        };
        *self.empty_clusters.get_or_init(|| found)
    }

    /// The file in which the guest's data lie.
    pub(crate) fn data_file(&self) -> &Arc<dyn File> {
        self.data.as_ref().map_or(&self.file, |data| &data.file)
    }

    /// What the file in which the guest's data lie is.
    pub(crate) fn file_info(&self) -> &FileInfo {
        self.data_file().info()
    }

    /// The layer's files on a reactor: the guest's data, and the tables.
    pub(crate) fn open_queues(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<(Rc<dyn FileQueue>, MetaIo)> {
        let file = self.file.open_queue(ctx)?;
        let meta = MetaIo::new(Rc::clone(&file));
        let Some(data) = &self.data else { return Ok((file, meta)) };
        let data = data.file.open_queue(ctx)?;
        Ok((Rc::clone(&data), meta.with_data(data)))
    }

    /// The tables, for calls that block.
    pub(crate) fn open_blocking(&self) -> Result<MetaIo> {
        let meta = MetaIo::of_file(&*self.file)?;
        match &self.data {
            Some(data) => Ok(meta.with_data(data.file.open_blocking()?)),
            None => Ok(meta),
        }
    }
}
