//! The form of a request for a ring.

use crate::base::call::{Action, Buffers};
use crate::request::progress::Request;
use crate::request::queue_file::QueueFile;
use crate::route::ring_flags;
use io_uring::{opcode, squeue, types};

/// Makes the entry for the rest of `request`. `slot` names the registered memory that `buffers` lie in, if any.
pub(crate) fn entry_of(request: &Request, buffers: Buffers, slot: Option<u16>) -> squeue::Entry {
    let QueueFile { file, fixed, .. } = &*request.target;
    let (fd, flags) = match fixed {
        // The flag makes the number an index into the table.
        Some(fixed) => (types::Fd(fixed.index as i32), squeue::Flags::FIXED_FILE),
        None => (types::Fd(file.raw_fd()), squeue::Flags::empty()),
    };
    let entry = match request.action {
        Action::Read { .. } | Action::Write { .. } => transfer(request, fd, buffers, slot),
        // These never get here, see `route`.
        Action::Sync
        | Action::Fallocate { .. }
        | Action::Truncate
        | Action::DiscardBlocks { .. }
        | Action::BeginWriteback
        | Action::CopyFrom { .. } => opcode::Nop::new().build(),
    };
    entry.flags(flags)
}

fn transfer(request: &Request, fd: types::Fd, buffers: Buffers, slot: Option<u16>) -> squeue::Entry {
    let is_write = matches!(request.action, Action::Write { .. });
    let (rw_flags, ioprio) = (ring_flags(request.target.traits, request.action), request.priority.ioprio());
    /// Adds what all kinds of transfers have. Each kind is a type of its own.
    macro_rules! built {
        ($kind:ident, $($place:expr),*) => {
            opcode::$kind::new(fd, $($place),*)
                .offset(request.file_offset())
                .rw_flags(rw_flags)
                .ioprio(ioprio)
                .build()
        };
    }
    match (is_write, buffers, slot) {
        (false, Buffers::Single { ptr, length_bytes }, None) => built!(Read, ptr, length_bytes as u32),
        (false, Buffers::Single { ptr, length_bytes }, Some(slot)) => built!(ReadFixed, ptr, length_bytes as u32, slot),
        (false, Buffers::Vector { ptr, count }, None) => built!(Readv, ptr, count as u32),
        (false, Buffers::Vector { ptr, count }, Some(slot)) => built!(ReadvFixed, ptr, count as u32, slot),
        (true, Buffers::Single { ptr, length_bytes }, None) => built!(Write, ptr, length_bytes as u32),
        (true, Buffers::Single { ptr, length_bytes }, Some(slot)) => built!(WriteFixed, ptr, length_bytes as u32, slot),
        (true, Buffers::Vector { ptr, count }, None) => built!(Writev, ptr, count as u32),
        (true, Buffers::Vector { ptr, count }, Some(slot)) => built!(WritevFixed, ptr, count as u32, slot),
    }
}
