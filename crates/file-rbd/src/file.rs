//! The image as a file.

use crate::calls::{Calls, Reply};
use crate::closing::{Closes, let_go, this_is_a_reactor, wait_for};
use crate::cluster::{failed, pool};
use crate::extents::{Extents, Question};
use crate::ffi::{EBLOCKLISTED, Errno, Image, Request};
use crate::lock;
use crate::name::RbdName;
use block::{
    Error, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, Locks, PastEnd,
    RangeLocks, ReactorCtx, Result, UntilChange, Work, block_on, in_pieces, run_aside_or_here, spawn_or_block_on, turn,
};
use memory::{AlignedBuf, BufferAccount, BufferUse, Window, to_usize};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longer transfers are carried out in pieces.
const PIECE_BYTES_MAX: u64 = 2 << 20;
/// Longer zeroes and discards, too.
const RANGE_BYTES_MAX: u64 = 1 << 30;

const ENOENT: Errno = 2;

/// How an image is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RbdOptions {
    /// Nothing is written.
    pub read_only: bool,
    /// Take the exclusive lock before writing.
    pub lock: bool,
    /// How long a lock that another client has is waited for.
    pub lock_timeout: Duration,
    /// librbd may keep writes until they are flushed, and what was read.
    pub cached: bool,
    /// Whose part of the memory for buffers the requests use.
    pub buffers: BufferAccount,
}

impl Default for RbdOptions {
    fn default() -> Self {
        let (lock_timeout, buffers) = (Duration::ZERO, BufferAccount::UNLIMITED);
        Self { read_only: false, lock: true, lock_timeout, cached: false, buffers }
    }
}

impl RbdOptions {
    /// Changed.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Opens an image. Blocks until the cluster answers, and until the image's lock is free.
pub fn open(name: &RbdName, options: &RbdOptions) -> Result<Arc<dyn File>> {
    let read_only = options.read_only;
    if name.snapshot.is_some() && !read_only {
        let message = format!("'{name}' is a snapshot, which can only be read: put an overlay over it");
        return Err(Error::new(ErrorKind::BadOption, message).only_for_writing());
    }
    let key = name.to_string();
    wait_for(&key);
    let open = || -> Result<Result<Image, Errno>> {
        Ok(pool(name, options.cached)?.open(&name.image, name.snapshot.as_deref(), read_only))
    };
    let opened = match open()? {
        // The connection turned out to be shut out. It is shared no more, so this has another one.
        Err(EBLOCKLISTED) => open()?,
        opened => opened,
    };
    let image = opened.map_err(|errno| {
        let hint = match (errno, &name.snapshot) {
            (ENOENT, None) => " (there is none of that name in the pool)",
            (ENOENT, Some(_)) => " (there is none of that name in the pool, or it has no such snapshot)",
            _ => "",
        };
        failed(name, "cannot open the image", errno, hint)
    })?;
    let closes = Closes::new(image, &key);
    let opened = closes
        .image()
        .map_or_else(|| Err(Error::new(ErrorKind::Io, key.clone())), |image| describe(name, image, options));
    let (info, question) = match opened {
        Ok(found) => found,
        Err(error) => {
            // Closing is work for the cluster: a process that ends meanwhile would break it off.
            drop(closes);
            wait_for(&key);
            return Err(error);
        }
    };
    let remote = Remote {
        calls: Calls::default(),
        length_bytes: AtomicU64::new(info.length_bytes),
        growth: RangeLocks::default(),
        question,
        known: UntilChange::default(),
        buffers: options.buffers.clone(),
        has_write_zeroes: info.fast_zeroes,
        is_cached: options.cached,
        has_lost: Arc::default(),
        closes,
    };
    Ok(Arc::new(RbdFile { info, remote: Some(Arc::new(remote)), buffers: options.buffers.clone() }))
}

/// Takes the lock, and looks at the image then.
fn describe(name: &RbdName, image: &Image, options: &RbdOptions) -> Result<(FileInfo, Question)> {
    let facts = || image.facts().map_err(|errno| failed(name, "cannot look at the image", errno, ""));
    let locks = match options.read_only || !options.lock {
        true => Locks::NotWanted,
        false => lock::take(name, image, facts()?.features, options.lock_timeout)?,
    };
    let (facts, librbd) = (facts()?, image.librbd());
    let info = FileInfo {
        name: name.to_string(),
        length_bytes: facts.size_bytes,
        read_only: options.read_only,
        offset_alignment_bytes: 1,
        memory_alignment_bytes: 1,
        can_discard: !options.read_only,
        // Parts of objects may stay.
        discard_zeroes: false,
        fast_zeroes: librbd.has_write_zeroes(),
        block_device: false,
        can_grow: !options.read_only,
        locks,
        in_memory: false,
        engine: format!("librbd {}{}", librbd.version(), if options.cached { ", cached" } else { "" }),
    };
    Ok((info, Question::of(&facts)))
}

struct RbdFile {
    info: FileInfo,
    /// `None` once it is dropped.
    remote: Option<Arc<Remote>>,
    buffers: BufferAccount,
}

impl std::fmt::Debug for RbdFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RbdFile").field("info", &self.info).finish_non_exhaustive()
    }
}

