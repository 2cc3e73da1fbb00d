//! One reactor's engines, made when they are first needed.

use crate::EngineKind;
use crate::inflight::Request;
use crate::stats::Counters;
use crate::target::{OpenFile, QueueFile};
use crate::threads::Workers;
use crate::uring::Uring;
use crate::wakeup::Wakeup;
use block::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// An engine, as a file's queue sees it.
#[derive(Clone)]
pub(crate) enum Engine {
    Uring(Rc<Uring>),
    Threads(Rc<Workers>),
}

impl Engine {
    /// Takes a request; nothing reaches the kernel before the reactor's next submit.
    pub(crate) fn push(&self, request: Request) {
        match self {
            Self::Uring(uring) => uring.push(request),
            Self::Threads(workers) => workers.push(request),
        }
    }
}

/// The engines of one reactor, and the files that are open on it.
pub(crate) struct Engines {
    counters: Arc<Counters>,
    wakeup: Arc<Wakeup>,
    workers: Rc<Workers>,
    uring: RefCell<Option<Rc<Uring>>>,
    files: RefCell<HashMap<u64, Weak<QueueFile>>>,
}

impl Engines {
    pub(crate) fn new(wakeup: Arc<Wakeup>, counters: Arc<Counters>) -> Self {
        let workers = Rc::new(Workers::new(Arc::clone(&wakeup), Arc::clone(&counters)));
        Self { counters, wakeup, workers, uring: RefCell::default(), files: RefCell::default() }
    }

    /// The engine that serves `file`, and the file's part on this reactor.
    pub(crate) fn attach(&self, file: &Arc<OpenFile>) -> Result<(Engine, Rc<QueueFile>)> {
        let engine = match file.engine {
            EngineKind::IoUring | EngineKind::Auto => Engine::Uring(self.uring()?),
            EngineKind::Threads | EngineKind::LinuxAio => Engine::Threads(Rc::clone(&self.workers)),
        };
        let mut files = self.files.borrow_mut();
        if let Some(target) = files.get(&file.id).and_then(Weak::upgrade) {
            return Ok((engine, target));
        }
        files.retain(|_, target| target.strong_count() > 0);
        let fixed = match &engine {
            Engine::Uring(uring) => uring.register_file(file.raw_fd()),
            Engine::Threads(_) => None,
        };
        let target = Rc::new(QueueFile::new(Arc::clone(file), fixed));
        files.insert(file.id, Rc::downgrade(&target));
        Ok((engine, target))
    }

    fn uring(&self) -> Result<Rc<Uring>> {
        let mut slot = self.uring.borrow_mut();
        if let Some(uring) = &*slot {
            return Ok(Rc::clone(uring));
        }
        let made = Uring::new(Rc::clone(&self.workers), &self.wakeup, Arc::clone(&self.counters));
        let uring = Rc::new(made.map_err(|error| {
            let message = "cannot set io_uring up on this reactor; engine=threads works without it";
            Error::with_source(ErrorKind::Unsupported, message, error)
        })?);
        Ok(Rc::clone(slot.insert(uring)))
    }

    fn with_uring<T: Default>(&self, call: impl FnOnce(&Uring) -> T) -> T {
        // Cloned, so that ending a request may open a queue.
        let uring = self.uring.borrow().clone();
        uring.map_or_else(T::default, |uring| call(&uring))
    }

    /// Submits what was pushed: once an engine. Returns whether there was anything.
    pub(crate) fn submit(&self) -> bool {
        let uring = self.with_uring(Uring::submit);
        self.workers.submit() | uring
    }

    /// Takes completions. Returns how many requests moved.
    pub(crate) fn harvest(&self) -> usize {
        self.with_uring(Uring::harvest) + self.workers.harvest()
    }

    /// The reactor is about to sleep, or awake again: whether engines shall signal its event descriptor.
    pub(crate) fn signal(&self, on: bool) {
        self.with_uring(|uring| uring.signal(on));
    }

    /// Whether there is something to submit or to take.
    pub(crate) fn has_work(&self) -> bool {
        self.with_uring(Uring::has_work) || self.workers.has_work()
    }

    /// Requests taken and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.with_uring(Uring::in_flight) + self.workers.in_flight()
    }

    /// Waits for every request. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        // The workers last: the others send them what they cannot do.
        self.with_uring(Uring::shut_down);
        self.workers.shut_down();
    }
}
