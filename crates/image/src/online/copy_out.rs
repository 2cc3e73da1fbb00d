//! Copying the contents of a disk at one moment to another image.
//!
//! Several pieces are copied at once, by calls of threads, so a slow target slows only the copy. When the copy has been
//! given up and has not noticed yet, guests may begin to write to the layers that it reads. So each read holds a place
//! in the epochs of the first layer; while the target is written to, none is held.

use super::copying::first_zeros;
use super::lanes::{InEpochs, Pieces, copy_in_lanes};
use super::ranges::total;
use super::watch::CopyWatch;
use crate::chain::give_up::Ends;
use crate::chain::image::Image;
use crate::chain::job_calls::JobCalls;
use crate::chain::place::Place;
use crate::chain::queue::Shared;
use block::{Disk as _, Error, ErrorKind, Extent, IoError, IoResult, Participant, Priority, Result, block_on};
use memory::{IoBuf, Window};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The largest piece.
const PIECE_BYTES: u64 = 256 << 10;

/// What is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Copied {
    /// All that the guest saw.
    All,
    /// The first layer's own data and zeros.
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

/// The first part of a range.
enum Found<'a> {
    Skip,
    Zeros,
    /// Data at this place. The first layer does not use the space again meanwhile.
    Data(Place, Option<InEpochs<'a>>),
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
        block_on(self.run_async(what, watch))
    }

    /// Like [`CopyOut::run`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn run_async(&self, what: &Copied, watch: &CopyWatch) -> Result<()> {
        let calls = JobCalls::new(watch.given_up_by());
        self.copy(what, watch, &calls).await?;
        let chain = self.to.chain();
        let top = chain.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
        top.close_by(&calls.open(top, Ends::All)?).await
    }

    async fn copy(&self, what: &Copied, watch: &CopyWatch, calls: &Rc<JobCalls>) -> Result<()> {
        let size_bytes = self.from.info().size_bytes;
        let ranges = match what {
            Copied::All | Copied::TopLayer => std::iter::once(0..size_bytes).collect(),
            Copied::Ranges(ranges) => ranges.clone(),
        };
        let inside = |range: Range<u64>| range.start.min(size_bytes)..range.end.min(size_bytes);
        let ranges: Vec<_> = ranges.into_iter().map(inside).collect();
        watch.more(total(&ranges));
        let of = |image: &Image, ends| Shared::for_job(&image.chain(), calls, ends);
        let (from, to) = (of(&self.from, Ends::Reads)?, of(&self.to, Ends::All)?);
        let epochs = from.chain.top().ok().and_then(|top| top.mapping.epochs());
        let in_from = epochs.map(|epochs| RefCell::new(epochs.join()));
        let (top_only, is_blank) = (*what == Copied::TopLayer, self.is_blank);
        let copying = Copying { from, to, in_from, top_only, is_blank };
        copy_in_lanes(&copying, calls, &ranges, watch).await.map(drop)
    }
}

/// A copy under way.
struct Copying {
    from: Shared,
    to: Shared,
    in_from: Option<RefCell<Participant>>,
    top_only: bool,
    is_blank: bool,
}

impl Copying {
    /// Returns what the first part of a range is, and its length.
    async fn look(&self, at: u64, length_bytes: u64) -> IoResult<(Found<'_>, u64)> {
        let from = &self.from;
        let in_from = InEpochs::enter(self.in_from.as_ref(), from.chain.top()?.mapping.epochs());
        let place = if self.top_only {
            let (top, meta) = (from.chain.top()?, from.metas.first().ok_or(IoError::EIO)?);
            let mapped = top.mapping.resolve(meta, at, length_bytes).await?;
            Place { layer: 0, extent: mapped.extent, length_bytes: mapped.length_bytes }
        } else {
            from.chain.resolve(&from.metas, at, length_bytes).await?
        };
        let length_bytes = place.length_bytes.min(length_bytes);
        match place.extent {
            _ if length_bytes == 0 => Err(IoError::EIO),
            Extent::Backing if self.top_only => Ok((Found::Skip, length_bytes)),
            Extent::Backing | Extent::Zero if self.is_blank => Ok((Found::Skip, length_bytes)),
            Extent::Backing | Extent::Zero => Ok((Found::Zeros, first_zeros(at, length_bytes))),
            Extent::Data { .. } | Extent::Compressed(_) => {
                let length_bytes = length_bytes.min(PIECE_BYTES);
                Ok((Found::Data(Place { length_bytes, ..place }, in_from), length_bytes))
            }
        }
    }

    async fn read(&self, place: Place) -> IoResult<Window> {
        let data = IoBuf::try_zeroed(usize::try_from(place.length_bytes).map_err(|_| IoError::EIO)?)?.whole();
        self.from.read_extent(place, data.clone(), Priority::NONE).await?;
        Ok(data)
    }
}

impl Pieces for Copying {
    type Found<'a> = Found<'a>;

    async fn find(&self, at: u64, length_bytes: u64) -> Result<(Found<'_>, u64)> {
        self.look(at, length_bytes).await.map_err(|error| failed(&self.from, "read", at, error))
    }

    async fn copy<'a>(&'a self, at: u64, length_bytes: u64, found: Found<'a>) -> Result<u64> {
        let write_failed = |error| failed(&self.to, "write to", at, error);
        match found {
            Found::Zeros => {
                self.to.write_zeroes(at, length_bytes, true).await.map_err(write_failed)?;
                Ok(0)
            }
            Found::Skip => Ok(0),
            Found::Data(place, in_from) => {
                let data = self.read(place).await.map_err(|error| failed(&self.from, "read", at, error))?;
                drop(in_from);
                // A raw file's holes count as data until they are read.
                if !(self.is_blank && data.is_zero()) {
                    self.to.write(at, data, Priority::NONE).await.map_err(write_failed)?;
                }
                Ok(length_bytes)
            }
        }
    }

    fn goes_on(&self, _left_bytes: u64) -> bool {
        true
    }
}

fn failed(layer: &Shared, what: &str, at: u64, error: IoError) -> Error {
    match layer.chain.layers.first() {
        Some(first) => first.failed(&format!("cannot {what} it at byte {at}"), error),
        None => Error::with_source(ErrorKind::Io, format!("cannot {what} at byte {at}"), error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::online::copying::ZEROED_BYTES;
    use crate::online::simulated_tests::image;
    use testkit::SimStorage;

    #[test]
    fn zeros_go_to_a_target_in_parts_and_are_not_written_to_a_blank_one() {
        let storage = SimStorage::new(1);
        let size_bytes = 3 * ZEROED_BYTES;
        let [from, to] = ["disk", "target"].map(|name| image(&storage, name, size_bytes));
        let calls = JobCalls::new(None);
        for is_blank in [false, true] {
            let [from, to] = [&from, &to].map(|image| Shared::for_job(&image.chain(), &calls, Ends::All).unwrap());
            let copying = Copying { from, to, in_from: None, top_only: false, is_blank };
            let (found, length_bytes) = block_on(copying.find(0, size_bytes)).unwrap();
            assert_eq!(matches!(found, Found::Skip), is_blank);
            assert_eq!(length_bytes, if is_blank { size_bytes } else { ZEROED_BYTES });
        }
    }
}
