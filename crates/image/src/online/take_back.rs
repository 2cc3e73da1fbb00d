//! Taking the top layer of a running disk back into the one below.

use super::converge::{End, converge};
use super::copying::What;
use super::grow::Grown;
use super::watch::CopyWatch;
use super::writable::lock_for_writing;
use crate::chain::exchange::{go_over, hold_quiet};
use crate::chain::give_up::Ends;
use crate::chain::image::Image;
use crate::chain::job_calls::JobCalls;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Error, ErrorKind, MetaIo, Result, block_on};
use std::sync::Arc;

/// A layer that was taken off is emptied in parts of this size.
const EMPTIED_BYTES: u64 = 64 << 20;
/// More clusters than this do not wait for a flush that frees them.
const UNFREED_CLUSTERS_MAX: u64 = 1 << 14;

/// Copies what the top layer holds into the layer below while guests use the disk, and takes the top layer off. The
/// layer below has to have been the top before: it is open for writing. A top layer with internal snapshots is refused.
///
/// At the end guests write to both layers, and are held for the barrier only. Before that `commit` is called, while
/// guests go on: whoever keeps a record of what the disk consists of makes it durable there. After that nobody may use
/// the layer that was taken off, because the layer below it changes. It is emptied, as `qemu-img commit` does, so its
/// space goes back to the host. On an error the disk stays as it was. A cancel gives an error of the kind
/// [`ErrorKind::Cancelled`]. Blocks; not to be called on a reactor's thread.
///
/// `commit` says by an error of the kind [`ErrorKind::Unsure`] that nobody knows which layer the record names. Then guests
/// write to both layers, and `commit` is called again every second: until it is known, or until [`Image::ends`].
pub fn take_back(image: &Image, watch: &CopyWatch, commit: impl FnMut() -> Result<()>) -> Result<()> {
    block_on(take_back_async(image, watch, commit))
}

/// Like [`take_back`]. Calls `is_off` when the layer is off, before it is emptied. From then on, a cancel or a pause
/// concerns only the emptying.
pub fn take_back_then(
    image: &Image,
    watch: &CopyWatch,
    commit: impl FnMut() -> Result<()>,
    is_off: impl FnOnce(),
) -> Result<()> {
    block_on(take_back_then_async(image, watch, commit, is_off))
}

/// Like [`take_back`], as a future. Its calls still block the thread.
#[doc(hidden)]
pub async fn take_back_async(image: &Image, watch: &CopyWatch, commit: impl FnMut() -> Result<()>) -> Result<()> {
    take_back_then_async(image, watch, commit, || ()).await
}

async fn take_back_then_async(
    image: &Image,
    watch: &CopyWatch,
    commit: impl FnMut() -> Result<()>,
    is_off: impl FnOnce(),
) -> Result<()> {
    let _turn = image.board.try_turn()?;
    let former = take_back_in_turn(image, watch, commit).await?;
    is_off();
    // The disk does not need the rest: storage that hangs can be left.
    watch.set_decided(false);
    if let Err(error) = empty(&former, watch).await {
        watch.keeps_space(&former.name, &error);
    }
    Ok(())
}

/// As [`take_back_async`], for a caller that holds the right to change the chain. Returns the layer that was taken off,
/// as it was.
pub(super) async fn take_back_in_turn(
    image: &Image,
    watch: &CopyWatch,
    commit: impl FnMut() -> Result<()>,
) -> Result<Arc<Layer>> {
    watch.check()?;
    watch.set_decided(false);
    let chain = image.chain();
    check(&chain).await?;
    if let Some(below) = chain.layers.get(1) {
        lock_for_writing(image, below)?;
    }
    let former = chain.layers.first().cloned().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
    let layers = made_as_large(image, &chain.layers, 1, chain.size_bytes, watch).await?;
    if let Err(error) = take_back_to(image, &chain, &layers, watch, commit).await {
        // Both layers hold the data now, as far as they were copied. Nothing is noted any more.
        if let Err(second) = stay_on(image, &chain, &layers).await {
            tracing::error!("after a commit that failed ({error}): {second}");
        }
        return Err(error);
    }
    // No request is in flight. Whoever still looks at the layer without a request fails, or asks the next chain.
    if let Some(epochs) = former.mapping.epochs() {
        epochs.close();
    }
    Ok(former)
}

