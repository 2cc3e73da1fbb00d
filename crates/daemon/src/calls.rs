//! Calls that work on a disk which is being removed: how long they are waited for.
//!
//! A call is given up if its thread has not run for a time. Whatever its storage answers wakes that thread: a request that
//! has ended, or a page that a flush has written back. The kernel finds tasks that hang in the same way.

use crate::daemon::Daemon;
use crate::hang::{HOPELESS_PATIENCE, JOBS_PATIENCE};
use crate::table::Found;
use rustix::thread::{Pid, gettid};
use std::time::{Duration, Instant};

/// No call is looked at more often.
const SHORTEST: Duration = Duration::from_millis(10);

/// The thread that makes a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(Pid);

/// How often a thread has begun to wait, or made room for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Switches {
    count: u64,
    /// It does not wait at this moment.
    runs: bool,
}

impl Caller {
    /// The thread that asks.
    pub(crate) fn this() -> Self {
        Self(gettid())
    }

    /// `None` if the thread has ended, or the kernel does not tell.
    pub(crate) fn switches(self) -> Option<Switches> {
        let path = format!("/proc/self/task/{}/status", self.0.as_raw_nonzero());
        Switches::parse(&std::fs::read_to_string(path).ok()?)
    }
}

impl Switches {
    fn parse(status: &str) -> Option<Self> {
        let value = |key: &str| status.lines().find_map(|line| Some(line.strip_prefix(key)?.trim()));
        let count = |key: &str| value(key)?.parse::<u64>().ok();
        let count = count("voluntary_ctxt_switches:")?.saturating_add(count("nonvoluntary_ctxt_switches:")?);
        Some(Self { count, runs: value("State:")?.starts_with('R') })
    }
}

impl Daemon {
    /// Waits for calls that work on a disk, at most until the `limit`; returns whether they have ended. Without a limit,
    /// they are waited for as long as they move. Storage that answers none of them in time is given up.
    pub(crate) fn wait_for_calls(&self, found: &Found, limit: Option<Duration>) -> bool {
        if let Some(limit) = limit {
            return self.table.wait_for_works(found.id, Some(limit));
        }
        let deadline = Instant::now() + JOBS_PATIENCE;
        loop {
            if self.wait_while_calls_move(found, deadline) {
                return true;
            }
            tracing::warn!(disk = %found.name, "calls do not end: their storage is given up");
            found.disk.image.iter().for_each(|image| image.cancel());
            let before = self.table.callers_of(found.id);
            if self.table.wait_for_works(found.id, Some(HOPELESS_PATIENCE)) {
                return true;
            }
            // A call on several disks may have waited for another one, which was given up too.
            if !have_moved(&before, &self.table.callers_of(found.id)) || Instant::now() >= deadline {
                return false;
            }
        }
    }

    /// Returns whether the calls on a disk have ended, once they have or do not move.
    fn wait_while_calls_move(&self, found: &Found, deadline: Instant) -> bool {
        loop {
            let before = self.table.callers_of(found.id);
            let left = deadline.saturating_duration_since(Instant::now());
            if self
                .table
                .wait_for_works(found.id, Some(self.config.give_up_after.clamp(SHORTEST, JOBS_PATIENCE).min(left)))
            {
                return true;
            }
            if !have_moved(&before, &self.table.callers_of(found.id)) || Instant::now() >= deadline {
                return false;
            }
        }
    }
}

/// Whether any of these calls has ended, or its thread has run in between.
fn have_moved(before: &[(u64, Option<Switches>)], now: &[(u64, Option<Switches>)]) -> bool {
    before != now || now.iter().any(|(_, switches)| switches.is_some_and(|switches| switches.runs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::DaemonConfig;
    use crate::status::NodeId;
    use crate::table::Table;
    use drive::DiskOptions;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    fn with_disk(give_up_after_ms: u64) -> (Arc<Daemon>, NodeId) {
        let config = DaemonConfig::default().with(|config| {
            config.give_up_after = Duration::from_millis(give_up_after_ms);
        });
        let daemon = Daemon::start(config).unwrap();
        let node = daemon.add_disk(&DiskOptions::null(1 << 20)).unwrap();
        (Arc::new(daemon), node)
    }

    /// Slow storage answers a little at a time, for far longer than anybody waits for storage that hangs.
    #[test]
    fn a_call_is_waited_for_as_long_as_it_moves() {
        let (daemon, node) = with_disk(500);
        let has_ended = Arc::new(AtomicBool::new(false));
        let (begun, ends) = (channel(), Arc::clone(&has_ended));
        let table = Arc::clone(&daemon.table);
        let call = std::thread::spawn(move || {
            let work = Table::begin_work(&table, node, "a slow call".to_owned(), None).unwrap();
            begun.0.send(()).unwrap();
            (0..600).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
            ends.store(true, Ordering::Release);
            drop(work);
        });
        begun.1.recv().unwrap();
        daemon.remove_disk(node, true).unwrap();
        assert!(has_ended.load(Ordering::Acquire), "it was given up");
        call.join().unwrap();
    }

    #[test]
    fn a_call_that_waits_all_the_time_is_given_up() {
        let (daemon, node) = with_disk(100);
        let ((begun, is_begun), (release, released)) = (channel(), channel::<()>());
        let table = Arc::clone(&daemon.table);
        let call = std::thread::spawn(move || {
            let work = Table::begin_work(&table, node, "a call that hangs".to_owned(), None).unwrap();
            begun.send(()).unwrap();
            let _ = released.recv();
            drop(work);
        });
        is_begun.recv().unwrap();
        let error = daemon.remove_disk(node, true).unwrap_err().to_string();
        assert!(error.contains("hangs"), "{error}");
        drop(release);
        call.join().unwrap();
    }

    #[test]
    fn what_the_kernel_says_about_a_thread_is_understood() {
        let text = "Name:\tx\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t2\n";
        assert_eq!(Switches::parse(text), Some(Switches { count: 7, runs: false }));
        assert!(Switches::parse(&text.replace("S (sleeping)", "R (running)")).unwrap().runs);
        assert_eq!(Switches::parse("Name:\tx\n"), None);
        assert!(Caller::this().switches().unwrap().runs);
    }
}
