//! More room on a running disk.

use crate::chain::exchange::hold_quiet;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::mapping::Mapping;
use crate::chain::queue::Shared;
use crate::chain::table_cache::share_of_top;
use block::{Disk, Error, ErrorKind, FileInfo, Priority, Result, SECTOR_BYTES, block_on};
use format_qcow2::{GrowBy, ResizeOptions};
use memory::IoBuf;
use std::sync::Arc;

impl Image {
    /// Makes the disk larger while guests use it. The new part reads as zeros, whatever the layers below hold there.
    /// When this returns, the change is durable and subscribers have been told. Requests are held while those in flight
    /// end, some flushes run, and the image is opened again: the time does not depend on the amount of data. Refuses to
    /// make the disk smaller: its guest may be using what would be lost. Blocks; not to be called on a reactor's
    /// thread.
    pub fn grow(&self, size_bytes: u64) -> Result<()> {
        block_on(self.grow_async(size_bytes))
    }

    /// Like [`Image::grow`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn grow_async(&self, size_bytes: u64) -> Result<()> {
        let _turn = self.board.try_turn()?;
        let chain = self.chain();
        let top = chain.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
        let refuse = |kind, what: &str| Err(Error::new(kind, format!("'{}': {what}", top.name)));
        if chain.disk.read_only {
            return refuse(ErrorKind::BadOption, "a read-only disk cannot be made larger");
        }
        if size_bytes < chain.size_bytes {
            let what =
                "a disk that is in use cannot be made smaller: its guest may use what would be lost. Stop it first";
            return refuse(ErrorKind::BadOption, what);
        }
        if !size_bytes.is_multiple_of(SECTOR_BYTES) {
            return refuse(ErrorKind::BadOption, "the new size must be a multiple of 512");
        }
        if chain.is_handing_over() {
            return refuse(ErrorKind::Io, "the former top layer could not be made durable");
        }
        if size_bytes == chain.size_bytes {
            return Ok(());
        }
        if top.name.is_temporary() {
            let what = "a disk with snapshot=on keeps its size; resize the image below while nobody uses it";
            return refuse(ErrorKind::Unsupported, what);
        }
        let in_context = |error: Error| error.in_context(format!("'{}'", top.name));
        top.memory_bitmaps.check_size(size_bytes).map_err(in_context)?;
        let barrier = hold_quiet(&self.board).await?;
        if let Err(error) = top.close().await {
            barrier.give_up().await;
            return Err(error);
        }
        let grown = chain.grown_top(size_bytes).await;
        let below = chain.layers.iter().skip(1).cloned();
        let (next, result) = match grown {
            Grown { layer: Some(layer), result } => {
                let layers = std::iter::once(Arc::new(layer)).chain(below).collect();
                (Chain::new(layers, &chain.disk), result)
            }
            Grown { layer: None, result } => (Chain::dead(chain.layers.clone(), &chain.disk), result),
        };
        barrier.release(vec![Arc::new(next)]).await;
        self.listeners.notify(|| self.info());
        result
    }
}

/// A layer after it was made larger.
pub(super) struct Grown {
    /// The layer with its new mapping, even if it could not be made larger; `None` if it could not be opened again.
    pub(super) layer: Option<Layer>,
    pub(super) result: Result<()>,
}

impl Chain {
    /// Makes the top layer larger. It was in use and has just been closed, or it was looked at
    /// ([`Layer::look_before_edit`]).
    pub(super) async fn grown_top(self: &Arc<Self>, size_bytes: u64) -> Grown {
        let Some(top) = self.layers.first() else {
            return Grown { layer: None, result: Err(Error::new(ErrorKind::Io, "an image without layers")) };
        };
        top.end_promises();
        let result = self.grow_top(top, size_bytes).await;
        match self.reopened(top) {
            Ok(layer) => Grown { layer: Some(layer), result },
            Err(error) => {
                tracing::error!("{error}; every request fails from now on");
                Grown { layer: None, result: result.and(Err(error)) }
            }
        }
    }

    async fn grow_top(self: &Arc<Self>, top: &Arc<Layer>, size_bytes: u64) -> Result<()> {
        let options = self.resize_options(size_bytes, false, GrowBy::Nothing).await?;
        top.resize_looked_at(&options, &mut |_, _| true).await
    }

    /// The layer with a mapping as the file has it now.
    pub(super) fn reopened(&self, top: &Arc<Layer>) -> Result<Layer> {
        let info = FileInfo { length_bytes: top.file.length_bytes()?, ..top.file.info().clone() };
        let name = top.name.to_string();
        let mapping = Mapping::open(name, &*top.file, &info, top.format(), !top.writable, None)?;
        let mut layer = top.with_mapping(mapping);
        share_of_top(&mut layer, self.layers.get(1..).unwrap_or_default(), self.disk.table_cache.bytes());
        Ok(layer)
    }

    /// What a change of the top layer's size has to know.
    pub(crate) async fn resize_options(
        self: &Arc<Self>,
        size_bytes: u64,
        shrink: bool,
        preallocation: GrowBy,
    ) -> Result<ResizeOptions> {
        let old_bytes = self.size_bytes;
        let top = self.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
        let cluster = u64::from(top.mapping.cluster_bytes().unwrap_or(1));
        let rest = old_bytes.checked_rem(cluster).unwrap_or(0);
        let mut last_cluster = Vec::new();
        if rest > 0 && size_bytes > old_bytes {
            let data = IoBuf::zeroed(usize::try_from(rest).unwrap_or(0)).whole();
            let read = Shared::blocking(self)?.read(old_bytes.saturating_sub(rest), data.clone(), Priority::NONE).await;
            read.map_err(|error| top.failed("cannot read the end of the disk", error))?;
            last_cluster = data.to_vec();
        }
        let backing_bytes = self.layers.get(1).map_or(0, |layer| layer.size_bytes);
        let data_file = top.data.as_ref().map(|data| &data.file);
        let data_file = data_file.filter(|file| file.info().can_grow && !file.info().block_device);
        let data_file_bytes = data_file.map(|file| file.length_bytes()).transpose()?;
        Ok(ResizeOptions::to(size_bytes).with(|options| {
            options.shrink = shrink;
            options.preallocation = preallocation;
            options.backing_bytes = backing_bytes;
            options.last_cluster = last_cluster;
            options.data_file_bytes = data_file_bytes;
        }))
    }
}
