//! The first step of each request: look up, split into pieces, push. A task does the slow rest.

use super::Core;
use super::unpacking::Packed;
use crate::chain::guessed_raw::checked_head;
use crate::chain::mapping::{Overwrite, Staged};
use crate::chain::pieces::Pieces;
use crate::chain::place::Place;
use crate::chain::slow_path::Slow;
use block::{Extent, FileOp, IoError, IoResult, Op, OpFlags, Priority, Task, WriteMap, turn};
use memory::{Window, to_usize};
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// The most pieces of one request that are pushed at once. A guest chooses the length of its requests and the
/// fragmentation of its disk. A task does the rest piece by piece. So a request takes a bounded part of a turn and of
/// the engine's memory.
const MAX_PIECES: usize = 128;

/// The most compressed clusters of one request that are read at the same time, so that several processors decompress.
const MAX_COMPRESSED: usize = 8;

/// The most bytes that one lookup of a read covers. A layer may walk a gigabyte of empty entries, each time that the
/// layer below is asked about a small part.
const LOOKUP_BYTES: u64 = 2 << 20;

impl Core {
    /// Starts a write that also goes to another chain.
    #[cold]
    fn start_on_both_sides(&mut self, index: usize, op: Op) {
        let flags = self.needed(op.flags());
        let done = self.count(index);
        let (shared, ctx) = (Rc::clone(&self.shared), Rc::clone(&self.ctx));
        self.ctx.spawn(Task::new(async move {
            let result = shared.on_both_sides(op.with_flags(flags), &ctx).await;
            done.complete(result);
        }));
    }

    pub(super) fn start(&mut self, index: usize, op: Op) -> IoResult {
        if let Some((offset, length)) = op.range() {
            self.shared.chain.check_range(offset, length)?;
            if self.shared.chain.looks_at_writes && op.is_write() {
                self.shared.chain.look_at_write(offset, length)?;
                if self.shared.chain.both.is_some() {
                    self.start_on_both_sides(index, op);
                    return Ok(());
                }
            }
        }
        match op {
            Op::Read { offset, data, priority } => {
                match self.shared.chain.lookup_data(offset, data.length_bytes() as u64) {
                    Some((layer, offset, past_end)) => {
                        self.note_hit();
                        self.push(index, layer, FileOp::Read { offset, data, past_end }, priority)
                    }
                    None => self.read(index, offset, &data, priority),
                }
            }
            Op::Write { offset, data, flags, priority } => {
                let flags = self.needed(flags);
                let chain = &self.shared.chain;
                let (top, fua) = (chain.top()?, flags.is_fua());
                // The slow path handles tables that are not durable yet, headers that a guessed raw image must not get,
                // and a flush before the data.
                let place = match chain.guessed_raw || flags.is_preflush() {
                    true => None,
                    false => top.mapping.begin_overwrite(offset, data.length_bytes() as u64),
                };
                match place.filter(|_| !fua || chain.is_durable_in_place()) {
                    Some(offset) => {
                        self.note_hit();
                        self.push(index, 0, FileOp::Write { offset, data, fua }, priority)
                    }
                    None => self.write(index, offset, &data, flags, priority),
                }
            }
            Op::Flush => self.flush(index),
            Op::Discard { offset, length } => self.discard(index, offset, length),
            // A secure erase is impossible: layers below and snapshots keep their data.
            Op::SecureErase { .. } => Err(IoError::new(block::IoErrorKind::Unsupported)),
            Op::WriteZeroes { offset, length, may_unmap, flags } => {
                self.write_zeroes(index, offset, length, may_unmap, self.needed(flags))
            }
        }
    }

    /// Returns the flags that a write still needs. Without a volatile cache, all writes are durable and no flush is
    /// needed.
    #[inline]
    fn needed(&self, flags: OpFlags) -> OpFlags {
        if self.shared.chain.disk.volatile_cache.load(Ordering::Acquire) { flags } else { OpFlags::FUA }
    }

