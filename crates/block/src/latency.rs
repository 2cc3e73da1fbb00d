//! The times that the parts of a request take.
//!
//! Most requests go straight to an engine, and the submitter measures how long that took. Code that lets a request wait
//! for something else notes the time. [`crate::DiskQueue::take_timings`] returns these notes.
//!
//! A request that runs as a task has a stopwatch on the task's thread ([`timed`]). The task's code names each part as
//! it ends ([`lap`], [`counts_as`]), without knowing the request.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::time::{Duration, Instant};

/// A part of a request's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The request waits for its turn, for a buffer, or for an exchange of layers.
    Queue,
    /// The request waits for the disk's limits.
    Throttle,
    /// Tables are read, allocated and written.
    Metadata,
    /// The surroundings of a write to new space are read.
    CopyOnWrite,
    /// Its data are read or written.
    Engine,
    /// Written data, of this request or of others, become durable.
    Flush,
    /// The guest is notified of the request's end.
    Notify,
}

impl Part {
    /// The number of parts.
    pub const COUNT: usize = 7;

    /// All parts and their names, in the order of a request's way.
    pub const NAMES: [(Self, &'static str); Self::COUNT] = [
        (Self::Queue, "queue"),
        (Self::Throttle, "throttle"),
        (Self::Metadata, "metadata"),
        (Self::CopyOnWrite, "copy-on-write"),
        (Self::Engine, "engine"),
        (Self::Flush, "flush"),
        (Self::Notify, "notify"),
    ];
}

/// The kind of the time that no part accounts for. When two pieces of a request are merged, the later variant wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Rest {
    /// The engine's time: there was nothing else to do.
    #[default]
    Engine,
    /// Waiting: the task has timed all that it did, so the request waited before it.
    Queue,
    /// The task was not timed. The shares of the last timed task stand for it, and nothing else is known.
    AsBefore,
}

/// The time that a request spent on each part, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Parts {
    ns: [u64; Part::COUNT],
    /// The kind of the time that no part accounts for.
    pub rest: Rest,
}

impl Parts {
    /// Nothing is known.
    pub const ZERO: Self = Self { ns: [0; Part::COUNT], rest: Rest::Engine };
    /// The parts of a task that was not timed.
    pub const AS_BEFORE: Self = Self { ns: [0; Part::COUNT], rest: Rest::AsBefore };

    /// Makes parts of one part alone.
    #[must_use]
    pub fn of(part: Part, time: Duration) -> Self {
        let mut parts = Self::ZERO;
        parts.add(part, nanos(time));
        parts
    }

    /// Returns the time spent on `part`, in nanoseconds.
    #[must_use]
    pub fn get(&self, part: Part) -> u64 {
        self.ns.get(part as usize).copied().unwrap_or(0)
    }

    /// Adds `ns` nanoseconds to `part`.
    pub fn add(&mut self, part: Part, ns: u64) {
        if let Some(sum) = self.ns.get_mut(part as usize) {
            *sum = sum.saturating_add(ns);
        }
    }

    /// Adds the parts of another piece of the same request.
    pub fn merge(&mut self, other: &Self) {
        for (sum, more) in self.ns.iter_mut().zip(other.ns) {
            *sum = sum.saturating_add(more);
        }
        self.rest = self.rest.max(other.rest);
    }

