//! Shows a disk behind a vhost-user socket as a file: `vhost-user:/run/disk.sock`. All that works on files works on it,
//! with raw or any other format inside.
//!
//! A server has few rings, often one, but its clients are many threads. So one reactor owns the ring, and the other
//! threads send it requests. Their data are copied. Requests that are not whole blocks of the device are read, changed
//! and written back there; overlapping requests wait meanwhile.

use block::{
    Completion, Disk, DiskQueue, Error, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, IoError, IoErrorKind,
    IoResult, Locks, Op, OpFlags, PastEnd, Poller, Priority, ReactorCtx, Result, Task, Work, block_on, reclaim,
    run_and_wait, run_aside_or_here,
};
use driver::{Driver, DriverOptions, DriverPath};
use engine::{Reactor, ReactorConfig, ReactorThread};
use memory::{AlignedBuf, IoBuf, Window};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// Longer requests are split into pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;
/// How long to wait for a server that is busy with another client, or is just starting.
const WAIT_MS: u64 = 1_000;

/// Connects to the server at `socket`.
pub(crate) fn open(socket: &Path, read_only: bool) -> Result<Arc<dyn File>> {
    let options = DriverOptions::default().with(|options| {
        options.path = DriverPath::Request;
        options.memory_bytes = 0;
        options.wait_for_socket_ms = WAIT_MS;
    });
    let driver = Driver::connect(socket, options)?;
    let disk = driver.info();
    let name = format!("vhost-user:{}", socket.display());
    if disk.read_only && !read_only {
        return Err(Error::new(ErrorKind::BadOption, format!("'{name}' is read-only: its server says so")));
    }
    let info = FileInfo {
        name,
        length_bytes: disk.size_bytes,
        read_only,
        offset_alignment_bytes: disk.logical_block_bytes,
        memory_alignment_bytes: 1,
        can_discard: disk.discard,
        discard_zeroes: false,
        fast_zeroes: disk.write_zeroes,
        block_device: true,
        can_grow: false,
        locks: Locks::NotWanted,
        in_memory: false,
        engine: "virtio-blk driver".to_owned(),
    };
    Ok(Arc::new(VhostUserFile { info, remote: Arc::new(Remote::start(driver)?) }))
}

#[derive(Debug)]
struct VhostUserFile {
    info: FileInfo,
    remote: Arc<Remote>,
}

impl File for VhostUserFile {
    fn info(&self) -> &FileInfo {
        &self.info
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(self.remote.driver.info().size_bytes)
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(RemoteQueue {
            remote: Arc::clone(&self.remote),
            refuses: self.info.read_only,
            ctx: Some(ctx.clone()),
        }))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(RemoteQueue { remote: Arc::clone(&self.remote), refuses: self.info.read_only, ctx: None }))
    }
}

/// A request to the thread that owns the ring. Ranges are whole blocks, except those of writes.
#[derive(Debug)]
enum Wish {
    Read(AlignedBuf),
    Write(AlignedBuf, OpFlags),
    Zero { length: u64, may_unmap: bool },
    Discard { length: u64 },
    Flush,
}

#[derive(Debug)]
struct Call {
    offset: u64,
    wish: Wish,
    priority: Priority,
    answer: Arc<Answer>,
}

/// The place for a call's result.
#[derive(Debug, Default)]
struct Answer(Mutex<AnswerState>);

#[derive(Debug, Default)]
struct AnswerState {
    /// The result, with the call's memory.
    end: Option<(IoResult, AlignedBuf)>,
    waiter: Option<Waker>,
}

