//! Runs requests on the queues of any disk, over the simulator or on real reactors' threads.

use crate::request::{Reply, Request, gathered};
use crate::sim::SimReactor;
use block::{Disk, DiskQueue, Poller, PollerId, ReactorCtx, ReactorHandle, Result, Tag, run_and_wait};
use memory::IoBuf;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The name of an open queue.
pub type QueueId = u64;

/// The results of a turn.
#[derive(Debug, Default)]
pub struct Turn {
    /// Requests that completed, on all queues.
    pub replies: Vec<(QueueId, Reply)>,
    /// Whether nothing more will come: requests still in flight are stalled or lost.
    pub idle: bool,
}

/// Runs a disk's queues, and lets time pass for them.
pub trait Harness {
    /// Returns the number of reactors.
    fn reactors(&self) -> usize;

    /// Whether a read may see parts of a write that overlaps it, even within a sector.
    fn overlapping_reads_mix(&self) -> bool {
        false
    }

    /// Opens a queue on a reactor.
    fn open(&mut self, disk: &Arc<dyn Disk>, reactor: usize) -> Result<QueueId>;

    /// Submits requests in order, without waiting.
    fn submit(&mut self, queue: QueueId, requests: Vec<(Tag, Request)>);

    /// Lets a little time pass: at most until something completes.
    fn turn(&mut self) -> Turn;

    /// Returns how many requests of `queue` have no reply yet.
    fn in_flight(&self, queue: QueueId) -> usize;

    /// Drops a queue, with everything in flight on it.
    fn close(&mut self, queue: QueueId);

    /// Returns the rules that the queue has broken.
    fn violations(&mut self, queue: QueueId) -> Vec<String>;

    /// Waits until the storage has finished everything, dropped queues included, as far as the harness can tell.
    fn settle(&mut self);
}

/// A queue and its requests, on its reactor's thread. Checks that the queue keeps the rules.
struct QueueDriver {
    disk: Weak<dyn Disk>,
    queue: Box<dyn DiskQueue>,
    flying: BTreeMap<Tag, (Request, Vec<IoBuf>)>,
    done: Vec<block::Completion>,
    violations: Vec<String>,
}

impl QueueDriver {
    fn new(disk: &Arc<dyn Disk>, queue: Box<dyn DiskQueue>) -> Self {
        Self { disk: Arc::downgrade(disk), queue, flying: BTreeMap::new(), done: Vec::new(), violations: Vec::new() }
    }

    fn submit(&mut self, tag: Tag, request: Request) {
        if matches!(request, Request::WriteByMap { .. }) {
            let map = request.map_on(self.disk.upgrade().as_deref());
            self.flying.insert(tag, (request, Vec::new()));
            if let Err(error) = self.queue.submit_map(tag, map) {
                self.violations.push(format!("the bytes of a map are gone: {error}"));
            }
            return self.count_in_flight("submit_map");
        }
        let (op, memory) = request.prepare();
        self.flying.insert(tag, (request, memory));
        self.queue.submit(tag, op);
        self.count_in_flight("submit");
    }

    fn harvest(&mut self) -> Vec<Reply> {
        self.done.clear();
        let told = self.queue.harvest(&mut self.done);
        if told != self.done.len() {
            self.violations.push(format!("harvest returned {told} for {} completions", self.done.len()));
        }
        let mut replies = Vec::new();
        for completion in std::mem::take(&mut self.done) {
            let Some((request, memory)) = self.flying.remove(&completion.tag) else {
                self.violations.push(format!("tag {} completed twice or was never submitted", completion.tag));
                continue;
            };
            if memory.iter().any(|buf| !buf.is_unique()) {
                self.violations.push(format!("memory is still held when the completion is visible: {request:?}"));
            }
            let data = gathered(&request, &memory);
            replies.push(Reply { tag: completion.tag, result: completion.result, data });
        }
        self.count_in_flight("harvest");
        replies
    }

    fn count_in_flight(&mut self, after: &str) {
        let told = self.queue.in_flight();
        if told != self.flying.len() {
            let actual = self.flying.len();
            self.violations.push(format!("in_flight() says {told} after {after}; {actual} are in flight"));
        }
    }
}

/// A harness over simulated reactors in one world.
pub struct SimHarness {
    reactors: Vec<Rc<SimReactor>>,
    queues: BTreeMap<QueueId, QueueDriver>,
    next_queue: QueueId,
}