impl RbdFile {
    fn remote(&self) -> Result<&Arc<Remote>> {
        self.remote.as_ref().ok_or_else(|| Error::new(ErrorKind::Io, format!("'{}' is closed", self.info.name)))
    }

    fn queue(&self, ctx: Option<Rc<dyn ReactorCtx>>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(RbdQueue { remote: Arc::clone(self.remote()?), refuses: self.info.read_only, ctx }))
    }
}

impl File for RbdFile {
    fn info(&self) -> &FileInfo {
        &self.info
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(self.remote()?.length_bytes())
    }

    fn hole_at(&self, offset: u64, length: u64) -> Result<(bool, u64)> {
        let failed = |error| {
            let message = format!("'{}': cannot tell where there are data", self.info.name);
            Error::with_source(ErrorKind::Io, message, error)
        };
        block_on(self.remote()?.hole_at(offset, length)).map_err(|error: IoError| failed(error))
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        this_is_a_reactor();
        self.queue(Some(Rc::clone(ctx)))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        self.queue(None)
    }

    fn buffers(&self) -> &BufferAccount {
        &self.buffers
    }

    fn cancel(&self) -> bool {
        if let Some(remote) = &self.remote {
            remote.calls.cancel();
        }
        true
    }
}

impl Drop for RbdFile {
    fn drop(&mut self) {
        let Some(remote) = self.remote.take() else { return };
        let key = Arc::clone(remote.closes.key());
        drop(remote);
        // Whoever opens it next, perhaps after this process, finds its lock free.
        wait_for(&key);
    }
}

/// A thread's way to the image.
struct RbdQueue {
    remote: Arc<Remote>,
    /// Writes.
    refuses: bool,
    /// None for a queue that waits.
    ctx: Option<Rc<dyn ReactorCtx>>,
}

impl FileQueue for RbdQueue {
    fn push(&self, FileIo { op, done, .. }: FileIo) {
        if let Some(error) = op.refused_when_read_only().filter(|_| self.refuses) {
            return done.complete(Err(error));
        }
        let remote = Arc::clone(&self.remote);
        let work = async move { done.complete(remote.perform(op).await) };
        spawn_or_block_on(self.ctx.as_ref(), work);
    }

    fn run_aside(&self, work: Work) {
        run_aside_or_here(self.ctx.as_ref(), &self.remote, work);
    }
}

struct Remote {
    calls: Calls,
    length_bytes: AtomicU64,
    /// Of changes of the length, one at a time.
    growth: RangeLocks,
    question: Question,
    /// Where data are.
    known: UntilChange<Extents>,
    buffers: BufferAccount,
    has_write_zeroes: bool,
    /// librbd acknowledges writes before the cluster has them.
    is_cached: bool,
    /// A flush has failed, and may have lost what it covered: no flush is believed any more.
    has_lost: Arc<AtomicBool>,
    closes: Closes,
}

impl Remote {
    fn length_bytes(&self) -> u64 {
        self.length_bytes.load(Ordering::Acquire)
    }

    /// The image, unless the cluster has shut its client out. Whoever had broken the lock may have written since. So
    /// nothing is written any more, whether or not the cluster would take it.
    fn image(&self) -> IoResult<Arc<Image>> {
        let image = self.closes.image().ok_or(IoError::EIO)?;
        if image.is_shut_out() { Err(IoError::from_errno(EBLOCKLISTED)) } else { Ok(Arc::clone(image)) }
    }

    fn error_of(&self, errno: i64) -> IoError {
        let errno = Errno::try_from(errno).unwrap_or(EIO);
        if errno == EBLOCKLISTED && self.closes.image().is_some_and(|image| image.notes_shut_out()) {
            tracing::error!(
                "'{}': the cluster has shut this client out, as another one has broken its lock: open this image anew, and all \
                 others of the same connection",
                self.closes.key()
            );
        }
        IoError::from_errno(errno)
    }

