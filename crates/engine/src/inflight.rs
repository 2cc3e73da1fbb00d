//! Requests that an engine has taken: what they are, how a result moves them on, and the slab that owns them (and with
//! them the memory) until the kernel is done. Their contexts come from the pool.

use crate::target::QueueFile;
use block::{Done, IoError, IoErrorKind, IoResult, Priority};
use memory::{Placed, PoolBox, PoolContext, Window, pooled, room_for};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// The most bytes one call may move: the kernel's own limit, rounded down to a page so that a cut stays aligned.
pub(crate) const MAX_CALL_BYTES: usize = 0x7fff_f000;
/// The most segments one call takes (`IOV_MAX`).
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// What an engine does with a file: the primitive steps that operations are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Fill the window. The file must have at least `need_bytes` there; what is behind its end reads as zeros.
    Read { need_bytes: usize },
    /// Store the window; durable first if so.
    Write { durable: bool },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with these mode bits.
    Fallocate { mode: i32, length: u64 },
    /// `ftruncate` to the offset.
    Truncate,
    /// `BLKDISCARD` on a block device.
    DiscardBlocks { length: u64 },
    /// The kernel begins to write what the page cache has of the file.
    BeginWriteback,
    /// `copy_file_range` of `length` bytes from `from_offset` of the descriptor `from`, which the request's owner keeps
    /// open.
    CopyFrom { from: RawFd, from_offset: u64, length: u64 },
}

impl Action {
    /// Whether its success says that data are durable.
    fn makes_durable(self) -> bool {
        matches!(self, Self::Sync | Self::Write { durable: true })
    }

    /// Whether failing with `error` means that data which the page cache took may be lost.
    fn loses_data(self, error: IoError) -> bool {
        match self {
            Self::Sync => true,
            // Out of space is the write's own failure: the caller knows what was not stored. So is memory that cannot be
            // read: a guest's monitor can take it away at any time.
            Self::Write { durable } => durable && error.kind() == IoErrorKind::Io && error.errno() != libc::EFAULT,
            _ => false,
        }
    }
}

/// One action in an engine's hands.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) target: Rc<QueueFile>,
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) window: Window,
    /// Bytes moved so far.
    pub(crate) progress: usize,
    /// Counted in [`QueueFile::change_begins`].
    pub(crate) counted: bool,
    /// Of transfers that the kernel carries out; a worker's calls have the priority of its thread.
    pub(crate) priority: Priority,
    pub(crate) done: Done,
}

/// What a result means for its request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is over.
    Finished(IoResult),
    /// Submit what is left.
    Again,
    /// The kernel would have to block: let a worker do the rest.
    ToWorker,
}

const EINTR: i32 = libc::EINTR;
const EAGAIN: i32 = libc::EAGAIN;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE;

impl Request {
    /// Bytes still to move.
    pub(crate) fn left_bytes(&self) -> usize {
        self.window.length_bytes() - self.progress
    }

    /// Where the rest starts in the file.
    pub(crate) fn file_offset(&self) -> u64 {
        self.offset + self.progress as u64
    }

    /// Whether what must not wait was refused for that, in other words than `EAGAIN`: a worker may wait.
    pub(crate) fn needs_to_wait(&self, result: i32) -> bool {
        match result.wrapping_neg() {
            // What a sync tells it may tell only once.
            _ if !matches!(self.action, Action::Read { .. } | Action::Write { .. }) => return false,
            // The file takes no `RWF_NOWAIT`: from now on workers carry all out.
            libc::EOPNOTSUPP => self.target.file.nowait_was_refused(),
            // There may be some for who may wait for it. (Some kernels say so of a page cache where they mean `EAGAIN`.)
            libc::ENOMEM => {}
            _ => return false,
        }
        true
    }

