//! A filter that fails chosen requests and passes all others on. It tests what guests and monitors do when storage
//! fails. A request that fails does not reach the disk below.

use crate::filters::Filter;
use block::{Completion, DiskQueue, IoError, Op, Parts, ReactorCtx, Result, Tag};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// [`Op::Read`].
    Read,
    /// [`Op::Write`].
    Write,
    /// [`Op::Flush`].
    Flush,
    /// [`Op::Discard`] and [`Op::SecureErase`].
    Discard,
    /// [`Op::WriteZeroes`].
    WriteZeroes,
}

impl RequestKind {
    /// All kinds with their names.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("read", Self::Read),
        ("write", Self::Write),
        ("flush", Self::Flush),
        ("discard", Self::Discard),
        ("write-zeroes", Self::WriteZeroes),
    ];

    /// Returns the kind of `op`.
    #[must_use]
    pub fn of(op: &Op) -> Self {
        match op {
            Op::Read { .. } => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard { .. } | Op::SecureErase { .. } => Self::Discard,
            Op::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }
}

/// Which requests fail. Matching requests are counted over all queues of the disk, in the order of their submission.
/// The first `after` of them pass. Of the others, every `every`th fails, until `count` have failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErrorOptions {
    /// The kinds that match.
    pub kinds: Vec<RequestKind>,
    /// Requests that touch these bytes of the disk match. A flush has no range: it matches only if this is the whole
    /// disk, `0..u64::MAX`.
    pub range: Range<u64>,
    /// How many matching requests pass first.
    pub after: u64,
    /// The last of each group of so many matching requests fails; at least 1.
    pub every: u64,
    /// How many requests fail at most.
    pub count: u64,
    /// The error of requests that fail.
    pub error: IoError,
}

impl ErrorOptions {
    /// Changes some of the options: `ErrorOptions::default().with(|options| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl Default for ErrorOptions {
    /// Makes options with which all requests fail with an I/O error.
    fn default() -> Self {
        let kinds = RequestKind::NAMES.map(|(_, kind)| kind).to_vec();
        Self { kinds, range: 0..u64::MAX, after: 0, every: 1, count: u64::MAX, error: IoError::EIO }
    }
}

/// The filter. See the module's documentation.
#[derive(Debug)]
pub struct Errors(Arc<Rule>);

/// The rule that all queues share.
#[derive(Debug)]
struct Rule {
    options: ErrorOptions,
    matched: AtomicU64,
}

impl Errors {
    /// Makes a filter that fails the requests that match.
    #[must_use]
    pub fn new(options: ErrorOptions) -> Self {
        Self(Arc::new(Rule { options, matched: AtomicU64::new(0) }))
    }
}

impl Filter for Errors {
    fn open_queue(&self, below: Box<dyn DiskQueue>, _: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(ErrorQueue { below, rule: Arc::clone(&self.0), failed: Vec::new() }))
    }
}

impl Rule {
    /// Counts the request if it matches. Returns whether it has to fail.
    fn hits(&self, op: &Op) -> bool {
        let ErrorOptions { after, every, count, .. } = self.options;
        if !self.matches(op) {
            return false;
        }
        let Some(behind) = self.matched.fetch_add(1, Ordering::Relaxed).checked_sub(after) else { return false };
        let (every, turn) = (every.max(1), behind.saturating_add(1));
        turn.is_multiple_of(every) && turn.checked_div(every).is_some_and(|failed| failed <= count)
    }

    fn matches(&self, op: &Op) -> bool {
        let ErrorOptions { kinds, range, .. } = &self.options;
        let touches = match op.range() {
            Some((offset, length)) => offset < range.end && range.start < offset.saturating_add(length.max(1)),
            None => *range == (0..u64::MAX),
        };
        touches && kinds.contains(&RequestKind::of(op))
    }
}

struct ErrorQueue {
    below: Box<dyn DiskQueue>,
    rule: Arc<Rule>,
    failed: Vec<Completion>,
}

impl DiskQueue for ErrorQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        if self.rule.hits(&op) {
            drop(op);
            self.failed.push(Completion { tag, result: Err(self.rule.options.error) });
        } else {
            self.below.submit(tag, op);
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let failed = self.failed.len();
        done.append(&mut self.failed);
        self.below.harvest(done).saturating_add(failed)
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight().saturating_add(self.failed.len())
    }

    fn abandon(&mut self) {
        self.below.abandon();
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        self.below.take_timings(timings);
    }
}
