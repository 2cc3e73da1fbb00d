//! Making the file of the top layer of a running disk shorter.
//!
//! Passes over the disk move what lies at the end of the file down into holes, by the format's own steps, while guests
//! go on. Then requests are held until none is in flight. The layer is closed, the few tables at the end of its file
//! are moved as in an offline edit, the file is cut off, and the layer is opened again. Each moment leaves a valid
//! image.

use super::watch::CopyWatch;
use crate::chain::closed_edit::ClosedEdit;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Error, ErrorKind, MetaIo, Result, block_on};
use format_qcow2::{Compaction, CompactionStep, Qcow2};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most passes: guests may fill holes as fast as they are found.
const PASSES_MAX: usize = 4;

/// Bytes that are moved between two flushes. Until a flush, the old places count as used, too.
const FLUSH_BYTES: u64 = 16 << 20;

/// After so many flushes in a row that free nothing, no more follow: guests discard as fast.
const VAIN_FLUSHES_MAX: u32 = 3;

/// How long a move waits for requests in flight, in naps. A write to that place meanwhile goes on, and ends the wait.
const NAPS: [u32; 3] = [20, 100, 1000];
const NAP: Duration = Duration::from_micros(100);

/// The result of a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// The length of the file before.
    pub before_bytes: u64,
    /// The length of the file afterwards.
    pub after_bytes: u64,
    /// Bytes that were moved.
    pub moved_bytes: u64,
    /// Bytes that kept the file from being shorter, and are never moved: compressed clusters, and clusters that
    /// internal snapshots share.
    pub fixed_bytes: u64,
    /// Bytes that could not be moved because guests took the room, or because requests in flight took too long.
    pub missed_bytes: u64,
}

impl std::fmt::Display for Compacted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { before_bytes, after_bytes, moved_bytes, fixed_bytes, missed_bytes } = self;
        write!(f, "the file had {before_bytes} bytes and has {after_bytes}; {moved_bytes} were moved")?;
        if *fixed_bytes > 0 {
            write!(f, "; compressed clusters and what internal snapshots share ({fixed_bytes} bytes) stay at its end")?;
        }
        match missed_bytes {
            0 => Ok(()),
            _ => write!(f, "; {missed_bytes} bytes were in the way of guests: run it again"),
        }
    }
}

/// Moves clusters from the end of the top layer's file down into holes while guests use the disk. Then cuts the file
/// off behind the last cluster in use.
///
/// A guest's write to a cluster that is being moved waits for the move. At the end, guests are held while their
/// requests in flight end, the layer is closed, the last tables are moved, and the layer is opened again. On an error,
/// or if the `watch` cancels, the disk is whole, and what was moved stays moved. Blocks; not to be called on a
/// reactor's thread.
pub fn compact(image: &Image, watch: &CopyWatch) -> Result<Compacted> {
    block_on(compact_async(image, watch, async || std::thread::sleep(NAP)))
}

/// Like [`compact`], as a future. Its calls still block the thread, except `nap`, which gives requests in flight some
/// time.
#[doc(hidden)]
pub async fn compact_async(image: &Image, watch: &CopyWatch, nap: impl AsyncFn()) -> Result<Compacted> {
    let _turn = image.board.try_turn()?;
    watch.check()?;
    let chain = image.chain();
    let (top, qcow2) = check(&chain)?;
    let before_bytes = top.file.length_bytes()?;
    let mut compacting = Compacting { top, qcow2, io: top.open_blocking()?, watch, nap, under_way: None };
    let (mut moved_bytes, mut last) = (0u64, Pass::default());
    for _ in 0..PASSES_MAX {
        last = compacting.pass(chain.size_bytes).await?;
        moved_bytes = moved_bytes.saturating_add(last.moved_bytes);
        if last.missed_bytes == 0 || last.moved_bytes == 0 {
            break;
        }
    }
    let looked_at = compacting.look_at_rest().await?;
    watch.check()?;
    let held = Instant::now();
    // Tables that are written meanwhile still go to the front: the last pass is not over yet.
    let result = image.edit_layer(0, &ClosedEdit::Shorten(looked_at)).await;
    watch.note_hold(held.elapsed());
    result?;
    let fixed_bytes = compacting.fixed_bytes();
    let after_bytes = top.file.length_bytes()?;
    let missed_bytes = last.missed_bytes;
    Ok(Compacted { before_bytes, after_bytes, moved_bytes, fixed_bytes, missed_bytes })
}