    /// Takes the kernel's result: a count of bytes, or a negated error number.
    pub(crate) fn advance(&mut self, result: i32) -> Step {
        match result {
            _ if result == -EINTR => return Step::Again,
            _ if result == -EAGAIN => return Step::ToWorker,
            _ if result < 0 => return Step::Finished(Err(IoError::from_errno(result.wrapping_neg()))),
            _ => {}
        }
        let moved = result as usize;
        match self.action {
            Action::Fallocate { mode, length } => {
                if let Some(mapped) = self.target.file.mapped.as_ref().filter(|_| mode & PUNCH_HOLE != 0) {
                    mapped.was_punched(self.offset, length);
                }
                Step::Finished(Ok(()))
            }
            Action::Sync
            | Action::Truncate
            | Action::DiscardBlocks { .. }
            | Action::BeginWriteback
            | Action::CopyFrom { .. } => Step::Finished(Ok(())),
            Action::Read { need_bytes } => self.advance_read(moved, need_bytes),
            Action::Write { .. } => self.advance_write(moved),
        }
    }

    fn advance_read(&mut self, moved: usize, need_bytes: usize) -> Step {
        if moved > self.left_bytes() {
            return Step::Finished(Err(IoError::EIO));
        }
        if let Some(mapped) = &self.target.file.mapped {
            mapped.was_read(self.file_offset(), moved as u64);
        }
        self.progress += moved;
        if self.left_bytes() == 0 {
            return Step::Finished(Ok(()));
        }
        let unit = self.target.file.alignment.offset_bytes as usize;
        let excess = self.progress % unit.max(1);
        if moved > 0 && excess == 0 {
            return Step::Again;
        }
        // Nothing, or not whole units of direct I/O: this is the end of the file, unless the kernel merely gave up
        // half-way through a unit, which then is read again from its start.
        if moved > 0 && !self.target.file.ends_by(self.file_offset()) {
            self.progress -= excess;
            return if moved > excess { Step::Again } else { Step::ToWorker };
        }
        if self.progress < need_bytes {
            return Step::Finished(Err(IoError::EIO));
        }
        self.window.slice(self.progress, self.left_bytes()).fill(0);
        Step::Finished(Ok(()))
    }

    fn advance_write(&mut self, moved: usize) -> Step {
        if moved > self.left_bytes() {
            return Step::Finished(Err(IoError::EIO));
        }
        if let Some(mapped) = &self.target.file.mapped {
            mapped.was_written(self.file_offset(), moved as u64);
        }
        self.progress += moved;
        if self.left_bytes() == 0 {
            return Step::Finished(Ok(()));
        }
        if moved == 0 {
            // A write that moves nothing and names no error will not get further by repeating it.
            return Step::Finished(Err(IoError::new(IoErrorKind::NoSpace)));
        }
        let unit = self.target.file.alignment.offset_bytes as usize;
        let excess = self.progress % unit.max(1);
        self.progress -= excess;
        if moved > excess { Step::Again } else { Step::Finished(Err(IoError::EIO)) }
    }

    /// Tells the owner. The memory, the file and the sink are let go of here.
    pub(crate) fn finish(self, result: IoResult) {
        let Self { target, window, done, counted, action, .. } = self;
        drop(window);
        let lost = action.makes_durable() && target.file.page_cached && target.file.sync_lost.load(Ordering::Relaxed);
        // The kernel tells of a page that it could not write once; another sync may have been told.
        let result = if lost && result.is_ok() { Err(IoError::EIO) } else { result };
        if let Err(error) = result
            && action.loses_data(error)
            && target.file.page_cached
            && !target.file.sync_lost.swap(true, Ordering::Relaxed)
        {
            let name = &target.file.info.name;
            tracing::error!(
                "'{name}': making data durable failed ({error}); flushes fail until the file is opened anew"
            );
        }
        done.complete(result);
        if counted {
            target.change_ended();
        }
    }
}

/// The memory of one call, in the form that the kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buffers {
    Single { ptr: *mut u8, length_bytes: usize },
    Vector { ptr: *const libc::iovec, count: usize },
}

/// Room for the lists of segments of one call, short ones and such as few requests need.
struct Segments<const ROOM: usize>(Vec<libc::iovec>);

// SAFETY: between requests the list is empty, and a list of pointers is as good on any thread.
unsafe impl<const ROOM: usize> Send for Segments<ROOM> {}

impl<const ROOM: usize> PoolContext for Segments<ROOM> {
    const HELD_BYTES: usize = ROOM * size_of::<libc::iovec>();

