//! The memory of a request, in the form for one system call.

use super::progress::Request;
use crate::base::call::{Buffers, MAX_CALL_BYTES, MAX_SEGMENTS};
use memory::{PoolBox, PoolContext, pooled};

/// A list of the segments of one call, with a fixed capacity. There are short lists, and long ones for the few requests
/// that need them.
pub(super) struct Segments<const ROOM: usize>(Vec<libc::iovec>);

// SAFETY: between requests the list is empty, and its pointers are only passed to the kernel.
unsafe impl<const ROOM: usize> Send for Segments<ROOM> {}

impl<const ROOM: usize> PoolContext for Segments<ROOM> {
    const HELD_BYTES: usize = ROOM * size_of::<libc::iovec>();

    fn create() -> Self {
        Self(Vec::with_capacity(ROOM))
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

const FEW_SEGMENTS: usize = 64;

pooled!(Segments<FEW_SEGMENTS>, "list of up to 64 segments");
pooled!(Segments<MAX_SEGMENTS>, "list of up to 1024 segments");

/// The list of a request whose segments must be split.
pub(super) enum Scratch {
    None,
    Few(PoolBox<Segments<FEW_SEGMENTS>>),
    Many(PoolBox<Segments<MAX_SEGMENTS>>),
}

impl Scratch {
    /// Returns a list with room for `count` segments. It is taken once: the rest of a request never has more segments
    /// than the whole.
    pub(super) fn list(&mut self, count: usize) -> &mut Vec<libc::iovec> {
        if matches!(self, Self::None) {
            *self = if count <= FEW_SEGMENTS { Self::Few(PoolBox::take()) } else { Self::Many(PoolBox::take()) };
        }
        match self {
            Self::Many(list) => &mut list.0,
            Self::Few(list) => &mut list.0,
            Self::None => unreachable!("was taken above"),
        }
    }
}

/// Returns the memory that is left to move. Puts its list into `iovecs`, if one is needed.
pub(crate) fn buffers_of(request: &Request, iovecs: &mut Vec<libc::iovec>) -> Buffers {
    listed(request).unwrap_or_else(|| cut(request, iovecs))
}

/// Returns the buffer's own list of segments, if all of it is left to move.
pub(super) fn listed(request: &Request) -> Option<Buffers> {
    if request.progress > 0 {
        return None;
    }
    if let Some(segment) = request.window.single_segment() {
        let length_bytes = segment.length_bytes().min(MAX_CALL_BYTES);
        return Some(Buffers::Single { ptr: segment.as_ptr(), length_bytes });
    }
    let segments = request.window.whole_segments().filter(|segments| segments.len() <= MAX_SEGMENTS)?;
    // `Segment` has the layout of an iovec.
    Some(Buffers::Vector { ptr: segments.as_ptr().cast(), count: segments.len() })
}

/// Lists the rest of the memory, as far as one call takes it.
pub(super) fn cut(request: &Request, iovecs: &mut Vec<libc::iovec>) -> Buffers {
    iovecs.clear();
    request.window.slice(request.progress, request.left_bytes()).for_each_segment(|segment| {
        if iovecs.len() < MAX_SEGMENTS && segment.length_bytes() > 0 {
            iovecs.push(segment.as_iovec());
        }
    });
    Buffers::Vector { ptr: iovecs.as_ptr(), count: iovecs.len() }
}
