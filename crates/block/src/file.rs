//! Files as images see them. An engine (or the simulator) implements [`File`] and [`FileQueue`]. A push never waits. Its
//! end is reported once, on the same thread, through its [`Done`].

use crate::aside::{Work, aside};
use crate::disk::{Lifetime, Topology};
use crate::done::{Done, WaitForIo, Waiter};
use crate::{IoError, IoErrorKind, IoResult, MapPiece, Priority, ReactorCtx, Result};
use memory::{BufferAccount, MappedRange, PoolRc, Window, to_usize};
use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

/// Whether a file is locked, so that we and other programs see each other's use of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locks {
    /// The file is locked.
    Held,
    /// The file is not locked, because no lock was asked for.
    NotWanted,
    /// The file should be locked, but its file system has no locks.
    Lacking,
}

/// The properties and abilities of a file.
#[derive(Debug, Clone)]
pub struct FileInfo {
    /// The name in messages: the path, or its substitute.
    pub name: String,
    /// Length in bytes when the file was opened (a block device's size).
    pub length_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Offsets and lengths that go to the storage without read-modify-write are multiples of this. The file serves any
    /// offset and length all the same.
    pub offset_alignment_bytes: u32,
    /// Memory at this alignment goes to the storage without a bounce buffer.
    pub memory_alignment_bytes: u32,
    /// Whether [`FileOp::Discard`] gives space back to the host.
    pub can_discard: bool,
    /// Whether a range after a successful [`FileOp::Discard`] reads as zeros (a hole).
    pub discard_zeroes: bool,
    /// Whether [`FileOp::WriteZeroes`] costs less than writing zeros.
    pub fast_zeroes: bool,
    /// A block device: writing does not change its length.
    pub block_device: bool,
    /// Whether writing past the end makes the file longer, with zeros between.
    pub can_grow: bool,
    /// Whether it is locked against other programs.
    pub locks: Locks,
    /// The file lies in memory, and reactors copy its bytes themselves. More than one request in flight then gains
    /// nothing.
    pub in_memory: bool,
    /// The engine, the cache mode, and why they were chosen, in one line.
    pub engine: String,
}

/// An open file, shared by all reactors.
pub trait File: Send + Sync + Debug {
    /// Returns the file's properties and abilities.
    fn info(&self) -> &FileInfo;

    /// Returns the file's length at this moment, in bytes.
    fn length_bytes(&self) -> Result<u64>;

    /// Returns the sizes to align to, as the device behind the file says; zeros if nothing is known.
    fn topology(&self) -> Topology {
        Topology::default()
    }

    /// Whether a write overwrites old data in place: the file is on this host. Copies that a file system or a device
    /// keeps by itself do not count.
    fn overwrites_in_place(&self) -> bool {
        false
    }

    /// Returns the present wear of the device behind the file, if it is known. It may wait.
    fn lifetime(&self) -> Option<Lifetime> {
        None
    }

    /// Returns how much space the contents take on the storage, in bytes. `None` if the file cannot tell.
    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Returns whether the bytes from `offset` on are a hole (and so read as zeros), and for how many of at most
    /// `length` bytes this holds. A file that cannot tell says that everything is data.
    fn hole_at(&self, offset: u64, length: u64) -> Result<(bool, u64)> {
        let _ = offset;
        Ok((false, length))
    }

    /// As [`Self::hole_at`], for callers that count granules with any data. A hole behind data may count as data up to
    /// the granule's end. This is cheaper if the host looks for the end of data page by page.
    fn hole_or_granule_at(&self, offset: u64, length: u64, granule_bytes: u64) -> Result<(bool, u64)> {
        let _ = granule_bytes;
        self.hole_at(offset, length)
    }

    /// Maps the bytes of a range in the host's memory: appends its pieces and returns `true`. Returns `false` if the
    /// bytes are not there; `pieces` may then hold anything. `past_end` decides about bytes behind the end. Does not
    /// wait.
    fn map(&self, offset: u64, length_bytes: usize, past_end: PastEnd, pieces: &mut Vec<MapPiece>) -> bool {
        let _ = (offset, length_bytes, past_end, pieces);
        false
    }

    /// Whether [`File::map_reserved`] may map anything. Cheap.
    fn can_map_reserved(&self) -> bool {
        false
    }

    /// Maps a range for writing. Its space is reserved, so writing there needs no more. Flushes of the file cover these
    /// writes.
    fn map_reserved(&self, offset: u64, length_bytes: usize) -> Option<MappedRange> {
        let _ = (offset, length_bytes);
        None
    }

    /// Opens a queue for one reactor's thread. Cheap after the first on a reactor.
    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>>;

