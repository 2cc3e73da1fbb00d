//! The engines of one reactor. Each is made when it is first needed.

use crate::aio::context::Aio;
use crate::base::options::EngineKind;
use crate::base::stats::Counters;
use crate::base::wakeup::Wakeup;
use crate::file::open_file::OpenFile;
use crate::request::progress::Request;
use crate::request::queue_file::QueueFile;
use crate::uring::registration::Registered;
use crate::uring::ring::Uring;
use crate::workers::thread_pool::Workers;
use block::{BatchEnd, Error, ErrorKind, Executor, ReactorHandle, Result, Work};
use memory::GuestMemory;
use rustix::thread::CpuSet;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

/// An engine, as a file's queue sees it.
#[derive(Clone)]
pub(crate) enum Engine {
    Uring(Rc<Uring>),
    Aio(Rc<Aio>),
    Threads(Rc<Workers>),
}

impl Engine {
    /// Takes a request; nothing reaches the kernel before the reactor's next submit.
    pub(crate) fn push(&self, request: Request) {
        match self {
            Self::Uring(uring) => uring.push(request),
            Self::Aio(aio) => aio.push(request),
            Self::Threads(workers) => workers.push(request),
        }
    }

    /// Returns the reactor's workers.
    pub(crate) fn workers(&self) -> &Workers {
        match self {
            Self::Uring(uring) => uring.workers(),
            Self::Aio(aio) => aio.workers(),
            Self::Threads(workers) => workers,
        }
    }
}

/// The most polls of the engines' own tasks in one turn.
const TASK_POLLS_PER_TURN: usize = 256;
/// About how long these polls may take.
const TASK_TIME_PER_TURN: Duration = Duration::from_micros(500);

thread_local! {
    static CURRENT: RefCell<Weak<Engines>> = const { RefCell::new(Weak::new()) };
}

/// The engines of one reactor, and the files that are open on it.
pub(crate) struct Engines {
    /// The engines' own tasks. They always run to their end, because they hold range locks for requests in flight.
    tasks: Rc<Executor>,
    reactor: Arc<dyn ReactorHandle>,
    counters: Arc<Counters>,
    wakeup: Arc<Wakeup>,
    workers: Rc<Workers>,
    processors: Option<CpuSet>,
    uring: RefCell<Option<Rc<Uring>>>,
    /// Guests' memory that is registered with the ring.
    registered: RefCell<Vec<Weak<Registered>>>,
    aio: RefCell<Option<Rc<Aio>>>,
    files: RefCell<HashMap<u64, Weak<QueueFile>>>,
    batch_end: BatchEnd,
}

impl Engines {
    /// Makes a reactor's engines. Workers may run on `processors`. `inline_bytes` is the longest copy that the reactor
    /// makes itself.
    pub(crate) fn new(
        reactor: Arc<dyn ReactorHandle>,
        wakeup: Arc<Wakeup>,
        counters: Arc<Counters>,
        processors: Option<CpuSet>,
        inline_bytes: usize,
        spin_limit: Duration,
    ) -> Self {
        let workers = Workers::new(Arc::clone(&wakeup), Arc::clone(&counters), processors, inline_bytes, spin_limit);
        Self {
            tasks: Rc::new(Executor::new(wakeup.waker())),
            reactor,
            counters,
            wakeup,
            workers: Rc::new(workers),
            processors,
            uring: RefCell::default(),
            registered: RefCell::default(),
            aio: RefCell::default(),
            files: RefCell::default(),
            batch_end: BatchEnd::default(),
        }
    }

    /// Returns the engines of the calling thread's reactor.
    pub(crate) fn current() -> Option<Rc<Self>> {
        CURRENT.with_borrow(Weak::upgrade)
    }

    /// Makes these the engines of the calling thread's reactor.
    pub(crate) fn become_current(self: &Rc<Self>) {
        CURRENT.set(Rc::downgrade(self));
    }

    /// Returns the handle by which other threads reach the reactor.
    pub(crate) fn reactor(&self) -> &Arc<dyn ReactorHandle> {
        &self.reactor
    }

    pub(crate) fn tasks(&self) -> &Rc<Executor> {
        &self.tasks
    }

    /// Runs the engines' own tasks; returns whether there were any.
    pub(crate) fn run_tasks(&self) -> bool {
        self.tasks.run_for(TASK_POLLS_PER_TURN, TASK_TIME_PER_TURN) > 0
    }

