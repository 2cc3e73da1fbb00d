//! CPU time and context switches of this process and of others, from /proc.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

const NS_PER_SECOND: f64 = 1e9;
/// Clock ticks a second in /proc/PID/stat: fixed for user space on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// The CPU use of each thread of a process, up to one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct CpuSample {
    threads: HashMap<String, ThreadSample>,
    /// The sum from /proc/PID/stat, for hosts without scheduler statistics of threads.
    whole_seconds: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct ThreadSample {
    cpu_ns: u64,
    /// The number of times that the thread went to sleep by itself.
    voluntary_switches: u64,
}

impl ThreadSample {
    fn take(task: &Path) -> Self {
        let first_word = |text: String| text.split_whitespace().next().and_then(|word| word.parse().ok());
        let switches = |text: String| {
            let line =
                text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:").map(str::to_owned))?;
            line.trim().parse().ok()
        };
        let read = |name: &str| fs::read_to_string(task.join(name)).ok();
        Self {
            cpu_ns: read("schedstat").and_then(first_word).unwrap_or(0),
            voluntary_switches: read("status").and_then(switches).unwrap_or(0),
        }
    }
}

impl CpuSample {
    /// Reads the time that the process has used so far; zero if it does not exist.
    pub(crate) fn take(pid: u32) -> Self {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let threads =
            tasks.map(|task| (task.file_name().to_string_lossy().into_owned(), ThreadSample::take(&task.path())));
        Self { threads: threads.collect(), whole_seconds: stat_seconds(pid).unwrap_or(0.0) }
    }

    /// Returns the CPU seconds since `earlier`. If threads ended in between, the coarser source is used.
    pub(crate) fn seconds_since(&self, earlier: &Self) -> f64 {
        let fine = self.growth_since(earlier, |thread| thread.cpu_ns);
        let gone = earlier.threads.keys().any(|thread| !self.threads.contains_key(thread));
        let coarse = self.whole_seconds - earlier.whole_seconds;
        if fine == 0 || gone { coarse.max(0.0) } else { fine as f64 / NS_PER_SECOND }
    }

    /// Returns how often threads went to sleep since `earlier`. Threads that ended in between do not count.
    pub(crate) fn voluntary_switches_since(&self, earlier: &Self) -> u64 {
        self.growth_since(earlier, |thread| thread.voluntary_switches)
    }

    fn growth_since(&self, earlier: &Self, value: impl Fn(&ThreadSample) -> u64) -> u64 {
        let before = |thread: &String| earlier.threads.get(thread).map_or(0, &value);
        self.threads.iter().map(|(thread, sample)| value(sample).saturating_sub(before(thread))).sum()
    }
}

fn stat_seconds(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; user and system time are the 12th and 13th fields behind it.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn work_of_this_process_is_seen() {
        let before = CpuSample::take(std::process::id());
        let mut words = crate::verify::Words::new(1);
        let mut sum = 0u64;
        loop {
            (0..1_000_000).for_each(|_| sum ^= words.next());
            if CpuSample::take(std::process::id()).seconds_since(&before) > 0.0 {
                break;
            }
        }
        assert_ne!(sum, 0);
        assert_eq!(CpuSample::take(0).seconds_since(&CpuSample::take(0)), 0.0);
    }

    #[test]
    fn each_sleep_of_a_thread_is_a_voluntary_switch() {
        const SLEEPS: u64 = 20;
        let before = CpuSample::take(std::process::id());
        for _ in 0..SLEEPS {
            std::thread::sleep(Duration::from_millis(1));
        }
        let slept = CpuSample::take(std::process::id()).voluntary_switches_since(&before);
        // On a loaded machine a sleep may be over before the thread is off its CPU.
        assert!(slept >= SLEEPS / 2, "{slept}");
        assert_eq!(CpuSample::take(0).voluntary_switches_since(&before), 0);
    }
}
