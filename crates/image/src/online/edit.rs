//! Changes to the persistent bitmaps and internal snapshots of a running disk.
//!
//! Requests are held until none is in flight. The layer is closed, changed as an image is that nobody uses, and opened
//! again. One header sector makes the change valid, so a power cut leaves the image before it or after it.

use crate::chain::closed_edit::ClosedEdit;
use crate::chain::exchange::{Barrier, hold_quiet};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::file_name::FileName;
use block::{DirtyBitmaps, DirtyMap, Error, ErrorKind, Result, block_on};
use format_qcow2::{BitmapAction, Snapshot, SnapshotName};
use std::sync::Arc;

/// How often, at most, a list is read if it changes meanwhile.
const TRIES: usize = 5;
/// A change of snapshots counts that many clusters in some milliseconds.
const MANY_CLUSTERS: u64 = 4096;
/// The longest bitmap that is returned, in bytes.
const DIRTY_BYTES_MAX: u64 = 64 << 20;

/// A bitmap of an image that is open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OnlineBitmap {
    /// The layer's file.
    pub file: FileName,
    /// Its name, unique in the file.
    pub name: String,
    /// Bytes of the disk that one bit stands for.
    pub granularity_bytes: u64,
    /// The bitmap notes writes to the disk while its layer is the top.
    pub recording: bool,
    /// The last program that used it did not close it. Its bits mean nothing, and it can only be removed.
    pub inconsistent: bool,
    /// It is kept in the layer's file. A raw image's bitmap is in memory, and is lost when the image is closed.
    pub persistent: bool,
    /// Bytes that it marks as written, in whole granules; `None` if that is unknown.
    pub dirty_bytes: Option<u64>,
}

impl Image {
    /// Changes bitmaps or internal snapshots of the top layer while guests use the disk. Durable when this returns.
    /// Guests wait for their requests in flight, a flush, and the change: of bitmaps, that takes as long as their
    /// tables; of snapshots, as long as reading and writing all tables of the image. On an error the image is as
    /// before. Blocks; not to be called on a reactor's thread.
    ///
    /// A snapshot may only be applied to a disk that no guest uses: what a guest has in memory would be wrong.
    pub fn edit_online(&self, edit: &ClosedEdit) -> Result<()> {
        block_on(self.edit_online_async(edit))
    }

