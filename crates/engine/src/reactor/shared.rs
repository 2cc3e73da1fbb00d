//! The state of a reactor that other threads share: jobs for it, and its stop.

use super::config::ReactorConfig;
use crate::base::stats::Counters;
use crate::base::wakeup::Wakeup;
use block::{Error, ErrorKind, Job, ReactorHandle, Result};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How long unfinished tasks may go on after the reactor is stopped.
pub(super) const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// The longest sleep of a stopping reactor, and of those who wait for its end, before they look again.
pub(super) const STOP_NAP: Duration = Duration::from_millis(20);

#[derive(Default)]
struct Jobs {
    waiting: Vec<Job>,
    closed: bool,
}

/// The state of a reactor that other threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: String,
    jobs: Mutex<Jobs>,
    /// Read in each turn, so that the lock is taken only if there are jobs.
    has_jobs: AtomicBool,
    stop: AtomicBool,
    /// How long unfinished tasks may go on, if that was said before the stop.
    pub(super) stop_patience: OnceLock<Duration>,
    pub(super) wakeup: Arc<Wakeup>,
    pub(super) counters: Arc<Counters>,
    pub(super) harvest_after_submit: bool,
}

impl Shared {
    pub(super) fn new(config: &ReactorConfig) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            name: config.name.clone(),
            jobs: Mutex::default(),
            has_jobs: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            stop_patience: OnceLock::new(),
            wakeup: Arc::new(Wakeup::new()?),
            counters: Arc::default(),
            harvest_after_submit: config.harvest_after_submit,
        }))
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the jobs that wait.
    #[inline]
    pub(super) fn take_jobs(&self) -> Vec<Job> {
        if !self.has_jobs() {
            return Vec::new();
        }
        self.has_jobs.store(false, Ordering::Relaxed);
        std::mem::take(&mut self.jobs().waiting)
    }

    #[inline]
    pub(super) fn has_jobs(&self) -> bool {
        self.has_jobs.load(Ordering::Acquire)
    }

    /// Tells the reactor to stop.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wakeup.wake();
    }

    #[inline]
    pub(super) fn must_stop(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jobs({} waiting)", self.waiting.len())
    }
}

impl ReactorHandle for Shared {
    fn run(&self, job: Job) -> Result<()> {
        let mut jobs = self.jobs();
        if jobs.closed {
            return Err(Error::new(ErrorKind::Io, format!("reactor '{}' has ended", self.name)));
        }
        jobs.waiting.push(job);
        drop(jobs);
        self.has_jobs.store(true, Ordering::Release);
        self.wakeup.wake();
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// Drops the remaining jobs, however the thread ends, so that nobody waits for a job that never runs.
pub(super) struct CloseOnExit(pub(super) Arc<Shared>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let mut jobs = self.0.jobs();
        jobs.closed = true;
        let left = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        drop(left);
    }
}
