//! A disk queue whose operations are awaited, for tasks on a reactor.

use crate::{
    Completion, Disk, DiskQueue, Done, IoResult, Op, OpFlags, Poller, PollerId, ReactorCtx, Result, Tag, Waiter,
    WriteMap,
};
use memory::{AlignedBuf, IoBuf, PoolRc};
use std::cell::RefCell;
use std::rc::{Rc, Weak};

/// A queue of a disk on one reactor, shared by the reactor's tasks. The queue is closed when the last of them drops it.
pub struct DiskIo {
    queue: RefCell<Box<dyn DiskQueue>>,
    /// The tasks that wait, by tag.
    waiting: RefCell<Vec<Option<PoolRc<Waiter>>>>,
    ctx: Rc<dyn ReactorCtx>,
    poller: RefCell<Option<PollerId>>,
}

impl DiskIo {
    /// Opens a queue. Call it on the reactor's thread.
    pub fn open(disk: &dyn Disk, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<Self>> {
        let io = Rc::new(Self {
            queue: RefCell::new(disk.open_queue(ctx)?),
            waiting: RefCell::default(),
            ctx: Rc::clone(ctx),
            poller: RefCell::default(),
        });
        // The reactor's list of pollers does not keep the queue open.
        let harvester = Harvester { io: Rc::downgrade(&io), done: Vec::new() };
        *io.poller.borrow_mut() = Some(ctx.add_poller(Rc::new(RefCell::new(harvester)))?);
        Ok(io)
    }

    /// Carries out one operation and waits for its end.
    pub async fn run(&self, op: Op) -> IoResult {
        self.submitted(|queue, tag| {
            queue.submit(tag, op);
            Ok(())
        })
        .await
    }

    /// Commits the new bytes of a range and waits for the end.
    pub async fn commit(&self, map: WriteMap) -> IoResult {
        map.check()?;
        self.submitted(|queue, tag| queue.submit_map(tag, map)).await
    }

    /// Awaits the operation that `submit` submits; returns its error if it submits none.
    async fn submitted(&self, submit: impl FnOnce(&mut dyn DiskQueue, Tag) -> IoResult) -> IoResult {
        let waiter = Waiter::new();
        let tag = {
            let mut waiting = self.waiting.borrow_mut();
            let free = waiting.iter().position(Option::is_none);
            let index = free.unwrap_or_else(|| {
                waiting.push(None);
                waiting.len() - 1
            });
            waiting[index] = Some(waiter.clone());
            index
        };
        if let Err(error) = submit(&mut **self.queue.borrow_mut(), tag as u64) {
            self.waiting.borrow_mut()[tag] = None;
            return Err(error);
        }
        Waiter::wait(&waiter).await
    }

    /// Fills the first `length_bytes` of `buf` from the disk at `offset`.
    pub async fn read(&self, offset: u64, buf: &mut AlignedBuf, length_bytes: usize) -> IoResult {
        self.read_part(offset, buf, 0..length_bytes).await
    }

    /// Fills a part of `buf` from the disk at `offset`.
    pub async fn read_part(&self, offset: u64, buf: &mut AlignedBuf, part: std::ops::Range<usize>) -> IoResult {
        let shared = IoBuf::from_aligned(std::mem::replace(buf, AlignedBuf::zeroed(0)));
        let data = shared.whole().slice(part.start, part.len());
        let result = self.run(Op::read(offset, data)).await;
        *buf = reclaim(shared);
        result
    }

    /// Writes a part of `buf` to the disk at `offset`.
    pub async fn write(&self, offset: u64, buf: &mut AlignedBuf, part: std::ops::Range<usize>) -> IoResult {
        let shared = IoBuf::from_aligned(std::mem::replace(buf, AlignedBuf::zeroed(0)));
        let data = shared.whole().slice(part.start, part.len());
        let result = self.run(Op::write(offset, data, OpFlags::NONE)).await;
        *buf = reclaim(shared);
        result
    }
}

/// Takes the bytes back from a buffer whose operation has ended. They are copied if the buffer has another handle.
pub fn reclaim(buf: IoBuf) -> AlignedBuf {
    buf.into_aligned().unwrap_or_else(|shared| AlignedBuf::copy_of(&shared.whole().to_vec()))
}

impl Drop for DiskIo {
    fn drop(&mut self) {
        if let Some(id) = self.poller.borrow_mut().take() {
            self.ctx.remove_poller(id);
        }
    }
}

/// Wakes the tasks whose operations have ended.
struct Harvester {
    io: Weak<DiskIo>,
    done: Vec<Completion>,
}

impl Poller for Harvester {
    fn poll(&mut self) -> bool {
        let Some(io) = self.io.upgrade() else { return false };
        let count = io.queue.borrow_mut().harvest(&mut self.done);
        for completion in self.done.drain(..) {
            let slot = usize::try_from(completion.tag).ok();
            let waiter = slot.and_then(|index| io.waiting.borrow_mut().get_mut(index).and_then(Option::take));
            if let Some(waiter) = waiter {
                Done::Waiter(waiter).complete(completion.result);
            }
        }
        count > 0
    }

    fn arm(&mut self) -> bool {
        self.poll()
    }
}
