//! Lets a job give up calls on storage that hangs.
//!
//! A job makes calls that block. A thread that waits for its storage cannot be interrupted. So each file of such a job
//! has a thread for its calls. The job waits for that thread, or until somebody gives up. The call then ends with an
//! error, and the thread stays until its storage answers. Bytes are copied on the way, so a late read lands in the
//! thread's own buffer.
//!
//! A late write still lands at its place in the file. So a write is given up only if nobody uses the file afterwards:
//! the target of a copy. A write to a layer of the disk is never abandoned: the job's thread waits for its own writes, and
//! guests' writes go on in tasks of their own ([`LateCalls`]). A write keeps its space and its locks until it has ended.

use super::layer::Layer;
use block::{
    Done, Error, ErrorKind, File, FileIo, FileOp, FileQueue, IoError, IoResult, MetaIo, PastEnd, ReactorCtx, Result,
    Task, WaitList, Waiter, block_on, reclaim,
};
use memory::{AlignedBuf, IoBuf};
use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::task::Poll;
use std::time::Duration;

/// How often a waiting job checks whether its calls were given up.
const LOOK: Duration = Duration::from_millis(50);
/// After so many waits, those that are over are forgotten.
const WAITS_KEPT: u64 = 1024;
/// ETIMEDOUT.
const TIMED_OUT: i32 = 110;

/// Says whether the calls of a job are given up.
#[derive(Debug, Default)]
pub(crate) struct GiveUp {
    is_given_up: AtomicBool,
    /// Tasks on reactors that wait for the same storage.
    tasks: WaitList,
    /// How often somebody began to wait.
    waits: AtomicU64,
}

/// Which calls end when they are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    Reads,
    All,
}

impl GiveUp {
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
        self.tasks.wake_all();
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }

    /// Drops the wakers of tasks that have stopped waiting.
    pub(crate) fn tidy(&self) {
        self.tasks.wake_all();
    }

    /// Awaits `call`. Fails as soon as the calls are given up and `may_end` allows this one to end.
    pub(crate) async fn or_end<T>(
        this: Option<&Self>,
        may_end: impl Fn() -> bool,
        call: impl Future<Output = IoResult<T>>,
    ) -> IoResult<T> {
        let Some(this) = this else { return call.await };
        if this.waits.fetch_add(1, Ordering::Relaxed) % WAITS_KEPT == WAITS_KEPT - 1 {
            this.tidy();
        }
        let may_end = &may_end;
        let mut call = pin!(call);
        let mut end = pin!(this.tasks.until(move || (this.is_given_up() && may_end()).then_some(())));
        std::future::poll_fn(|context| match call.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => end.as_mut().poll(context).map(|()| Err(given_up())),
        })
        .await
    }
}

/// Writes and flushes on reactors that nobody waits for any more, and that have to end before anything of theirs is let go.
#[derive(Default)]
pub(crate) struct LateCalls {
    count: AtomicU64,
    ended: WaitList,
}

impl LateCalls {
    /// Runs a call in a task of its own, which goes on if its end is not waited for.
    pub(crate) fn run<C: Future<Output = IoResult> + 'static>(
        this: &Arc<Self>,
        ctx: &dyn ReactorCtx,
        call: C,
    ) -> impl Future<Output = IoResult> + use<C> {
        this.count.fetch_add(1, Ordering::AcqRel);
        let (waiter, late) = (Waiter::new(), LateCall(Arc::clone(this)));
        let done = Done::Waiter(waiter.clone());
        ctx.spawn(Task::new(async move {
            let result = call.await;
            drop(late);
            done.complete(result);
        }));
        Waiter::wait(&waiter)
    }

    /// Waits until all have ended.
    pub(crate) async fn end(&self) {
        self.ended.until(|| (self.count.load(Ordering::Acquire) == 0).then_some(())).await;
    }
}

/// Counted until it is dropped.
struct LateCall(Arc<LateCalls>);