    /// Returns the sum of all parts.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.ns.iter().copied().fold(0, u64::saturating_add)
    }

    /// Scales the parts to another sum. The result is exact: the rounding error goes to the largest part.
    #[must_use]
    pub fn scaled_to(&self, whole_ns: u64) -> Self {
        let sum = self.sum_ns();
        let mut scaled = *self;
        if sum == 0 {
            scaled.add(Part::Engine, whole_ns);
            return scaled;
        }
        // One division for all parts, because this happens for each request whose task was not timed.
        let factor = whole_ns as f64 / sum as f64;
        let mut left = whole_ns;
        for part in &mut scaled.ns {
            *part = ((*part as f64 * factor) as u64).min(left);
            left = left.saturating_sub(*part);
        }
        if let Some(largest) = scaled.ns.iter_mut().max() {
            *largest = largest.saturating_add(left);
        }
        scaled
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The running stopwatch of the task that is being polled.
struct Stopwatch {
    last: Instant,
    /// The part that all time counts as, if one is set.
    within: Option<Part>,
    parts: Parts,
}

impl Stopwatch {
    fn lap(&mut self, part: Part) {
        let now = Instant::now();
        self.parts.add(part, nanos(now.saturating_duration_since(self.last)));
        self.last = now;
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Stopwatch>> = const { RefCell::new(None) };
}

/// Runs `work` with a stopwatch, from its first poll on. Time that no lap names counts as metadata.
///
/// The future is pinned, as in [`counts_as`]: a future by value would be stored twice, and copied for each request.
pub async fn timed<F: Future>(mut work: Pin<&mut F>) -> (F::Output, Parts) {
    let mut watch = None;
    let output = poll_fn(|context| {
        let begun = || Stopwatch { last: Instant::now(), within: None, parts: Parts::ZERO };
        let mine = watch.take().unwrap_or_else(begun);
        let other = CURRENT.replace(Some(mine));
        let polled = work.as_mut().poll(context);
        watch = CURRENT.replace(other);
        polled
    })
    .await;
    let mut parts = Parts::ZERO;
    if let Some(mut watch) = watch {
        watch.lap(Part::Metadata);
        parts = watch.parts;
    }
    parts.rest = Rest::Queue;
    (output, parts)
}

/// Counts the time since the last lap as `part`. Costs next to nothing if no stopwatch runs.
pub fn lap(part: Part) {
    CURRENT.with_borrow_mut(|current| {
        if let Some(watch) = current.as_mut().filter(|watch| watch.within.is_none()) {
            watch.lap(part);
        }
    });
}

/// Runs `work`, and counts all its time as `part`; its own laps are ignored.
pub async fn counts_as<F: Future>(part: Part, work: Pin<&mut F>) -> F::Output {
    lap(Part::Metadata);
    let is_outermost = CURRENT.with_borrow_mut(|current| {
        let watch = current.as_mut().filter(|watch| watch.within.is_none());
        watch.map(|watch| watch.within = Some(part)).is_some()
    });
    let output = work.await;
    if is_outermost {
        CURRENT.with_borrow_mut(|current| {
            if let Some(watch) = current {
                watch.within = None;
                watch.lap(part);
            }
        });
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{block_on, yield_now};
    use std::pin::pin;

    fn work(ms: u64) {
        std::thread::sleep(Duration::from_millis(ms));
    }

    #[test]
    fn the_parts_of_a_task_are_what_it_says_and_sum_to_the_whole() {
        let begun = Instant::now();
        let ((), parts) = block_on(timed(pin!(async {
            work(2);
            lap(Part::Metadata);
            work(4);
            yield_now().await;
            lap(Part::Engine);
            counts_as(
                Part::CopyOnWrite,
                pin!(async {
                    work(8);
                    lap(Part::Engine);
                    counts_as(Part::Flush, pin!(yield_now())).await;
                }),
            )
            .await;
            work(2);
        })));
        let whole = nanos(begun.elapsed());
        let at_least = [(Part::Metadata, 4), (Part::Engine, 4), (Part::CopyOnWrite, 8)];
        assert!(at_least.iter().all(|(part, ms)| parts.get(*part) >= ms * 1_000_000), "{parts:?}");
        assert_eq!((parts.get(Part::Flush), parts.rest), (0, Rest::Queue));
        assert!(parts.sum_ns() <= whole, "{parts:?} of {whole}");
        // Nobody watches any more.
        lap(Part::Flush);
    }

    #[test]
    fn shares_of_another_whole_sum_to_it() {
        let mut parts = Parts::of(Part::Engine, Duration::from_nanos(7));
        parts.add(Part::Metadata, 3);
        for whole in [0, 1, 9, 1_000_003, u64::MAX / 2] {
            assert_eq!(parts.scaled_to(whole).sum_ns(), whole);
        }
        assert_eq!(Parts::ZERO.scaled_to(5).get(Part::Engine), 5);
        parts.merge(&Parts::AS_BEFORE);
        assert_eq!((parts.rest, parts.sum_ns()), (Rest::AsBefore, 10));
    }
}