    /// Like [`Image::edit_online`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn edit_online_async(&self, edit: &ClosedEdit) -> Result<()> {
        let _turn = self.board.try_turn()?;
        let chain = self.chain();
        if let (ClosedEdit::ApplySnapshot(which), Some(top)) = (edit, chain.layers.first()) {
            refuse_other_size(top, which, chain.size_bytes).await?;
        }
        self.edit_layer(0, edit).await
    }

    /// Whether taking or deleting an internal snapshot takes so long that guests notice it: the change reads the tables of
    /// all clusters. [`crate::PointInTime::change_snapshots`] keeps nobody waiting.
    #[must_use]
    pub fn has_many_clusters(&self) -> bool {
        let chain = self.chain();
        let top = chain.layers.first().filter(|top| top.mapping.can_be_edited());
        let clusters = top.and_then(|top| {
            let length_bytes = top.file.length_bytes().ok()?;
            length_bytes.checked_div(u64::from(top.mapping.cluster_bytes()?))
        });
        clusters.is_some_and(|clusters| clusters > MANY_CLUSTERS)
    }

    /// Like [`Image::edit_online`], for a layer of the chain that was opened for writing. The caller holds the right to
    /// change the chain.
    pub(crate) async fn edit_layer(&self, index: usize, edit: &ClosedEdit) -> Result<()> {
        let chain = self.chain();
        let nothing = || Error::new(ErrorKind::Io, "an image without layers");
        let layer = chain.layers.get(index).ok_or_else(nothing)?;
        layer.refuse_edit(edit)?;
        let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, format!("'{}': {what}", layer.name)));
        if chain.disk.read_only || !layer.writable {
            return refuse("it is open for reading only");
        }
        if chain.is_handing_over() {
            return refuse("the former top layer could not be made durable");
        }
        if layer.name.is_temporary() {
            return refuse("what is written to a disk with snapshot=on is thrown away");
        }
        let barrier = hold_quiet(&self.board).await?;
        if let (true, ClosedEdit::Bitmaps(actions)) = (layer.mapping.has_bitmaps_in_memory(), edit) {
            return edit_in_memory(&chain, index, actions, barrier).await;
        }
        if let Err(error) = layer.close().await {
            barrier.give_up().await;
            return Err(error);
        }
        // Whoever still looks at the layer without a request fails, or asks the next chain.
        if let Some(epochs) = layer.mapping.epochs() {
            epochs.close();
        }
        let result = layer.edit_closed(edit).await;
        // Its tables may have changed even if the change failed.
        let lower = Chain::plain(chain.layers.get(index..).unwrap_or_default().to_vec(), &chain.disk);
        let next = match lower.reopened(layer) {
            Ok(edited) => {
                let mut layers = chain.layers.clone();
                if let Some(layer) = layers.get_mut(index) {
                    *layer = Arc::new(edited);
                }
                Chain::new(layers, &chain.disk)
            }
            Err(error) => {
                tracing::error!("{error}; every request fails from now on");
                barrier.release(vec![Arc::new(Chain::dead(chain.layers.clone(), &chain.disk))]).await;
                return result.and(Err(error));
            }
        };
        barrier.release(vec![Arc::new(next)]).await;
        result
    }

    /// The persistent bitmaps of all layers, top first. Blocks.
    pub fn online_bitmaps(&self) -> Result<Vec<OnlineBitmap>> {
        again(|| {
            let layers = self.chain().layers.clone();
            let found = layers.iter().map(|layer| block_on(bitmaps_of(layer))).collect::<Result<Vec<_>>>()?;
            Ok(found.into_iter().flatten().collect())
        })
    }

    async fn read_dirty_bitmap(&self, name: &str) -> Result<DirtyMap> {
        for (index, layer) in self.chain().layers.iter().enumerate() {
            let in_memory = layer.memory_bitmaps.find(name).map(|found| (found.granularity_bytes(), found.enabled));
            let found = match in_memory {
                Some(found) => Some(found),
                None => {
                    let found = layer.bitmaps().await?.into_iter().find(|bitmap| bitmap.name == name);
                    found.map(|found| (found.granularity_bytes(), found.enabled))
                }
            };
            let Some((granularity_bytes, is_enabled)) = found else { continue };
            if index > 0 {
                let what = format!(
                    "bitmap '{name}' is in a lower layer ('{}'), and does not note what is written now: commit the layers \
                     above it, or make one in the top layer",
                    layer.name
                );
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            let bits_bytes = layer.size_bytes.div_ceil(granularity_bytes.max(1)).div_ceil(8);
            if bits_bytes > DIRTY_BYTES_MAX {
                let what = format!(
                    "the bitmap '{name}' of '{}' has {bits_bytes} bytes, and at most {DIRTY_BYTES_MAX} are kept in memory: \
                     make it anew with larger granules",
                    layer.name
                );
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            let noted = layer.mapping.noted_bits(name);
            let is_recording = noted.is_some() || is_enabled && layer.writable;
            let bits = match noted {
                Some(bits) => bits,
                None => layer.read_bitmap(name).await?,
            };
            let (granularity_bits, size_bytes) = (bits.granularity_bits, bits.size_bytes);
            return Ok(DirtyMap::new(granularity_bits, size_bytes, bits.into_bytes(), is_recording));
        }
        Err(Error::new(ErrorKind::NotFound, format!("no layer of the disk has a bitmap '{name}'")))
    }

    /// The internal snapshots of the top layer, as they are now. Blocks.
    pub fn online_snapshots(&self) -> Result<Vec<Snapshot>> {
        again(|| {
            let top = self.chain().layers.first().cloned();
            top.map(|top| block_on(top.internal_snapshots())).transpose().map(Option::unwrap_or_default)
        })
    }
}

/// Changes bitmaps that are in memory only, of a layer that nobody writes to now.
async fn edit_in_memory(
    chain: &Arc<Chain>,
    index: usize,
    actions: &[(String, BitmapAction)],
    barrier: Barrier,
) -> Result<()> {
    let edit = || {
        let layer = chain.layers.get(index).ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
        let lower = Chain::plain(chain.layers.get(index..).unwrap_or_default().to_vec(), &chain.disk);
        let edited = layer.memory_bitmaps.edited(actions, layer.size_bytes)?;
        let mut next = lower.reopened(layer)?;
        next.memory_bitmaps = Arc::new(edited);
        Ok(Arc::new(next))
    };
    match edit() {
        Ok(edited) => {
            let mut layers = chain.layers.clone();
            if let Some(layer) = layers.get_mut(index) {
                *layer = edited;
            }
            barrier.release(vec![Arc::new(Chain::new(layers, &chain.disk))]).await;
            Ok(())
        }
        Err(error) => {
            barrier.give_up().await;
            Err(error)
        }
    }
}

impl DirtyBitmaps for Image {
    /// Only the top layer's bitmaps tell all that was written: one of a lower layer is refused.
    fn dirty_bitmap(&self, name: &str) -> Result<DirtyMap> {
        again(|| block_on(self.read_dirty_bitmap(name)))
    }
}

/// Repeats a read that fails or makes no sense because somebody changes the image meanwhile.
fn again<T>(read: impl Fn() -> Result<T>) -> Result<T> {
    let mut result = read();
    for _ in 1..TRIES {
        if result.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        result = read();
    }
    result
}

async fn bitmaps_of(layer: &Layer) -> Result<Vec<OnlineBitmap>> {
    if layer.mapping.has_bitmaps_in_memory() {
        let found = layer.memory_bitmaps.iter().map(|bitmap| OnlineBitmap {
            file: layer.name.clone(),
            name: bitmap.name.clone(),
            granularity_bytes: bitmap.granularity_bytes(),
            recording: bitmap.enabled,
            inconsistent: false,
            persistent: false,
            dirty_bytes: Some(bitmap.dirty_bytes()),
        });
        return Ok(found.collect());
    }
    let noting = layer.mapping.noting_bitmaps();
    let mut found = Vec::new();
    for bitmap in layer.bitmaps().await? {
        let noted = noting.iter().find(|(name, _)| *name == bitmap.name).map(|(_, dirty_bytes)| *dirty_bytes);
        let inconsistent = bitmap.in_use && noted.is_none();
        let dirty_bytes = match noted {
            Some(dirty_bytes) => Some(dirty_bytes),
            None if inconsistent => None,
            None => {
                let ranges = layer.read_bitmap(&bitmap.name).await?.ranges();
                let lengths = ranges.iter().map(|range| range.end.saturating_sub(range.start));
                Some(lengths.fold(0, u64::saturating_add).min(layer.size_bytes))
            }
        };
        found.push(OnlineBitmap {
            file: layer.name.clone(),
            granularity_bytes: bitmap.granularity_bytes(),
            recording: bitmap.enabled && !inconsistent,
            name: bitmap.name,
            inconsistent,
            persistent: true,
            dirty_bytes,
        });
    }
    Ok(found)
}

async fn refuse_other_size(top: &Layer, which: &SnapshotName, size_bytes: u64) -> Result<()> {
    let snapshots = top.internal_snapshots().await?;
    match which.find_in(&snapshots) {
        Some(found) if found.disk_bytes != size_bytes => {
            let what = format!(
                "'{}': the disk had {} bytes when snapshot {which} was taken, and has {size_bytes}; a served disk keeps its \
                 size: remove it and use 'ringdisk snapshot -a'",
                top.name, found.disk_bytes
            );
            Err(Error::new(ErrorKind::Unsupported, what))
        }
        // One that is not there is refused by whoever applies it.
        _ => Ok(()),
    }
}
