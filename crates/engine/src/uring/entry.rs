//! The form of a request for a ring.

use crate::base::call::{Action, Buffers};
use crate::request::progress::Request;
use crate::request::queue_file::QueueFile;
use crate::route::ring_flags;
use io_uring::{opcode, squeue, types};

/// Makes the entry for the rest of `request`. `slot` names the registered memory that `buffers` lie in, if any.
pub(crate) fn entry_of(request: &Request, buffers: Buffers, slot: Option<u16>) -> squeue::Entry {
    let QueueFile { file, traits, fixed, .. } = &*request.target;
    let (fd, flags) = match fixed {
        // The flag makes the number an index into the table.
        Some(fixed) => (types::Fd(fixed.index as i32), squeue::Flags::FIXED_FILE),
        None => (types::Fd(file.raw_fd()), squeue::Flags::empty()),
    };
    let extras = Extras { rw_flags: ring_flags(*traits, request.action), ioprio: request.priority.ioprio() };
    let entry = match request.action {
        Action::Read { .. } => read_entry(fd, request.file_offset(), buffers, slot, extras),
        Action::Write { .. } => write_entry(fd, request.file_offset(), buffers, slot, extras),
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

/// Further arguments of a transfer.
#[derive(Clone, Copy)]
struct Extras {
    rw_flags: i32,
    ioprio: u16,
}

fn read_entry(fd: types::Fd, offset: u64, buffers: Buffers, slot: Option<u16>, extras: Extras) -> squeue::Entry {
    let Extras { rw_flags, ioprio } = extras;
    match (buffers, slot) {
        (Buffers::Single { ptr, length_bytes }, None) => {
            opcode::Read::new(fd, ptr, length_bytes as u32).offset(offset).rw_flags(rw_flags).ioprio(ioprio).build()
        }
        (Buffers::Single { ptr, length_bytes }, Some(slot)) => {
            opcode::ReadFixed::new(fd, ptr, length_bytes as u32, slot)
                .offset(offset)
                .rw_flags(rw_flags)
                .ioprio(ioprio)
                .build()
        }
        (Buffers::Vector { ptr, count }, None) => {
            opcode::Readv::new(fd, ptr, count as u32).offset(offset).rw_flags(rw_flags).ioprio(ioprio).build()
        }
        (Buffers::Vector { ptr, count }, Some(slot)) => opcode::ReadvFixed::new(fd, ptr, count as u32, slot)
            .offset(offset)
            .rw_flags(rw_flags)
            .ioprio(ioprio)
            .build(),
    }
}

fn write_entry(fd: types::Fd, offset: u64, buffers: Buffers, slot: Option<u16>, extras: Extras) -> squeue::Entry {
    let Extras { rw_flags, ioprio } = extras;
    match (buffers, slot) {
        (Buffers::Single { ptr, length_bytes }, None) => {
            opcode::Write::new(fd, ptr, length_bytes as u32).offset(offset).rw_flags(rw_flags).ioprio(ioprio).build()
        }
        (Buffers::Single { ptr, length_bytes }, Some(slot)) => {
            opcode::WriteFixed::new(fd, ptr, length_bytes as u32, slot)
                .offset(offset)
                .rw_flags(rw_flags)
                .ioprio(ioprio)
                .build()
        }
        (Buffers::Vector { ptr, count }, None) => {
            opcode::Writev::new(fd, ptr, count as u32).offset(offset).rw_flags(rw_flags).ioprio(ioprio).build()
        }
        (Buffers::Vector { ptr, count }, Some(slot)) => opcode::WritevFixed::new(fd, ptr, count as u32, slot)
            .offset(offset)
            .rw_flags(rw_flags)
            .ioprio(ioprio)
            .build(),
    }
}
