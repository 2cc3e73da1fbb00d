//! Copies from the chain that guests use to another one, several pieces at once.

use super::lanes::{InEpochs, LANES, Pieces, copy_in_lanes};
use super::watch::CopyWatch;
use crate::chain::both_sides::BothSides;
use crate::chain::give_up::{Ends, GiveUp, LateCalls};
use crate::chain::job_calls::JobCalls;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::place::Place;
use crate::chain::queue::Shared;
use block::{Error, ErrorKind, Extent, IoError, IoResult, MetaIo, Participant, Priority, Result, Ticket};
use memory::IoBuf;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The largest piece.
const PIECE_BYTES: u64 = 256 << 10;
/// Zeros are written in parts of this size. Storage that cannot zero by itself takes long for one, and a copy is cancelled
/// between two.
pub(super) const ZEROED_BYTES: u64 = 64 << 20;

/// Returns how long the first part of these zeros is. It ends where a cluster ends, whatever the format.
pub(super) fn first_zeros(at: u64, length_bytes: u64) -> u64 {
    length_bytes.min(ZEROED_BYTES.saturating_sub(at & (ZEROED_BYTES - 1)))
}

/// What is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// What the top layer says: the other chain rests on the same layers.
    Top,
    /// All that guests see.
    All {
        /// The other chain reads as zeros where nothing was copied to it.
        skip_zeros: bool,
    },
}

/// The first part of a range, as the source has it.
struct Piece {
    length_bytes: u64,
    /// Where it lies, for what the top layer says; the whole chain is asked otherwise.
    in_top: Option<Extent>,
    kind: Kind,
}

/// A piece on its way.
struct Found<'a> {
    piece: Piece,
    /// Keeps the piece's clusters from being used again meanwhile.
    _in_top: Option<InEpochs<'a>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing is to be done.
    Nothing,
    Zeros,
    Data,
}

/// Copies from one chain to another.
pub(super) struct Copying<'a> {
    top: &'a Layer,
    next_top: &'a Layer,
    watch: &'a CopyWatch,
    calls: Rc<JobCalls>,
    top_meta: MetaIo,
    from: Shared,
    to: Shared,
    in_top: Option<RefCell<Participant>>,
    /// Nothing that the other chain frees is used again while guests read it, or have writes to it in flight.
    in_next: Option<(Participant, Ticket)>,
    /// Which calls to the other chain end when they are given up.
    ends: Ends,
    /// What guests had written to the other chain when that was given up.
    late: Arc<LateCalls>,
}

impl<'a> Copying<'a> {
    pub(super) fn new(layers: &'a [Arc<Layer>], next: &'a Arc<Chain>, watch: &'a CopyWatch) -> Result<Self> {
        let nothing = || Error::new(ErrorKind::Io, "an image without layers");
        let top = layers.first().ok_or_else(nothing)?;
        let next_top = next.layers.first().ok_or_else(nothing)?;
        let chain = Arc::new(Chain::plain(layers.to_vec(), &next.disk));
        // A late write to a layer of the disk may overwrite what guests have written since.
        let is_apart = !layers.iter().any(|layer| Arc::ptr_eq(&layer.file, &next_top.file));
        let ends = if is_apart { Ends::All } else { Ends::Reads };
        let in_next = next_top.mapping.epochs().map(|epochs| {
            let mut participant = epochs.join();
            let ticket = participant.begin(epochs);
            (participant, ticket)
        });
        let calls = JobCalls::new(watch.given_up_by());
        Ok(Self {
            top,
            next_top,
            watch,
            top_meta: calls.open(top, Ends::Reads)?,
            from: Shared::for_job(&chain, &calls, Ends::Reads)?,
            to: Shared::for_job(next, &calls, ends)?,
            in_top: top.mapping.epochs().map(|epochs| RefCell::new(epochs.join())),
            calls,
            in_next,
            ends,
            late: Arc::default(),
        })
    }

    /// Ends waits for the other chain when the copy is given up.
    pub(super) fn given_up_by(&self) -> Option<Arc<GiveUp>> {
        self.watch.given_up_by().cloned()
    }

    /// Guests' writes that nobody waits for any more, if the other chain has layers of the disk. They still end.
    pub(super) fn late(&self) -> Option<Arc<LateCalls>> {
        (self.ends == Ends::Reads).then(|| Arc::clone(&self.late))
    }

    /// Waits until all that guests sent to the other chain has ended.
    pub(super) async fn late_calls_end(&self) {
        self.late.end().await;
    }

    /// Opens the other chain's top. Its calls are given up when the copy's are.
    pub(super) fn next_meta(&self) -> Result<MetaIo> {
        self.calls.open(self.next_top, self.ends)
    }

    /// Keeps the other chain from using space again that it frees.
    pub(super) fn into_hold(self) -> Option<(Participant, Ticket)> {
        self.in_next
    }

