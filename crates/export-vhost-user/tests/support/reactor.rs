//! A reactor that does just what the contract says: jobs, pollers, sleep until an edge.
#![allow(dead_code, unreachable_pub)]

use block::{Job, Poller, PollerId, ReactorCtx, ReactorHandle, Result, Task, Timers, Work};
use memory::{GuestMemory, GuestRegion};
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

struct Shared {
    name: String,
    jobs: Mutex<Vec<Job>>,
    stop: AtomicBool,
    wake: OwnedFd,
    /// Regions of the memory that is registered now, by table.
    registered: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl ReactorHandle for Shared {
    fn run(&self, job: Job) -> Result<()> {
        self.jobs.lock().unwrap().push(job);
        self.wake();
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }
}

impl Shared {
    fn wake(&self) {
        rustix::io::write(&self.wake, &1_u64.to_ne_bytes()).unwrap();
    }
}

type Named = (PollerId, Rc<RefCell<dyn Poller>>);

struct Local {
    epoll: OwnedFd,
    pollers: RefCell<Vec<Named>>,
    /// Removed, and dropped at the end of the turn.
    removed: RefCell<Vec<Rc<RefCell<dyn Poller>>>>,
    next: Cell<u64>,
    registered: Arc<Mutex<Vec<Vec<u64>>>>,
}

/// A table of memory, registered as long as it lives.
struct Registered(Arc<Mutex<Vec<Vec<u64>>>>, Vec<u64>);

impl Drop for Registered {
    fn drop(&mut self) {
        let mut registered = self.0.lock().unwrap();
        let index = registered.iter().position(|table| *table == self.1).unwrap();
        registered.swap_remove(index);
    }
}

impl Local {
    fn watch(&self, fd: impl AsFd) {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags).unwrap();
    }

    /// Late, as on a busy reactor: what must not wait for it is not to be seen by luck.
    fn drop_removed(&self) {
        let removed = std::mem::take(&mut *self.removed.borrow_mut());
        if !removed.is_empty() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn each(&self, mut look: impl FnMut(&mut dyn Poller) -> bool) -> bool {
        let pollers: Vec<_> = self.pollers.borrow().iter().map(|(_, poller)| Rc::clone(poller)).collect();
        pollers.iter().fold(false, |any, poller| look(&mut *poller.borrow_mut()) | any)
    }
}

impl ReactorCtx for Local {
    fn spawn(&self, _task: Task) {
        unimplemented!("no task here")
    }

    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> Result<PollerId> {
        if let Some(fd) = poller.borrow().wake_fd() {
            self.watch(fd);
        }
        let id = PollerId(self.next.get());
        self.next.set(id.0 + 1);
        self.pollers.borrow_mut().push((id, poller));
        Ok(id)
    }

    fn remove_poller(&self, id: PollerId) {
        let mut pollers = self.pollers.borrow_mut();
        if let Some(index) = pollers.iter().position(|(other, _)| *other == id) {
            let (_, poller) = pollers.swap_remove(index);
            if let Some(fd) = poller.borrow().wake_fd() {
                // Others hold duplicates of the descriptor, so closing ours does not end the watch.
                epoll::delete(&self.epoll, fd).unwrap();
            }
            self.removed.borrow_mut().push(poller);
        }
    }

    fn register_memory(&self, memory: &Arc<GuestMemory>) -> Result<Box<dyn Any>> {
        let table: Vec<u64> = memory.regions().iter().map(GuestRegion::length_bytes).collect();
        self.registered.lock().unwrap().push(table.clone());
        Ok(Box::new(Registered(Arc::clone(&self.registered), table)))
    }

    fn timers(&self) -> &Rc<Timers> {
        unimplemented!("no timer here")
    }

    fn run_aside(&self, _turn: u64, work: Work) {
        work();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A reactor's thread; stops when dropped.
pub struct TestReactor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl TestReactor {
    pub fn start(name: &str) -> Self {
        let wake = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (jobs, registered) = (Mutex::default(), Arc::default());
        let stop = AtomicBool::new(false);
        let shared = Arc::new(Shared { name: name.into(), jobs, stop, wake, registered });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&theirs)).unwrap();
        Self { shared, thread: Some(thread) }
    }

    /// The lengths of the regions that are registered with its engines, by table.
    pub fn registered(&self) -> Vec<Vec<u64>> {
        self.shared.registered.lock().unwrap().clone()
    }

    pub fn handle(&self) -> Arc<dyn ReactorHandle> {
        Arc::clone(&self.shared) as Arc<dyn ReactorHandle>
    }
}

impl Drop for TestReactor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the reactor panicked");
    }
}

fn run(shared: &Shared) {
    let local = Rc::new(Local {
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
        pollers: RefCell::default(),
        removed: RefCell::default(),
        next: Cell::new(0),
        registered: Arc::clone(&shared.registered),
    });
    local.watch(&shared.wake);
    let ctx: Rc<dyn ReactorCtx> = Rc::clone(&local) as Rc<dyn ReactorCtx>;
    while !shared.stop.load(Ordering::SeqCst) {
        let jobs = std::mem::take(&mut *shared.jobs.lock().unwrap());
        let had_jobs = !jobs.is_empty();
        for job in jobs {
            job(&ctx);
        }
        local.drop_removed();
        if local.each(|poller| poller.poll()) || had_jobs {
            continue;
        }
        if !local.each(|poller| poller.arm()) {
            let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
            let _ = epoll::wait(&local.epoll, &mut events, None);
        }
        local.each(|poller| {
            poller.disarm();
            false
        });
    }
    local.pollers.borrow_mut().clear();
}