async fn stay_on(image: &Image, chain: &Chain, layers: &[Arc<Layer>]) -> Result<()> {
    go_over(&image.board, Chain::new(layers.to_vec(), &chain.disk)).await?;
    match layers.get(1) {
        Some(below) => below.close().await,
        None => Ok(()),
    }
}

/// Empties a layer that no disk uses any more: its space goes back to the host. It stays a valid image, which shows
/// what the layer below holds. Goes on until the `watch` cancels, and waits while it pauses.
pub(super) async fn empty(former: &Layer, watch: &CopyWatch) -> Result<()> {
    if !former.mapping.can_reveal() || former.mapping.data_file().is_some() {
        return Ok(());
    }
    let calls = JobCalls::new(watch.given_up_by());
    let io = calls.open(former, Ends::All)?;
    calls.awaiting(empty_by(former, &io, watch)).await
}

async fn empty_by(former: &Layer, io: &MetaIo, watch: &CopyWatch) -> Result<()> {
    let mut at = 0;
    while at < former.size_bytes && !watch.is_cancelled() {
        let length_bytes = EMPTIED_BYTES.min(former.size_bytes.saturating_sub(at));
        let emptied = former.mapping.reveal(io, at, length_bytes).await;
        emptied.map_err(|error| former.failed("cannot empty it", error))?;
        at = at.saturating_add(length_bytes);
        // A flush frees what was unlinked, so that little of it waits in memory.
        let unfreed = former.mapping.unfreed_clusters();
        if unfreed > UNFREED_CLUSTERS_MAX {
            former.flush_by(io).await?;
        }
        // Nothing is moved: only a pause makes it wait.
        watch.pace(0);
    }
    former.close_by(io).await
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
    if chain.is_dead() {
        return refuse("the layer below could not be opened again after a change");
    }
    if below.size_bytes > chain.size_bytes {
        return refuse("the layer below is larger");
    }
    // Internal snapshots would go with the layer. Until then they would show data that the commit writes below.
    match top.internal_snapshots().await?.first() {
        None => Ok(()),
        Some(first) => {
            let kept = &first.name;
            refuse(&format!("it has internal snapshots ('{kept}' is one), which go with it; delete them first"))
        }
    }
}

/// Makes a layer below the top at least this large. Returns the layers.
pub(super) async fn made_as_large(
    image: &Image,
    layers: &[Arc<Layer>],
    index: usize,
    size_bytes: u64,
    watch: &CopyWatch,
) -> Result<Vec<Arc<Layer>>> {
    let present = image.chain();
    let disk = &present.disk;
    let Some(layer) = layers.get(index).filter(|layer| layer.size_bytes < size_bytes) else {
        return Ok(layers.to_vec());
    };
    let in_context = |error: Error| error.in_context(format!("'{}'", layer.name));
    layer.memory_bitmaps.check_size(size_bytes).map_err(in_context)?;
    let lower = Arc::new(Chain::new(layers.get(index..).unwrap_or_default().to_vec(), disk));
    // Nobody writes to the layer, so this look takes its time while guests go on.
    layer.look_before_edit(&mut |_, _| !watch.is_cancelled()).await?;
    watch.check()?;
    let barrier = hold_quiet(&image.board).await?;
    let Grown { layer, result } = lower.grown_top(size_bytes).await;
    let Some(layer) = layer else {
        barrier.release(vec![Arc::new(Chain::dead(layers.to_vec(), disk))]).await;
        return result.map(|()| Vec::new());
    };
    let mut layers = layers.to_vec();
    if let Some(place) = layers.get_mut(index) {
        *place = Arc::new(layer);
    }
    barrier.release(vec![Arc::new(Chain::new(layers.clone(), disk))]).await;
    result.map(|()| layers)
}

async fn take_back_to(
    image: &Image,
    chain: &Chain,
    layers: &[Arc<Layer>],
    watch: &CopyWatch,
    record: impl FnMut() -> Result<()>,
) -> Result<()> {
    let now = Chain::plain(layers.to_vec(), &chain.disk);
    let lower = Arc::new(Chain::new(layers.get(1..).unwrap_or_default().to_vec(), &chain.disk));
    converge(image, &now, &lower, What::Top, End::Switch, watch, record).await
}
