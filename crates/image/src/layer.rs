//! One layer of a chain: a file in a format. Dispatch by enum, so that the fast path has no virtual call here.

use crate::guess::Format;
use block::{File, FileInfo, IoResult, Mapped, MetaIo};
use format_qcow2::{Overwrite, Qcow2};
use format_raw::Raw;
use std::path::PathBuf;
use std::sync::Arc;

/// The mapping of a layer.
pub(crate) enum Mapping {
    Raw(Raw),
    Qcow2(Qcow2),
}

/// A file and where its guest bytes lie.
pub(crate) struct Layer {
    /// Canonical name.
    pub(crate) path: PathBuf,
    /// As the user or the layer above named it, for tools that show it.
    pub(crate) said: PathBuf,
    pub(crate) file: Arc<dyn File>,
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

    pub(crate) fn file_info(&self) -> &FileInfo {
        self.file.info()
    }

    /// Where the first part of the range lies; `None` if that takes a read. The range lies inside the layer.
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Option<Mapped> {
        match &self.mapping {
            Mapping::Raw(raw) => Some(raw.lookup(offset, length_bytes)),
            Mapping::Qcow2(qcow2) => qcow2.lookup(offset, length_bytes),
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
    pub(crate) fn lookup_overwrite(&self, offset: u64, length_bytes: u64) -> Overwrite {
        match &self.mapping {
            Mapping::Raw(_) => Overwrite::InPlace { offset, length_bytes },
            Mapping::Qcow2(qcow2) => qcow2.lookup_overwrite(offset, length_bytes),
        }
    }
}
