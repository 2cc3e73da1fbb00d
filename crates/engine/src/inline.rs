//! What of a file that lies in memory a reactor carries out itself, and what it leaves to workers.
//!
//! While workers change such a file, what else would change it by a call is theirs as well: the kernel lets one change it
//! at a time.

use crate::inflight::{Action, Request};

/// Whether the reactor carries this out itself: on a file that lies in memory, what is not longer than `longest_bytes`.
pub(crate) fn is_inline(request: &Request, longest_bytes: usize) -> bool {
    let file = &*request.target.file;
    file.in_memory
        && match request.action {
            Action::Read { .. } | Action::Write { .. } => request.left_bytes() <= longest_bytes,
            // There is nothing to make durable.
            Action::Sync => true,
            // Behind the end of the file there is nothing to free.
            Action::Fallocate { mode, length } => {
                let frees = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
                length <= longest_bytes as u64 || (frees && file.ends_by(request.offset))
            }
            Action::Truncate | Action::DiscardBlocks { .. } | Action::BeginWriteback | Action::CopyFrom { .. } => false,
        }
}

/// Whether the reactor would only wait for the end of what a worker does.
pub(crate) fn waits_for_workers(request: &Request) -> bool {
    goes_in_turn(request) && request.target.file.is_changed_by_workers()
}

/// Whether a worker carries it out after others on the file, since the kernel would let it wait for other changes.
pub(crate) fn goes_in_turn(request: &Request) -> bool {
    let file = &*request.target.file;
    match request.action {
        Action::Write { .. } if file.in_memory => true,
        // A durable one lets others go ahead while it is made durable.
        Action::Write { durable } => !durable && file.page_cached && !file.info.block_device,
        Action::Fallocate { .. } | Action::Truncate | Action::CopyFrom { .. } => file.in_memory,
        Action::Read { .. } | Action::Sync | Action::DiscardBlocks { .. } | Action::BeginWriteback => false,
    }
}
