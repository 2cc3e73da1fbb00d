//! The disk as a file: requests of any offset and length, split into those that the server takes.

use crate::calls::{Answer, Calls, Payload, Wish};
use crate::handshake::{Agreed, connect, end_of_patience};
use crate::link::Link;
use crate::uri::NbdUri;
use block::{
    Error, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, Locks, PastEnd,
    RangeGuard, RangeLocks, ReactorCtx, Result, UntilChange, Work, block_on, in_pieces, run_aside_or_here,
    spawn_or_block_on, turn,
};
use memory::{BufferAccount, BufferGrant, BufferUse, IoBuf, PooledBuf, Window, to_usize};
use nbd_wire::numbers::{allocation, export};
use nbd_wire::reply::Extent;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Longer reads are split. They take no room from the buffer account.
const READ_BYTES_MAX: u64 = 4 << 20;
/// Longer zeroes and discards are split. A multiple of every block size.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// Connects to a server. Opening for writing fails if the server's disk is read-only. Requests take room for their data
/// from `buffers` and wait for it.
pub fn open(uri: &NbdUri, read_only: bool, buffers: &BufferAccount) -> Result<Arc<dyn File>> {
    let (stream, agreed) = connect(uri, end_of_patience())?;
    let may_write = agreed.flags & export::READ_ONLY == 0;
    if !may_write && !read_only {
        return Err(Error::new(ErrorKind::BadOption, format!("'{uri}' is read-only: its server says so")));
    }
    let can = |flag: u16| may_write && agreed.flags & flag != 0;
    let info = FileInfo {
        name: uri.to_string(),
        length_bytes: agreed.size_bytes,
        read_only,
        offset_alignment_bytes: agreed.block_bytes,
        memory_alignment_bytes: 1,
        can_discard: can(export::SEND_TRIM),
        discard_zeroes: false,
        fast_zeroes: can(export::SEND_WRITE_ZEROES),
        block_device: true,
        can_grow: false,
        locks: Locks::NotWanted,
        in_memory: false,
        engine: "NBD client".to_owned(),
    };
    let calls = Arc::new(Calls::new(agreed.size_bytes)?);
    let link = Link::new(uri.clone(), stream, agreed.clone(), Arc::clone(&calls));
    std::thread::Builder::new()
        .name("nbd-client".into())
        .spawn(move || link.run())
        .map_err(|error| Error::io("cannot start the connection's thread", error))?;
    let remote = Remote {
        calls,
        block_bytes: u64::from(agreed.block_bytes),
        agreed,
        locks: RangeLocks::default(),
        known: UntilChange::default(),
        buffers: buffers.clone(),
    };
    Ok(Arc::new(NbdFile { info, remote: Arc::new(remote) }))
}

#[derive(Debug)]
struct NbdFile {
    info: FileInfo,
    remote: Arc<Remote>,
}

impl File for NbdFile {
    fn info(&self) -> &FileInfo {
        &self.info
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(self.remote.size_bytes())
    }

    fn buffers(&self) -> &BufferAccount {
        &self.remote.buffers
    }

    fn cancel(&self) -> bool {
        self.remote.calls.cancel();
        true
    }

    fn hole_at(&self, offset: u64, length: u64) -> Result<(bool, u64)> {
        let failed = |error| Error::with_source(ErrorKind::Io, format!("'{}': no block status", self.info.name), error);
        block_on(self.remote.hole_at(offset, length)).map_err(|error: IoError| failed(error))
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(self.queue(Some(Rc::clone(ctx)))))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(self.queue(None)))
    }
}

impl NbdFile {
    fn queue(&self, ctx: Option<Rc<dyn ReactorCtx>>) -> NbdQueue {
        let number = self.remote.calls.open_queue();
        NbdQueue { remote: Arc::clone(&self.remote), number, refuses: self.info.read_only, ctx }
    }
}

/// A thread's access to the connections.
struct NbdQueue {
    remote: Arc<Remote>,
    number: usize,
    /// Fails writes.
    refuses: bool,
    /// `None` for a blocking queue.
    ctx: Option<Rc<dyn ReactorCtx>>,
}

