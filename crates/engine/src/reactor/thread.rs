//! A reactor from outside: starts its thread, and stops it.

use super::config::ReactorConfig;
use super::event_loop::Local;
use super::shared::{CloseOnExit, STOP_NAP, STOP_PATIENCE, Shared};
use crate::base::pace::Paces;
use crate::base::stats::ReactorStats;
use block::{Error, ErrorKind, ReactorHandle, Result};
use rustix::thread::CpuSet;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts reactors.
#[derive(Debug)]
pub struct Reactor;

impl Reactor {
    /// Starts a reactor on a thread of its own.
    pub fn spawn(config: ReactorConfig) -> Result<ReactorThread> {
        let fails = |error| Error::io(format!("cannot start reactor '{}'", config.name), error);
        let shared = Shared::new(&config).map_err(fails)?;
        let theirs = Arc::clone(&shared);
        let (sender, started) = std::sync::mpsc::sync_channel(1);
        let limit = Duration::from_micros(u64::from(config.poll_max_us));
        let thread = std::thread::Builder::new().name(config.name.clone()).spawn(move || {
            let _end = CloseOnExit(Arc::clone(&theirs));
            let processors = config.cpu.and_then(|cpu| bind_to(cpu, &theirs.name));
            match Local::new(theirs, processors, config.inline_bytes, limit) {
                Ok(local) => {
                    local.become_current();
                    let _ = sender.send(Ok(()));
                    local.run(Paces::new(limit));
                }
                Err(error) => {
                    let _ = sender.send(Err(error));
                }
            }
        });
        let thread = thread.map_err(|error| Error::io(format!("cannot start reactor '{}'", shared.name), error))?;
        let gone = |_| Error::new(ErrorKind::Io, format!("reactor '{}' ended while it started", shared.name));
        started.recv().map_err(gone)??;
        Ok(ReactorThread { shared, thread: Some(thread) })
    }
}

/// Binds the calling thread to one processor. Returns where it was allowed to run before.
fn bind_to(cpu: usize, name: &str) -> Option<CpuSet> {
    let before = rustix::thread::sched_getaffinity(None).ok();
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
    }
    match rustix::thread::sched_setaffinity(None, &set) {
        Ok(()) => before,
        Err(error) => {
            tracing::warn!(%error, "cannot bind reactor '{name}' to processor {cpu}; it runs on any");
            None
        }
    }
}

/// A running reactor. Dropping it stops the reactor, as [`ReactorThread::stop`] does.
pub struct ReactorThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ReactorThread {
    /// Returns a handle that reaches the reactor from any thread. It may outlive the reactor.
    #[must_use]
    pub fn handle(&self) -> Arc<dyn ReactorHandle> {
        Arc::clone(&self.shared) as _
    }

    /// Returns the reactor's counts since its start.
    #[must_use]
    pub fn stats(&self) -> ReactorStats {
        self.shared.counters.snapshot()
    }

    /// Returns the harvests counted by their number of completions: index three has the number of harvests with three.
    /// The last entry stands for as many completions or more.
    #[must_use]
    pub fn harvest_lengths(&self) -> Vec<u64> {
        self.shared.counters.harvest_lengths.snapshot()
    }

    /// Stops the reactor and waits for its end. Jobs given before are run, and pollers dropped. Tasks at work get a few
    /// seconds to end; those that only wait for a time or a descriptor are dropped. Every request in flight is waited
    /// for, so no memory goes that the kernel may still write. Must not be called on the reactor's own thread.
    pub fn stop(mut self) -> Result<()> {
        self.join()
    }

    /// As [`ReactorThread::stop`], but waits for `limit` at most. Tasks at work get half of it: computations that wait
    /// for a worker end with the tasks. A thread that has not ended by then is left running, with the memory of the
    /// requests that its storage does not end.
    pub fn stop_within(mut self, limit: Duration) -> Result<()> {
        self.shared.stop_patience.get_or_init(|| STOP_PATIENCE.min(limit / 2));
        self.shared.stop();
        let begun = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if begun.elapsed() >= limit {
                self.thread = None;
                let message =
                    format!("reactor '{}' is left behind: storage does not end its requests", self.shared.name);
                return Err(Error::new(ErrorKind::Io, message));
            }
            std::thread::sleep(STOP_NAP);
        }
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        self.shared.stop();
        thread.join().map_err(|_| {
            Error::new(ErrorKind::Io, format!("reactor '{}' panicked; its requests were waited for", self.shared.name))
        })
    }
}

impl Drop for ReactorThread {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!("{error}");
        }
    }
}

impl fmt::Debug for ReactorThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReactorThread({})", self.shared.name)
    }
}
