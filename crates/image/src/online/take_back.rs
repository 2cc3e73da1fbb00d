//! Taking the top layer of a running disk back into the one below.

use super::converge::{End, converge};
use super::copying::What;
use super::grow::Grown;
use super::watch::CopyWatch;
use crate::chain::exchange::{go_over, hold_quiet};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Error, ErrorKind, Result, block_on};
use std::sync::Arc;

/// Copies what the top layer holds into the layer below while guests use the disk, and takes the top layer off. The layer
/// below has to have been the top before: it is open for writing. A top layer with internal snapshots is refused.
///
/// At the end guests write to both layers, and are held for the barrier only. Before that `commit` is called, while guests go
/// on: whoever keeps a record of what the disk consists of makes it durable there. From then on the layer that was taken off
/// is of no use to anybody: it rests on a layer that changes. On an error the disk stays as it is; so it does when the `watch` cancels, which is an error of the kind
/// [`ErrorKind::Cancelled`]. Blocks; not to be called on a reactor's thread.
pub fn take_back(image: &Image, watch: &CopyWatch, commit: impl FnOnce() -> Result<()>) -> Result<()> {
    block_on(take_back_async(image, watch, commit))
}

/// As [`take_back`], as a future that makes calls that block.
#[doc(hidden)]
pub async fn take_back_async(image: &Image, watch: &CopyWatch, commit: impl FnOnce() -> Result<()>) -> Result<()> {
    let _turn = image.board.try_turn()?;
    take_back_in_turn(image, watch, commit).await
}

/// As [`take_back_async`], by whoever has the turn to change the chain.
pub(super) async fn take_back_in_turn(
    image: &Image,
    watch: &CopyWatch,
    commit: impl FnOnce() -> Result<()>,
) -> Result<()> {
    watch.check()?;
    watch.set_decided(false);
    let chain = image.chain();
    check(&chain).await?;
    let layers = below_made_as_large(image, &chain).await?;
    let result = take_back_to(image, &chain, &layers, watch, commit).await;
    if result.is_err() {
        // Both layers hold the data now, as far as they were copied. Nothing is noted any more.
        go_over(&image.board, Chain::new(layers.clone(), &chain.disk)).await?;
        if let Some(below) = layers.get(1) {
            below.close().await?;
        }
    }
    result
}

async fn check(chain: &Chain) -> Result<()> {
    let name = chain.layers.first().map(|top| top.name.to_string()).unwrap_or_default();
    let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, format!("'{name}' cannot be taken back: {what}")));
    let [top, below, ..] = &*chain.layers else { return refuse("there is no layer below") };
    if chain.disk.read_only {
        return refuse("the disk is read-only");
    }
    if let Some(header) = top.mapping.kept_header().filter(|_| !below.writable) {
        let base = &header.backing_file;
        return refuse(&format!(
            "while it is served, '{base}' below it is open for reading only. Remove the disk ('ringdisk ctl remove'), run \
             'ringdisk commit --allow-backing any {name}', and add the disk again"
        ));
    }
    if !below.writable {
        return refuse("the layer below is open for reading only");
    }
    if chain.is_handing_over() {
        return refuse("the layer below could not be made durable");
    }
    if below.size_bytes > chain.size_bytes {
        return refuse("the layer below is larger");
    }
    // They are lost with the layer, and before that they show what comes into the layer below.
    match top.internal_snapshots().await?.first() {
        None => Ok(()),
        Some(first) => {
            let kept = &first.name;
            refuse(&format!("it has internal snapshots ('{kept}' is one), which go with it; delete them first"))
        }
    }
}

/// The layers, the one below the top made as large as the disk where that has grown.
async fn below_made_as_large(image: &Image, chain: &Chain) -> Result<Vec<Arc<Layer>>> {
    let [top, below, rest @ ..] = &*chain.layers else { return Ok(chain.layers.clone()) };
    if below.size_bytes >= chain.size_bytes {
        return Ok(chain.layers.clone());
    }
    let lower = Arc::new(Chain::new(chain.layers.get(1..).unwrap_or_default().to_vec(), &chain.disk));
    let barrier = hold_quiet(&image.board).await?;
    let Grown { layer, result } = lower.grown_top(chain.size_bytes).await;
    let Some(layer) = layer else {
        barrier.release(vec![Arc::new(Chain::dead(chain.layers.clone(), &chain.disk))]).await;
        return result.map(|()| Vec::new());
    };
    let layers: Vec<_> = [Arc::clone(top), Arc::new(layer)].into_iter().chain(rest.iter().cloned()).collect();
    barrier.release(vec![Arc::new(Chain::new(layers.clone(), &chain.disk))]).await;
    result.map(|()| layers)
}

async fn take_back_to(
    image: &Image,
    chain: &Chain,
    layers: &[Arc<Layer>],
    watch: &CopyWatch,
    record: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let now = Chain::plain(layers.to_vec(), &chain.disk);
    let lower = Arc::new(Chain::new(layers.get(1..).unwrap_or_default().to_vec(), &chain.disk));
    converge(image, &now, &lower, What::Top, End::Switch, watch, record).await
}