impl Drop for LateCall {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.ended.wake_all();
        }
    }
}

pub(crate) fn given_up() -> IoError {
    IoError::from_errno(TIMED_OUT)
}

/// Opens a layer's files for calls that block until they end or are given up.
pub(crate) fn open_blocking(layer: &Layer, give_up: Option<&Arc<GiveUp>>, ends: Ends) -> Result<MetaIo> {
    let Some(give_up) = give_up else { return layer.open_blocking() };
    let meta = MetaIo::new(Calls::begin(&layer.file, give_up, ends)?);
    match &layer.data {
        Some(data) => Ok(meta.with_data(Calls::begin(&data.file, give_up, ends)?)),
        None => Ok(meta),
    }
}

/// An operation that owns its bytes, so that another thread can carry it out.
enum Call {
    Read {
        offset: u64,
        length_bytes: usize,
        past_end: PastEnd,
    },
    Write {
        offset: u64,
        data: AlignedBuf,
        fua: bool,
    },
    /// A call without bytes.
    Other(Bare),
}

#[derive(Clone, Copy)]
enum Bare {
    Flush,
    Discard { offset: u64, length: u64 },
    WriteZeroes { offset: u64, length: u64, may_unmap: bool },
    SetLength { length: u64 },
}

/// A call's result; a read's bytes.
type End = IoResult<Option<AlignedBuf>>;

impl Call {
    fn of(op: &FileOp) -> IoResult<Self> {
        Ok(match op {
            FileOp::Read { offset, data, past_end } => {
                Self::Read { offset: *offset, length_bytes: data.length_bytes(), past_end: *past_end }
            }
            FileOp::Write { offset, data, fua } => {
                let mut copy = AlignedBuf::try_zeroed(data.length_bytes())?;
                data.copy_to_slice(0, &mut copy);
                Self::Write { offset: *offset, data: copy, fua: *fua }
            }
            FileOp::Flush => Self::Other(Bare::Flush),
            FileOp::Discard { offset, length } => Self::Other(Bare::Discard { offset: *offset, length: *length }),
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                Self::Other(Bare::WriteZeroes { offset: *offset, length: *length, may_unmap: *may_unmap })
            }
            FileOp::SetLength { length } => Self::Other(Bare::SetLength { length: *length }),
        })
    }

    /// Carries out the call. Blocks.
    fn carry_out(self, queue: &dyn FileQueue) -> End {
        let run = |op| {
            let waiter = Waiter::new();
            queue.push(FileIo::new(op, Done::Waiter(waiter.clone())));
            block_on(Waiter::wait(&waiter))
        };
        match self {
            Self::Read { offset, length_bytes, past_end } => {
                let buf = IoBuf::try_zeroed(length_bytes)?;
                run(FileOp::Read { offset, data: buf.whole(), past_end })?;
                Ok(Some(reclaim(buf)))
            }
            Self::Write { offset, data, fua } => {
                run(FileOp::Write { offset, data: IoBuf::from_aligned(data).whole(), fua }).map(|()| None)
            }
            Self::Other(bare) => run(match bare {
                Bare::Flush => FileOp::Flush,
                Bare::Discard { offset, length } => FileOp::Discard { offset, length },
                Bare::WriteZeroes { offset, length, may_unmap } => FileOp::WriteZeroes { offset, length, may_unmap },
                Bare::SetLength { length } => FileOp::SetLength { length },
            })
            .map(|()| None),
        }
    }
}

/// The calls of one file, and the thread that makes them.
struct Calls {
    calls: Sender<Call>,
    ends: Receiver<End>,
    /// The end of a call that was given up is still to come.
    is_out_of_step: Cell<bool>,
    give_up: Arc<GiveUp>,
    may_end: Ends,
}

