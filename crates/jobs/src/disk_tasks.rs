//! A disk queue for tasks: operations that are awaited.

use block::{Completion, Disk, DiskQueue, Done, IoResult, Op, Poller, PollerId, ReactorCtx, Result, Waiter};
use image::Image;
use memory::{AlignedBuf, IoBuf, PoolRc};
use std::cell::RefCell;
use std::rc::{Rc, Weak};

/// A queue of a disk on one reactor, shared by its tasks.
pub(crate) struct DiskTasks {
    queue: RefCell<Box<dyn DiskQueue>>,
    /// Who waits, by tag.
    waiting: RefCell<Vec<Option<PoolRc<Waiter>>>>,
    ctx: Rc<dyn ReactorCtx>,
    poller: RefCell<Option<PollerId>>,
}

impl DiskTasks {
    /// Opens a queue; called on the reactor's thread.
    pub(crate) fn open(disk: &dyn Disk, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<Self>> {
        let tasks = Rc::new(Self {
            queue: RefCell::new(disk.open_queue(ctx)?),
            waiting: RefCell::default(),
            ctx: Rc::clone(ctx),
            poller: RefCell::default(),
        });
        // The queue goes with its tasks, not with the reactor's list.
        let harvester = Harvester { tasks: Rc::downgrade(&tasks), done: Vec::new() };
        *tasks.poller.borrow_mut() = Some(ctx.add_poller(Rc::new(RefCell::new(harvester)))?);
        Ok(tasks)
    }

    /// Carries out one operation.
    pub(crate) async fn run(&self, op: Op) -> IoResult {
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
        self.queue.borrow_mut().submit(tag as u64, op);
        Waiter::wait(&waiter).await
    }

    /// Fills the first `length_bytes` of `buf` from the disk.
    pub(crate) async fn read(&self, offset: u64, buf: &mut AlignedBuf, length_bytes: usize) -> IoResult {
        self.read_part(offset, buf, 0..length_bytes).await
    }

    /// Fills a part of `buf` from the disk.
    pub(crate) async fn read_part(&self, offset: u64, buf: &mut AlignedBuf, part: std::ops::Range<usize>) -> IoResult {
        let shared = IoBuf::from_aligned(std::mem::replace(buf, AlignedBuf::zeroed(0)));
        let data = shared.whole().slice(part.start, part.len());
        let result = self.run(Op::Read { offset, data }).await;
        *buf = reclaim(shared);
        result
    }

    /// Stores a part of `buf` on the disk, at `offset`.
    pub(crate) async fn write(&self, offset: u64, buf: &mut AlignedBuf, part: std::ops::Range<usize>) -> IoResult {
        let shared = IoBuf::from_aligned(std::mem::replace(buf, AlignedBuf::zeroed(0)));
        let data = shared.whole().slice(part.start, part.len());
        let result = self.run(Op::Write { offset, data, fua: false }).await;
        *buf = reclaim(shared);
        result
    }
}

/// Closes an image that was written to, whatever came of that: what was written is in order, and its bitmaps know of it.
/// No queue of it is open.
pub(crate) fn closed(done: Result<()>, image: &Image) -> Result<()> {
    let closed = image.close();
    done.and(closed)
}

/// The bytes back from a buffer whose operation is complete: a copy where somebody still holds a handle.
pub(crate) fn reclaim(buf: IoBuf) -> AlignedBuf {
    buf.into_aligned().unwrap_or_else(|shared| AlignedBuf::copy_of(&shared.whole().to_vec()))
}

impl Drop for DiskTasks {
    fn drop(&mut self) {
        if let Some(id) = self.poller.borrow_mut().take() {
            self.ctx.remove_poller(id);
        }
    }
}

/// Wakes the tasks whose operations have ended.
struct Harvester {
    tasks: Weak<DiskTasks>,
    done: Vec<Completion>,
}

impl Poller for Harvester {
    fn poll(&mut self) -> bool {
        let Some(tasks) = self.tasks.upgrade() else { return false };
        let count = tasks.queue.borrow_mut().harvest(&mut self.done);
        for completion in self.done.drain(..) {
            let slot = usize::try_from(completion.tag).ok();
            let waiter = slot.and_then(|index| tasks.waiting.borrow_mut().get_mut(index).and_then(Option::take));
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