    /// Opens a queue that carries out each push before it returns, on any thread. For opening images and for tools.
    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>>;

    /// Returns the buffer account that requests of the file use, and those of the disk in it.
    fn buffers(&self) -> &BufferAccount {
        &BufferAccount::UNLIMITED
    }

    /// Gives up requests in flight, if the file can: they fail soon, and so do later ones. For a disk that is removed
    /// although its storage hangs. Returns whether the file can do so.
    fn cancel(&self) -> bool {
        false
    }

    /// Returns the host's device and inode numbers, without a look at the storage; `None` if the file is not on this host.
    fn identity(&self) -> Option<(u64, u64)> {
        None
    }

    /// Changes the file's locks: to those of a file that is written to, or to those of one that is only read. There is no
    /// moment without locks. Fails if somebody else uses the file in a way that contradicts it. For a locked file that is
    /// also open without locks, for writing, in this program. A file without locks has nothing to change.
    fn lock_again(&self, for_writing: bool) -> Result<()> {
        let _ = for_writing;
        Ok(())
    }

    /// Returns the descriptor from which the host can copy by itself; `None` if it cannot or should not.
    fn copy_source(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A queue for operations on one file, on one thread.
pub trait FileQueue {
    /// Takes one operation. Does not wait (except on a queue from [`File::open_blocking`]). `io.done` is completed
    /// exactly once, perhaps before this returns. The operation's window is held until the kernel is done with it,
    /// whatever happens to the owner of `done`.
    ///
    /// Any offset and length works (see [`FileInfo::offset_alignment_bytes`]). Short reads and writes are resumed or
    /// failed, never reported as success.
    fn push(&self, io: FileIo);

    /// Lets the host copy from another file, without the bytes passing through our memory. The file system may make a
    /// reflink. `done` is completed as for a push. If the host does not copy, the error is Unsupported or the kernel's.
    /// Part of the range may have been written then, and the caller moves all of it itself.
    fn copy_from(&self, copy: CopyRange, done: Done) {
        drop(copy);
        done.complete(Err(IoError::new(IoErrorKind::Unsupported)));
    }

    /// Runs `work` for a request of this file on a thread that does not hold up the reactor. Files take turns. A queue
    /// without such a thread runs the work at once.
    fn run_aside(&self, work: Work) {
        work();
    }
}

/// A part of another file, and its target.
#[derive(Debug, Clone)]
pub struct CopyRange {
    /// The file to copy from.
    pub source: Arc<dyn File>,
    /// The first byte in the source.
    pub source_offset: u64,
    /// The first byte in the target.
    pub offset: u64,
    /// The length in bytes.
    pub length_bytes: u64,
}

/// The result of reading behind the end of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PastEnd {
    /// Zeros (a qcow2 cluster that was allocated but never written).
    Zeros,
    /// An I/O error, because the bytes should be there.
    Fails,
}

impl PastEnd {
    /// Returns how many bytes of `data` the file has, for a read from `offset` on in a file of `file_bytes`. The others
    /// become zeros, or the read fails.
    pub fn settle(self, offset: u64, data: &Window, file_bytes: u64) -> IoResult<u64> {
        let length = data.length_bytes() as u64;
        let there = file_bytes.saturating_sub(offset).min(length);
        if there == length {
            return Ok(there);
        }
        match self {
            Self::Zeros => {
                let skip = to_usize(there);
                data.slice(skip, data.length_bytes().saturating_sub(skip)).fill(0);
                Ok(there)
            }
            Self::Fails => Err(IoError::EIO),
        }
    }
}

/// One operation on a file. Offsets and lengths are bytes of the file.
#[derive(Debug)]
pub enum FileOp {
    /// Fills `data`.
    Read {
        /// First byte.
        offset: u64,
        /// The memory to fill.
        data: Window,
        /// What to do about bytes behind the end.
        past_end: PastEnd,
    },
    /// Stores `data`. Grows the file if it can grow.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes to store.
        data: Window,
        /// Whether the data are durable before the operation completes.
        fua: bool,
    },
    /// When it completes, all writes that completed before are durable, and so is the length needed to read them.
    Flush,
    /// Gives space back. Fails with Unsupported if the file cannot. The length of the file does not change.
    Discard {
        /// First byte.
        offset: u64,
        /// The length in bytes.
        length: u64,
    },
    /// Makes the range read as zeros. Grows the file if the range ends behind its end. Always works if writing does.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// The length in bytes.
        length: u64,
        /// May become a hole.
        may_unmap: bool,
    },
    /// Makes the file exactly this long; added space reads as zeros.
    SetLength {
        /// The new length.
        length: u64,
    },
}