impl FileQueue for NbdQueue {
    fn push(&self, FileIo { op, done, .. }: FileIo) {
        if let Some(error) = op.refused_when_read_only().filter(|_| self.refuses) {
            return done.complete(Err(error));
        }
        let (remote, number) = (Arc::clone(&self.remote), self.number);
        let work = async move { done.complete(remote.perform(number, op).await) };
        spawn_or_block_on(self.ctx.as_ref(), work);
    }

    fn run_aside(&self, work: Work) {
        run_aside_or_here(self.ctx.as_ref(), &self.remote, work);
    }
}

/// What the server said of a range.
#[derive(Debug)]
struct Known {
    start: u64,
    extents: Vec<Extent>,
}

impl Known {
    /// Whether a byte is in a hole, and how many follow that have the same answer.
    fn at(&self, offset: u64) -> Option<(bool, u64)> {
        let mut start = self.start;
        for extent in &self.extents {
            let end = start.saturating_add(extent.length_bytes);
            if start <= offset && offset < end {
                return Some((extent.flags & allocation::ZERO != 0, end.saturating_sub(offset)));
            }
            start = end;
        }
        None
    }
}

struct Remote {
    calls: Arc<Calls>,
    agreed: Agreed,
    block_bytes: u64,
    /// Locks blocks that are written in part.
    locks: RangeLocks,
    known: UntilChange<Known>,
    buffers: BufferAccount,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("agreed", &self.agreed).finish_non_exhaustive()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.calls.close();
    }
}

impl Remote {
    fn size_bytes(&self) -> u64 {
        self.calls.size_bytes()
    }

    fn can(&self, flag: u16) -> bool {
        self.agreed.flags & flag != 0
    }

    fn blocks_around(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.saturating_sub(range.start.checked_rem(self.block_bytes).unwrap_or(0));
        let end = range.end.checked_next_multiple_of(self.block_bytes).unwrap_or(range.end);
        start..end.min(self.size_bytes().max(range.end))
    }

    fn blocks_inside(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.checked_next_multiple_of(self.block_bytes).unwrap_or(range.end).min(range.end);
        let end = range.end.saturating_sub(range.end.checked_rem(self.block_bytes).unwrap_or(0));
        start..end.max(start)
    }