    /// Keeps the engines going while a blocking queue waits on the reactor's thread.
    pub(crate) fn advance(&self) {
        if self.run_tasks() | self.submit() | (self.harvest() > 0) {
            return;
        }
        // This also looks for results without a signal.
        if !self.has_work() {
            std::thread::yield_now();
        }
    }

    pub(crate) fn batch_end(&self) -> BatchEnd {
        self.batch_end.clone()
    }

    /// Returns where other threads may run, if the reactor is bound to a processor.
    pub(crate) fn processors(&self) -> Option<CpuSet> {
        self.processors
    }

    /// Returns the engine that serves `file`, and this reactor's [`QueueFile`] for it.
    pub(crate) fn attach(&self, file: &Arc<OpenFile>) -> Result<(Engine, Rc<QueueFile>)> {
        let engine = match file.traits.engine {
            EngineKind::IoUring | EngineKind::Auto => self.uring().map(Engine::Uring),
            EngineKind::LinuxAio => self.aio().map(Engine::Aio),
            EngineKind::Threads => Ok(Engine::Threads(Rc::clone(&self.workers))),
        };
        let engine = match engine {
            Err(error) if file.chosen_freely => {
                tracing::warn!("'{}' is served by threads on this reactor: {error}", file.info.name);
                Engine::Threads(Rc::clone(&self.workers))
            }
            other => other?,
        };
        let mut files = self.files.borrow_mut();
        if let Some(target) = files.get(&file.id).and_then(Weak::upgrade) {
            return Ok((engine, target));
        }
        files.retain(|_, target| target.strong_count() > 0);
        let fixed = match &engine {
            Engine::Uring(uring) => uring.register_file(file.raw_fd()),
            Engine::Aio(_) | Engine::Threads(_) => None,
        };
        let target = Rc::new(QueueFile::on_reactor(Arc::clone(file), fixed));
        files.insert(file.id, Rc::downgrade(&target));
        Ok((engine, target))
    }