    fn create() -> Self {
        Self(Vec::with_capacity(ROOM))
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

const FEW_SEGMENTS: usize = 64;

pooled!(Segments<FEW_SEGMENTS>, "list of up to 64 segments");
pooled!(Segments<MAX_SEGMENTS>, "list of up to 1024 segments");

/// Scratch for a request whose segments must be cut.
enum Scratch {
    None,
    Few(PoolBox<Segments<FEW_SEGMENTS>>),
    Many(PoolBox<Segments<MAX_SEGMENTS>>),
}

impl Scratch {
    /// A list with room for `count` segments (what is left of a request has no more than it had before).
    fn list(&mut self, count: usize) -> &mut Vec<libc::iovec> {
        if matches!(self, Self::None) {
            *self = if count <= FEW_SEGMENTS { Self::Few(PoolBox::take()) } else { Self::Many(PoolBox::take()) };
        }
        match self {
            Self::Many(list) => &mut list.0,
            Self::Few(list) => &mut list.0,
            Self::None => unreachable!("was taken above"),
        }
    }
}

/// What a request in an engine's hands needs: its context, from the pool.
struct InFlight {
    request: Request,
    scratch: Scratch,
}

room_for!(InFlight, "request in an engine");

/// Owns the requests in flight, by index: a table that grows to the peak. The indices are the kernel's names for
/// requests.
#[derive(Default)]
pub(crate) struct Slab {
    slots: Vec<Option<Placed<InFlight>>>,
    free: Vec<u32>,
}

impl Slab {
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { slots: Vec::with_capacity(count), free: Vec::with_capacity(count) }
    }

    /// Requests owned now.
    pub(crate) fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The most requests owned at once so far: lists of them have room for so many, so that they grow now and not when
    /// the machine happens to end many at once.
    pub(crate) fn peak(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn insert(&mut self, request: Request) -> u32 {
        let context = Some(Placed::new(InFlight { request, scratch: Scratch::None }));
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = context;
                index
            }
            None => {
                self.slots.push(context);
                self.free.reserve(self.slots.len());
                (self.slots.len() - 1) as u32
            }
        }
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Request> {
        self.slots.get(index as usize)?.as_ref().map(|context| &context.request)
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Request> {
        self.slots.get_mut(index as usize)?.as_mut().map(|context| &mut context.request)
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Request> {
        let context = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(context.into_inner().request)
    }

    /// The memory that is left to move, for one call. The pointers stay valid until the slot is prepared again or its
    /// request removed: they point into the buffer's own list, which is not refilled while the request holds a handle,
    /// or into the context's scratch.
    pub(crate) fn buffers(&mut self, index: u32) -> Buffers {
        let Some(Some(context)) = self.slots.get_mut(index as usize) else {
            return Buffers::Vector { ptr: std::ptr::null(), count: 0 };
        };
        let InFlight { request, scratch } = &mut **context;
        listed(request).unwrap_or_else(|| cut(request, scratch.list(request.window.segment_count())))
    }
}

/// As [`Slab::buffers`], with scratch of the caller's own.
pub(crate) fn buffers_of(request: &Request, iovecs: &mut Vec<libc::iovec>) -> Buffers {
    listed(request).unwrap_or_else(|| cut(request, iovecs))
}

/// The memory as the buffer itself lists it, where that is all of it.
fn listed(request: &Request) -> Option<Buffers> {
    if request.progress > 0 {
        return None;
    }
    if let Some(segment) = request.window.single_segment() {
        let length_bytes = segment.length_bytes().min(MAX_CALL_BYTES);
        return Some(Buffers::Single { ptr: segment.as_ptr(), length_bytes });
    }
    let segments = request.window.whole_segments().filter(|segments| segments.len() <= MAX_SEGMENTS)?;
    // `Segment` has the layout of an iovec.
    Some(Buffers::Vector { ptr: segments.as_ptr().cast(), count: segments.len() })
}

fn cut(request: &Request, iovecs: &mut Vec<libc::iovec>) -> Buffers {
    iovecs.clear();
    request.window.slice(request.progress, request.left_bytes()).for_each_segment(|segment| {
        if iovecs.len() < MAX_SEGMENTS && segment.length_bytes() > 0 {
            iovecs.push(segment.as_iovec());
        }
    });
    Buffers::Vector { ptr: iovecs.as_ptr(), count: iovecs.len() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheMode, EngineKind, OpenOptions};
    use memory::IoBuf;
    use std::io::Write;

    /// A read or write of `length` bytes at 0 of a file of 5000 bytes, in memory cut at byte 700.
    fn request(cache: CacheMode, action: Action, length: usize) -> Request {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 5000]).unwrap();
        let options = OpenOptions { engine: EngineKind::Threads, cache, lock: false, ..OpenOptions::default() };
        let file = crate::open::open_file(file.into(), "test", &options).unwrap();
        let memory = IoBuf::zeroed(length).whole();
        memory.fill(0xee);
        let window = IoBuf::gather(vec![memory.slice(0, 700), memory.slice(700, length - 700)]).whole();
        let target = Rc::new(QueueFile::new(std::sync::Arc::new(file), None));
        let done = Done::Sink { sink: block::Sink::new(), token: 0 };
        Request { target, action, offset: 0, window, progress: 0, counted: false, priority: Priority::NONE, done }
    }

    fn bytes_listed(request: &Request) -> usize {
        let mut scratch = Vec::new();
        match buffers_of(request, &mut scratch) {
            Buffers::Single { length_bytes, .. } => length_bytes,
            Buffers::Vector { ptr, count } => {
                // SAFETY: the list has `count` entries, in the window or in `scratch`.
                unsafe { std::slice::from_raw_parts(ptr, count) }.iter().map(|iovec| iovec.iov_len).sum()
            }
        }
    }

    #[test]
    fn only_reads_and_writes_are_tried_again_by_who_may_wait() {
        let needs_to_wait = |action, errno: i32| request(CacheMode::Writeback, action, 4096).needs_to_wait(-errno);
        for errno in [libc::ENOMEM, libc::EOPNOTSUPP] {
            assert!(needs_to_wait(Action::Read { need_bytes: 0 }, errno));
            assert!(needs_to_wait(Action::Write { durable: true }, errno));
            assert!(!needs_to_wait(Action::Sync, errno), "it may say only once that data were lost");
        }
        assert!(!needs_to_wait(Action::Read { need_bytes: 0 }, libc::EIO));
    }

    #[test]
    fn a_short_transfer_goes_on_where_it_stopped_until_all_is_moved() {
        for action in [Action::Read { need_bytes: 4096 }, Action::Write { durable: false }] {
            let mut request = request(CacheMode::Writeback, action, 4096);
            let mut left = 4096;
            for moved in [1, 698, 1, 300, 3000] {
                assert_eq!(bytes_listed(&request), left);
                assert_eq!(request.advance(moved), Step::Again);
                left -= moved as usize;
                assert_eq!(request.file_offset(), 4096 - left as u64);
            }
            assert_eq!(request.advance(-libc::EINTR), Step::Again);
            assert_eq!(request.advance(-libc::EAGAIN), Step::ToWorker);
            assert_eq!(request.advance(left as i32), Step::Finished(Ok(())));
        }
    }

    #[test]
    fn what_makes_data_durable_fails_once_a_sync_was_told_of_lost_ones() {
        for (action, expected) in [
            (Action::Sync, Err(IoError::EIO)),
            (Action::Write { durable: true }, Err(IoError::EIO)),
            (Action::Write { durable: false }, Ok(())),
        ] {
            let request = request(CacheMode::Writeback, action, 4096);
            request.target.file.sync_lost.store(true, Ordering::Relaxed);
            let Done::Sink { sink, .. } = &request.done else { unreachable!("made so above") };
            let (sink, mut ended) = (Rc::clone(sink), Vec::new());
            request.finish(Ok(()));
            sink.take(&mut ended);
            assert_eq!(ended, [(0, expected)], "{action:?}");
        }
    }

    #[test]
    fn nothing_moved_is_the_end_of_the_file_for_a_read_and_a_full_disk_for_a_write() {
        let mut enough = request(CacheMode::Writeback, Action::Read { need_bytes: 4000 }, 4096);
        assert_eq!(enough.advance(4000), Step::Again);
        assert_eq!(enough.advance(0), Step::Finished(Ok(())));
        assert_eq!(enough.window.to_vec()[3999..4001], [0xee, 0], "what lies behind the end reads as zeros");
        let mut too_short = request(CacheMode::Writeback, Action::Read { need_bytes: 4000 }, 4096);
        assert_eq!(too_short.advance(3999), Step::Again);
        assert_eq!(too_short.advance(0), Step::Finished(Err(IoError::EIO)));
        let mut write = request(CacheMode::Writeback, Action::Write { durable: false }, 4096);
        assert_eq!(write.advance(512), Step::Again);
        assert!(matches!(write.advance(0), Step::Finished(Err(error)) if error.kind() == IoErrorKind::NoSpace));
    }

    #[test]
    fn results_that_cannot_be_true_are_errors() {
        for action in [Action::Read { need_bytes: 0 }, Action::Write { durable: false }] {
            let mut request = request(CacheMode::Writeback, action, 4096);
            assert_eq!(request.advance(4097), Step::Finished(Err(IoError::EIO)));
            assert!(
                matches!(request.advance(-libc::ENOSPC), Step::Finished(Err(e)) if e.kind() == IoErrorKind::NoSpace)
            );
        }
    }

    #[test]
    fn a_short_direct_read_stays_aligned_and_believes_only_the_true_end() {
        let mut request = request(CacheMode::None, Action::Read { need_bytes: 5000 }, 8192);
        let unit = request.target.file.alignment.offset_bytes as i32;
        if unit < 2 {
            eprintln!("skipped: direct I/O on this file system takes any alignment");
            return;
        }
        assert_eq!(request.advance(unit + 1), Step::Again, "half a unit in the middle of the file is read again");
        assert_eq!(request.file_offset(), unit as u64);
        assert_eq!(request.advance(5000 - unit), Step::Finished(Ok(())), "the file's own end");
        assert_eq!(request.window.to_vec()[4999..5001], [0xee, 0]);
    }

    #[test]
    fn more_segments_than_a_call_takes_go_in_several_calls() {
        let one = IoBuf::zeroed(1).whole();
        let count = MAX_SEGMENTS * 2 + 5;
        let mut request = request(CacheMode::Writeback, Action::Write { durable: false }, 4096);
        request.window = IoBuf::gather(vec![one; count]).whole();
        let mut moved = 0;
        while request.left_bytes() > 0 {
            let now = bytes_listed(&request);
            assert!(now > 0 && now <= MAX_SEGMENTS);
            moved += now;
            request.advance(now as i32);
        }
        assert_eq!(moved, count);
    }

    #[test]
    fn the_slab_grows_to_the_peak_only() {
        let mut slab = Slab::default();
        let new = || request(CacheMode::Writeback, Action::Sync, 4096);
        let held: Vec<_> = (0..4).map(|_| slab.insert(new())).collect();
        for index in &held {
            assert!(slab.remove(*index).is_some());
            assert!(slab.remove(*index).is_none());
            assert!(slab.insert(new()) < 4);
        }
        assert_eq!(slab.live(), 4);
    }

    #[test]
    fn memory_that_a_guest_has_taken_away_says_nothing_of_the_storage() {
        let failing = request(CacheMode::Writeback, Action::Write { durable: true }, 4096);
        let file = Rc::clone(&failing.target);
        failing.finish(Err(IoError::from_errno(libc::EFAULT)));
        assert!(!file.file.sync_lost.load(Ordering::Relaxed));
        let failing = request(CacheMode::Writeback, Action::Write { durable: true }, 4096);
        let file = Rc::clone(&failing.target);
        failing.finish(Err(IoError::EIO));
        assert!(file.file.sync_lost.load(Ordering::Relaxed));
    }

    #[test]
    fn after_a_failed_sync_of_the_page_cache_no_flush_is_believed() {
        for (cache, lost) in [(CacheMode::Writeback, true), (CacheMode::None, false)] {
            let failing = request(cache, Action::Sync, 4096);
            let file = Rc::clone(&failing.target);
            failing.finish(Err(IoError::EIO));
            let queue = crate::queue::HostQueue::blocking(std::sync::Arc::clone(&file.file));
            let queue: Rc<dyn block::FileQueue> = Rc::new(queue);
            let flushed = block::block_on(queue.start(block::FileOp::Flush));
            assert_eq!(flushed.is_err(), lost, "{cache}");
        }
    }
}
