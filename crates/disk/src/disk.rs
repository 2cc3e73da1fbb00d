//! An open disk and its thread.

use crate::buffer::Buffer;
use crate::operation::Operation;
use block::{
    DiskIo, Error, ErrorKind, IoResult, Op, OpFlags, ReactorCtx, Result, SECTOR_BYTES, Task, WriteMap, reclaim,
    run_and_wait,
};
use drive::OpenedDisk;
use engine::{Reactor, ReactorConfig, ReactorThread};
use memory::{AlignedBuf, IoBuf};
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// An open disk. Any number of threads may use it at once.
///
/// Offsets and lengths are in bytes, in multiples of 512. Concurrent operations end in any order; overlapping ones may
/// be carried out in any order. A write is durable when a flush that began after the write's end has ended.
///
/// Dropping a disk closes it and waits for running operations. [`Disk::close`] also returns whether that succeeded.
pub struct Disk {
    opened: Option<OpenedDisk>,
    thread: Option<ReactorThread>,
    running: Arc<Running>,
    name: Arc<str>,
}

/// The number of running operations.
#[derive(Default)]
struct Running {
    count: Mutex<usize>,
    none: Condvar,
}

/// Counts one running operation.
struct Ticket(Arc<Running>);

impl Running {
    fn enter(this: &Arc<Self>) -> Ticket {
        *this.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Ticket(Arc::clone(this))
    }

