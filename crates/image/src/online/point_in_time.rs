//! A disk as it is at one moment, kept while its guests go on.
//!
//! A new top layer takes what guests write from the barrier on. What lies below is the disk at that moment, and does
//! not change. Afterwards the new layer is taken back. That writes to the layer below as guests would have done, so the
//! persistent bitmaps there note it.
//!
//! Meanwhile a backup copies what lies below, or an internal snapshot of it is taken or deleted. Such a change writes new
//! tables beside the old ones, by which guests go on reading until they go over to the new ones.

use super::copy_out::CopyOut;
use super::overlay::{OpenedOverlay, put_overlay_in_turn, refuse_unless_named};
use super::take_back::take_back_in_turn;
use super::watch::CopyWatch;
use crate::chain::closed_edit::ClosedEdit;
use crate::chain::exchange::board::Turn;
use crate::chain::exchange::go_over;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::{Chain, Constants, TableCacheSetting};
use crate::chain::table_cache::Hits;
use block::{Error, ErrorKind, Result, block_on};
use format_qcow2::{BitmapAction, BitmapBits};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// A disk at the moment of [`PointInTime::begin`]. Nobody else changes the disk's chain as long as this lives. Dropped,
/// it leaves the temporary layer in its place.
pub struct PointInTime<'a> {
    image: &'a Image,
    view: Arc<Image>,
    settled: Result<()>,
    _turn: Turn,
}

impl<'a> PointInTime<'a> {
    /// Puts the overlay on top, as [`crate::put_overlay`] does, and calls `commit` as that does. On an error nothing
    /// has changed. Blocks; not to be called on a reactor's thread.
    pub fn begin(image: &'a Image, overlay: OpenedOverlay, commit: impl FnOnce() -> Result<()>) -> Result<Self> {
        block_on(Self::begin_async(image, overlay, commit))
    }

    /// Like [`PointInTime::begin`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn begin_async(
        image: &'a Image,
        overlay: OpenedOverlay,
        commit: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let turn = image.board.try_turn()?;
        let settled = put_overlay_in_turn(image, overlay, commit).await?;
        let below = image.chain().layers.get(1..).unwrap_or_default().to_vec();
        let view = Arc::new(Image::new(Chain::new(below, &constants(true))));
        Ok(Self { image, view, settled, _turn: turn })
    }

    /// Returns the disk as it was then. Fails if what was written by then cannot be made durable.
    pub fn view(&self) -> Result<Arc<Image>> {
        match &self.settled {
            Ok(()) => Ok(Arc::clone(&self.view)),
            Err(error) => Err(Error::new(error.kind(), error.to_string())),
        }
    }

    /// Returns the bits of a persistent bitmap, as they were then.
    pub fn read_bitmap(&self, bitmap: &str) -> Result<BitmapBits> {
        block_on(self.former_top()?.read_bitmap(bitmap))
    }

    /// Clears a persistent bitmap durably: afterwards it says what was written since. Guests are held for their
    /// requests in flight, and for as long as the tables of the bitmaps take.
    pub fn clear_bitmap(&self, bitmap: &str) -> Result<()> {
        let edit = ClosedEdit::Bitmaps(vec![(bitmap.to_owned(), BitmapAction::Clear)]);
        block_on(self.image.edit_layer(1, &edit))
    }

    /// Takes or deletes an internal snapshot of the former top, while guests go on. It holds the disk as it was then.
    /// Durable when this returns. If the layer cannot be opened again, every request fails, and the temporary layer has
    /// to stay. `go_on` is asked again and again; if it returns false, the image stays as it was.
    pub fn change_snapshots(&self, edit: &ClosedEdit, go_on: &mut dyn FnMut() -> bool) -> Result<()> {
        block_on(self.change_snapshots_async(edit, go_on))
    }

    /// Like [`PointInTime::change_snapshots`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn change_snapshots_async(&self, edit: &ClosedEdit, go_on: &mut dyn FnMut() -> bool) -> Result<()> {
        let former = self.former_top()?;
        // What was written by then has to be in it.
        self.view()?;
        let changed = former.change_snapshots_beside_readers(edit, go_on).await;
        let chain = self.image.chain();
        // Its tables may have changed even if the change failed.
        let lower = Chain::plain(chain.layers.get(1..).unwrap_or_default().to_vec(), &chain.disk);
        let next = lower.reopened(&former).map(|opened| {
            let (above, below) = (chain.layers.iter().take(1).cloned(), chain.layers.iter().skip(2).cloned());
            let opened = Arc::new(opened);
            (Chain::new(above.chain([Arc::clone(&opened)]).chain(below).collect(), &chain.disk), opened)
        });
        let gone_over = match next {
            Ok((next, opened)) => go_over(&self.image.board, next).await.map(|()| opened),
            Err(error) => Err(error),
        };
        let opened = match gone_over {
            Ok(opened) => opened,
            Err(error) => {
                // Nobody may write by the old tables.
                tracing::error!("{error}; every request fails from now on");
                go_over(&self.image.board, Chain::dead(chain.layers.clone(), &chain.disk)).await?;
                return changed.and(Err(error));
            }
        };
        // Whoever still looks at the layer without a request fails, or asks the next chain.
        if let Some(epochs) = former.mapping.epochs() {
            epochs.close();
        }
        opened.give_back(&changed?).await;
        Ok(())
    }

    /// Opens a new image over the layers below the former top, as the target for a copy of the former top.
    pub fn image_beside_top(&self, new: OpenedOverlay) -> Result<Image> {
        let below = self.view.chain().layers.get(1..).unwrap_or_default().to_vec();
        if let Some(below) = below.first() {
            refuse_unless_named(&new.layer, below)?;
        }
        let layers = std::iter::once(Arc::new(new.layer)).chain(below).collect();
        Ok(Image::new(Chain::new(layers, &constants(false))))
    }

    /// Returns a copy of it to an image, not yet begun. `is_blank` says that the image reads as zeros where nothing was
    /// written to it.
    pub fn copy_out(&self, to: Arc<Image>, is_blank: bool) -> Result<CopyOut> {
        CopyOut::new(self.view()?, to, is_blank)
    }

    /// Takes the temporary layer back, as [`crate::take_back`] does. On an error it stays on top, and can be taken back
    /// later.
    pub fn end(self, watch: &CopyWatch, commit: impl FnMut() -> Result<()>) -> Result<()> {
        block_on(self.end_async(watch, commit))
    }

    /// Like [`PointInTime::end`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn end_async(self, watch: &CopyWatch, commit: impl FnMut() -> Result<()>) -> Result<()> {
        take_back_in_turn(self.image, watch, commit).await.map(drop)
    }

    fn former_top(&self) -> Result<Arc<Layer>> {
        let top = self.view.chain().layers.first().cloned();
        top.ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))
    }
}

fn constants(read_only: bool) -> Arc<Constants> {
    Arc::new(Constants {
        read_only,
        serial: String::new(),
        volatile_cache: AtomicBool::new(true),
        table_cache: TableCacheSetting::new(None),
        refused_headers: AtomicU64::new(0),
        has_lost: AtomicBool::new(false),
        hits: Hits::default(),
    })
}
