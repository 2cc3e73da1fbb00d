//! A request in the form that goes into a ring.

use crate::inflight::{Action, Buffers, Request};
use crate::target::QueueFile;
use io_uring::{opcode, squeue, types};

/// What the page cache has is copied while the reactor submits. A longer copy goes to a kernel worker: it would hold up
/// every other disk of the reactor.
const INLINE_COPY_BYTES_MAX: usize = 1 << 20;

/// The entry of what is left of `request`; `slot` names the registered memory that `buffers` lie in, if they do.
pub(crate) fn entry_of(request: &Request, buffers: Buffers, slot: Option<u16>) -> squeue::Entry {
    let QueueFile { file, fixed, .. } = &*request.target;
    let long_copy = file.page_cached && request.left_bytes() > INLINE_COPY_BYTES_MAX;
    let flags = if long_copy { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
    let (fd, flags) = match fixed {
        // The flag makes it an index into the table.
        Some(fixed) => (types::Fd(fixed.index as i32), flags | squeue::Flags::FIXED_FILE),
        None => (types::Fd(file.raw_fd()), flags),
    };
    let entry = match request.action {
        Action::Read { .. } => read_entry(fd, request.file_offset(), buffers, slot),
        Action::Write { durable } => write_entry(fd, request.file_offset(), buffers, slot, durable),
        Action::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        Action::Fallocate { mode, length } => {
            opcode::Fallocate::new(fd, length).offset(request.file_offset()).mode(mode).build()
        }
        // The others never get here, see `State::cannot_do`.
        Action::Truncate | Action::DiscardBlocks { .. } | Action::BeginWriteback | Action::CopyFrom { .. } => {
            opcode::Ftruncate::new(fd, request.file_offset()).build()
        }
    };
    entry.flags(flags)
}

fn read_entry(fd: types::Fd, offset: u64, buffers: Buffers, slot: Option<u16>) -> squeue::Entry {
    match (buffers, slot) {
        (Buffers::Single { ptr, length_bytes }, None) => {
            opcode::Read::new(fd, ptr, length_bytes as u32).offset(offset).build()
        }
        (Buffers::Single { ptr, length_bytes }, Some(slot)) => {
            opcode::ReadFixed::new(fd, ptr, length_bytes as u32, slot).offset(offset).build()
        }
        (Buffers::Vector { ptr, count }, None) => opcode::Readv::new(fd, ptr, count as u32).offset(offset).build(),
        (Buffers::Vector { ptr, count }, Some(slot)) => {
            opcode::ReadvFixed::new(fd, ptr, count as u32, slot).offset(offset).build()
        }
    }
}

fn write_entry(fd: types::Fd, offset: u64, buffers: Buffers, slot: Option<u16>, durable: bool) -> squeue::Entry {
    let flags = if durable { libc::RWF_DSYNC } else { 0 };
    match (buffers, slot) {
        (Buffers::Single { ptr, length_bytes }, None) => {
            opcode::Write::new(fd, ptr, length_bytes as u32).offset(offset).rw_flags(flags).build()
        }
        (Buffers::Single { ptr, length_bytes }, Some(slot)) => {
            opcode::WriteFixed::new(fd, ptr, length_bytes as u32, slot).offset(offset).rw_flags(flags).build()
        }
        (Buffers::Vector { ptr, count }, None) => {
            opcode::Writev::new(fd, ptr, count as u32).offset(offset).rw_flags(flags).build()
        }
        (Buffers::Vector { ptr, count }, Some(slot)) => {
            opcode::WritevFixed::new(fd, ptr, count as u32, slot).offset(offset).rw_flags(flags).build()
        }
    }
}
