//! CPU time of this process and of others, from /proc.

use std::collections::HashMap;
use std::fs;

const NS_PER_SECOND: f64 = 1e9;
/// Clock ticks a second in /proc/PID/stat: fixed for user space on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time of a process by thread, in nanoseconds, as of one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct CpuSample {
    threads: HashMap<String, u64>,
    /// From /proc/PID/stat, where the scheduler keeps no statistics of threads.
    whole_seconds: f64,
}

impl CpuSample {
    /// What the process has used so far; nothing if it does not exist.
    pub(crate) fn take(pid: u32) -> Self {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let threads = tasks.filter_map(|task| {
            let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
            let ns = text.split_whitespace().next()?.parse().ok()?;
            Some((task.file_name().to_string_lossy().into_owned(), ns))
        });
        Self { threads: threads.collect(), whole_seconds: stat_seconds(pid).unwrap_or(0.0) }
    }

    /// CPU seconds from `earlier` to this moment. Threads that ended in between count through the coarser source.
    pub(crate) fn seconds_since(&self, earlier: &Self) -> f64 {
        let fine: u64 = self
            .threads
            .iter()
            .map(|(thread, ns)| ns.saturating_sub(earlier.threads.get(thread).copied().unwrap_or(0)))
            .sum();
        let gone = earlier.threads.keys().any(|thread| !self.threads.contains_key(thread));
        let coarse = self.whole_seconds - earlier.whole_seconds;
        if fine == 0 || gone { coarse.max(0.0) } else { fine as f64 / NS_PER_SECOND }
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

    #[test]
    fn work_of_this_process_is_seen() {
        let before = CpuSample::take(std::process::id());
        let mut words = super::super::verify::Words::new(1);
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
}