    /// One request of librbd: what it counted, and the buffer. It goes on if nobody waits any more.
    async fn ask(&self, offset: u64, request: Request) -> IoResult<(u64, Option<AlignedBuf>)> {
        let image = self.image()?;
        let asked = self.calls.ask(|reply: Reply<(i64, Option<AlignedBuf>)>| {
            let key = Arc::clone(self.closes.key());
            // librbd tells one flush only that cached writes have failed. The next one, of whoever asks, would succeed without
            // them. So it is noted whether or not somebody waits.
            let may_lose = self.is_cached && matches!(request, Request::Flush);
            let loses = may_lose.then(|| Arc::clone(&self.has_lost));
            let tell = Box::new(move |ended: crate::ffi::Ended| {
                if let Some(has_lost) = loses.filter(|_| ended.returned < 0)
                    && !has_lost.swap(true, Ordering::AcqRel)
                {
                    tracing::error!("'{key}': a flush has failed: no flush succeeds until the image is opened anew");
                }
                // Whoever waited may drop the file at once, and finds nobody else who has the image.
                let_go(ended.image, &key);
                reply.give(Ok((ended.returned, ended.buffer)));
            });
            image.start(offset, request, tell);
        });
        let (returned, buffer) = asked.await?;
        let count = u64::try_from(returned).map_err(|_| self.error_of(returned.saturating_neg()))?;
        Ok((count, buffer))
    }