    /// Copies these ranges while guests go on. With `both`, a guest's write waits while the same place is being copied.
    /// `goes_on` is called after each piece with the bytes that are left; if it returns false, the copy stops. Returns
    /// the ranges that were not copied.
    pub(super) async fn copy(
        &self,
        ranges: &[Range<u64>],
        what: What,
        both: Option<&BothSides>,
        goes_on: impl FnMut(u64) -> bool,
    ) -> Result<Vec<Range<u64>>> {
        let pass = Pass { copying: self, what, both, goes_on: RefCell::new(goes_on) };
        copy_in_lanes(&pass, &self.calls, ranges, self.watch).await
    }

    /// Makes a range of the other chain zeros, which nobody reads there.
    pub(super) async fn zero(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            self.watch.check()?;
            let length_bytes = first_zeros(at, range.end.saturating_sub(at));
            let zeroed = self.to.write_zeroes(at, length_bytes, true).await;
            zeroed.map_err(|error| self.next_top.failed(&format!("cannot zero it from byte {at} on"), error))?;
            at = at.saturating_add(length_bytes);
        }
        Ok(())
    }

    fn cannot_read(&self, at: u64, error: IoError) -> Error {
        self.top.failed(&format!("cannot copy from byte {at} on"), error)
    }

    /// Copies a piece. Returns how many bytes were moved.
    async fn copy_piece(&self, at: u64, piece: &Piece) -> Result<u64> {
        let write_failed = |error| self.next_top.failed(&format!("cannot write what belongs at byte {at}"), error);
        match piece.kind {
            Kind::Nothing => Ok(0),
            Kind::Zeros => {
                self.to.write_zeroes(at, piece.length_bytes, true).await.map_err(write_failed)?;
                Ok(0)
            }
            Kind::Data => {
                let read = self.read(at, piece.length_bytes, piece.in_top).await;
                let data = read.map_err(|error| self.cannot_read(at, error))?;
                self.to.write(at, data, Priority::NONE).await.map_err(write_failed)?;
                Ok(piece.length_bytes)
            }
        }
    }

    async fn read(&self, at: u64, length_bytes: u64, in_top: Option<Extent>) -> IoResult<memory::Window> {
        let data = IoBuf::try_zeroed(usize::try_from(length_bytes).map_err(|_| IoError::EIO)?)?.whole();
        match in_top {
            Some(extent) => {
                let place = Place { layer: 0, extent, length_bytes };
                self.from.read_extent(place, data.clone(), Priority::NONE).await?;
            }
            None => self.from.read(at, data.clone(), Priority::NONE).await?,
        }
        Ok(data)
    }

    /// Returns what the first part of a range holds.
    async fn look(&self, at: u64, length_bytes: u64, what: What) -> IoResult<Piece> {
        let (extent, found_bytes, is_top) = match what {
            What::Top => {
                let mapped = self.top.mapping.resolve(&self.top_meta, at, length_bytes).await?;
                (mapped.extent, mapped.length_bytes, true)
            }
            What::All { .. } => {
                let place = self.from.chain.resolve(&self.from.metas, at, length_bytes).await?;
                (place.extent, place.length_bytes, false)
            }
        };
        let length_bytes = found_bytes.min(length_bytes);
        let kind = match (extent, what) {
            _ if length_bytes == 0 => return Err(IoError::EIO),
            (Extent::Backing, What::Top) | (Extent::Zero | Extent::Backing, What::All { skip_zeros: true }) => {
                Kind::Nothing
            }
            (Extent::Zero | Extent::Backing, _) => Kind::Zeros,
            (Extent::Data { .. } | Extent::Compressed(_), _) => Kind::Data,
        };
        let length_bytes = match kind {
            Kind::Nothing => length_bytes,
            Kind::Zeros => first_zeros(at, length_bytes),
            Kind::Data => length_bytes.min(PIECE_BYTES),
        };
        Ok(Piece { length_bytes, in_top: is_top.then_some(extent), kind })
    }
}

/// One pass of a copy.
struct Pass<'a, F> {
    copying: &'a Copying<'a>,
    what: What,
    both: Option<&'a BothSides>,
    goes_on: RefCell<F>,
}

