//! Calls that work on a disk which is being removed: how long they are waited for.
//!
//! A call is given up if its thread has not run for a time. Whatever its storage answers wakes that thread: a request that
//! has ended, or a page that a flush has written back. The kernel finds tasks that hang in the same way. A thread that
//! the kernel lets wait for its own storage, for a journal or a disk's cache, gets longer: one such wait can be long, and
//! nobody can cut it short.

use crate::daemon::Daemon;
use crate::hang::{HOPELESS_PATIENCE, JOBS_PATIENCE};
use crate::state::caller::{At, Switches};
use crate::table::Found;
use rustix::fs::{major, minor};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// No call is looked at more often.
const SHORTEST: Duration = Duration::from_millis(10);
/// How long a call may be in one wait for the kernel's own storage. The kernel, too, calls a task hung after this time.
const KERNEL_PATIENCE: Duration = Duration::from_secs(120);

/// The calls on a disk by number, with what their threads do.
type Calls = Vec<(u64, Option<Switches>)>;

/// What was seen of the calls on a disk.
#[derive(Debug, Default)]
struct Watched {
    calls: Calls,
    /// Since when each call is in the same wait.
    since: BTreeMap<u64, Instant>,
    /// What the devices of the disk's files have written.
    written: u64,
}

impl Watched {
    /// Takes another look. Returns whether a call has ended or run since the last one, or the kernel may still be at work
    /// for one.
    fn have_moved(&mut self, now: Instant, calls: Calls, written: u64) -> bool {
        let have_written = written != std::mem::replace(&mut self.written, written);
        let before = std::mem::replace(&mut self.calls, calls);
        let mut at_work = false;
        let mut since = BTreeMap::new();
        for call in &self.calls {
            let (number, switches) = call;
            let first_seen = self.since.get(number).filter(|_| before.contains(call) && !have_written);
            let first_seen = first_seen.copied().unwrap_or(now);
            since.insert(*number, first_seen);
            at_work |= match switches.map(|switches| switches.at) {
                Some(At::Work) => true,
                Some(At::Storage) => now.saturating_duration_since(first_seen) < KERNEL_PATIENCE,
                Some(At::Rest) | None => false,
            };
        }
        self.since = since;
        at_work || before != self.calls
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
        let mut watched = Watched::default();
        loop {
            if self.wait_while_calls_move(found, &mut watched, deadline) {
                return true;
            }
            tracing::warn!(disk = %found.name, "calls do not end: their storage is given up");
            found.disk.image.iter().for_each(|image| image.cancel());
            self.look_at_calls(found, &mut watched);
            if self.table.wait_for_works(found.id, Some(HOPELESS_PATIENCE)) {
                return true;
            }
            // A call on several disks may have waited for another one, which was given up too.
            if !self.look_at_calls(found, &mut watched) || Instant::now() >= deadline {
                return false;
            }
        }
    }

    /// Returns whether the calls on a disk have ended, once they have or do not move.
    fn wait_while_calls_move(&self, found: &Found, watched: &mut Watched, deadline: Instant) -> bool {
        self.look_at_calls(found, watched);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let patience = self.config.give_up_after.clamp(SHORTEST, JOBS_PATIENCE).min(left);
            if self.table.wait_for_works(found.id, Some(patience)) {
                return true;
            }
            if !self.look_at_calls(found, watched) || Instant::now() >= deadline {
                return false;
            }
        }
    }

    fn look_at_calls(&self, found: &Found, watched: &mut Watched) -> bool {
        watched.have_moved(Instant::now(), self.table.callers_of(found.id), written_by_devices_of(found))
    }
}

/// Returns how many writes and flushes the block devices below a disk's files have ended: of this disk or of others, which
/// errs on the side of the data. Zero where no such device is known, as with NFS.
fn written_by_devices_of(found: &Found) -> u64 {
    let devices = found.disk.image.iter().flat_map(|image| image.written_files()).map(|(device, _)| {
        let path = format!("/sys/dev/block/{}:{}/stat", major(device), minor(device));
        std::fs::read_to_string(path).ok().and_then(|stat| written_of(&stat)).unwrap_or(0)
    });
    devices.fold(0, u64::wrapping_add)
}

/// Reads the writes and flushes that a device has ended out of its `stat`.
fn written_of(stat: &str) -> Option<u64> {
    let field = |index: usize| stat.split_whitespace().nth(index)?.parse::<u64>().ok();
    // Flushes are counted since Linux 5.5.
    Some(field(4)?.wrapping_add(field(15).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::DaemonConfig;
    use crate::state::status::NodeId;
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
    fn what_the_kernel_says_about_a_device_is_understood() {
        assert_eq!(written_of("1 2 3 4 50 6 7 8 9 10 11 12 13 14 15 600 17"), Some(650));
        assert_eq!(written_of("1 2 3 4 50 6 7 8 9 10 11"), Some(50));
        assert_eq!(written_of("1 2"), None);
    }

    #[test]
    fn one_long_wait_for_the_kernels_storage_is_no_hang_until_it_lasts_too_long() {
        let start = Instant::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let call = |count: u64, at: At| vec![(7, Some(Switches { count, at }))];
        let mut watched = Watched::default();
        // A wait for a server: given up at the second look.
        assert!(watched.have_moved(start, call(1, At::Rest), 0));
        assert!(!watched.have_moved(after(20), call(1, At::Rest), 0));
        // A wait for a flush of the device.
        assert!(watched.have_moved(after(20), call(2, At::Storage), 0));
        for seconds in [40, 60, 139] {
            assert!(watched.have_moved(after(seconds), call(2, At::Storage), 0), "after {seconds} s");
        }
        assert!(!watched.have_moved(after(140), call(2, At::Storage), 0));
        // The device writes, so the flush comes to its end.
        assert!(watched.have_moved(after(150), call(2, At::Storage), 8));
        assert!(watched.have_moved(after(269), call(2, At::Storage), 8));
        assert!(!watched.have_moved(after(270), call(2, At::Storage), 8));
        // What the device does for others does not help a call that waits for a server.
        assert!(watched.have_moved(after(280), call(3, At::Rest), 8));
        assert!(!watched.have_moved(after(300), call(3, At::Rest), 9));
        // A call that ends, and one that runs.
        assert!(watched.have_moved(after(320), Vec::new(), 9));
        assert!(watched.have_moved(after(340), call(4, At::Work), 9));
        assert!(watched.have_moved(after(360), call(4, At::Work), 9));
    }
}
