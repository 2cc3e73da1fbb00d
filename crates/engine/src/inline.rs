//! What of a file that lies in memory a reactor carries out itself, and what it leaves to workers.
//!
//! It never waits for what is swapped out. Of a file whose mapping is armed (see `resident`) it copies what is mapped, and
//! leaves all calls to workers. Of others it makes calls, too, but such as would find something swapped out (see `swap`).
//! While workers change such a file, what else would change it by a call is theirs as well: the kernel lets one do so at a
//! time.

use crate::inflight::{Action, Request};
use crate::job_queue::Job;
use crate::resident::{Aside, Resident};
use crate::stats::Counters;
use crate::swap::{self, Swap};
use std::ptr::NonNull;

/// Whether the reactor would carry this out itself, were nothing of it swapped out: on a file that lies in memory, what is
/// not longer than `longest_bytes`.
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

/// Longer reads of a file in memory are worth a worker each.
const SHORT_READ_BYTES: usize = 16 << 10;

/// Whether a worker carries it out after others on the file: the kernel would let it wait for other changes, or it is too
/// short for a worker of its own.
pub(crate) fn goes_in_turn(request: &Request) -> bool {
    let file = &*request.target.file;
    match request.action {
        Action::Write { .. } if file.in_memory || file.copied_by_workers => true,
        // A durable one lets others go ahead while it is made durable.
        Action::Write { durable } => !durable && file.page_cached && !file.info.block_device,
        Action::Fallocate { .. } | Action::Truncate | Action::CopyFrom { .. } => file.in_memory,
        Action::Read { .. } => file.copied_by_workers && request.left_bytes() <= SHORT_READ_BYTES,
        Action::Sync | Action::DiscardBlocks { .. } | Action::BeginWriteback => false,
    }
}

/// What the reactor may do for a request that it would carry out itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum May {
    Nothing,
    /// But no call.
    Copy,
    Call,
}

/// See [`May`].
pub(crate) fn what_reactor_may(request: &Request, swap: Swap, counters: &Counters) -> May {
    let file = &*request.target.file;
    match swap {
        _ if file.is_armed() => May::Copy,
        Swap::None => May::Call,
        _ if file.resident.as_ref().is_some_and(Resident::may_be_armed) => May::Nothing,
        Swap::InUse if waits_for_swap(request, counters) => May::Nothing,
        Swap::Unused | Swap::InUse => May::Call,
    }
}

/// Whether the reactor would wait for what of the request's range is swapped out. A range that is given back is read,
/// too, where it does not end with a page.
fn waits_for_swap(request: &Request, counters: &Counters) -> bool {
    let length = match request.action {
        Action::Read { .. } | Action::Write { .. } => request.left_bytes() as u64,
        Action::Fallocate { length, .. } => length,
        _ => return false,
    };
    counters.system_calls.add(1);
    swap::may_hold(&request.target.file.fd, request.file_offset(), length)
}

/// What the worker that a request is left to does beside its call.
pub(crate) fn aside(request: &Request, job: &Job, swap: Swap) -> Option<(Aside, NonNull<Resident>)> {
    let resident = request.target.file.resident.as_ref()?;
    let what = match () {
        () if resident.is_armed() => resident.aside(job.action, job.offset, job.length_bytes as u64)?,
        () if swap != Swap::None && resident.begins_arming() => Aside::Arm,
        () => return None,
    };
    Some((what, NonNull::from(resident)))
}
