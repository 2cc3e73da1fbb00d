//! Another backing file for a layer of a running disk.

use super::watch::CopyWatch;
use crate::chain::exchange::hold_quiet_for;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::Result;
use std::sync::Arc;

/// What a layer comes to rest on.
pub(super) struct NewBase<'a> {
    /// The layers of the disk as it is, top first.
    pub(super) layers: &'a [Arc<Layer>],
    /// The layer whose header changes.
    pub(super) index: usize,
    /// That layer as it is open for writing.
    pub(super) writer: &'a Layer,
    /// The layers that it will rest on.
    pub(super) below: &'a [Arc<Layer>],
}

/// Holds requests until none is in flight, closes the layer, changes its header, and opens it again over the new layers
/// below, which show the same as the old ones. Calls `commit` before the header changes; if the layer keeps its base
/// after that, calls `stay`.
pub(super) async fn rest_on(
    image: &Image,
    disk: &Chain,
    change: &NewBase<'_>,
    watch: &CopyWatch,
    commit: impl FnOnce() -> Result<()>,
    stay: impl FnOnce(),
) -> Result<()> {
    let NewBase { layers, index, writer, below } = *change;
    let backing = below.first().map(|base| base.in_header()).transpose()?;
    let is_new = |layer: &&Arc<Layer>| !layers.iter().any(|known| Arc::ptr_eq(known, layer));
    let new = below.iter().filter(is_new).cloned().collect();
    let barrier = hold_quiet_for(&image.board, new).await?;
    // The storage may have hung since the last look.
    let mut is_asked = false;
    let decide = || {
        watch.check()?;
        watch.set_decided(true);
        is_asked = true;
        commit()
    };
    if let Err(error) = writer.close().await.and_then(|()| decide()) {
        watch.set_decided(false);
        barrier.give_up().await;
        if is_asked {
            stay();
        }
        return Err(error);
    }
    layers.get(index).into_iter().for_each(|layer| layer.end_promises());
    let result = writer.set_backing(backing.as_ref()).await;
    let stays;
    let lower = Chain::plain(layers.get(index..).unwrap_or_default().to_vec(), &disk.disk);
    let reopened = layers.get(index).map(|layer| lower.reopened(layer)).transpose();
    let next = match reopened {
        // The header says what the layer rests on, even if the change failed halfway.
        Ok(layer) => {
            let named = layer.as_ref().and_then(|layer| layer.mapping.backing()).map(|(name, _)| name);
            let has_moved = named == backing.as_ref().map(|new| &*new.file);
            stays = result.is_err() && !has_moved;
            let rest = if stays { layers.get(index.saturating_add(1)..).unwrap_or_default() } else { below };
            let above = layers.iter().take(index).cloned();
            Chain::new(above.chain(layer.map(Arc::new)).chain(rest.iter().cloned()).collect(), &disk.disk)
        }
        Err(error) => {
            tracing::error!("{error}; every request fails from now on");
            barrier.release(vec![Arc::new(Chain::dead(layers.to_vec(), &disk.disk))]).await;
            return result.and(Err(error));
        }
    };
    barrier.release(vec![Arc::new(next)]).await;
    if stays {
        stay();
    }
    result
}