    fn read(&mut self, index: usize, offset: u64, data: &Window, priority: Priority) -> IoResult {
        let shared = Rc::clone(&self.shared);
        let chain = &shared.chain;
        let mut pieces = Pieces::new(offset, data);
        let (mut count, mut compressed) = (0_usize, 0_usize);
        while let Some((at, left)) = pieces.rest() {
            let place = match chain.lookup(at, left.min(LOOKUP_BYTES)) {
                Some(place) if count < MAX_PIECES && is_quick(&place) => place,
                Some(Place { extent: Extent::Compressed(extent), length_bytes, layer }) => {
                    let bytes = chain.layer(layer)?.mapping.decompress_bytes(&extent);
                    let bytes = to_usize(bytes);
                    compressed = compressed.saturating_add(1);
                    let is_rest = compressed > MAX_COMPRESSED;
                    let data = if is_rest { pieces.remaining() } else { pieces.take(length_bytes) };
                    self.unpack(index, Packed { offset: at, data, priority, bytes });
                    if is_rest {
                        return Ok(());
                    }
                    continue;
                }
                _ => {
                    self.spawn(index, Slow::Read { offset: at, data: pieces.remaining(), priority });
                    return Ok(());
                }
            };
            count = count.saturating_add(1);
            let piece = pieces.take(place.length_bytes);
            self.note_hit();
            match place.extent {
                Extent::Data { offset, .. } => {
                    let past_end = chain.layer(place.layer)?.mapping.past_end(offset);
                    self.push(index, place.layer, FileOp::Read { offset, data: piece, past_end }, priority)?;
                }
                _ => {
                    piece.fill(0);
                    turn::note_moved(piece.length_bytes());
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, index: usize, offset: u64, data: &Window, flags: OpFlags, priority: Priority) -> IoResult {
        let shared = Rc::clone(&self.shared);
        let chain = &shared.chain;
        let top = chain.top()?;
        let checked = match chain.guessed_raw {
            true => checked_head(offset, data).inspect_err(|_| chain.log_refused_header(offset))?,
            false => None,
        };
        let data = checked.as_ref().unwrap_or(data);
        let end = offset.saturating_add(data.length_bytes() as u64);
        if flags.is_preflush() || top.mapping.needs_padding(end) {
            self.spawn(index, Slow::Write { offset, data: data.clone(), flags, priority });
            return Ok(());
        }
        let fua = flags.is_fua();
        let mut pieces = Pieces::new(offset, data);
        let mut count = 0_usize;
        while let Some((at, left)) = pieces.rest() {
            let place = top.mapping.lookup_overwrite(at, left);
            let is_quick = |length_bytes| match fua {
                false => count < MAX_PIECES,
                // A write in one piece is durable by itself if the tables that lead there are durable. Several pieces
                // share a flush.
                true => length_bytes == data.length_bytes() as u64 && chain.is_durable_in_place(),
            };
            match place {
                Overwrite::InPlace { offset, length_bytes } if is_quick(length_bytes) => {
                    count = count.saturating_add(1);
                    let data = pieces.take(length_bytes);
                    self.note_hit();
                    self.push(index, 0, FileOp::Write { offset, data, fua }, priority)?;
                }
                Overwrite::InPlace { .. } | Overwrite::Slow => {
                    self.spawn(index, Slow::Write { offset: at, data: pieces.remaining(), flags, priority });
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self, index: usize) -> IoResult {
        if self.shared.chain.disk.read_only {
            return Ok(());
        }
        self.shared.chain.look_at_flush()?;
        if self.shared.chain.top()?.mapping.has_tables() || self.shared.chain.both.is_some() {
            self.spawn(index, Slow::Flush);
            return Ok(());
        }
        self.push(index, 0, FileOp::Flush, Priority::NONE)
    }

    fn discard(&mut self, index: usize, offset: u64, length: u64) -> IoResult {
        let shared = Rc::clone(&self.shared);
        let chain = &shared.chain;
        let top = chain.top()?;
        if length == 0 {
            return Ok(());
        }
        if top.mapping.has_tables() {
            self.spawn(index, Slow::Discard { offset, length });
            return Ok(());
        }
        if !top.file_info().can_discard {
            // A hint that the file cannot follow is not an error.
            return Ok(());
        }
        self.push(index, 0, FileOp::Discard { offset, length }, Priority::NONE)
    }

    /// Publishes a map's space in the top layer.
    pub(super) fn take_over(&mut self, index: usize, map: WriteMap) -> IoResult {
        let offset = map.offset();
        self.shared.chain.check_range(offset, map.length_bytes() as u64)?;
        let mut staged: Box<Staged> = map.into_claim()?.downcast().map_err(|_| IoError::EIO)?;
        let flags = self.needed(OpFlags::NONE);
        if !flags.is_fua()
            && let Some(linked) = self.shared.chain.top()?.mapping.link_at_once(offset, &mut staged)
        {
            return linked;
        }
        self.spawn(index, Slow::TakeOver { offset, staged, flags });
        Ok(())
    }

    fn write_zeroes(&mut self, index: usize, offset: u64, length: u64, may_unmap: bool, flags: OpFlags) -> IoResult {
        if length == 0 {
            return if flags.is_preflush() { self.flush(index) } else { Ok(()) };
        }
        let top = self.shared.chain.top()?;
        let is_plain = flags == OpFlags::NONE && !top.mapping.has_tables();
        if !is_plain || top.mapping.needs_padding(offset.saturating_add(length)) {
            self.spawn(index, Slow::WriteZeroes { offset, length, may_unmap, flags });
            return Ok(());
        }
        self.push(index, 0, FileOp::WriteZeroes { offset, length, may_unmap }, Priority::NONE)
    }
}

/// Whether a piece of a read can be started at once.
fn is_quick(place: &Place) -> bool {
    match place.extent {
        Extent::Data { .. } => true,
        // A task zeroes long runs, step by step.
        Extent::Zero | Extent::Backing => place.length_bytes <= turn::STEP_BYTES as u64 && !turn::has_moved_enough(),
        Extent::Compressed(_) => false,
    }
}