    /// A call of librbd that blocks.
    async fn ask_aside<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Image) -> Result<T, Errno> + Send + 'static,
    ) -> IoResult<T> {
        let (image, key) = (self.image()?, Arc::clone(self.closes.key()));
        let called = self.calls.ask_aside(move || {
            let result = call(&image);
            let_go(image, &key);
            Ok(result)
        });
        called.await?.map_err(|errno| self.error_of(errno.into()))
    }

    async fn perform(&self, op: FileOp) -> IoResult {
        match op {
            FileOp::Read { offset, data, past_end } => self.read(offset, &data, past_end).await,
            FileOp::Write { offset, data, fua } => {
                self.grow_to(end_of(offset, data.length_bytes() as u64)?).await?;
                let written = self.write(offset, &data).await;
                self.known.changed();
                written?;
                if fua { self.flush().await } else { Ok(()) }
            }
            FileOp::Flush => self.flush().await,
            FileOp::Discard { offset, length } => {
                let end = end_of(offset, length)?.min(self.length_bytes());
                let discarded = self.in_ranges(offset, end, Request::Discard).await;
                self.known.changed();
                discarded
            }
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                let end = end_of(offset, length)?;
                self.grow_to(end).await?;
                let zeroed = match self.has_write_zeroes {
                    true => {
                        let zero = |length| Request::Zero(to_usize(length), !may_unmap);
                        self.in_ranges(offset, end, zero).await
                    }
                    false => self.write_zeros(offset, end).await,
                };
                self.known.changed();
                zeroed
            }
            FileOp::SetLength { length } => {
                let _one = self.growth.lock(0..1).await;
                self.resize(length).await
            }
        }
    }

    async fn flush(&self) -> IoResult {
        if self.has_lost.load(Ordering::Acquire) {
            return Err(IoError::EIO);
        }
        let flushed = match self.ask(0, Request::Flush).await {
            // Only a write says that there is no space, and may be tried again.
            Err(error) if error.kind() == IoErrorKind::NoSpace => Err(IoError::EIO),
            flushed => flushed.map(|_| ()),
        };
        // Another one may have been told while this one was under way.
        if self.has_lost.load(Ordering::Acquire) { flushed.and(Err(IoError::EIO)) } else { flushed }
    }

    async fn read(&self, offset: u64, data: &Window, past_end: PastEnd) -> IoResult {
        let there = past_end.settle(offset, data, self.length_bytes())?;
        let piece = async |part: Range<u64>| {
            let length = part.end.saturating_sub(part.start);
            let _room = self.buffers.grant(BufferUse::Bounce, to_usize(length)).await;
            let buffer = AlignedBuf::try_zeroed(to_usize(length))?;
            let (count, buffer) = self.ask(part.start, Request::Read(buffer)).await?;
            // Inside the image librbd reads all of it.
            let buffer = buffer.filter(|_| count == length).ok_or(IoError::EIO)?;
            data.copy_from_slice(to_usize(part.start.saturating_sub(offset)), &buffer);
            turn::note_moved(buffer.len());
            Ok(())
        };
        self.in_pieces(offset..offset.saturating_add(there), piece).await
    }

    async fn write(&self, offset: u64, data: &Window) -> IoResult {
        let piece = async |part: Range<u64>| {
            let length = to_usize(part.end.saturating_sub(part.start));
            let _room = self.buffers.grant(BufferUse::Bounce, length).await;
            // The pieces of a request are not all copied in one turn.
            turn::until_free().await;
            let mut buffer = AlignedBuf::try_zeroed(length)?;
            data.copy_to_slice(to_usize(part.start.saturating_sub(offset)), &mut buffer);
            data.check()?;
            turn::note_moved(length);
            self.ask(part.start, Request::Write(buffer)).await.map(|_| ())
        };
        self.in_pieces(offset..end_of(offset, data.length_bytes() as u64)?, piece).await
    }

    /// For versions that have no call for it.
    async fn write_zeros(&self, offset: u64, end: u64) -> IoResult {
        let piece = async |part: Range<u64>| {
            let length = to_usize(part.end.saturating_sub(part.start));
            let _room = self.buffers.grant(BufferUse::Bounce, length).await;
            self.ask(part.start, Request::Write(AlignedBuf::try_zeroed(length)?)).await.map(|_| ())
        };
        self.in_pieces(offset..end, piece).await
    }

    async fn in_pieces(&self, range: Range<u64>, piece: impl AsyncFn(Range<u64>) -> IoResult) -> IoResult {
        let piece_bytes = PIECE_BYTES_MAX.min(self.buffers.piece_bytes() as u64).max(1);
        in_pieces(range, |at| at.saturating_add(piece_bytes), piece).await
    }

    async fn in_ranges(&self, offset: u64, end: u64, request: impl Fn(u64) -> Request) -> IoResult {
        let mut at = offset;
        while at < end {
            let length = end.saturating_sub(at).min(RANGE_BYTES_MAX);
            self.ask(at, request(length)).await?;
            at = at.saturating_add(length);
        }
        Ok(())
    }

    /// Makes the image longer where something is to be written behind its end: librbd does not.
    async fn grow_to(&self, end: u64) -> IoResult {
        self.known.changed();
        if end <= self.length_bytes() {
            return Ok(());
        }
        let _one = self.growth.lock(0..1).await;
        if end <= self.length_bytes() {
            return Ok(());
        }
        // Somebody else may have made it longer: it is never cut here.
        let there = self.ask_aside(|image| image.facts().map(|facts| facts.size_bytes)).await?;
        self.length_bytes.fetch_max(there, Ordering::AcqRel);
        if end <= there { Ok(()) } else { self.resize(end).await }
    }

    async fn resize(&self, length_bytes: u64) -> IoResult {
        if length_bytes == self.length_bytes() {
            return Ok(());
        }
        self.known.changed();
        let resized = self.ask_aside(move |image| image.resize(length_bytes)).await;
        if resized.is_ok() {
            self.length_bytes.store(length_bytes, Ordering::Release);
        }
        self.known.changed();
        resized
    }

    async fn hole_at(&self, offset: u64, length: u64) -> IoResult<(bool, u64)> {
        let size_bytes = self.length_bytes();
        let length = length.min(size_bytes.saturating_sub(offset));
        if length == 0 {
            return Ok((false, 1));
        }
        if let Some(found) = self.known_at(offset) {
            return Ok((found.0, found.1.min(length)));
        }
        let asked = self.known.asks();
        let (question, range) = (self.question, self.question.range_at(offset, length, size_bytes));
        let extents = self.ask_aside(move |image| question.ask(image, range)).await?;
        self.known.learn(asked, extents);
        let found = self.known_at(offset).unwrap_or((false, length));
        Ok((found.0, found.1.min(length)))
    }

    /// Whether a byte is in a hole, and how many follow that have the same answer.
    fn known_at(&self, offset: u64) -> Option<(bool, u64)> {
        let (is_hole, end) = self.known.look_up(|extents| extents.at(offset))?;
        Some((is_hole, end.saturating_sub(offset)))
    }
}

const EIO: Errno = 5;

fn end_of(offset: u64, length: u64) -> IoResult<u64> {
    let end = offset.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
    end.ok_or(IoError::new(IoErrorKind::OutOfRange))
}