impl<F: FnMut(u64) -> bool> Pieces for Pass<'_, F> {
    type Found<'a>
        = Found<'a>
    where
        Self: 'a;

    async fn find(&self, at: u64, length_bytes: u64) -> Result<(Found<'_>, u64)> {
        let Copying { top, next_top, watch, .. } = self.copying;
        if let Some(error) = self.both.and_then(BothSides::failure) {
            return Err(next_top.failed("cannot write to it", error));
        }
        let in_top = InEpochs::enter(self.copying.in_top.as_ref(), top.mapping.epochs());
        let look = self.copying.look(at, length_bytes, self.what).await;
        let piece = look.map_err(|error| self.copying.cannot_read(at, error))?;
        let length_bytes = match (self.both, piece.kind) {
            // If a guest has written here since, both sides have its data, or the log has the range.
            (_, Kind::Nothing) | (None, _) => piece.length_bytes,
            (Some(_), _) => length_bytes.min(watch.piece_bytes(PIECE_BYTES, LANES)),
        };
        Ok((Found { piece, _in_top: in_top }, length_bytes))
    }

    async fn copy<'a>(&'a self, at: u64, length_bytes: u64, found: Found<'a>) -> Result<u64> {
        let Some(both) = self.both.filter(|_| found.piece.kind != Kind::Nothing) else {
            return self.copying.copy_piece(at, &found.piece).await;
        };
        let end = at.saturating_add(length_bytes);
        let (mut at, mut moved_bytes) = (at, 0_u64);
        while at < end {
            // The lock is held for one extent, so that a guest's write never waits for a whole piece.
            let _range = both.lock(at..end).await;
            // Guests may have written since.
            let look = self.copying.look(at, end.saturating_sub(at), self.what).await;
            let piece = look.map_err(|error| self.copying.cannot_read(at, error))?;
            moved_bytes = moved_bytes.saturating_add(self.copying.copy_piece(at, &piece).await?);
            at = at.saturating_add(piece.length_bytes);
        }
        Ok(moved_bytes)
    }

    fn goes_on(&self, left_bytes: u64) -> bool {
        self.copying.watch.left(left_bytes);
        (self.goes_on.borrow_mut())(left_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::online::simulated_tests::{CLUSTER_BYTES, image};
    use block::block_on;
    use std::future::{Future, poll_fn};
    use std::pin::pin;
    use std::task::Poll;
    use testkit::SimStorage;

    async fn contents(of: &Shared) -> Vec<u8> {
        let data = IoBuf::zeroed(PIECE_BYTES as usize).whole();
        of.read(0, data.clone(), Priority::NONE).await.unwrap();
        data.to_vec()
    }

    #[test]
    fn a_write_of_a_guest_waits_for_one_extent_of_a_piece_and_not_for_all() {
        let storage = SimStorage::new(1);
        let [disk, target] = ["disk", "target"].map(|name| image(&storage, name, PIECE_BYTES));
        let (chain, next, watch) = (disk.chain(), target.chain(), CopyWatch::default());
        let copying = Copying::new(&chain.layers, &next, &watch).unwrap();
        let both = BothSides::with(next.size_bytes, None, None);
        block_on(async {
            for at in (0..PIECE_BYTES).step_by(2 * CLUSTER_BYTES as usize) {
                let data = IoBuf::zeroed(CLUSTER_BYTES as usize).whole();
                data.fill(7);
                copying.from.write(at, data, Priority::NONE).await.unwrap();
            }
            let range = 0..PIECE_BYTES;
            let earlier = both.lock(range.clone()).await;
            let ranges = [range.clone()];
            let mut copy = pin!(copying.copy(&ranges, What::All { skip_zeros: false }, Some(&both), |_| true));
            let mut guest = pin!(both.lock(range));
            poll_fn(|context| {
                assert!(copy.as_mut().poll(context).is_pending() && guest.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            drop(earlier);
            let guest = poll_fn(|context| {
                assert!(copy.as_mut().poll(context).is_pending(), "all was copied while the guest waited");
                guest.as_mut().poll(context)
            })
            .await;
            let (first, rest) = (CLUSTER_BYTES as usize, contents(&copying.to).await);
            assert_eq!(rest.iter().filter(|byte| **byte != 0).count(), first);
            drop(guest);
            assert!(copy.await.unwrap().is_empty());
            assert_eq!(contents(&copying.to).await, contents(&copying.from).await);
        });
    }

    #[test]
    fn a_copy_of_zeros_looks_for_a_cancel_between_two_parts() {
        let storage = SimStorage::new(1);
        let size_bytes = 3 * ZEROED_BYTES;
        let [disk, target] = ["disk", "target"].map(|name| image(&storage, name, size_bytes));
        let (chain, next, watch) = (disk.chain(), target.chain(), CopyWatch::default());
        let copying = Copying::new(&chain.layers, &next, &watch).unwrap();
        assert_eq!(first_zeros(ZEROED_BYTES + 512, ZEROED_BYTES), ZEROED_BYTES - 512);
        let (range, mut left) = (0..size_bytes, Vec::new());
        let all = [range];
        let note = |left_bytes| {
            left.push(left_bytes);
            true
        };
        assert!(block_on(copying.copy(&all, What::All { skip_zeros: false }, None, note)).unwrap().is_empty());
        assert_eq!(left, [2 * ZEROED_BYTES, ZEROED_BYTES, 0]);
        watch.cancel();
        let what = What::All { skip_zeros: false };
        assert_eq!(block_on(copying.copy(&all, what, None, |_| true)).unwrap_err().kind(), ErrorKind::Cancelled);
    }
}
