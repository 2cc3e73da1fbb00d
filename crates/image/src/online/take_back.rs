//! Taking the top layer of a running disk back into the one below.

use super::grow::Grown;
use super::watch::CopyWatch;
use crate::chain::exchange::change_log::ChangeLog;
use crate::chain::exchange::{Barrier, go_over, hold_quiet};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::{Chain, Place};
use crate::chain::queue::Shared;
use block::{Error, ErrorKind, Extent, IoError, IoResult, MetaIo, Participant, Priority, Result, Ticket, block_on};
use memory::IoBuf;
use std::ops::Range;
use std::sync::Arc;

/// Copied at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Rounds of copying while guests go on, at most: they may write faster than we copy.
const ROUNDS_MAX: usize = 5;
/// So little is left to the last round, in which guests wait.
const LAST_ROUND_BYTES: u64 = 4 << 20;

/// Copies what the top layer holds into the layer below while guests use the disk, and takes the top layer off. The layer
/// below has to have been the top before: it is open for writing.
///
/// Guests are held at the end for as long as their requests in flight take, what they wrote in the last round (mostly a few
/// MiB) is copied, and the layer below is flushed. Then `commit` is called: whoever keeps a record of what the disk consists
/// of makes it durable there. From then on the layer that was taken off is of no use to anybody: it rests on a layer that
/// changes. On an error the disk stays as it is; so it does when the `watch` cancels, which is an error of the kind
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
    let chain = image.chain();
    check(&chain)?;
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

fn check(chain: &Chain) -> Result<()> {
    let name = chain.layers.first().map(|top| top.name.to_string()).unwrap_or_default();
    let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, format!("'{name}' cannot be taken back: {what}")));
    let Some(below) = chain.layers.get(1) else { return refuse("there is no layer below") };
    if chain.disk.read_only {
        return refuse("the disk is read-only");
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
    Ok(())
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
    commit: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(below) = layers.get(1) else { return Ok(()) };
    let lower = Arc::new(Chain::new(layers.get(1..).unwrap_or_default().to_vec(), &chain.disk));
    let mut copying = Copying::new(layers, &lower, watch)?;
    let noting = || Chain::noting(layers.to_vec(), &chain.disk);
    // What was begun before is not noted, so it has to be over.
    go_over(&image.board, noting()).await?;
    let all = 0..chain.size_bytes;
    let mut ranges = Vec::from([all]);
    for _ in 0..ROUNDS_MAX {
        copying.copy(&ranges, Pace::AsAsked).await?;
        let noted = image.chain();
        go_over(&image.board, noting()).await?;
        ranges = noted.log.as_ref().map(|log| log.ranges(chain.size_bytes)).unwrap_or_default();
        if total(&ranges) <= LAST_ROUND_BYTES {
            break;
        }
    }
    copying.copy(&ranges, Pace::AsAsked).await?;
    below.flush().await?;
    watch.check()?;
    let noted = image.chain();
    let barrier = hold_quiet(&image.board).await?;
    let ranges = noted.log.as_ref().map(|log: &ChangeLog| log.ranges(chain.size_bytes)).unwrap_or_default();
    let result = match copying.copy(&ranges, Pace::Fast).await {
        Ok(()) => below.flush().await.and_then(|()| commit()),
        Err(error) => Err(error),
    };
    end(barrier, result, lower).await
}

async fn end(barrier: Barrier, result: Result<()>, lower: Arc<Chain>) -> Result<()> {
    match result {
        Ok(()) => barrier.release(vec![lower]).await,
        Err(_) => barrier.give_up().await,
    }
    result
}

fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum()
}

/// How fast to copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// As whoever watches wants it.
    AsAsked,
    /// Guests are held.
    Fast,
}

/// Copies from the top layer to the one below, by calls that block.
struct Copying<'a> {
    top: &'a Layer,
    watch: &'a CopyWatch,
    top_meta: MetaIo,
    from: Shared,
    to: Shared,
    in_top: Option<Participant>,
    /// Nothing that the layer below frees is used again while guests read it.
    _in_below: Option<(Participant, Ticket)>,
}

impl<'a> Copying<'a> {
    fn new(layers: &'a [Arc<Layer>], lower: &Arc<Chain>, watch: &'a CopyWatch) -> Result<Self> {
        let nothing = || Error::new(ErrorKind::Io, "an image without layers");
        let top = layers.first().ok_or_else(nothing)?;
        let chain = Arc::new(Chain::plain(layers.to_vec(), &lower.disk));
        let epochs = lower.layers.first().and_then(|below| below.mapping.epochs());
        let in_below = epochs.map(|epochs| {
            let mut participant = epochs.join();
            let ticket = participant.begin(epochs);
            (participant, ticket)
        });
        Ok(Self {
            top,
            watch,
            top_meta: top.open_blocking()?,
            from: Shared::blocking(&chain)?,
            to: Shared::blocking(lower)?,
            in_top: top.mapping.epochs().map(block::Epochs::join),
            _in_below: in_below,
        })
    }

    async fn copy(&mut self, ranges: &[Range<u64>], pace: Pace) -> Result<()> {
        self.watch.more(total(ranges));
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                self.watch.check()?;
                let ticket = match (&mut self.in_top, self.top.mapping.epochs()) {
                    (Some(participant), Some(epochs)) => Some(participant.begin(epochs)),
                    _ => None,
                };
                let copied = self.copy_piece(at, range.end.saturating_sub(at)).await;
                if let (Some(participant), Some(ticket)) = (&mut self.in_top, ticket) {
                    participant.end(ticket);
                }
                let copied =
                    copied.map_err(|error| self.top.failed(&format!("cannot copy from byte {at} on"), error))?;
                at = at.saturating_add(copied);
                self.watch.done(copied);
                if pace == Pace::AsAsked {
                    self.watch.pace(copied);
                }
            }
        }
        Ok(())
    }

    /// Copies the first part of a range, if the top layer says anything about it; its length.
    async fn copy_piece(&self, at: u64, length_bytes: u64) -> IoResult<u64> {
        let mapped = self.top.mapping.resolve(&self.top_meta, at, length_bytes).await?;
        let length_bytes = mapped.length_bytes.min(length_bytes);
        match mapped.extent {
            _ if length_bytes == 0 => Err(IoError::EIO),
            Extent::Backing => Ok(length_bytes),
            Extent::Zero => {
                self.to.write_zeroes(at, length_bytes, true).await?;
                Ok(length_bytes)
            }
            extent @ (Extent::Data { .. } | Extent::Compressed(_)) => {
                let length_bytes = length_bytes.min(PIECE_BYTES);
                let data = IoBuf::try_zeroed(usize::try_from(length_bytes).map_err(|_| IoError::EIO)?)?.whole();
                self.from.read_extent(Place { layer: 0, extent, length_bytes }, data.clone(), Priority::NONE).await?;
                self.to.write(at, data, Priority::NONE).await?;
                Ok(length_bytes)
            }
        }
    }
}
