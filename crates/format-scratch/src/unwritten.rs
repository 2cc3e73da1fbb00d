//! What a kept overlay has beside the state of a temporary one: its header, and the changes that its file lacks.

use crate::header::Header;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

/// The state of an overlay that outlives its process.
pub(crate) struct Kept {
    pub(crate) header: Header,
    /// Whether nothing has changed since the last flush. Cleared before a change is published.
    pub(crate) is_clean: AtomicBool,
}

/// The changes that the index file lacks.
#[derive(Debug, Default)]
pub(crate) struct Unwritten {
    is_kept: bool,
    /// Changed pages of the index.
    pub(crate) pages: BTreeSet<u64>,
    /// The number of the latest change.
    pub(crate) change: u64,
    /// The number of the latest durable change.
    pub(crate) durable: u64,
    /// Whether a flush is under way.
    pub(crate) is_flushing: bool,
}

impl Unwritten {
    pub(crate) fn new(is_kept: bool) -> Self {
        Self { is_kept, ..Self::default() }
    }

    /// Notes that these pages of the index have changed, or are about to. The lock is held until they have.
    pub(crate) fn note(&mut self, pages: impl IntoIterator<Item = u64>) {
        if self.is_kept {
            self.change = self.change.saturating_add(1);
            self.pages.extend(pages);
        }
    }
}

impl Kept {
    pub(crate) fn new(header: Header) -> Self {
        Self { header, is_clean: AtomicBool::new(true) }
    }
}
