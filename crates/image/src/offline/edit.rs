//! Changes to an image that nobody uses: snapshots, another size.

use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::open::guess::Format;
use crate::open::layers::format_of;
use block::{Error, ErrorKind, Extent, File, IoError, IoResult, MetaIo, Result, block_on};
use format_qcow2::{AmendOptions, GrowBy, NewSnapshot, Qcow2, ResizeOptions, SnapshotName};
use std::path::Path;
use std::rc::Rc;
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
        let (top, qcow2) = self.top_qcow2()?;
        let options = self.resize_options(top, qcow2, size_bytes, shrink, preallocation)?;
        self.resize_by(&options, watch)
    }

    /// As [`Image::resize`], to a larger size; but what the layer below holds there shows in what is added.
    pub fn resize_showing_below(self, size_bytes: u64, watch: &mut EditWatch<'_>) -> Result<()> {
        let (top, qcow2) = self.top_qcow2()?;
        let options = self.resize_options(top, qcow2, size_bytes, false, GrowBy::Nothing)?;
        self.resize_by(&ResizeOptions { backing_bytes: 0, ..options }, watch)
    }

    fn resize_by(&self, options: &ResizeOptions, watch: &mut EditWatch<'_>) -> Result<()> {
        let (top, _) = self.top_qcow2()?;
        let io = top.open_blocking()?;
        block_on(format_qcow2::resize(&io, top.file.as_ref(), &top.name.to_string(), options, watch))
    }

    /// Changes options of a qcow2 image that was opened for writing and that no queue uses; blocks. The image is closed.
    pub fn amend(self, amend: &Amend, watch: &mut EditWatch<'_>) -> Result<()> {
        let (top, qcow2) = self.top_qcow2()?;
        let resize = amend.size_bytes.map(|size| self.resize_options(top, qcow2, size, true, GrowBy::Nothing));
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

    fn top_qcow2(&self) -> Result<(&Layer, &Qcow2)> {
        let top = self.chain.layers.first();
        let found = top.and_then(|top| Some((top, top.mapping.qcow2()?)));
        found.ok_or_else(|| Error::new(ErrorKind::Unsupported, "only qcow2 images can be changed like this"))
    }

    fn resize_options(
        &self,
        top: &Layer,
        qcow2: &Qcow2,
        size_bytes: u64,
        shrink: bool,
        preallocation: GrowBy,
    ) -> Result<ResizeOptions> {
        let old_bytes = self.chain.size_bytes;
        let cluster = 1u64.checked_shl(qcow2.header().cluster_bits).unwrap_or(1);
        let rest = old_bytes.checked_rem(cluster).unwrap_or(0);
        let mut last_cluster = Vec::new();
        if rest > 0 && size_bytes > old_bytes {
            let name = &top.name;
            let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot read the end of '{name}'"), error);
            last_cluster = self.read_blocking(old_bytes.saturating_sub(rest), rest)?.map_err(failed)?;
        }
        let backing_bytes = self.chain.layers.get(1).map_or(0, |layer| layer.size_bytes);
        let data_file = top.data.as_ref().map(|data| &data.file);
        let data_file = data_file.filter(|file| file.info().can_grow && !file.info().block_device);
        let data_file_bytes = data_file.map(|file| file.length_bytes()).transpose()?;
        Ok(ResizeOptions { size_bytes, shrink, preallocation, backing_bytes, last_cluster, data_file_bytes })
    }

    fn read_blocking(&self, offset: u64, length_bytes: u64) -> Result<IoResult<Vec<u8>>> {
        let metas: Vec<MetaIo> = self.chain.layers.iter().map(Layer::open_blocking).collect::<Result<_>>()?;
        Ok(block_on(self.read_parts(&metas, offset, length_bytes)))
    }

    async fn read_parts(&self, metas: &[MetaIo], offset: u64, length_bytes: u64) -> IoResult<Vec<u8>> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length_bytes {
            let at = offset.saturating_add(bytes.len() as u64);
            let left = length_bytes.saturating_sub(bytes.len() as u64);
            let place = self.chain.resolve(metas, at, left).await?;
            let part = usize::try_from(place.length_bytes.min(left)).map_err(|_| IoError::EIO)?;
            let layer = self.chain.layer(place.layer)?;
            let meta = metas.get(place.layer).ok_or(IoError::EIO)?;
            match place.extent {
                Extent::Zero | Extent::Backing => bytes.resize(bytes.len().saturating_add(part), 0),
                Extent::Data { offset, .. } => {
                    let data = meta.data().map_or_else(|| meta.clone(), |data| MetaIo::new(Rc::clone(data)));
                    bytes.extend_from_slice(&data.read(offset, part, layer.mapping.past_end(offset)).await?);
                }
                Extent::Compressed(extent) => {
                    let cluster = layer.mapping.read_compressed(meta, extent).await?;
                    let skip = extent.skip_bytes as usize;
                    bytes.extend_from_slice(cluster.get(skip..skip.saturating_add(part)).ok_or(IoError::EIO)?);
                }
            }
        }
        Ok(bytes)
    }
}