impl Calls {
    fn begin(file: &Arc<dyn File>, give_up: &Arc<GiveUp>, may_end: Ends) -> Result<Rc<dyn FileQueue>> {
        let ((calls, asked), (end, ends), file) = (channel::<Call>(), channel(), Arc::clone(file));
        let (opened, is_open) = channel();
        let run = move || {
            // The job that asks may be gone at any time.
            let queue = match file.open_blocking() {
                Ok(queue) => queue,
                Err(error) => return opened.send(Err(error)).unwrap_or(()),
            };
            opened.send(Ok(())).unwrap_or(());
            for call in asked {
                if end.send(call.carry_out(&*queue)).is_err() {
                    return;
                }
            }
        };
        let started = std::thread::Builder::new().name("calls".to_owned()).spawn(run);
        started.map_err(|error| Error::io("cannot start a thread", error))?;
        let panicked = || Error::new(ErrorKind::Io, "a file could not be opened once more");
        is_open.recv().map_err(|_| panicked())??;
        let is_out_of_step = Cell::new(false);
        Ok(Rc::new(Self { calls, ends, is_out_of_step, give_up: Arc::clone(give_up), may_end }))
    }

    fn wait(&self, op: &FileOp) -> IoResult {
        let may_end = self.may_end == Ends::All || matches!(op, FileOp::Read { .. });
        // No call follows one that was given up: it would get the earlier call's end.
        if self.give_up.is_given_up() && (may_end || self.is_out_of_step.get()) {
            return Err(given_up());
        }
        self.calls.send(Call::of(op)?).map_err(|_| IoError::EIO)?;
        let end = loop {
            match self.ends.recv_timeout(LOOK) {
                Ok(end) => break end?,
                Err(RecvTimeoutError::Disconnected) => return Err(IoError::EIO),
                Err(RecvTimeoutError::Timeout) if may_end && self.give_up.is_given_up() => {
                    self.is_out_of_step.set(true);
                    return Err(given_up());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        if let (FileOp::Read { data, .. }, Some(found)) = (op, end) {
            data.copy_from_slice(0, &found);
        }
        Ok(())
    }
}

impl FileQueue for Calls {
    fn push(&self, FileIo { op, done, .. }: FileIo) {
        done.complete(self.wait(&op));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_given_up_ends_and_no_later_one_gets_its_end() {
        let (calls, asked) = channel();
        let (end, ends) = channel();
        let give_up = Arc::new(GiveUp::default());
        let its = Arc::clone(&give_up);
        let queue = Calls { calls, ends, is_out_of_step: Cell::new(false), give_up: its, may_end: Ends::Reads };
        let other = Arc::clone(&give_up);
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            other.give_up();
        });
        let data = IoBuf::zeroed(4).whole();
        let read = FileOp::Read { offset: 0, data: data.clone(), past_end: PastEnd::Zeros };
        assert_eq!(queue.wait(&read), Err(given_up()));
        later.join().unwrap();
        assert!(matches!(asked.try_recv(), Ok(Call::Read { length_bytes: 4, .. })));
        // The late end of the read changes nothing.
        end.send(Ok(Some(AlignedBuf::copy_of(&[1; 4])))).unwrap();
        assert_eq!(queue.wait(&FileOp::Flush), Err(given_up()));
        assert!(data.is_zero() && asked.try_recv().is_err());
    }

    #[test]
    fn what_may_not_end_is_waited_for_though_others_are_given_up() {
        let (calls, asked) = channel::<Call>();
        let (end, ends) = channel();
        let give_up = Arc::new(GiveUp::default());
        give_up.give_up();
        let queue = Calls { calls, ends, is_out_of_step: Cell::new(false), give_up, may_end: Ends::Reads };
        let storage = std::thread::spawn(move || {
            asked.recv().unwrap();
            std::thread::sleep(Duration::from_millis(120));
            end.send(Ok(None)).unwrap();
        });
        assert_eq!(queue.wait(&FileOp::Flush), Ok(()));
        storage.join().unwrap();
    }
}