    fn inside(&self, offset: u64, length: u64) -> IoResult<Range<u64>> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size_bytes() => Ok(offset..end),
            _ => Err(IoError::new(IoErrorKind::OutOfRange)),
        }
    }

    /// Locks the blocks of a range against others that change parts of them. With blocks of one byte there is no need.
    async fn keep(&self, range: &Range<u64>) -> Option<RangeGuard<'_>> {
        match self.block_bytes {
            0 | 1 => None,
            _ => Some(self.locks.lock(self.blocks_around(range)).await),
        }
    }

    async fn perform(&self, queue: usize, op: FileOp) -> IoResult {
        match op {
            FileOp::Read { offset, data, past_end } => self.read(queue, offset, &data, past_end).await,
            FileOp::Write { offset, data, fua } => {
                let range = self.inside(offset, data.length_bytes() as u64)?;
                let _kept = self.keep(&range).await;
                self.known.changed();
                let written = self.write(queue, range, Some(&data), fua && self.can(export::SEND_FUA)).await;
                self.known.changed();
                written?;
                if fua && !self.can(export::SEND_FUA) { self.flush(queue).await } else { Ok(()) }
            }
            FileOp::Flush => self.flush(queue).await,
            FileOp::Discard { offset, length } => {
                let range = self.inside(offset, length)?;
                if !self.can(export::SEND_TRIM) {
                    return Err(IoError::new(IoErrorKind::Unsupported));
                }
                // Blocks that it covers in part stay.
                self.known.changed();
                let trim = |length_bytes| Wish::Trim { length_bytes };
                let trimmed = self.in_ranges(queue, self.blocks_inside(&range), trim).await;
                self.known.changed();
                trimmed
            }
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                let range = self.inside(offset, length)?;
                let _kept = self.keep(&range).await;
                self.known.changed();
                let zeroed = self.zero(queue, range, may_unmap).await;
                self.known.changed();
                zeroed
            }
            FileOp::SetLength { length } => self.set_length(queue, length).await,
        }
    }

    /// Asks the server whether its disk has grown to this length: only the server can change it.
    async fn set_length(&self, queue: usize, length: u64) -> IoResult {
        if length > self.size_bytes() {
            self.calls.ask(queue, 0, Wish::Renew).await?;
            self.known.changed();
        }
        if length == self.size_bytes() { Ok(()) } else { Err(IoError::new(IoErrorKind::Unsupported)) }
    }

    async fn flush(&self, queue: usize) -> IoResult {
        match self.can(export::SEND_FLUSH) {
            true => match self.calls.ask(queue, 0, Wish::Flush).await {
                // Only a write says that there is no space, and may be tried again.
                Err(error) if error.kind() == IoErrorKind::NoSpace => Err(IoError::EIO),
                flushed => flushed.map(|_| ()),
            },
            false => Ok(()),
        }
    }

    /// Returns the longest payload of whole blocks that the server takes and sends.
    fn payload_bytes(&self) -> u64 {
        let most = u64::from(self.agreed.payload_bytes_max);
        most.saturating_sub(most.checked_rem(self.block_bytes).unwrap_or(0))
    }

    fn piece_bytes(&self) -> u64 {
        // A piece that is not aligned reaches into one more block at each end.
        let around = if self.block_bytes > 1 { self.block_bytes.saturating_mul(2) } else { 0 };
        let piece = self.payload_bytes().saturating_sub(around).min(self.buffers.piece_bytes() as u64);
        piece.max(self.block_bytes).max(1)
    }

    /// Reads a range. If the range is whole blocks, the connections' thread puts the data directly into place.
    async fn read(&self, queue: usize, offset: u64, data: &Window, past_end: PastEnd) -> IoResult {
        let there = past_end.settle(offset, data, self.size_bytes())?;
        let range = offset..offset.saturating_add(there);
        let piece_bytes = match self.blocks_around(&range) == range {
            true => self.payload_bytes().min(READ_BYTES_MAX).max(self.block_bytes).max(1),
            false => self.piece_bytes(),
        };
        let piece = async |part: Range<u64>| {
            let length = to_usize(part.end.saturating_sub(part.start));
            let place = data.slice(to_usize(part.start.saturating_sub(offset)), length);
            let blocks = self.blocks_around(&part);
            if blocks == part {
                return self.read_blocks(queue, part.start, &place).await;
            }
            let _room = self.room(&blocks).await;
            let bytes = IoBuf::from_pool(to_usize(blocks.end.saturating_sub(blocks.start)))?.whole();
            self.read_blocks(queue, blocks.start, &bytes).await?;
            place.copy_from(0, &bytes.slice(to_usize(part.start.saturating_sub(blocks.start)), length));
            Ok(())
        };
        in_pieces(range, |at| self.end_of_piece(at, piece_bytes), piece).await
    }

    /// Takes room for the data of blocks; the grant is held until the server has answered.
    async fn room(&self, blocks: &Range<u64>) -> BufferGrant {
        let length = to_usize(blocks.end.saturating_sub(blocks.start));
        self.buffers.grant(BufferUse::Bounce, length).await
    }

    /// Fills a window with whole blocks. A caller that stops waiting gets its memory back at once.
    async fn read_blocks(&self, queue: usize, start: u64, place: &Window) -> IoResult {
        let (lent, _held) = place.lend();
        self.calls.ask(queue, start, Wish::Read(lent)).await.map(|_| ())
    }

    /// Writes data, or zeros if there are none.
    async fn write(&self, queue: usize, range: Range<u64>, data: Option<&Window>, fua: bool) -> IoResult {
        let (start, piece_bytes) = (range.start, self.piece_bytes());
        let piece = async |part: Range<u64>| {
            let blocks = self.blocks_around(&part);
            let length = to_usize(blocks.end.saturating_sub(blocks.start));
            // A partly written block is read into a second buffer first.
            let buffers = if blocks == part { 1 } else { 2 };
            let _room = self.buffers.grant(BufferUse::Bounce, length.saturating_mul(buffers)).await;
            // The pieces of a request are not all copied in one turn.
            turn::until_free().await;
            let mut bytes = PooledBuf::take(length)?;
            if blocks != part {
                // Partly written blocks keep the rest of their data.
                let found = IoBuf::from_pool(bytes.len())?.whole();
                self.read_blocks(queue, blocks.start, &found).await?;
                found.copy_to_slice(0, &mut bytes);
            }
            let skip = to_usize(part.start.saturating_sub(blocks.start));
            let end = skip.saturating_add(to_usize(part.end.saturating_sub(part.start)));
            let place = bytes.get_mut(skip..end).ok_or(IoError::EIO)?;
            match data {
                Some(data) => {
                    data.copy_to_slice(to_usize(part.start.saturating_sub(start)), place);
                    data.check()?;
                }
                None => place.fill(0),
            }
            turn::note_moved(length);
            self.calls.ask(queue, blocks.start, Wish::Write { data: Payload::new(bytes), fua }).await.map(|_| ())
        };
        in_pieces(range, |at| self.end_of_piece(at, piece_bytes), piece).await
    }

    /// Where a piece ends that begins at a place: where a block does, so that no two pieces write parts of one block.
    fn end_of_piece(&self, at: u64, piece_bytes: u64) -> u64 {
        let end = at.saturating_add(piece_bytes);
        end.saturating_sub(end.checked_rem(self.block_bytes).unwrap_or(0))
    }

    async fn zero(&self, queue: usize, range: Range<u64>, may_unmap: bool) -> IoResult {
        let whole = if self.can(export::SEND_WRITE_ZEROES) { self.blocks_inside(&range) } else { range.end..range.end };
        // Writes partial blocks as data; and all of it, if the server has no command for zeroes.
        for part in [range.start..whole.start, whole.end..range.end] {
            self.write(queue, part, None, false).await?;
        }
        self.in_ranges(queue, whole, |length_bytes| Wish::Zero { length_bytes, may_unmap }).await
    }

    async fn in_ranges(&self, queue: usize, range: Range<u64>, wish: impl Fn(u64) -> Wish) -> IoResult {
        let mut at = range.start;
        while at < range.end {
            let length = range.end.saturating_sub(at).min(RANGE_BYTES_MAX);
            self.calls.ask(queue, at, wish(length)).await?;
            at = at.saturating_add(length);
        }
        Ok(())
    }

    async fn hole_at(&self, offset: u64, length: u64) -> IoResult<(bool, u64)> {
        let length = length.min(self.size_bytes().saturating_sub(offset));
        if self.agreed.allocation.is_none() || length == 0 {
            return Ok((false, length.max(1)));
        }
        if let Some(found) = self.known.look_up(|known| known.at(offset)) {
            return Ok((found.0, found.1.min(length)));
        }
        let asked = self.known.asks();
        // As much as one question can tell: the next is often about what follows.
        let ahead = offset.saturating_add(length.clamp(1, RANGE_BYTES_MAX)).min(self.size_bytes());
        let blocks = self.blocks_around(&(offset..ahead));
        let length_bytes = blocks.end.saturating_sub(blocks.start);
        let Answer::Extents(extents) = self.calls.ask(0, blocks.start, Wish::Status { length_bytes }).await? else {
            return Err(IoError::EIO);
        };
        if extents.is_empty() || extents.iter().any(|extent| extent.length_bytes == 0) {
            return Err(IoError::EIO);
        }
        self.known.learn(asked, Known { start: blocks.start, extents });
        let found = self.known.look_up(|known| known.at(offset)).unwrap_or((false, self.block_bytes.max(1)));
        Ok((found.0, found.1.min(length)))
    }
}