impl SimHarness {
    /// Makes a harness with `reactors` simulated reactors.
    #[must_use]
    pub fn new(seed: u64, reactors: usize) -> Self {
        let first = SimReactor::new(seed);
        let others = (1..reactors).map(|_| first.sibling()).collect::<Vec<_>>();
        let reactors = std::iter::once(first).chain(others).collect();
        Self { reactors, queues: BTreeMap::new(), next_queue: 0 }
    }

    /// Ends the last reactor (never the first) with its tasks. Close its queues first.
    pub fn end_last_reactor(&mut self) {
        if self.reactors.len() > 1 {
            self.reactors.pop();
        }
    }

    /// Returns the first reactor.
    #[must_use]
    pub fn reactor(&self) -> &Rc<SimReactor> {
        &self.reactors[0]
    }
}

impl Harness for SimHarness {
    fn reactors(&self) -> usize {
        self.reactors.len()
    }

    fn open(&mut self, disk: &Arc<dyn Disk>, reactor: usize) -> Result<QueueId> {
        let queue = disk.open_queue(&self.reactors[reactor % self.reactors.len()].ctx())?;
        self.next_queue += 1;
        self.queues.insert(self.next_queue, QueueDriver::new(disk, queue));
        Ok(self.next_queue)
    }

    fn submit(&mut self, queue: QueueId, requests: Vec<(Tag, Request)>) {
        if let Some(driver) = self.queues.get_mut(&queue) {
            requests.into_iter().for_each(|(tag, request)| driver.submit(tag, request));
        }
    }

    fn turn(&mut self) -> Turn {
        let busy = self.reactors[0].step();
        let mut turn = Turn { replies: Vec::new(), idle: !busy };
        for (id, driver) in &mut self.queues {
            turn.replies.extend(driver.harvest().into_iter().map(|reply| (*id, reply)));
        }
        // Harvests may have pushed more.
        turn.idle &= turn.replies.is_empty() && !self.reactors[0].step();
        turn
    }

    fn in_flight(&self, queue: QueueId) -> usize {
        self.queues.get(&queue).map_or(0, |driver| driver.flying.len())
    }

    fn close(&mut self, queue: QueueId) {
        self.queues.remove(&queue);
    }

    fn violations(&mut self, queue: QueueId) -> Vec<String> {
        self.queues.get_mut(&queue).map(|driver| std::mem::take(&mut driver.violations)).unwrap_or_default()
    }

    fn settle(&mut self) {
        self.reactors[0].run_until_idle();
    }
}

type Here = BTreeMap<QueueId, (Rc<RefCell<ThreadPoller>>, PollerId)>;

thread_local! {
    /// The queues that a [`ThreadHarness`] opened on this reactor's thread: jobs find them by name.
    static HERE: RefCell<Here> = const { RefCell::new(BTreeMap::new()) };
}

struct ThreadPoller {
    id: QueueId,
    driver: QueueDriver,
    replies: Sender<(QueueId, Reply)>,
}

impl Poller for ThreadPoller {
    fn poll(&mut self) -> bool {
        let replies = self.driver.harvest();
        let busy = !replies.is_empty();
        for reply in replies {
            // Fails only if the test has ended and dropped the harness.
            let _ = self.replies.send((self.id, reply));
        }
        busy
    }
}

/// A harness over real reactors.
pub struct ThreadHarness {
    reactors: Vec<Arc<dyn ReactorHandle>>,
    /// For each queue, its reactor and how many replies are due.
    queues: BTreeMap<QueueId, (usize, usize)>,
    replies: Receiver<(QueueId, Reply)>,
    sender: Sender<(QueueId, Reply)>,
    whole_sectors: bool,
}

/// Numbers of queues are unique in the process: several harnesses may share a thread.
static NEXT_QUEUE: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
/// After this time a reply counts as lost. Long, because the machine may be busy.
const LOST_AFTER: Duration = Duration::from_secs(60);

impl ThreadHarness {
    /// Makes a harness over these reactors.
    #[must_use]
    pub fn new(reactors: Vec<Arc<dyn ReactorHandle>>) -> Self {
        let (sender, replies) = channel();
        Self { reactors, queues: BTreeMap::new(), replies, sender, whole_sectors: false }
    }

    /// Sets whether the disk's files bypass the page cache. A read then finds whole sectors even while a write overlaps
    /// it.
    #[must_use]
    pub fn with_whole_sectors(mut self, whole_sectors: bool) -> Self {
        self.whole_sectors = whole_sectors;
        self
    }

