//! Copies many pieces, several of them at once.
//!
//! Pieces are looked up one after the other, because each says where the next begins. Then they are copied in *lanes*,
//! one piece at a time in each. A copy that is limited or paused goes piece by piece, and nothing is under way while it
//! waits.

use super::ranges::total;
use super::watch::CopyWatch;
use crate::chain::job_calls::JobCalls;
use block::{Epochs, Error, Participant, Result, Ticket, WaitList};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::task::Poll;

/// Pieces that are under way at once.
pub(super) const LANES: usize = 8;

/// What is done to each piece.
pub(super) trait Pieces {
    /// What a piece is.
    type Found<'a>
    where
        Self: 'a;

    /// Says what the first part of a range is, and how long that is.
    async fn find(&self, at: u64, length_bytes: u64) -> Result<(Self::Found<'_>, u64)>;

    /// Copies a piece; returns how many bytes were moved for it.
    async fn copy<'a>(&'a self, at: u64, length_bytes: u64, found: Self::Found<'a>) -> Result<u64>;

    /// Whether to go on. Called after each piece with the bytes that are left.
    fn goes_on(&self, left_bytes: u64) -> bool;
}

/// Copies these ranges. Returns what is left because [`Pieces::goes_on`] said so. Nothing is under way when this
/// returns.
pub(super) async fn copy_in_lanes(
    pieces: &impl Pieces,
    calls: &JobCalls,
    ranges: &[Range<u64>],
    watch: &CopyWatch,
) -> Result<Vec<Range<u64>>> {
    let course = Course::new(ranges, watch);
    while course.place().is_some() && !course.is_over.get() {
        course.rests.set(false);
        course.is_alone.set(watch.has_to_wait());
        let count = if course.is_alone.get() { 1 } else { LANES };
        let lanes = (0..count).map(|_| Box::pin(course.lane(pieces)) as Lane<'_>).collect();
        calls.awaiting(all(lanes)).await;
        if let Some(error) = course.error.take() {
            return Err(error);
        }
        watch.pace(course.moved_bytes.take());
    }
    Ok(course.rest())
}

type Lane<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

async fn all(mut lanes: Vec<Lane<'_>>) {
    poll_fn(|context| {
        lanes.retain_mut(|lane| lane.as_mut().poll(context).is_pending());
        if lanes.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// How far a copy has come.
struct Course<'a> {
    ranges: &'a [Range<u64>],
    watch: &'a CopyWatch,
    /// The range of the next piece, and how much of that is taken.
    next: Cell<(usize, u64)>,
    left_bytes: Cell<u64>,
    /// Bytes that were moved under a limit, and that the copy has not waited for yet.
    moved_bytes: Cell<u64>,
    is_finding: Cell<bool>,
    found: WaitList,
    /// No more pieces begin.
    is_over: Cell<bool>,
    /// No more pieces begin before the copy has waited.
    rests: Cell<bool>,
    /// There is one lane. After each piece the copy checks whether more are allowed.
    is_alone: Cell<bool>,
    error: RefCell<Option<Error>>,
}

impl<'a> Course<'a> {
    fn new(ranges: &'a [Range<u64>], watch: &'a CopyWatch) -> Self {
        Self {
            ranges,
            watch,
            next: Cell::new((0, 0)),
            left_bytes: Cell::new(total(ranges)),
            moved_bytes: Cell::new(0),
            is_finding: Cell::new(false),
            found: WaitList::default(),
            is_over: Cell::new(false),
            rests: Cell::new(false),
            is_alone: Cell::new(false),
            error: RefCell::default(),
        }
    }

    /// Returns the range whose first part is the next piece.
    fn place(&self) -> Option<Range<u64>> {
        let (mut index, mut taken_bytes) = self.next.get();
        loop {
            let range = self.ranges.get(index)?;
            let at = range.start.saturating_add(taken_bytes);
            if at < range.end {
                self.next.set((index, taken_bytes));
                return Some(at..range.end);
            }
            (index, taken_bytes) = (index.saturating_add(1), 0);
        }
    }

    fn rest(&self) -> Vec<Range<u64>> {
        let Some(first) = self.place() else { return Vec::new() };
        let later = self.ranges.get(self.next.get().0.saturating_add(1)..).unwrap_or_default();
        std::iter::once(first).chain(later.iter().filter(|range| !range.is_empty()).cloned()).collect()
    }

    async fn lane<P: Pieces>(&self, pieces: &P) {
        while let Some((at, length_bytes, found)) = self.find(pieces).await {
            match pieces.copy(at, length_bytes, found).await {
                Ok(moved_bytes) => self.note(pieces, length_bytes, moved_bytes),
                Err(error) => self.fail(error),
            }
        }
    }

    async fn find<'p, P: Pieces>(&self, pieces: &'p P) -> Option<(u64, u64, P::Found<'p>)> {
        self.found.until(|| (!self.is_finding.replace(true)).then_some(())).await;
        let found = self.find_next(pieces).await;
        self.is_finding.set(false);
        self.found.wake_all();
        found.unwrap_or_else(|error| {
            self.fail(error);
            None
        })
    }

    async fn find_next<'p, P: Pieces>(&self, pieces: &'p P) -> Result<Option<(u64, u64, P::Found<'p>)>> {
        if self.is_over.get() || self.rests.get() {
            return Ok(None);
        }
        let Some(place) = self.place() else { return Ok(None) };
        self.watch.check()?;
        let (found, length_bytes) = pieces.find(place.start, place.end.saturating_sub(place.start)).await?;
        let (index, taken_bytes) = self.next.get();
        self.next.set((index, taken_bytes.saturating_add(length_bytes)));
        Ok(Some((place.start, length_bytes, found)))
    }

    fn note(&self, pieces: &impl Pieces, length_bytes: u64, moved_bytes: u64) {
        self.left_bytes.set(self.left_bytes.get().saturating_sub(length_bytes));
        self.watch.done(length_bytes);
        if let Some(give_up) = self.watch.given_up_by() {
            give_up.tidy();
        }
        if !pieces.goes_on(self.left_bytes.get()) {
            self.is_over.set(true);
        }
        let has_to_wait = self.watch.has_to_wait();
        if has_to_wait {
            self.moved_bytes.set(self.moved_bytes.get().saturating_add(moved_bytes));
        }
        if has_to_wait || self.is_alone.get() {
            self.rests.set(true);
        }
    }

    /// Keeps the first error. No more pieces begin; those under way end.
    fn fail(&self, error: Error) {
        self.is_over.set(true);
        self.error.borrow_mut().get_or_insert(error);
    }
}

/// Keeps a layer from using space again that it frees, until this is dropped.
pub(super) struct InEpochs<'a>(&'a RefCell<Participant>, Ticket);

impl<'a> InEpochs<'a> {
    /// Returns `None` if the layer has no epochs.
    pub(super) fn enter(participant: Option<&'a RefCell<Participant>>, epochs: Option<&Epochs>) -> Option<Self> {
        let (participant, epochs) = (participant?, epochs?);
        let ticket = participant.borrow_mut().begin(epochs);
        Some(Self(participant, ticket))
    }
}

impl Drop for InEpochs<'_> {
    fn drop(&mut self) {
        self.0.borrow_mut().end(self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ranges::joined;
    use super::*;
    use block::{ErrorKind, block_on, yield_now};

    #[derive(Default)]
    struct Seen<'a> {
        done: RefCell<Vec<Range<u64>>>,
        under_way: Cell<usize>,
        most: Cell<usize>,
        stops_at_bytes: u64,
        fails_at: Option<u64>,
        /// Its limit is lifted while the first piece is copied.
        lifts_limit_of: Option<&'a CopyWatch>,
    }

    impl Pieces for Seen<'_> {
        type Found<'a>
            = u64
        where
            Self: 'a;

        async fn find(&self, at: u64, length_bytes: u64) -> Result<(u64, u64)> {
            yield_now().await;
            Ok((at, length_bytes.min(7)))
        }

        #[allow(clippy::needless_lifetimes, reason = "as in the trait")]
        async fn copy<'a>(&'a self, at: u64, length_bytes: u64, found: u64) -> Result<u64> {
            assert_eq!(at, found);
            self.under_way.set(self.under_way.get() + 1);
            self.most.set(self.most.get().max(self.under_way.get()));
            if let Some(watch) = self.lifts_limit_of {
                watch.set_rate(0);
            }
            for _ in 0..5 + at % 50 {
                yield_now().await;
            }
            self.under_way.set(self.under_way.get() - 1);
            if self.fails_at.is_some_and(|fails_at| (at..at + length_bytes).contains(&fails_at)) {
                return Err(Error::new(ErrorKind::Io, format!("at {at}")));
            }
            self.done.borrow_mut().push(at..at + length_bytes);
            Ok(length_bytes)
        }

