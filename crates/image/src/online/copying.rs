//! Copies from the chain that guests use to another one, by calls that block.

use super::watch::CopyWatch;
use crate::chain::both_sides::BothSides;
use crate::chain::give_up::{Ends, GiveUp, LateCalls, open_blocking};
use crate::chain::layer::Layer;
use crate::chain::layers::{Chain, Place};
use crate::chain::queue::Shared;
use block::{Error, ErrorKind, Extent, IoError, IoResult, MetaIo, Participant, Priority, Result, Ticket};
use memory::IoBuf;
use std::ops::Range;
use std::sync::Arc;

/// Copied at once while nobody waits for it.
const PIECE_BYTES: u64 = 1 << 20;

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
    top_meta: MetaIo,
    from: Shared,
    to: Shared,
    in_top: Option<Participant>,
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
        // What is written late to a layer of the disk may land on what guests have written since.
        let is_apart = !layers.iter().any(|layer| Arc::ptr_eq(&layer.file, &next_top.file));
        let ends = if is_apart { Ends::All } else { Ends::Reads };
        let in_next = next_top.mapping.epochs().map(|epochs| {
            let mut participant = epochs.join();
            let ticket = participant.begin(epochs);
            (participant, ticket)
        });
        Ok(Self {
            top,
            next_top,
            watch,
            top_meta: open_blocking(top, watch.given_up_by(), Ends::Reads)?,
            from: Shared::blocking_or_given_up(&chain, watch.given_up_by(), Ends::Reads)?,
            to: Shared::blocking_or_given_up(next, watch.given_up_by(), ends)?,
            in_top: top.mapping.epochs().map(block::Epochs::join),
            in_next,
            ends,
            late: Arc::default(),
        })
    }

    /// What ends waits for the other chain.
    pub(super) fn given_up_by(&self) -> Option<Arc<GiveUp>> {
        self.watch.given_up_by().cloned()
    }

    /// Where the other chain's layers are the disk's own: what guests send there ends, though nobody waits for it.
    pub(super) fn late(&self) -> Option<Arc<LateCalls>> {
        (self.ends == Ends::Reads).then(|| Arc::clone(&self.late))
    }

    /// Waits until all that guests sent to the other chain has ended.
    pub(super) async fn late_calls_end(&self) {
        self.late.end().await;
    }

    /// The other chain's top, for calls that end as those of the copy.
    pub(super) fn next_meta(&self) -> Result<MetaIo> {
        open_blocking(self.next_top, self.watch.given_up_by(), self.ends)
    }

    /// What keeps the other chain from using space again that it frees.
    pub(super) fn into_hold(self) -> Option<(Participant, Ticket)> {
        self.in_next
    }

    /// Copies these ranges while guests go on. With `both`, writes that guests send to both sides wait for the piece that
    /// is copied just then. Stops early when `goes_on` says so, which is asked after each piece and told how much is left;
    /// what was not copied comes back.
    pub(super) async fn copy(
        &mut self,
        ranges: &[Range<u64>],
        what: What,
        both: Option<&BothSides>,
        mut goes_on: impl FnMut(u64) -> bool,
    ) -> Result<Vec<Range<u64>>> {
        let mut left_bytes = super::ranges::total(ranges);
        for (index, range) in ranges.iter().enumerate() {
            let mut at = range.start;
            while at < range.end {
                self.watch.check()?;
                if let Some(error) = both.and_then(BothSides::failure) {
                    return Err(self.next_top.failed("cannot write to it", error));
                }
                let ticket = match (&mut self.in_top, self.top.mapping.epochs()) {
                    (Some(participant), Some(epochs)) => Some(participant.begin(epochs)),
                    _ => None,
                };
                let copied = self.piece(at, range.end.saturating_sub(at), what, both).await;
                if let (Some(participant), Some(ticket)) = (&mut self.in_top, ticket) {
                    participant.end(ticket);
                }
                let (length_bytes, moved_bytes) = copied?;
                at = at.saturating_add(length_bytes);
                left_bytes = left_bytes.saturating_sub(length_bytes);
                self.watch.done(length_bytes);
                self.watch.left(left_bytes);
                self.watch.pace(moved_bytes);
                if let Some(give_up) = self.watch.given_up_by() {
                    give_up.tidy();
                }
                if !goes_on(left_bytes) {
                    let rest = ranges.get(index.saturating_add(1)..).unwrap_or_default().iter().cloned();
                    return Ok(std::iter::once(at..range.end).chain(rest).filter(|range| !range.is_empty()).collect());
                }
            }
        }
        Ok(Vec::new())
    }

    /// Deals with the first part of a range: its length, and how many bytes were moved.
    async fn piece(&self, at: u64, length_bytes: u64, what: What, both: Option<&BothSides>) -> Result<(u64, u64)> {
        let read_failed = |error| self.top.failed(&format!("cannot copy from byte {at} on"), error);
        let piece = self.look(at, length_bytes, what).await.map_err(read_failed)?;
        if piece.kind == Kind::Nothing {
            // Where that is so no longer, a guest has written, which the other side gets or a log has noted.
            return Ok((piece.length_bytes, 0));
        }
        let Some(both) = both else { return self.copy_piece(at, &piece).await };
        let length_bytes = length_bytes.min(self.watch.piece_bytes(PIECE_BYTES));
        let _range = both.lock(at..at.saturating_add(length_bytes)).await;
        let piece = self.look(at, length_bytes, what).await.map_err(read_failed)?;
        self.copy_piece(at, &piece).await
    }

    async fn copy_piece(&self, at: u64, piece: &Piece) -> Result<(u64, u64)> {
        let write_failed = |error| self.next_top.failed(&format!("cannot write what belongs at byte {at}"), error);
        match piece.kind {
            Kind::Nothing => Ok((piece.length_bytes, 0)),
            Kind::Zeros => {
                self.to.write_zeroes(at, piece.length_bytes, true).await.map_err(write_failed)?;
                Ok((piece.length_bytes, 0))
            }
            Kind::Data => {
                let length_bytes = piece.length_bytes.min(PIECE_BYTES);
                let read = self.read(at, length_bytes, piece.in_top).await;
                let data = read.map_err(|error| self.top.failed(&format!("cannot copy from byte {at} on"), error))?;
                self.to.write(at, data, Priority::NONE).await.map_err(write_failed)?;
                Ok((length_bytes, length_bytes))
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

    /// What the first part of a range holds.
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
        Ok(Piece { length_bytes, in_top: is_top.then_some(extent), kind })
    }
}