impl Answer {
    fn give(&self, result: IoResult, data: AlignedBuf) {
        let waker = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.end = Some((result, data));
            state.waiter.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    async fn wait(&self) -> (IoResult, AlignedBuf) {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match state.end.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    state.waiter = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// The handle of the ring's thread, for all threads.
#[derive(Debug)]
struct Remote {
    calls: Mutex<Sender<Call>>,
    driver: Arc<Driver>,
    block_bytes: u64,
    thread: ReactorThread,
}

impl Remote {
    fn start(driver: Driver) -> Result<Self> {
        let thread = Reactor::spawn(ReactorConfig::default().with(|config| config.name = "vhost-user".into()))?;
        let (calls, received) = channel();
        let block_bytes = u64::from(driver.info().logical_block_bytes);
        let driver = Arc::new(driver);
        let disk: Arc<dyn Disk> = Arc::clone(&driver) as _;
        run_and_wait(thread.handle().as_ref(), move |ctx| {
            let queue = disk.open_queue(ctx)?;
            let server =
                Server { received, queue, block_bytes, waiting: VecDeque::new(), active: Vec::new(), done: Vec::new() };
            ctx.add_poller(Rc::new(RefCell::new(server))).map(|_| ())
        })??;
        Ok(Self { calls: Mutex::new(calls), driver, block_bytes, thread })
    }

    /// Sends one request and waits for its end.
    async fn ask(&self, offset: u64, wish: Wish, priority: Priority) -> (IoResult, AlignedBuf) {
        let answer = Arc::new(Answer::default());
        let call = Call { offset, wish, priority, answer: Arc::clone(&answer) };
        let sent = self.calls.lock().unwrap_or_else(PoisonError::into_inner).send(call).is_ok();
        // An empty job wakes the thread.
        if !sent || self.thread.handle().run(Box::new(|_| {})).is_err() {
            return (Err(IoError::EIO), AlignedBuf::zeroed(0));
        }
        answer.wait().await
    }

    async fn perform(&self, op: FileOp, priority: Priority) -> IoResult {
        let size_bytes = self.driver.info().size_bytes;
        let inside = |offset: u64, length: u64| match offset.checked_add(length) {
            Some(end) if end <= size_bytes => Ok(offset..end),
            _ => Err(IoError::new(IoErrorKind::OutOfRange)),
        };
        match op {
            FileOp::Read { offset, data, past_end } => self.read(offset, &data, past_end, size_bytes, priority).await,
            FileOp::Write { offset, data, fua } => {
                let range = inside(offset, data.length_bytes() as u64)?;
                self.write(range, &data, OpFlags::from_fua(fua), priority).await
            }
            FileOp::Flush => self.ask(0, Wish::Flush, priority).await.0,
            FileOp::Discard { offset, length } => {
                let range = inside(offset, length)?;
                // Blocks that the range covers only partly stay.
                let (start, end) = (range.start.next_multiple_of(self.block_bytes), self.block_start(range.end));
                match start < end {
                    true => self.ask(start, Wish::Discard { length: end - start }, priority).await.0,
                    false => Ok(()),
                }
            }
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                self.zero(inside(offset, length)?, may_unmap, priority).await
            }
            FileOp::SetLength { length } if length == size_bytes => Ok(()),
            FileOp::SetLength { .. } => Err(IoError::new(IoErrorKind::Unsupported)),
        }
    }

    fn block_start(&self, offset: u64) -> u64 {
        offset - offset % self.block_bytes
    }

    async fn read(&self, offset: u64, data: &Window, past_end: PastEnd, size: u64, priority: Priority) -> IoResult {
        let length = data.length_bytes() as u64;
        let there = size.saturating_sub(offset).min(length);
        if there < length {
            match past_end {
                PastEnd::Zeros => data.slice(there as usize, (length - there) as usize).fill(0),
                PastEnd::Fails => return Err(IoError::EIO),
            }
        }
        let mut done = 0;
        while done < there {
            let at = offset + done;
            let piece = (there - done).min(PIECE_BYTES);
            let (start, end) = (self.block_start(at), (at + piece).next_multiple_of(self.block_bytes));
            let (result, bytes) =
                self.ask(start, Wish::Read(AlignedBuf::zeroed((end - start) as usize)), priority).await;
            result?;
            let skip = (at - start) as usize;
            let found = bytes.get(skip..skip + piece as usize).ok_or(IoError::EIO)?;
            data.copy_from_slice(done as usize, found);
            done += piece;
        }
        Ok(())
    }

    async fn write(&self, range: Range<u64>, data: &Window, flags: OpFlags, priority: Priority) -> IoResult {
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).min(PIECE_BYTES);
            let mut bytes = AlignedBuf::zeroed(length as usize);
            data.copy_to_slice((at - range.start) as usize, &mut bytes);
            self.ask(at, Wish::Write(bytes, flags), priority).await.0?;
            at += length;
        }
        Ok(())
    }

    async fn zero(&self, range: Range<u64>, may_unmap: bool, priority: Priority) -> IoResult {
        let first_block = range.start.next_multiple_of(self.block_bytes).min(range.end);
        let last_block = self.block_start(range.end).max(first_block);
        for part in [range.start..first_block, last_block..range.end] {
            if !part.is_empty() {
                let zeros = AlignedBuf::zeroed((part.end - part.start) as usize);
                self.ask(part.start, Wish::Write(zeros, OpFlags::NONE), priority).await.0?;
            }
        }
        let length = last_block - first_block;
        match length {
            0 => Ok(()),
            _ => self.ask(first_block, Wish::Zero { length, may_unmap }, priority).await.0,
        }
    }
}

/// A thread's access to the ring's thread.
struct RemoteQueue {
    remote: Arc<Remote>,
    /// Whether writes are refused.
    refuses: bool,
    /// `None` for a queue that blocks.
    ctx: Option<Rc<dyn ReactorCtx>>,
}

impl FileQueue for RemoteQueue {
    fn push(&self, FileIo { op, priority, done }: FileIo) {
        if let Some(error) = op.refused_when_read_only().filter(|_| self.refuses) {
            return done.complete(Err(error));
        }
        let remote = Arc::clone(&self.remote);
        let work = async move { done.complete(remote.perform(op, priority).await) };
        match &self.ctx {
            Some(ctx) => ctx.spawn(Task::new(work)),
            None => block_on(work),
        }
    }

    fn run_aside(&self, work: Work) {
        run_aside_or_here(self.ctx.as_ref(), &self.remote, work);
    }
}

