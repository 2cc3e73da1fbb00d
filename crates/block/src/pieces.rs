//! Carries out a long request in pieces, several of them at once.

use crate::{IoError, IoResult};
use std::future::{Future as _, poll_fn};
use std::ops::Range;
use std::task::Poll;

/// Pieces of one request that are under way at once.
const PIECES_MAX: usize = 4;

/// Carries out `range` piece by piece, up to four at once, in any order. `end_of` says where the piece ends that begins at
/// a place; `piece` carries one out.
///
/// After an error no more pieces begin. Nothing is under way when this returns, so whoever was told of the error can try
/// again. A request of one piece allocates nothing.
pub async fn in_pieces(
    range: Range<u64>,
    end_of: impl Fn(u64) -> u64,
    piece: impl AsyncFn(Range<u64>) -> IoResult,
) -> IoResult {
    let mut at = range.start;
    let mut next = || {
        let part = at..end_of(at).max(at.saturating_add(1)).min(range.end);
        at = part.end;
        (part.start < part.end).then_some(part)
    };
    let Some(first) = next() else { return Ok(()) };
    if first.end == range.end {
        return piece(first).await;
    }
    let mut under_way = Vec::with_capacity(PIECES_MAX);
    under_way.push(Box::pin(piece(first)));
    let mut failed: Option<IoError> = None;
    poll_fn(|context| {
        loop {
            while failed.is_none()
                && under_way.len() < PIECES_MAX
                && let Some(part) = next()
            {
                under_way.push(Box::pin(piece(part)));
            }
            if under_way.is_empty() {
                return Poll::Ready(failed.take().map_or(Ok(()), Err));
            }
            let before = under_way.len();
            under_way.retain_mut(|piece| match piece.as_mut().poll(context) {
                Poll::Ready(ended) => {
                    failed = failed.take().or(ended.err());
                    false
                }
                Poll::Pending => true,
            });
            if under_way.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await
}

#[cfg(all(test, not(feature = "explore")))]
mod tests {
    use super::*;
    use crate::{IoErrorKind, block_on, turn, yield_now};
    use std::cell::{Cell, RefCell};
    use std::pin::pin;

    /// Pieces that begin, and those that end, with the most that were under way at once.
    #[derive(Default)]
    struct Seen {
        begun: RefCell<Vec<Range<u64>>>,
        ended: Cell<usize>,
        most: Cell<usize>,
    }

    impl Seen {
        async fn piece(&self, part: Range<u64>, fails_at: Option<u64>) -> IoResult {
            self.begun.borrow_mut().push(part.clone());
            self.most.set(self.most.get().max(self.begun.borrow().len() - self.ended.get()));
            // Later pieces end first.
            for _ in 0..100_u64.saturating_sub(part.start) {
                yield_now().await;
            }
            self.ended.set(self.ended.get() + 1);
            let fails = fails_at.is_some_and(|at| part.contains(&at));
            if fails { Err(IoError::new(IoErrorKind::NoSpace)) } else { Ok(()) }
        }

        fn run(&self, range: Range<u64>, piece_bytes: u64, fails_at: Option<u64>) -> IoResult {
            block_on(in_pieces(range, |at| at + piece_bytes, async |part| self.piece(part, fails_at).await))
        }
    }

    #[test]
    fn each_byte_is_in_one_piece_and_a_few_are_under_way() {
        for (range, piece_bytes, most) in [(7..90, 10, PIECES_MAX), (7..20, 10, 2), (7..17, 10, 1), (7..7, 10, 0)] {
            let seen = Seen::default();
            seen.run(range.clone(), piece_bytes, None).unwrap();
            let begun = seen.begun.take();
            assert_eq!((seen.ended.get(), seen.most.get()), (begun.len(), most), "{range:?}");
            let ends = std::iter::once(range.start).chain(begun.iter().map(|part| part.end));
            assert!(begun.iter().map(|part| part.start).eq(ends.take(begun.len())), "{begun:?}");
            assert_eq!(begun.last().map_or(range.end, |last| last.end), range.end);
        }
    }

    #[test]
    fn after_an_error_no_piece_begins_and_those_under_way_end() {
        let seen = Seen::default();
        let failed = seen.run(0..200, 10, Some(25)).unwrap_err();
        assert_eq!(failed.kind(), IoErrorKind::NoSpace);
        let begun = seen.begun.borrow().len();
        assert!(begun < 20 && seen.ended.get() == begun, "{begun} of 20 pieces, {} ended", seen.ended.get());
    }

    #[test]
    fn pieces_that_move_much_go_one_in_a_turn_on_a_thread_that_waits_too() {
        let (polls, most) = (Cell::new(0), Cell::new(0));
        let piece = async |_| {
            turn::until_free().await;
            turn::note_moved(1 << 20);
            polls.set(polls.get() + 1);
            most.set(most.get().max(polls.get()));
            yield_now().await;
            Ok(())
        };
        let mut request = pin!(in_pieces(0..8, |at| at + 1, piece));
        let in_turns = poll_fn(|context| {
            polls.set(0);
            request.as_mut().poll(context)
        });
        block_on(in_turns).unwrap();
        assert_eq!(most.get(), 1, "pieces in one turn");
    }

    #[test]
    fn pieces_that_are_said_to_be_empty_still_come_to_an_end() {
        let seen = Seen::default();
        seen.run(0..20, 0, None).unwrap();
        assert_eq!(seen.ended.get(), 20);
    }
}
