//! Where a client's longest waits come from: what the host does to threads that no limit holds back.

use super::measure::{CLIENT_CORE, SERVER_CORE};
use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::time::{Duration, Instant};

/// What a thread does on its core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Thread {
    /// It reads the clock all the time.
    ReadsTheClock,
    /// It sleeps until each next millisecond.
    Sleeps,
}

const PERIOD: Duration = Duration::from_millis(1);

/// Runs a thread on each of the two cores for this time. Returns the longest wait of either, in milliseconds: the time
/// between two looks at the clock, or how late it woke up.
pub(super) fn longest_wait_ms(thread: Thread, seconds: f64) -> Result<f64> {
    let time = Duration::from_secs_f64(seconds);
    let waits = std::thread::scope(|scope| {
        let threads = [SERVER_CORE, CLIENT_CORE].map(|core| scope.spawn(move || wait_on(core, thread, time)));
        threads.map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
    });
    let waits = waits.into_iter().collect::<Result<Vec<Duration>>>()?;
    Ok(waits.into_iter().max().unwrap_or_default().as_secs_f64() * 1000.0)
}

fn wait_on(core: &str, thread: Thread, time: Duration) -> Result<Duration> {
    let mut cores = CpuSet::new();
    cores.set(core.parse().context("a core is a number")?);
    sched_setaffinity(None, &cores).with_context(|| format!("cannot run on core {core}"))?;
    let begun = Instant::now();
    let (mut longest, mut last) = (Duration::ZERO, begun);
    while last.duration_since(begun) < time {
        if thread == Thread::Sleeps {
            last += PERIOD;
            std::thread::sleep(last.saturating_duration_since(Instant::now()));
        }
        let now = Instant::now();
        longest = longest.max(now.saturating_duration_since(last));
        last = now;
    }
    Ok(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_waits_for_some_time() {
        if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
            return;
        }
        for thread in [Thread::ReadsTheClock, Thread::Sleeps] {
            assert!(longest_wait_ms(thread, 0.02).unwrap() > 0.0, "{thread:?}");
        }
    }
}
