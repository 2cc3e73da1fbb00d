//! The driver's record of its requests, whatever the ring's layout: the heads in flight, the positions of adding,
//! showing and popping, and the error that broke the ring.

use super::{AddError, Indirect, IndirectLayout, RingError, low};
use crate::ring_access::LayoutError;
use memory::GuestMemory;
use std::sync::Arc;

/// The record of a head.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Head {
    /// Descriptors of the ring that its chain takes; zero while it is not in flight.
    descriptors: u16,
    /// For a split ring: the length in the descriptor of its indirect table. The descriptor is rewritten only if the
    /// length changes.
    pub(super) table_bytes: u32,
    /// The number of requests added before this one.
    position: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct State {
    pub(super) size: u16,
    pub(super) indirect: Option<Indirect>,
    pub(super) event_idx: bool,
    /// Free heads, the next one last.
    pub(super) free: Vec<u16>,
    pub(super) heads: Vec<Head>,
    /// Counts of all requests added, shown to the device, published, and popped. The indices of a split ring are their
    /// low 16 bits. A request may stay in flight while the indices wrap around.
    pub(super) added: u64,
    pub(super) shown: u64,
    pub(super) published: u64,
    pub(super) popped: u64,
    pub(super) broken: Option<RingError>,
}

impl State {
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        size: u16,
        event_idx: bool,
        indirect: Option<IndirectLayout>,
    ) -> Result<Self, LayoutError> {
        Ok(Self {
            size,
            indirect: Indirect::find(memory, indirect, size)?,
            event_idx,
            free: (0..size).rev().collect(),
            heads: vec![Head::default(); usize::from(size)],
            added: 0,
            shown: 0,
            published: 0,
            popped: 0,
            broken: None,
        })
    }

    pub(super) fn max_buffers(&self) -> u16 {
        // 2.7.5.3.1, 2.8.5: a chain, even an indirect one, is never longer than the queue.
        self.indirect.as_ref().map_or(self.size, |indirect| indirect.layout.entries.min(self.size))
    }

    /// Returns how many descriptors of the ring a request of `buffers` takes.
    #[inline]
    pub(super) fn descriptors_for(&self, buffers: usize) -> Result<u16, AddError> {
        let most = self.max_buffers();
        match u16::try_from(buffers) {
            Ok(count) if (1..=most).contains(&count) => Ok(if self.indirect.is_some() { 1 } else { count }),
            _ => Err(AddError::TooLong { buffers, most }),
        }
    }

    /// Notes that the request at `head` is in the ring.
    #[inline]
    pub(super) fn begin(&mut self, head: u16, descriptors: u16) {
        let position = self.added;
        if let Some(state) = self.heads.get_mut(usize::from(head)) {
            (state.descriptors, state.position) = (descriptors, position);
        }
        self.added = position.wrapping_add(1);
    }

    /// Ends the request that the device names by `id`. Returns its head, and how many descriptors its chain took.
    #[inline]
    pub(super) fn end(&mut self, id: u32) -> Result<(u16, u16), RingError> {
        let size = self.size;
        let head = u16::try_from(id).map_err(|_| RingError::UsedId { id, size })?;
        let state = self.heads.get_mut(usize::from(head)).ok_or(RingError::UsedId { id, size })?;
        // The request must be shown and not used since: the device cannot know one that was only added.
        if state.descriptors == 0 || state.position >= self.shown {
            return Err(RingError::NotInFlight { head });
        }
        self.popped = self.popped.wrapping_add(1);
        Ok((head, std::mem::take(&mut state.descriptors)))
    }

    pub(super) fn in_flight(&self) -> u16 {
        low(self.added.wrapping_sub(self.popped))
    }

    pub(super) fn is_unpublished(&self) -> bool {
        self.published != self.added
    }
}
