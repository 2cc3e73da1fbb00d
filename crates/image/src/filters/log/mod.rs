//! A filter that writes every change of a disk to a file. From it, `ringdisk replay` makes the disk as it was at any
//! moment.
//!
//! A request ends for the guest when it is in the log. So the log holds everything that a guest was told, even after
//! the daemon was killed. Its order is one that can have happened: of two requests in flight together, either may come
//! first. A flush also makes the log durable. A request that fails is not logged.

mod reader;
mod record;
mod writer;

use crate::filters::Filter;
use block::{
    Completion, DiskQueue, Interest, IoError, IoErrorKind, Op, Parts, ReactorCtx, Result, SECTOR_BYTES, Tag, Watch,
};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use writer::{Ended, Told};

pub use reader::{LogReader, LoggedRequest};
pub use record::{LogEntry, LoggedKind};

/// The most bytes of data whose copies a queue holds, but for one request.
const HELD_BYTES_MAX: usize = 32 << 20;

/// The filter. See the module's documentation.
pub struct WriteLog {
    ended: Sender<Ended>,
}

impl WriteLog {
    /// Makes a log in `file`, which is open for reading and writing. The file is empty, or holds a log to be continued.
    pub fn new(file: File) -> Result<Self> {
        writer::lock(&file)?;
        Ok(Self { ended: writer::start(file)? })
    }
}

impl fmt::Debug for WriteLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WriteLog")
    }
}

impl Filter for WriteLog {
    fn keeps_data(&self) -> bool {
        true
    }

    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let told = Arc::new(Told::new()?);
        let wake = Watch::new(ctx, WakeFd(Arc::clone(&told)))?;
        Ok(Box::new(LogQueue {
            below,
            ended: self.ended.clone(),
            told,
            wake,
            changes: HashMap::new(),
            waiting: VecDeque::new(),
            held_bytes: 0,
            with_log: 0,
            scratch: Vec::new(),
            refused: Vec::new(),
            is_abandoned: false,
        }))
    }
}

/// Readable when the log's thread has told a queue of logged requests.
struct WakeFd(Arc<Told>);

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}

/// A request that changes the disk, with its entry in the log.
struct Change {
    entry: LogEntry,
    data: Vec<u8>,
    durable: bool,
    preflush: bool,
}

impl Change {
    fn of(op: &Op) -> Option<Self> {
        let (durable, preflush) = (op.flags().is_fua(), op.flags().is_preflush());
        let entry = |offset, length_bytes, kind| LogEntry { offset, length_bytes, kind };
        let (entry, data) = match op {
            Op::Read { .. } => return None,
            Op::Write { offset, data, .. } => {
                let mut bytes = vec![0; data.length_bytes()];
                data.copy_to_slice(0, &mut bytes);
                (entry(*offset, bytes.len() as u64, LoggedKind::Write { fua: durable }), bytes)
            }
            Op::WriteZeroes { offset, length, .. } => {
                (entry(*offset, *length, LoggedKind::Write { fua: durable }), Vec::new())
            }
            Op::Discard { offset, length } | Op::SecureErase { offset, length } => {
                (entry(*offset, *length, LoggedKind::Discard), Vec::new())
            }
            Op::Flush => (entry(0, 0, LoggedKind::Flush), Vec::new()),
        };
        Some(Self { entry, data, durable, preflush })
    }
}

struct LogQueue {
    below: Box<dyn DiskQueue>,
    ended: Sender<Ended>,
    told: Arc<Told>,
    wake: Watch<WakeFd>,
    /// The changes in flight below.
    changes: HashMap<Tag, Change>,
    /// Requests that wait for memory to copy their data, or behind one that does.
    waiting: VecDeque<(Tag, Op)>,
    held_bytes: usize,
    /// How many requests the log's thread has.
    with_log: usize,
    scratch: Vec<Completion>,
    refused: Vec<Completion>,
    is_abandoned: bool,
}

impl LogQueue {
    fn begin(&mut self, tag: Tag, op: Op) {
        // The log counts in sectors, as guests do. Other disks refuse such requests, too.
        let in_sectors = |(offset, length): (u64, u64)| (offset | length).is_multiple_of(SECTOR_BYTES);
        if op.is_write() && !op.range().is_some_and(in_sectors) {
            self.refused.push(Completion { tag, result: Err(IoError::new(IoErrorKind::OutOfRange)) });
            return;
        }
        if let Some(change) = Change::of(&op) {
            self.held_bytes = self.held_bytes.saturating_add(change.data.len());
            self.changes.insert(tag, change);
        }
        self.below.submit(tag, op);
    }

    fn has_room(&self) -> bool {
        self.held_bytes < HELD_BYTES_MAX
    }

    /// Hands a request that ended below to the log's thread. Returns the completion if nothing is to be logged.
    fn ended_below(&mut self, completion: Completion) -> Option<Completion> {
        let Some(Change { entry, data, durable, preflush }) = self.changes.remove(&completion.tag) else {
            return Some(completion);
        };
        let held_bytes = data.len();
        let queue = Arc::clone(&self.told);
        if completion.result.is_ok()
            && self.ended.send(Ended { entry, data, durable, preflush, completion, queue }).is_ok()
        {
            self.with_log = self.with_log.saturating_add(1);
            return None;
        }
        self.held_bytes = self.held_bytes.saturating_sub(held_bytes);
        Some(completion)
    }

    fn take_logged(&mut self, done: &mut Vec<Completion>) {
        if self.wake.is_ready(Interest::Read)
            && rustix::io::read(self.wake.get_ref(), &mut [0; 8]) == Err(rustix::io::Errno::AGAIN)
        {
            self.wake.not_ready(Interest::Read);
        }
        for (completion, held_bytes) in self.told.take() {
            self.held_bytes = self.held_bytes.saturating_sub(held_bytes);
            self.with_log = self.with_log.saturating_sub(1);
            done.push(completion);
        }
    }
}

impl DiskQueue for LogQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        if self.waiting.is_empty() && self.has_room() {
            self.begin(tag, op);
        } else if self.is_abandoned {
            self.refused.push(Completion { tag, result: Err(IoError::EIO) });
        } else {
            self.waiting.push_back((tag, op));
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        let mut scratch = std::mem::take(&mut self.scratch);
        self.below.harvest(&mut scratch);
        done.extend(scratch.drain(..).filter_map(|completion| self.ended_below(completion)));
        self.scratch = scratch;
        if self.with_log > 0 {
            self.take_logged(done);
        }
        done.append(&mut self.refused);
        while self.has_room()
            && let Some((tag, op)) = self.waiting.pop_front()
        {
            self.begin(tag, op);
        }
        done.len().saturating_sub(before)
    }

    fn in_flight(&self) -> usize {
        let own = self.with_log.saturating_add(self.waiting.len()).saturating_add(self.refused.len());
        self.below.in_flight().saturating_add(own)
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
        let waiting = self.waiting.drain(..);
        self.refused.extend(waiting.map(|(tag, _)| Completion { tag, result: Err(IoError::EIO) }));
        self.below.abandon();
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        self.below.take_timings(timings);
    }
}
