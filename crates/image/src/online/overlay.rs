//! A new, empty layer on top of running disks.

use crate::chain::exchange::board::{Board, Hold, Turn};
use crate::chain::exchange::lease::Over;
use crate::chain::exchange::{Barrier, go_over};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::table_cache::share_of_top;
use crate::file_name::FileName;
use crate::guess::Format;
use crate::open::gate::{Role, backing_path};
use crate::open::layer::{MAX_LAYERS, open_layer};
use block::{Error, ErrorKind, Extent, File, Participant, Result, Ticket, block_on};
use std::path::Path;
use std::sync::Arc;

/// An overlay that is open for writing, and not in use.
pub struct OpenedOverlay {
    pub(super) layer: Layer,
}

impl OpenedOverlay {
    /// Opens a new, empty qcow2 image that was durably created over the image that it is to rest on. `file` was opened
    /// for writing. The image's backing file is not opened, and not looked at.
    pub fn open(name: &FileName, file: Arc<dyn File>) -> Result<Self> {
        let layer = open_layer(name, file, Format::OF_OVERLAYS, Role::Writable, None)?;
        let refuse = |what: &str| {
            Err(Error::new(ErrorKind::BadOption, format!("'{name}' cannot be put on top of a disk: {what}")))
        };
        if layer.file.info().read_only {
            return refuse("it is open for reading only");
        }
        if layer.mapping.backing().is_none() {
            return refuse("it names no backing file");
        }
        if layer.mapping.data_file().is_some() {
            return refuse("it has an external data file");
        }
        match block_on(is_empty(&layer))? {
            true => Ok(Self { layer }),
            false => refuse("it holds data"),
        }
    }
}

/// Refuses a new layer whose header names another file than the layer that it is to rest on. The disk may have got
/// another top since the file was made. What such a file holds would be read over the wrong layer when it is opened
/// again.
pub(super) fn refuse_unless_named(layer: &Layer, below: &Layer) -> Result<()> {
    let canonical = |name: FileName| {
        let canonical = |path: &Path| Ok(path.canonicalize().unwrap_or_else(|_| path.to_owned()));
        name.try_map_path(canonical)
    };
    let named = layer.mapping.backing().map(|(name, _)| backing_path(&layer.name, name)).transpose()?;
    let named = named.map(canonical).transpose()?;
    let is_below = |named: &FileName| match below.name.is_remote() {
        // The header leaves out the parts of a name that only this program knows.
        true => named.address() == below.name.address(),
        false => canonical(below.name.clone()).is_ok_and(|below| named.is_same_file(&below)),
    };
    if named.as_ref().is_some_and(is_below) {
        return Ok(());
    }
    let named = named.map_or_else(|| "nothing".to_owned(), |named| format!("'{named}'"));
    let what = format!(
        "'{}' names {named} as its backing file, and would lie on '{}': if the layers of the disk have just changed, try again",
        layer.name, below.name
    );
    Err(Error::new(ErrorKind::Locked, what))
}

async fn is_empty(layer: &Layer) -> Result<bool> {
    let io = layer.open_blocking()?;
    let mut at = 0;
    while at < layer.size_bytes {
        let left = layer.size_bytes.saturating_sub(at);
        let mapped = layer.mapping.resolve(&io, at, left).await;
        let mapped = mapped.map_err(|error| layer.failed("cannot read its tables", error))?;
        if mapped.extent != Extent::Backing {
            return Ok(false);
        }
        at = at.saturating_add(mapped.length_bytes.max(1));
    }
    Ok(true)
}

/// Puts a new layer on top of each of these disks while guests use them. All disks pass one barrier. Once a write to a
/// new layer of any disk is acknowledged, every later request of every disk goes to the new layers.
///
/// First `commit` is called, while guests go on: whoever keeps a record of what a disk consists of makes it durable
/// there. The new layers are empty, so a disk that is opened by that record before they are in place is the same. Then
/// requests are held for the barrier only. If `commit` fails, or a queue cannot open a new layer, all goes on as
/// before. The error says so, and the caller takes back what it has recorded before it removes the new layers.
///
/// Returns when the former tops are closed: no byte of theirs changes any more. The results say, disk by disk, whether
/// that has succeeded. If not, the new layer is in place all the same. Every flush then first tries to make the former
/// top durable. Until that succeeds, flushes fail. Blocks; not to be called on a reactor's thread.
pub fn put_overlay(
    disks: Vec<(Arc<Image>, OpenedOverlay)>,
    commit: impl FnOnce() -> Result<()>,
) -> Result<Vec<Result<()>>> {
    block_on(put_overlay_async(disks, commit))
}