        fn goes_on(&self, left_bytes: u64) -> bool {
            left_bytes > self.stops_at_bytes
        }
    }

    fn copy(seen: &Seen<'_>, watch: &CopyWatch) -> Result<Vec<Range<u64>>> {
        let rest = block_on(copy_in_lanes(seen, &JobCalls::new(None), &[0..200, 200..200, 300..650], watch));
        assert_eq!(seen.under_way.get(), 0);
        rest
    }

    #[test]
    fn each_byte_is_copied_once_or_left_and_several_pieces_are_under_way() {
        for stops_at_bytes in [0, 220] {
            let (seen, watch) = (Seen { stops_at_bytes, ..Seen::default() }, CopyWatch::default());
            let rest = copy(&seen, &watch).unwrap();
            let done = seen.done.take();
            assert_eq!(rest.is_empty(), stops_at_bytes == 0);
            assert_eq!(watch.done_bytes(), total(&done));
            assert_eq!(total(&done) + total(&rest), 550);
            assert_eq!(joined([done, rest]), [0..200, 300..650]);
            assert!(seen.most.get() > LANES / 2, "{}", seen.most.get());
        }
    }

    #[test]
    fn a_copy_with_a_limit_has_one_piece_under_way() {
        let (seen, watch) = (Seen::default(), CopyWatch::default());
        watch.set_rate(1 << 30);
        assert!(copy(&seen, &watch).unwrap().is_empty());
        assert_eq!((seen.most.get(), watch.done_bytes()), (1, 550));
    }

    #[test]
    fn a_limit_that_comes_later_counts_from_then_on() {
        let (seen, watch) = (Seen::default(), CopyWatch::default());
        let course = Course::new(&[], &watch);
        (0..70).for_each(|_| course.note(&seen, 7, 7));
        assert!(!course.rests.get());
        watch.set_rate(100);
        (0..2).for_each(|_| course.note(&seen, 7, 7));
        assert!(course.rests.get());
        assert_eq!(course.moved_bytes.get(), 14);
    }

    #[test]
    fn a_copy_whose_limit_is_lifted_has_several_pieces_under_way() {
        let watch = CopyWatch::default();
        watch.set_rate(1 << 30);
        let seen = Seen { lifts_limit_of: Some(&watch), ..Seen::default() };
        assert!(copy(&seen, &watch).unwrap().is_empty());
        assert!(seen.most.get() > LANES / 2, "{}", seen.most.get());
        assert_eq!(watch.done_bytes(), 550);
    }

    #[test]
    fn after_an_error_or_a_cancel_what_is_under_way_ends_and_no_more_begins() {
        let (seen, watch) = (Seen { fails_at: Some(300), ..Seen::default() }, CopyWatch::default());
        assert_eq!(copy(&seen, &watch).unwrap_err().to_string(), "at 300");
        assert!(total(&seen.done.take()) < 500);
        watch.cancel();
        assert_eq!(copy(&seen, &watch).unwrap_err().kind(), ErrorKind::Cancelled);
        assert!(seen.done.take().is_empty());
    }
}