    fn on_reactor<T: Send + 'static>(
        &self,
        queue: QueueId,
        job: impl FnOnce(&Rc<dyn ReactorCtx>) -> T + Send + 'static,
    ) -> T {
        let (reactor, _) = self.queues[&queue];
        match run_and_wait(&*self.reactors[reactor], job) {
            Ok(value) => value,
            Err(error) => panic!("{error}"),
        }
    }

    fn take(&mut self, id: QueueId, reply: Reply, turn: &mut Turn) {
        // Replies of a queue that was closed meanwhile are dropped.
        if let Some((_, due)) = self.queues.get_mut(&id) {
            *due = due.saturating_sub(1);
            turn.replies.push((id, reply));
        }
    }
}

impl Harness for ThreadHarness {
    fn reactors(&self) -> usize {
        self.reactors.len()
    }

    /// Whether reads may mix: the kernel's page cache copies without a lock.
    fn overlapping_reads_mix(&self) -> bool {
        !self.whole_sectors
    }

    fn open(&mut self, disk: &Arc<dyn Disk>, reactor: usize) -> Result<QueueId> {
        let reactor = reactor % self.reactors.len();
        let id = NEXT_QUEUE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (disk, replies) = (Arc::clone(disk), self.sender.clone());
        run_and_wait(&*self.reactors[reactor], move |ctx| {
            let driver = QueueDriver::new(&disk, disk.open_queue(ctx)?);
            let poller = Rc::new(RefCell::new(ThreadPoller { id, driver, replies }));
            let name = ctx.add_poller(Rc::clone(&poller) as Rc<RefCell<dyn Poller>>)?;
            HERE.with_borrow_mut(|here| here.insert(id, (poller, name)));
            Ok(())
        })??;
        self.queues.insert(id, (reactor, 0));
        Ok(id)
    }

    fn submit(&mut self, queue: QueueId, requests: Vec<(Tag, Request)>) {
        if let Some((_, due)) = self.queues.get_mut(&queue) {
            *due += requests.len();
        }
        self.on_reactor(queue, move |_| {
            HERE.with_borrow(|here| {
                let driver = &mut here[&queue].0.borrow_mut().driver;
                requests.into_iter().for_each(|(tag, request)| driver.submit(tag, request));
            });
        });
    }

    fn turn(&mut self) -> Turn {
        let mut turn = Turn::default();
        if self.queues.values().all(|(_, due)| *due == 0) {
            turn.idle = true;
            return turn;
        }
        match self.replies.recv_timeout(LOST_AFTER) {
            Ok((id, reply)) => self.take(id, reply, &mut turn),
            Err(_) => turn.idle = true,
        }
        while let Ok((id, reply)) = self.replies.try_recv() {
            self.take(id, reply, &mut turn);
        }
        turn
    }

    fn in_flight(&self, queue: QueueId) -> usize {
        self.queues.get(&queue).map_or(0, |(_, due)| *due)
    }

    fn close(&mut self, queue: QueueId) {
        if self.queues.contains_key(&queue) {
            self.on_reactor(queue, move |ctx| {
                let gone = HERE.with_borrow_mut(|here| here.remove(&queue));
                if let Some((_, name)) = &gone {
                    ctx.remove_poller(*name);
                }
            });
            self.queues.remove(&queue);
        }
    }

    fn violations(&mut self, queue: QueueId) -> Vec<String> {
        self.on_reactor(queue, move |_| {
            HERE.with_borrow(|here| std::mem::take(&mut here[&queue].0.borrow_mut().driver.violations))
        })
    }

    fn settle(&mut self) {
        let queues: Vec<_> = self.queues.keys().copied().collect();
        while queues.iter().any(|queue| self.in_flight(*queue) > 0) {
            if self.turn().idle {
                return;
            }
        }
    }
}

impl Drop for ThreadHarness {
    fn drop(&mut self) {
        for queue in self.queues.keys().copied().collect::<Vec<_>>() {
            // Fails only if the reactor has ended, and its queues with it.
            let _ = run_and_wait(&*self.reactors[self.queues[&queue].0], move |ctx| {
                let gone = HERE.with_borrow_mut(|here| here.remove(&queue));
                if let Some((_, name)) = &gone {
                    ctx.remove_poller(*name);
                }
            });
        }
    }
}