/// Like [`put_overlay`], as a future. Its calls still block the thread.
#[doc(hidden)]
pub async fn put_overlay_async(
    disks: Vec<(Arc<Image>, OpenedOverlay)>,
    commit: impl FnOnce() -> Result<()>,
) -> Result<Vec<Result<()>>> {
    let exchange = |(image, new): (Arc<Image>, _)| Exchange::new(&image, new, Some(image.board.try_turn()?));
    put_on(disks.into_iter().map(exchange).collect::<Result<Vec<_>>>()?, commit).await
}

/// Like [`put_overlay_async`], for one disk. The caller holds the right to change its chain.
pub(super) async fn put_overlay_in_turn(
    image: &Image,
    overlay: OpenedOverlay,
    commit: impl FnOnce() -> Result<()>,
) -> Result<Result<()>> {
    let settled = put_on(vec![Exchange::new(image, overlay, None)?], commit).await?;
    Ok(settled.into_iter().fold(Ok(()), Result::and))
}

async fn put_on(mut exchanges: Vec<Exchange>, commit: impl FnOnce() -> Result<()>) -> Result<Vec<Result<()>>> {
    let prepared =
        exchanges.iter().map(|disk| (Arc::clone(&disk.board), disk.layers.iter().take(1).cloned().collect()));
    let prepared = prepared.collect();
    commit()?;
    let barrier = Barrier::prepare(prepared, Hold::Requests).await?;
    barrier.release(exchanges.iter_mut().map(Exchange::handing_over).collect()).await;
    let mut results = Vec::new();
    for disk in exchanges {
        results.push(disk.settle().await);
    }
    Ok(results)
}

/// What is done to one disk.
struct Exchange {
    board: Arc<Board>,
    former: Arc<Chain>,
    /// The end of the former chain.
    over: Arc<Over>,
    /// The layers of the next chain.
    layers: Vec<Arc<Layer>>,
    /// Keeps the former top from using space again that it frees.
    in_epochs: Option<(Participant, Ticket)>,
    _turn: Option<Turn>,
}

impl Exchange {
    fn new(image: &Image, OpenedOverlay { mut layer }: OpenedOverlay, turn: Option<Turn>) -> Result<Self> {
        let board = Arc::clone(&image.board);
        let former = board.chain();
        let name = layer.name.to_string();
        let refuse = |what: String| Err(Error::new(ErrorKind::BadOption, format!("'{name}': {what}")));
        if former.disk.read_only {
            return refuse("the disk below is read-only".to_owned());
        }
        if former.layers.iter().any(|below| below.name.is_temporary()) {
            return refuse("a disk with snapshot=on has no image that another could rest on".to_owned());
        }
        if former.is_handing_over() {
            return refuse("the disk has a former top layer that could not be made durable".to_owned());
        }
        if layer.size_bytes != former.size_bytes {
            return refuse(format!("it has {} bytes, the disk below {}", layer.size_bytes, former.size_bytes));
        }
        if former.layers.len() >= MAX_LAYERS {
            return refuse(format!("the chain below has {MAX_LAYERS} layers already"));
        }
        if former.layers.iter().any(|below| below.name == layer.name || Arc::ptr_eq(&below.file, &layer.file)) {
            return refuse("it is part of the chain below".to_owned());
        }
        if let Some(below) = former.layers.first() {
            refuse_unless_named(&layer, below)?;
        }
        share_of_top(&mut layer, &former.layers, former.disk.table_cache.bytes());
        let layers = std::iter::once(Arc::new(layer)).chain(former.layers.iter().cloned()).collect();
        Ok(Self { over: board.over(), board, former, layers, in_epochs: None, _turn: turn })
    }

    /// The chain that is used until the former one is over.
    fn handing_over(&mut self) -> Arc<Chain> {
        let epochs = self.former.layers.first().and_then(|top| top.mapping.epochs());
        self.in_epochs = epochs.map(|epochs| {
            let mut participant = epochs.join();
            let ticket = participant.begin(epochs);
            (participant, ticket)
        });
        let over = Arc::clone(&self.over);
        #[cfg(all(test, feature = "explore"))]
        let over = self.board.mutant.hurry(over);
        Arc::new(Chain::handing_over(self.layers.clone(), &self.former.disk, over))
    }

    /// Waits for the end of the former chain, and closes its top.
    async fn settle(mut self) -> Result<()> {
        self.over.wait().await;
        let former_top = self.former.layers.first().cloned();
        let Some(former_top) = former_top else { return Ok(()) };
        let result = match former_top.flush().await {
            Ok(()) => go_over(&self.board, Chain::new(self.layers.clone(), &self.former.disk)).await,
            Err(error) => Err(error),
        };
        let in_epochs = self.in_epochs.take();
        if result.is_err() {
            // Both layers are flushed from now on, and read as before.
            self.board.keep(Box::new(in_epochs));
            return result;
        }
        drop(in_epochs);
        former_top.close().await
    }
}