/// A call in progress.
struct Active {
    /// The range that it touches, in whole blocks.
    range: Range<u64>,
    changes: bool,
    /// A write of incomplete blocks: its bytes go into the blocks that are being read.
    patch: Option<(usize, AlignedBuf, OpFlags)>,
    buf: IoBuf,
    priority: Priority,
    answer: Arc<Answer>,
}

/// The ring's side: carries out all calls.
struct Server {
    received: Receiver<Call>,
    queue: Box<dyn DiskQueue>,
    block_bytes: u64,
    waiting: VecDeque<Call>,
    /// Calls by tag; `None` if a tag is free.
    active: Vec<Option<Active>>,
    done: Vec<Completion>,
}

impl Server {
    /// Returns the range of a call in whole blocks.
    fn range(&self, call: &Call) -> Range<u64> {
        let length = match &call.wish {
            Wish::Read(data) | Wish::Write(data, _) => data.len() as u64,
            Wish::Zero { length, .. } | Wish::Discard { length } => *length,
            Wish::Flush => 0,
        };
        let start = call.offset - call.offset % self.block_bytes;
        start..(call.offset + length).next_multiple_of(self.block_bytes)
    }

    /// Whether a call must wait. Overlapping calls that change the disk exclude each other if one changes parts of
    /// blocks.
    fn must_wait(&self, call: &Call) -> bool {
        let range = self.range(call);
        let is_part = matches!(&call.wish, Wish::Write(data, _) if range.end - range.start != data.len() as u64);
        let changes = !matches!(call.wish, Wish::Read(_) | Wish::Flush);
        changes
            && self.active.iter().flatten().any(|other| {
                let overlaps = other.range.start < range.end && range.start < other.range.end;
                overlaps && other.changes && (is_part || other.patch.is_some())
            })
    }

    fn begin(&mut self, Call { offset, wish, priority, answer }: Call, range: Range<u64>) {
        let slot = self.active.iter().position(Option::is_none).unwrap_or_else(|| {
            self.active.push(None);
            self.active.len() - 1
        });
        let changes = !matches!(wish, Wish::Read(_) | Wish::Flush);
        let whole_bytes = (range.end - range.start) as usize;
        let empty = IoBuf::empty;
        let (op, buf, patch) = match wish {
            Wish::Read(data) => {
                let buf = IoBuf::from_aligned(data);
                (Op::Read { offset, data: buf.whole(), priority }, buf, None)
            }
            Wish::Write(data, flags) if data.len() == whole_bytes => {
                let buf = IoBuf::from_aligned(data);
                (Op::Write { offset, data: buf.whole(), flags, priority }, buf, None)
            }
            Wish::Write(data, flags) => {
                let buf = IoBuf::zeroed(whole_bytes);
                let patch = Some(((offset - range.start) as usize, data, flags));
                (Op::Read { offset: range.start, data: buf.whole(), priority }, buf, patch)
            }
            Wish::Zero { length, may_unmap } => {
                (Op::WriteZeroes { offset, length, may_unmap, flags: OpFlags::NONE }, empty(), None)
            }
            Wish::Discard { length } => (Op::Discard { offset, length }, empty(), None),
            Wish::Flush => (Op::Flush, empty(), None),
        };
        if let Some(place) = self.active.get_mut(slot) {
            *place = Some(Active { range, changes, patch, buf, priority, answer });
        }
        self.queue.submit(slot as u64, op);
    }

    fn end(&mut self, Completion { tag, result }: Completion) {
        let Some(place) = self.active.get_mut(tag as usize) else { return };
        let Some(mut active) = place.take() else { return };
        // The second half of a read-modify-write. The empty rest of the patch keeps others away.
        if let Some((skip, bytes, flags)) = &mut active.patch
            && result.is_ok()
            && !bytes.is_empty()
        {
            active.buf.whole().copy_from_slice(*skip, bytes);
            *bytes = AlignedBuf::zeroed(0);
            let (offset, data) = (active.range.start, active.buf.whole());
            let op = Op::Write { offset, data, flags: *flags, priority: active.priority };
            *place = Some(active);
            return self.queue.submit(tag, op);
        }
        active.answer.give(result, reclaim(active.buf));
    }
}

impl Poller for Server {
    fn poll(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let mut works = self.queue.harvest(&mut done) > 0;
        done.drain(..).for_each(|completion| self.end(completion));
        self.done = done;
        self.waiting.extend(self.received.try_iter());
        // First come, first served: a call that has to wait also holds back later ones.
        while let Some(call) = self.waiting.front()
            && !self.must_wait(call)
            && let range = self.range(call)
            && let Some(call) = self.waiting.pop_front()
        {
            self.begin(call, range);
            works = true;
        }
        works
    }

    fn arm(&mut self) -> bool {
        self.poll()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // All calls end, so that nobody waits for ever.
        let active = self.active.drain(..).flatten().map(|active| active.answer);
        let waiting = self.waiting.drain(..).chain(self.received.try_iter()).map(|call| call.answer);
        active.chain(waiting).for_each(|answer| answer.give(Err(IoError::EIO), AlignedBuf::zeroed(0)));
    }
}