fn check(chain: &Chain) -> Result<(&Arc<Layer>, &Qcow2)> {
    let top = chain.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
    let refuse = |what: &str| {
        let what = format!("'{}' cannot be made shorter while it is in use: {what}", top.name);
        Err(Error::new(ErrorKind::Unsupported, what))
    };
    if chain.disk.read_only || !top.writable {
        return refuse("it is open for reading only");
    }
    if top.name.is_temporary() {
        return refuse("what is written to a disk with snapshot=on is thrown away");
    }
    if chain.is_handing_over() {
        return refuse("the former top layer could not be made durable");
    }
    let Some(qcow2) = top.mapping.qcow2() else {
        return refuse("only qcow2 images have clusters that can move");
    };
    match qcow2.refuses_compaction() {
        Some(why) => refuse(why),
        None => Ok((top, qcow2)),
    }
}

#[derive(Debug, Default)]
struct Pass {
    moved_bytes: u64,
    missed_bytes: u64,
}

struct Compacting<'a, N> {
    top: &'a Layer,
    qcow2: &'a Qcow2,
    io: MetaIo,
    watch: &'a CopyWatch,
    nap: N,
    /// The pass that was begun last.
    under_way: Option<Compaction>,
}

impl<N: AsyncFn()> Compacting<'_, N> {
    async fn pass(&mut self, size_bytes: u64) -> Result<Pass> {
        self.free_what_was_discarded().await?;
        self.watch.round(size_bytes);
        let failed = |error| self.top.failed("cannot find out what of it is in use", error);
        self.under_way = None;
        let mut compaction = self.qcow2.begin_compaction(&self.io).await.map_err(failed)?;
        let (mut at, mut since_flush, mut late) = (0, 0u64, 0u64);
        while at < size_bytes {
            self.watch.check()?;
            let CompactionStep { next, moved_bytes, late_bytes, .. } = self.step(&mut compaction, at).await?;
            late = late.saturating_add(late_bytes);
            since_flush = since_flush.saturating_add(moved_bytes);
            if since_flush >= FLUSH_BYTES {
                since_flush = 0;
                self.top.flush().await?;
            }
            let next = next.min(size_bytes);
            self.watch.done(next.saturating_sub(at));
            self.watch.left(size_bytes.saturating_sub(next));
            self.watch.pace(moved_bytes);
            at = next;
            // On a reactor's thread, other tasks go on meanwhile.
            block::yield_now().await;
        }
        let pass = Pass {
            moved_bytes: compaction.moved_bytes(),
            missed_bytes: compaction.missed_bytes().saturating_add(late),
        };
        self.under_way = Some(compaction);
        Ok(pass)
    }

    /// Discarded clusters count as used until their unlinking is durable. One flush frees only a part of them, and none
    /// that requests in flight may still use.
    async fn free_what_was_discarded(&self) -> Result<()> {
        let (mut left, mut vain) = (u64::MAX, 0);
        while left > 0 && vain < VAIN_FLUSHES_MAX {
            self.watch.check()?;
            self.top.flush().await?;
            let now = self.qcow2.unfreed_clusters();
            vain = if now < left { 0 } else { vain.saturating_add(1) };
            left = now;
        }
        Ok(())
    }

    fn fixed_bytes(&self) -> u64 {
        self.under_way.as_ref().map_or(0, Compaction::fixed_bytes)
    }

    /// Looks at what the last pass did not meet. Returns the clusters of which all that count as free are unused.
    async fn look_at_rest(&mut self) -> Result<Range<u64>> {
        let Some(compaction) = &mut self.under_way else { return Ok(0..0) };
        let goes_on = || self.watch.check().is_ok();
        let looked = self.qcow2.look_at_still(&self.io, compaction, goes_on).await;
        looked.map_err(|error| self.top.failed("cannot find out what of it is in use", error))?;
        self.watch.check()?;
        Ok(compaction.looked_at())
    }

    /// Moves the next clusters. If requests in flight take long, it tries again with longer waits, and then leaves
    /// them.
    async fn step(&self, compaction: &mut Compaction, at: u64) -> Result<CompactionStep> {
        let failed = |error| self.top.failed(&format!("cannot move what belongs at byte {at}"), error);
        let mut limits = NAPS.into_iter();
        loop {
            let limit = limits.next();
            let mut naps_left = limit.unwrap_or(0);
            let waits = async || {
                if naps_left == 0 || self.watch.is_cancelled() {
                    return false;
                }
                naps_left = naps_left.saturating_sub(1);
                (self.nap)().await;
                true
            };
            let step = self.qcow2.compact_step(&self.io, compaction, at, waits).await.map_err(failed)?;
            if step.late_bytes == 0 || limit.is_none() || self.watch.is_cancelled() {
                return Ok(step);
            }
        }
    }
}
