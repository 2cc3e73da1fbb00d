//! Finds the processes that hold locks on a file. The kernel lists locks with the open descriptors of each process
//! (`/proc/PID/fdinfo`).
//!
//! A killed process keeps its locks until the kernel has ended its last request, which takes long on slow storage. Its
//! writes still land meanwhile, so the image must not be used yet. But the user need not stop that process.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// The bit of SIGKILL in the masks of `/proc/PID/status`.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);
/// The kernel's flag of a thread that is exiting (`PF_EXITING`, field 9 of `/proc/PID/stat`).
const EXITING: u64 = 4;

/// A living process that holds a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pid: u32,
    name: String,
}

impl Holder {
    pub(crate) fn is_this_program(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} ({})", self.pid, self.name)
    }
}

/// A lock as the kernel lists it.
#[derive(Debug, PartialEq, Eq)]
struct Listed<'a> {
    /// Device and inode, as the kernel writes them.
    file: &'a str,
    for_writing: bool,
    start: i64,
    /// `i64::MAX` for the end of the file.
    last: i64,
}

/// Returns the visible living processes that hold a lock in the way on the file of `fd`. `is_in_the_way` is given a
/// lock's first and last byte, and whether it is a lock for writing.
pub(crate) fn living(fd: BorrowedFd<'_>, is_in_the_way: impl Fn(i64, i64, bool) -> bool) -> Vec<Holder> {
    let own = std::process::id();
    let own_number = fd.as_raw_fd().to_string();
    let Some(wanted) = identity_of(fd) else { return Vec::new() };
    let holds = |info: &Path| {
        let text = std::fs::read_to_string(info).unwrap_or_default();
        let in_the_way =
            |lock: Listed<'_>| lock.file == wanted && is_in_the_way(lock.start, lock.last, lock.for_writing);
        text.lines().filter_map(parse).any(in_the_way)
    };
    let mut holders = Vec::new();
    for pid in numbers_in(Path::new("/proc")) {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let is_own = |info: &PathBuf| pid == own && info.file_name().is_some_and(|name| *name == *own_number);
        if descriptors_of(&process).into_iter().filter(|info| !is_own(info)).any(|info| holds(&info))
            && is_living(&process)
        {
            let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            holders.push(Holder { pid, name: name.trim_end().to_owned() });
        }
    }
    holders
}

/// Returns how the kernel names the file in its lists: from a lock of our own, or else from the numbers that file
/// systems usually give.
fn identity_of(fd: BorrowedFd<'_>) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap_or_default();
    if let Some(lock) = text.lines().find_map(parse) {
        return Some(lock.file.to_owned());
    }
    let stat = rustix::fs::fstat(fd).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Some(format!("{major:02x}:{minor:02x}:{}", stat.st_ino))
}

/// Reads a line such as `lock:  1: OFDLCK ADVISORY  READ -1 fd:00:1234 100 100`.
fn parse(line: &str) -> Option<Listed<'_>> {
    let mut words = line.strip_prefix("lock:")?.split_whitespace();
    let for_writing = words.by_ref().find_map(|word| match word {
        "READ" => Some(false),
        "WRITE" => Some(true),
        _ => None,
    })?;
    let _pid = words.next()?;
    let file = words.next()?;
    let start = words.next()?.parse().ok()?;
    let last = match words.next()? {
        "EOF" => i64::MAX,
        last => last.parse().ok()?,
    };
    Some(Listed { file, for_writing, start, last })
}

/// Returns the kernel's file about each open descriptor of a process; through another of its threads if the first has
/// ended.
fn descriptors_of(process: &Path) -> Vec<PathBuf> {
    let of = |of: &Path| -> Vec<PathBuf> {
        let dir = of.join("fdinfo");
        numbers_in(&dir).map(|number| dir.join(number.to_string())).collect()
    };
    let first = of(process);
    if !first.is_empty() {
        return first;
    }
    let tasks = process.join("task");
    numbers_in(&tasks).map(|task| of(&tasks.join(task.to_string()))).find(|infos| !infos.is_empty()).unwrap_or_default()
}

/// Returns the names in a directory that are numbers; none if it cannot be read.
fn numbers_in(dir: &Path) -> impl Iterator<Item = u32> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Whether any thread of the process still runs user code. A thread that was killed, dumps core or exits does not.
fn is_living(process: &Path) -> bool {
    let tasks = process.join("task");
    numbers_in(&tasks).any(|task| {
        let task = tasks.join(task.to_string());
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        !is_ending(&read("status"), &read("stat"))
    })
}

/// Whether one thread is ending, by its files `status` and `stat`. They are empty if the thread is gone.
fn is_ending(status: &str, stat: &str) -> bool {
    let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let killed = |mask: &str| u64::from_str_radix(mask, 16).is_ok_and(|mask| mask & KILLED != 0);
    // The name may hold anything, but ends at the last parenthesis.
    let flags = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_none_or(|flags| flags & EXITING != 0)
        || line("SigPnd:").is_some_and(killed)
        || line("ShdPnd:").is_some_and(killed)
        || line("CoreDumping:") == Some("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_lock_is_read_whatever_its_kind() {
        let read = |file, start, last| Some(Listed { file, for_writing: false, start, last });
        assert_eq!(parse("lock:\t1: OFDLCK ADVISORY  READ -1 fd:00:1234 100 103"), read("fd:00:1234", 100, 103));
        let locked = Some(Listed { file: "08:01:7", for_writing: true, start: 0, last: i64::MAX });
        assert_eq!(parse("lock:\t12: POSIX  ADVISORY  WRITE 4711 08:01:7 0 EOF"), locked);
        for line in ["pos:\t0", "lock:\t1: OFDLCK ADVISORY  READ -1 fd:00:1234", "lock:\tREAD a b c d", ""] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_thread_that_was_killed_exits_or_dumps_core_is_ending() {
        let stat = |flags: u32| format!("17 (a) b (c) D 1 1 1 0 -1 {flags} 0 0");
        let status = "Name:\ta\nCoreDumping:\t0\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n";
        assert!(!is_ending(status, &stat(0x40_0000)));
        assert!(is_ending(status, &stat(0x40_0004)));
        assert!(is_ending(&status.replace("SigPnd:\t0000000000000000", "SigPnd:\t0000000000000100"), &stat(0)));
        assert!(is_ending(&status.replace("Dumping:\t0", "Dumping:\t1"), &stat(0)));
        assert!(is_ending("", ""), "it is gone");
        assert!(is_living(Path::new("/proc/self")));
    }
}
