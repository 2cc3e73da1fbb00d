//! Changes to an image that nobody uses: snapshots, another size.

use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::open::guess::Format;
use crate::open::layers::format_of;
use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use format_qcow2::{AmendOptions, GrowBy, NewSnapshot, ResizeOptions, SnapshotName};
use std::path::Path;
use std::sync::Arc;

pub use format_qcow2::EditWatch;

/// What to do to an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// Take an internal snapshot.
    CreateSnapshot(NewSnapshot),
    /// Make the disk what it was when this snapshot was taken.
    ApplySnapshot(SnapshotName),
    /// Delete this snapshot.
    DeleteSnapshot(SnapshotName),
}

/// Changes the image in a file that was opened for writing; blocks. Power cuts leave the image before or after.
pub fn edit(
    path: &Path,
    file: &Arc<dyn File>,
    format: Option<Format>,
    edit: &Edit,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let name = path.display().to_string();
    let (format, _) = format_of(path.display(), file.as_ref(), format)?;
    if format == Format::Raw {
        return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': a raw image has no snapshots")));
    }
    let (io, file) = (MetaIo::new(file.open_blocking()?), file.as_ref());
    block_on(async {
        match edit {
            Edit::CreateSnapshot(new) => format_qcow2::create_snapshot(&io, file, &name, new, watch).await,
            Edit::ApplySnapshot(which) => format_qcow2::apply_snapshot(&io, file, &name, which, watch).await,
            Edit::DeleteSnapshot(which) => format_qcow2::delete_snapshot(&io, file, &name, which, watch).await,
        }
    })
}

/// Other options for an image that exists; what is `None` stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Amend {
    /// 2 (compat=0.10) or 3 (compat=1.1).
    pub version: Option<u32>,
    /// 1, 2, 4 ... 64.
    pub refcount_bits: Option<u32>,
    /// Allows writers to postpone refcounts.
    pub lazy_refcounts: Option<bool>,
    /// Another size; a smaller one cuts data off.
    pub size_bytes: Option<u64>,
    /// Another name of the external data file.
    pub data_file: Option<String>,
    /// Whether the external data file can be read as a raw image: only `false` makes a difference.
    pub data_file_raw: Option<bool>,
}

impl Image {
    /// Changes the size of a qcow2 image that was opened for writing and that no queue uses; blocks. What is added reads
    /// as zeros. The image is closed: what is in memory is out of date afterwards.
    pub fn resize(self, size_bytes: u64, shrink: bool, preallocation: GrowBy, watch: &mut EditWatch<'_>) -> Result<()> {
        let chain = self.chain();
        top_qcow2(&chain)?;
        let options = block_on(chain.resize_options(size_bytes, shrink, preallocation))?;
        resize_by(&chain, &options, watch)
    }

    /// As [`Image::resize`], to a larger size; but what the layer below holds there shows in what is added.
    pub fn resize_showing_below(self, size_bytes: u64, watch: &mut EditWatch<'_>) -> Result<()> {
        let chain = self.chain();
        top_qcow2(&chain)?;
        let options = block_on(chain.resize_options(size_bytes, false, GrowBy::Nothing))?;
        resize_by(&chain, &ResizeOptions { backing_bytes: 0, ..options }, watch)
    }

    /// Changes options of a qcow2 image that was opened for writing and that no queue uses; blocks. The image is closed.
    pub fn amend(self, amend: &Amend, watch: &mut EditWatch<'_>) -> Result<()> {
        let chain = self.chain();
        let top = top_qcow2(&chain)?;
        let resize = amend.size_bytes.map(|size| block_on(chain.resize_options(size, true, GrowBy::Nothing)));
        let options = AmendOptions {
            version: amend.version,
            refcount_bits: amend.refcount_bits,
            lazy_refcounts: amend.lazy_refcounts,
            resize: resize.transpose()?,
            data_file: amend.data_file.clone(),
            data_file_raw: amend.data_file_raw,
        };
        let io = top.open_blocking()?;
        block_on(format_qcow2::amend(&io, top.file.as_ref(), &top.name.to_string(), &options, watch))
    }
}

/// The top layer, for what only qcow2 images can.
fn top_qcow2(chain: &Chain) -> Result<&Layer> {
    let top = chain.layers.first().filter(|top| top.mapping.qcow2().is_some());
    let refused = || Error::new(ErrorKind::Unsupported, "only qcow2 images can be changed like this");
    top.map(|top| &**top).ok_or_else(refused)
}

fn resize_by(chain: &Chain, options: &ResizeOptions, watch: &mut EditWatch<'_>) -> Result<()> {
    let top = top_qcow2(chain)?;
    let io = top.open_blocking()?;
    block_on(format_qcow2::resize(&io, top.file.as_ref(), &top.name.to_string(), options, watch))
}