    fn wait_for_none(&self) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.none.wait_while(count, |count| *count > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut count = self.0.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

thread_local! {
    /// The queue of the disk on this thread.
    static QUEUE: RefCell<Option<Rc<DiskIo>>> = const { RefCell::new(None) };
}

impl Disk {
    pub(crate) fn start(opened: OpenedDisk, name: String) -> Result<Self> {
        let mut config = ReactorConfig::default();
        config.name = "ringdisk-disk".to_owned();
        let thread = Reactor::spawn(config)?;
        let disk = Arc::clone(&opened.disk);
        let open = move |ctx: &Rc<dyn ReactorCtx>| {
            let io = DiskIo::open(&*disk, ctx)?;
            QUEUE.set(Some(io));
            Ok(())
        };
        // From here on an error closes the disk.
        let running = Arc::default();
        let started = Self { opened: Some(opened), thread: Some(thread), running, name: name.into() };
        started.on_thread(open)??;
        Ok(started)
    }

    /// Returns the size of the disk in bytes, as a guest would see it.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.opened.as_ref().map_or(0, |opened| opened.disk.info().size_bytes)
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.opened.as_ref().is_none_or(|opened| opened.disk.info().read_only)
    }

    /// Reads `length_bytes` from `offset` on.
    pub fn read(&self, offset: u64, length_bytes: usize) -> Operation<Buffer> {
        if let Err(error) = self.check("read", offset, length_bytes as u64) {
            return Operation::failed(error);
        }
        // Allocated here: if it is too large for memory, the caller fails and not the disk's thread.
        let buf = AlignedBuf::zeroed(length_bytes);
        self.start_operation("read", offset, move |io| async move {
            let shared = IoBuf::from_aligned(buf);
            let ended = io.run(Op::read(offset, shared.whole())).await;
            ended.map(|()| Buffer(reclaim(shared)))
        })
    }

    /// Writes `bytes` to the disk from `offset` on.
    pub fn write(&self, offset: u64, bytes: impl Into<Buffer>) -> Operation<()> {
        let Buffer(buf) = bytes.into();
        if let Err(error) = self.check("write", offset, buf.len() as u64) {
            return Operation::failed(error);
        }
        self.start_operation("write", offset, move |io| async move {
            let data = IoBuf::from_aligned(buf).whole();
            io.run(Op::write(offset, data, OpFlags::NONE)).await
        })
    }

    /// Makes every write durable that ended before this call.
    pub fn flush(&self) -> Operation<()> {
        self.start_operation("flush", 0, |io| async move { io.run(Op::Flush).await })
    }

    /// Gives space back to the host. The range may then read as zeros, or as any old data.
    pub fn discard(&self, offset: u64, length_bytes: u64) -> Operation<()> {
        if let Err(error) = self.check("discard", offset, length_bytes) {
            return Operation::failed(error);
        }
        self.start_operation("discard", offset, move |io| async move {
            io.run(Op::Discard { offset, length: length_bytes }).await
        })
    }

    /// Makes the range read as zeros, without using space if the format and the host can do that.
    pub fn write_zeroes(&self, offset: u64, length_bytes: u64) -> Operation<()> {
        if let Err(error) = self.check("zero", offset, length_bytes) {
            return Operation::failed(error);
        }
        self.start_operation("zero", offset, move |io| async move {
            io.run(Op::WriteZeroes { offset, length: length_bytes, may_unmap: true, flags: OpFlags::NONE }).await
        })
    }

    /// Waits for running operations, makes everything durable, and closes the image.
    pub fn close(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.running.wait_for_none();
        let queue_closed = run_and_wait(&*thread.handle(), |_| drop(QUEUE.take()));
        let stopped = thread.stop();
        let closed = self.opened.take().map_or(Ok(()), |opened| opened.close());
        queue_closed.and(stopped).and(closed)
    }

    pub(crate) fn image(&self) -> Option<&dyn block::Disk> {
        self.opened.as_ref().map(|opened| &*opened.disk)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn map_failed(&self, what: &str, offset: u64, why: &str) -> Error {
        Error::new(ErrorKind::BadOption, format!("cannot {what} at byte {offset} of '{}': {why}", self.name))
    }

    pub(crate) fn commit_map(&self, offset: u64, map: WriteMap) -> Operation<()> {
        self.start_operation("commit a map", offset, move |io| async move { io.commit(map).await })
    }

    pub(crate) fn check(&self, what: &str, offset: u64, length_bytes: u64) -> Result<()> {
        let fails = |why: String| {
            let message = format!("cannot {what} {length_bytes} bytes at {offset} of '{}': {why}", self.name);
            Err(Error::new(ErrorKind::BadOption, message))
        };
        let size = self.size_bytes();
        if !offset.is_multiple_of(SECTOR_BYTES) || !length_bytes.is_multiple_of(SECTOR_BYTES) {
            return fails(format!("offset and length have to be multiples of {SECTOR_BYTES}"));
        }
        match offset.checked_add(length_bytes) {
            Some(end) if end <= size => Ok(()),
            _ => fails(format!("the disk has {size} bytes")),
        }
    }

    /// Begins an operation on the disk's thread.
    fn start_operation<T: Send + 'static, F: Future<Output = IoResult<T>> + 'static>(
        &self,
        what: &'static str,
        offset: u64,
        run: impl FnOnce(Rc<DiskIo>) -> F + Send + 'static,
    ) -> Operation<T> {
        let (operation, completer) = Operation::new();
        let (name, ticket) = (Arc::clone(&self.name), Running::enter(&self.running));
        let job = Box::new(move |ctx: &Rc<dyn ReactorCtx>| {
            // Without a queue the completer is dropped, which reports that the disk is closed.
            let Some(io) = QUEUE.with_borrow(Clone::clone) else { return };
            ctx.spawn(Task::new(async move {
                let ended = run(io).await.map_err(|error| {
                    Error::with_source(ErrorKind::Io, format!("cannot {what} at byte {offset} of '{name}'"), error)
                });
                completer.complete(ended);
                drop(ticket);
            }));
        });
        let begun = self.thread.as_ref().map(|thread| thread.handle().run(job));
        // A job that was refused is dropped, with its completer.
        drop(begun);
        operation
    }

    fn on_thread<T: Send + 'static>(&self, job: impl FnOnce(&Rc<dyn ReactorCtx>) -> T + Send + 'static) -> Result<T> {
        let closed = || Error::new(ErrorKind::Io, "the disk is closed");
        run_and_wait(&*self.thread.as_ref().ok_or_else(closed)?.handle(), job)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!("{error}");
        }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("name", &self.name).field("size_bytes", &self.size_bytes()).finish()
    }
}