/// An operation, and the receiver of its result.
#[derive(Debug)]
pub struct FileIo {
    /// What to do.
    pub op: FileOp,
    /// The urgency of a read or a write. An engine whose calls are made by threads ignores it: threads have a priority
    /// of their own.
    pub priority: Priority,
    /// Receives the result, exactly once.
    pub done: Done,
}

impl FileIo {
    /// Makes an operation without a priority.
    #[inline]
    #[must_use]
    pub fn new(op: FileOp, done: Done) -> Self {
        Self { op, priority: Priority::NONE, done }
    }
}

impl dyn FileQueue {
    /// Pushes `op` now and returns a future of its result. The operation happens whether or not the future is awaited.
    pub fn start(&self, op: FileOp) -> impl Future<Output = IoResult> + use<> {
        self.start_with(op, Priority::NONE, Waiter::new())
    }

    /// As `start`, with a priority.
    pub fn start_at(&self, op: FileOp, priority: Priority) -> impl Future<Output = IoResult> + use<> {
        self.start_with(op, priority, Waiter::new())
    }

    /// As `start`, and keeps `value` until the operation has ended, even if the future is dropped before. In this way a
    /// write to space that must not be reused meanwhile keeps its queue's part in the image's [`crate::Epochs`].
    pub fn start_keeping(&self, op: FileOp, value: Rc<dyn Any>) -> impl Future<Output = IoResult> + use<> {
        self.start_keeping_at(op, Priority::NONE, value)
    }

    /// As `start_keeping`, with a priority.
    pub fn start_keeping_at(
        &self,
        op: FileOp,
        priority: Priority,
        value: Rc<dyn Any>,
    ) -> impl Future<Output = IoResult> + use<> {
        self.start_with(op, priority, Waiter::keeping(value))
    }

    /// As `start_keeping`, for a copy that the host makes.
    pub fn start_copy(&self, copy: CopyRange, value: Rc<dyn Any>) -> impl Future<Output = IoResult> + use<> {
        let waiter = Waiter::keeping(value);
        self.copy_from(copy, Done::Waiter(waiter.clone()));
        WaitForIo(waiter)
    }

    /// Computes something for a request on another thread. Fails if the work was given up.
    pub fn compute<T, F>(&self, compute: F) -> impl Future<Output = IoResult<T>> + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (work, value) = aside(compute);
        self.run_aside(work);
        value
    }

    fn start_with(
        &self,
        op: FileOp,
        priority: Priority,
        waiter: PoolRc<Waiter>,
    ) -> impl Future<Output = IoResult> + use<> {
        self.push(FileIo { op, priority, done: Done::Waiter(waiter.clone()) });
        WaitForIo(waiter)
    }
}

impl FileOp {
    /// Returns the error with which a read-only file refuses the operation; `None` if it serves it.
    #[must_use]
    pub fn refused_when_read_only(&self) -> Option<IoError> {
        let writes = !matches!(self, Self::Read { .. } | Self::Flush);
        writes.then_some(IoError::new(IoErrorKind::ReadOnly))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    struct Holding(RefCell<Vec<FileIo>>);

    impl FileQueue for Holding {
        fn push(&self, io: FileIo) {
            self.0.borrow_mut().push(io);
        }
    }

    #[test]
    fn what_an_operation_keeps_outlives_the_task_that_started_it() {
        let holding = Rc::new(Holding(RefCell::default()));
        let queue: Rc<dyn FileQueue> = Rc::clone(&holding) as _;
        let kept: Rc<dyn Any> = Rc::new(());
        drop(queue.start_keeping(FileOp::Flush, Rc::clone(&kept)));
        assert_eq!(Rc::strong_count(&kept), 2, "the operation is still in flight");
        for io in holding.0.take() {
            io.done.complete(Ok(()));
        }
        assert_eq!(Rc::strong_count(&kept), 1);
    }

    #[test]
    fn what_lies_behind_the_end_is_zeros_or_an_error() {
        let settle = |past_end: PastEnd, offset, file_bytes| {
            let data = memory::IoBuf::zeroed(8).whole();
            data.fill(7);
            (past_end.settle(offset, &data, file_bytes), data.to_vec())
        };
        assert_eq!(settle(PastEnd::Fails, 4, 12), (Ok(8), vec![7; 8]));
        assert_eq!(settle(PastEnd::Fails, 4, 11).0, Err(IoError::EIO));
        assert_eq!(settle(PastEnd::Zeros, 4, 7), (Ok(3), vec![7, 7, 7, 0, 0, 0, 0, 0]));
        assert_eq!(settle(PastEnd::Zeros, 9, 7), (Ok(0), vec![0; 8]));
    }
}