    fn uring(&self) -> Result<Rc<Uring>> {
        let mut slot = self.uring.borrow_mut();
        match &*slot {
            Some(uring) if uring.is_closed() => {
                let what = "io_uring has failed on this reactor; engine=threads works without it";
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            Some(uring) => return Ok(Rc::clone(uring)),
            None => {}
        }
        let (workers, counters) = (Rc::clone(&self.workers), Arc::clone(&self.counters));
        let made = Uring::new(workers, &self.wakeup, counters, self.batch_end());
        let uring = Rc::new(made.map_err(|error| {
            let message = "cannot set io_uring up on this reactor; engine=threads works without it";
            Error::with_source(ErrorKind::Unsupported, message, error)
        })?);
        Ok(Rc::clone(slot.insert(uring)))
    }

    /// Registers a guest's memory with this reactor's ring, for as long as the result is held. Also returns whether it
    /// is new: then the caller must add a poller that does the registering.
    pub(crate) fn register_memory(&self, memory: &Arc<GuestMemory>) -> Result<(Rc<Registered>, bool)> {
        let mut all = self.registered.borrow_mut();
        all.retain(|registered| registered.strong_count() > 0);
        if let Some(registered) = all.iter().filter_map(Weak::upgrade).find(|registered| registered.is_of(memory)) {
            return Ok((registered, false));
        }
        let Some(ring) = self.uring.borrow().clone() else {
            let message = "memory is registered with io_uring only, and this reactor does not use it";
            return Err(Error::new(ErrorKind::Unsupported, message));
        };
        let registered = Registered::new(Arc::clone(memory), ring);
        all.push(Rc::downgrade(&registered));
        Ok((registered, true))
    }

    fn aio(&self) -> Result<Rc<Aio>> {
        let mut slot = self.aio.borrow_mut();
        if let Some(aio) = &*slot {
            return Ok(Rc::clone(aio));
        }
        let (workers, wakeup) = (Rc::clone(&self.workers), Arc::clone(&self.wakeup));
        let made = Aio::new(workers, wakeup, Arc::clone(&self.counters), self.batch_end());
        let aio = made.map_err(|error| {
            let message = "cannot set Linux AIO up on this reactor; raise the sysctl fs.aio-max-nr, or use engine=io_uring or engine=threads";
            Error::with_source(ErrorKind::Unsupported, message, error)
        })?;
        Ok(Rc::clone(slot.insert(Rc::new(aio))))
    }

    fn with_aio<T: Default>(&self, call: impl FnOnce(&Aio) -> T) -> T {
        let aio = self.aio.borrow().clone();
        aio.map_or_else(T::default, |aio| call(&aio))
    }

    fn with_uring<T: Default>(&self, call: impl FnOnce(&Uring) -> T) -> T {
        // Cloned, so that the end of a request may open a queue.
        let uring = self.uring.borrow().clone();
        uring.map_or_else(T::default, |uring| call(&uring))
    }

    /// Submits the pushed requests, once for each engine. Returns whether there were any.
    pub(crate) fn submit(&self) -> bool {
        let _ = self.batch_end.take();
        // The workers come last: the other engines send them requests that they cannot carry out.
        self.with_uring(Uring::submit) | self.with_aio(Aio::submit) | self.workers.submit()
    }

    /// Takes completions. Returns how many.
    pub(crate) fn harvest(&self) -> usize {
        self.with_uring(Uring::harvest) + self.with_aio(Aio::harvest) + self.workers.harvest()
    }

    /// Sets whether the ring signals the reactor's event descriptor: on before it sleeps, off when it is awake.
    pub(crate) fn signal(&self, on: bool) {
        self.with_uring(|uring| uring.signal(on));
    }

    /// Whether a sleeping reactor must look now and then for results that are not signalled at once.
    pub(crate) fn may_be_unsignalled(&self) -> bool {
        self.workers.may_be_unsignalled()
    }

    /// Whether the ring has failed, so that it must be tried again now and then.
    pub(crate) fn has_failed(&self) -> bool {
        self.with_uring(Uring::has_failed)
    }

    /// Looks for results that are not signalled. The next harvest takes them.
    pub(crate) fn look_for_unsignalled(&self) {
        self.workers.look_for_unsignalled();
    }

    /// Whether there is something to submit or to take.
    pub(crate) fn has_work(&self) -> bool {
        self.with_uring(Uring::has_work) || self.with_aio(Aio::has_work) || self.workers.has_work()
    }

    /// Returns how many requests were taken and have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.with_uring(Uring::in_flight) + self.with_aio(Aio::in_flight) + self.workers.in_flight()
    }

    /// Makes a worker compute something for the file with this number.
    pub(crate) fn run_aside(&self, file: u64, work: Work) {
        self.workers.run_aside(file, work);
    }

    /// Whether workers have computations that have not ended.
    pub(crate) fn is_computing(&self) -> bool {
        self.workers.is_computing()
    }

    /// Waits for all requests in flight. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        // The workers come last: the other engines send them requests that they cannot carry out.
        self.with_uring(Uring::shut_down);
        self.with_aio(Aio::shut_down);
        self.workers.shut_down();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::options::OpenOptions;
    use block::Job;

    struct NoReactor;

    impl ReactorHandle for NoReactor {
        fn run(&self, _: Job) -> Result<()> {
            Err(Error::new(ErrorKind::Io, "there is no reactor"))
        }

        fn name(&self) -> &str {
            "none"
        }
    }

    #[test]
    fn a_file_that_is_opened_after_the_ring_has_failed_for_good_is_served_by_threads() {
        let (wakeup, counters) = (Arc::new(Wakeup::new().unwrap()), Arc::default());
        let engines = Engines::new(Arc::new(NoReactor), wakeup, counters, None, 0, Duration::ZERO);
        let [free, asked] = [EngineKind::Auto, EngineKind::IoUring].map(|engine| {
            let options = OpenOptions { engine, lock: false, ..OpenOptions::default() };
            let file = tempfile::tempfile().unwrap();
            let mut file = crate::open::opening::open_file(file.into(), "test", &options).unwrap();
            file.traits.engine = EngineKind::IoUring;
            Arc::new(file)
        });
        let Ok((Engine::Uring(ring), _)) = engines.attach(&free) else { panic!("this kernel has io_uring") };
        ring.fail_for_good();
        assert!(matches!(engines.attach(&free), Ok((Engine::Threads(_), _))));
        let refused = engines.attach(&asked).map(drop).unwrap_err().to_string();
        assert!(refused.contains("engine=threads"), "{refused}");
    }
}
