//! A filter that makes a disk slow: each request waits a fixed time before it begins. It stands for storage that is far
//! away, in tests and measurements of what has many requests in flight.

use block::{
    Completion, Disk, DiskInfo, DiskListener, DiskQueue, Error, Op, Poller, PollerId, ReactorCtx, Result, Tag,
};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Requests for which a queue has room from the beginning.
const ROOM: usize = 256;

/// See the module.
#[derive(Clone)]
pub struct DelayDisk {
    disk: Arc<dyn Disk>,
    delay: Duration,
}

impl DelayDisk {
    /// `disk`, with every request `delay` later.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, delay: Duration) -> Self {
        Self { disk, delay }
    }
}

impl std::fmt::Debug for DelayDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DelayDisk({:?})", self.delay)
    }
}

impl Disk for DelayDisk {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)
            .map_err(|error| Error::io("cannot make a timer for a delayed disk", error.into()))?;
        let waiting = Rc::new(RefCell::new(Waiting { requests: VecDeque::with_capacity(ROOM), timer }));
        let queue = self.disk.open_queue(ctx)?;
        let poller = ctx.add_poller(Rc::clone(&waiting) as Rc<RefCell<dyn Poller>>)?;
        Ok(Box::new(DelayQueue { queue, delay: self.delay, waiting, ctx: Rc::clone(ctx), poller }))
    }

    fn set_volatile_cache(&self, volatile: bool) {
        self.disk.set_volatile_cache(volatile);
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.disk.subscribe(listener);
    }
}

struct Late {
    due: Instant,
    tag: Tag,
    op: Op,
}

/// Requests that wait for their time, the first first: all wait equally long. As a poller it only wakes the reactor.
struct Waiting {
    requests: VecDeque<Late>,
    timer: OwnedFd,
}

impl Waiting {
    fn take_due(&mut self, now: Instant) -> Option<Late> {
        let due = self.requests.front().is_some_and(|late| late.due <= now);
        if due { self.requests.pop_front() } else { None }
    }
}

impl Poller for Waiting {
    fn poll(&mut self) -> bool {
        // Whoever owns the queue looks each turn; that a request is due is seen there.
        false
    }

    fn arm(&mut self) -> bool {
        let Some(late) = self.requests.front() else { return false };
        let left = late.due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
        let value = Timespec { tv_sec: seconds, tv_nsec: i64::from(left.subsec_nanos()) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // Without a timer the reactor goes on looking.
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).is_err()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }
}

struct DelayQueue {
    queue: Box<dyn DiskQueue>,
    delay: Duration,
    waiting: Rc<RefCell<Waiting>>,
    ctx: Rc<dyn ReactorCtx>,
    poller: PollerId,
}

impl DiskQueue for DelayQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let due = Instant::now().checked_add(self.delay).unwrap_or_else(Instant::now);
        self.waiting.borrow_mut().requests.push_back(Late { due, tag, op });
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if !self.waiting.borrow().requests.is_empty() {
            let now = Instant::now();
            loop {
                // Not borrowed while the disk takes it.
                let late = self.waiting.borrow_mut().take_due(now);
                let Some(Late { tag, op, .. }) = late else { break };
                self.queue.submit(tag, op);
            }
        }
        self.queue.harvest(done)
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight().saturating_add(self.waiting.borrow().requests.len())
    }
}

impl Drop for DelayQueue {
    fn drop(&mut self) {
        self.ctx.remove_poller(self.poller);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NullDisk;
    use engine::{Reactor, ReactorConfig};
    use memory::IoBuf;

    /// Sends a request when its predecessor has ended.
    struct OneByOne {
        queue: Box<dyn DiskQueue>,
        left: u32,
        done: Vec<Completion>,
        ended: std::sync::mpsc::Sender<Duration>,
        since: Instant,
    }

    impl Poller for OneByOne {
        fn poll(&mut self) -> bool {
            let ended = self.queue.harvest(&mut self.done) > 0;
            if ended {
                assert!(self.done.drain(..).all(|completion| completion.result.is_ok()));
                self.ended.send(self.since.elapsed()).unwrap();
            }
            if self.queue.in_flight() > 0 || self.left == 0 {
                return ended;
            }
            self.left -= 1;
            self.since = Instant::now();
            self.queue.submit(7, Op::read(0, IoBuf::zeroed(512).whole()));
            true
        }
    }

    #[test]
    fn each_request_waits_its_time_and_a_sleeping_reactor_wakes_up_for_it() {
        const COUNT: u32 = 2;
        let delay = Duration::from_millis(200);
        let disk = DelayDisk::new(Arc::new(NullDisk::new(1 << 20, String::new())), delay);
        assert_eq!(disk.info().size_bytes, 1 << 20);
        let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
        let (ended, times) = std::sync::mpsc::channel();
        let begin = move |ctx: &Rc<dyn ReactorCtx>| {
            let queue = disk.open_queue(ctx).unwrap();
            let load = OneByOne { queue, left: COUNT, done: Vec::new(), ended, since: Instant::now() };
            ctx.add_poller(Rc::new(RefCell::new(load))).unwrap();
        };
        block::run_and_wait(&*reactor.handle(), begin).unwrap();
        for time in times.iter().take(COUNT as usize) {
            assert!(time >= delay, "{time:?}");
        }
        assert!(reactor.stats().sleeps > 0, "it slept meanwhile");
        reactor.stop().unwrap();
    }
}
