//! One layer of a chain: a file in a format. Dispatch by enum, so that the fast path has no virtual call here.

use crate::open::guess::Format;
use block::{File, FileInfo, FileQueue, IoResult, Mapped, MetaIo, ReactorCtx, Result};
use format_qcow2::{Overwrite, Plain, Qcow2};
use format_raw::Raw;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// The mapping of a layer.
pub(crate) enum Mapping {
    Raw(Raw),
    Qcow2(Qcow2),
}

/// The file in which a layer keeps its guest's data, where that is another than its tables'.
pub(crate) struct DataFile {
    /// Canonical name.
    pub(crate) path: PathBuf,
    /// As the image names it, from where the user named the image.
    pub(crate) said: PathBuf,
    pub(crate) file: Arc<dyn File>,
}

/// A file and where its guest bytes lie.
pub(crate) struct Layer {
    /// Canonical name.
    pub(crate) path: PathBuf,
    /// As the user or the layer above named it, for tools that show it.
    pub(crate) said: PathBuf,
    /// The format was not said by anybody.
    pub(crate) guessed: bool,
    pub(crate) file: Arc<dyn File>,
    pub(crate) data: Option<DataFile>,
    pub(crate) mapping: Mapping,
    pub(crate) size_bytes: u64,
}

impl Layer {
    pub(crate) fn format(&self) -> Format {
        match &self.mapping {
            Mapping::Raw(_) => Format::Raw,
            Mapping::Qcow2(_) => Format::Qcow2,
        }
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
        let meta = MetaIo::new(self.file.open_blocking()?);
        match &self.data {
            Some(data) => Ok(meta.with_data(data.file.open_blocking()?)),
            None => Ok(meta),
        }
    }

    /// Where the first part of the range lies; `None` if that takes a read. The range lies inside the layer.
    #[inline]
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Option<Mapped> {
        match &self.mapping {
            Mapping::Raw(raw) => Some(raw.lookup(offset, length_bytes)),
            Mapping::Qcow2(qcow2) => qcow2.lookup(offset, length_bytes),
        }
    }

    /// The answer that most lookups get, in few steps. `None` says nothing, ask [`Layer::lookup`].
    #[inline]
    pub(crate) fn lookup_plain(&self, offset: u64, length_bytes: u64) -> Option<Plain> {
        match &self.mapping {
            Mapping::Raw(raw) => raw.is_in_one_piece(offset, length_bytes).then_some(Plain::Data(offset)),
            Mapping::Qcow2(qcow2) => qcow2.lookup_plain(offset, length_bytes),
        }
    }

    /// The answer that most writes get, in few steps: where all of the range may be overwritten in one piece; it is noted
    /// as written. `None` says nothing.
    #[inline]
    pub(crate) fn begin_overwrite(&self, offset: u64, length_bytes: u64) -> Option<u64> {
        match &self.mapping {
            Mapping::Raw(raw) => {
                let quick = length_bytes > 0 && !raw.needs_padding(offset.saturating_add(length_bytes));
                quick.then_some(offset)
            }
            Mapping::Qcow2(qcow2) => qcow2.begin_overwrite(offset, length_bytes),
        }
    }

    /// Whether what was looked up before this call is durably where it was found.
    #[inline]
    pub(crate) fn is_mapping_durable(&self) -> bool {
        match &self.mapping {
            Mapping::Raw(_) => true,
            Mapping::Qcow2(qcow2) => qcow2.is_mapping_durable(),
        }
    }

    /// As `lookup`, reading the tables that it takes.
    pub(crate) async fn resolve(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult<Mapped> {
        match &self.mapping {
            Mapping::Raw(raw) => Ok(raw.lookup(offset, length_bytes)),
            Mapping::Qcow2(qcow2) => qcow2.resolve(io, offset, length_bytes).await,
        }
    }

    /// The first part of the range that may be overwritten where it lies, at once.
    #[inline]
    pub(crate) fn lookup_overwrite(&self, offset: u64, length_bytes: u64) -> Overwrite {
        match &self.mapping {
            Mapping::Raw(_) => Overwrite::InPlace { offset, length_bytes },
            Mapping::Qcow2(qcow2) => qcow2.lookup_overwrite(offset, length_bytes),
        }
    }
}
