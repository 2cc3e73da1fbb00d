//! Copying what a disk was at one moment to another image.
//!
//! One piece after the other, by calls that block: a slow target slows this thread, and nobody else. Guests may begin to
//! write to the layers that are read here when the copy has been given up and has not noticed yet. So each read holds a
//! place in the epochs of the first layer; while the target is written to, none is held.

use super::watch::CopyWatch;
use crate::chain::give_up::{Ends, open_blocking};
use crate::chain::image::Image;
use crate::chain::layers::Place;
use crate::chain::queue::Shared;
use block::{Disk as _, Error, ErrorKind, Extent, IoError, IoResult, Participant, Priority, Result, block_on};
use memory::{IoBuf, Window};
use std::ops::Range;
use std::sync::Arc;

/// Copied at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Copied {
    /// All that the guest saw.
    All,
    /// What the first layer says itself.
    TopLayer,
    /// These ranges of what the guest saw.
    Ranges(Vec<Range<u64>>),
}

/// A copy from one image, whose guests write elsewhere, to another one.
pub struct CopyOut {
    from: Arc<Image>,
    to: Arc<Image>,
    is_blank: bool,
}

/// Where the first part of a range comes from.
enum Found {
    Skip,
    Zeros,
    Data(Window),
}

impl CopyOut {
    pub(super) fn new(from: Arc<Image>, to: Arc<Image>, is_blank: bool) -> Result<Self> {
        let (has, needs) = (to.info().size_bytes, from.info().size_bytes);
        if has < needs {
            let what = format!("the target has {has} bytes, and the disk has {needs}");
            return Err(Error::new(ErrorKind::BadOption, what));
        }
        Ok(Self { from, to, is_blank })
    }

    /// Copies, and makes the copy durable. Blocks; not to be called on a reactor's thread.
    pub fn run(&self, what: &Copied, watch: &CopyWatch) -> Result<()> {
        block_on(self.copy(what, watch))?;
        let chain = self.to.chain();
        let top = chain.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
        block_on(top.close_by(&open_blocking(top, watch.given_up_by(), Ends::All)?))
    }

    async fn copy(&self, what: &Copied, watch: &CopyWatch) -> Result<()> {
        let size_bytes = self.from.info().size_bytes;
        let ranges = match what {
            Copied::All | Copied::TopLayer => std::iter::once(0..size_bytes).collect(),
            Copied::Ranges(ranges) => ranges.clone(),
        };
        let inside = |range: Range<u64>| range.start.min(size_bytes)..range.end.min(size_bytes);
        let ranges: Vec<_> = ranges.into_iter().map(inside).collect();
        watch.more(ranges.iter().map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add));
        let of = |image: &Image, ends| Shared::blocking_or_given_up(&image.chain(), watch.given_up_by(), ends);
        let (from, to) = (of(&self.from, Ends::Reads)?, of(&self.to, Ends::All)?);
        let mut in_from = from.chain.top().ok().and_then(|top| top.mapping.epochs()).map(block::Epochs::join);
        let top_only = *what == Copied::TopLayer;
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                watch.check()?;
                let left = range.end.saturating_sub(at);
                let found = find(&from, &mut in_from, top_only, at, left).await;
                let failed = |layer: &Shared, what: &str, error| match layer.chain.layers.first() {
                    Some(first) => first.failed(&format!("cannot {what} it at byte {at}"), error),
                    None => Error::with_source(ErrorKind::Io, format!("cannot {what} at byte {at}"), error),
                };
                let (found, length_bytes) = found.map_err(|error| failed(&from, "read", error))?;
                let written = self.put(&to, at, length_bytes, found).await;
                let moved = written.map_err(|error| failed(&to, "write to", error))?;
                at = at.saturating_add(length_bytes);
                watch.done(length_bytes);
                watch.pace(moved);
            }
        }
        Ok(())
    }

    /// Brings a piece to the target; how many bytes were moved for it.
    async fn put(&self, to: &Shared, at: u64, length_bytes: u64, found: Found) -> IoResult<u64> {
        match found {
            Found::Zeros if !self.is_blank => {
                to.write_zeroes(at, length_bytes, true).await?;
                Ok(0)
            }
            Found::Skip | Found::Zeros => Ok(0),
            Found::Data(data) => {
                to.write(at, data, Priority::NONE).await?;
                Ok(length_bytes)
            }
        }
    }
}

/// What the first part of a range holds, and its length.
async fn find(
    from: &Shared,
    participant: &mut Option<Participant>,
    top_only: bool,
    at: u64,
    length_bytes: u64,
) -> IoResult<(Found, u64)> {
    let top = Arc::clone(from.chain.top()?);
    let ticket = match (participant.as_mut(), top.mapping.epochs()) {
        (Some(participant), Some(epochs)) => Some(participant.begin(epochs)),
        _ => None,
    };
    let found = look(from, top_only, at, length_bytes).await;
    if let (Some(participant), Some(ticket)) = (participant.as_mut(), ticket) {
        participant.end(ticket);
    }
    found
}

async fn look(from: &Shared, top_only: bool, at: u64, length_bytes: u64) -> IoResult<(Found, u64)> {
    let place = if top_only {
        let (top, meta) = (from.chain.top()?, from.metas.first().ok_or(IoError::EIO)?);
        let mapped = top.mapping.resolve(meta, at, length_bytes).await?;
        Place { layer: 0, extent: mapped.extent, length_bytes: mapped.length_bytes }
    } else {
        from.chain.resolve(&from.metas, at, length_bytes).await?
    };
    let length_bytes = place.length_bytes.min(length_bytes);
    match place.extent {
        _ if length_bytes == 0 => Err(IoError::EIO),
        Extent::Backing => Ok((if top_only { Found::Skip } else { Found::Zeros }, length_bytes)),
        Extent::Zero => Ok((Found::Zeros, length_bytes)),
        Extent::Data { .. } | Extent::Compressed(_) => {
            let length_bytes = length_bytes.min(PIECE_BYTES);
            let data = IoBuf::try_zeroed(usize::try_from(length_bytes).map_err(|_| IoError::EIO)?)?.whole();
            from.read_extent(Place { length_bytes, ..place }, data.clone(), Priority::NONE).await?;
            Ok((Found::Data(data), length_bytes))
        }
    }
}
