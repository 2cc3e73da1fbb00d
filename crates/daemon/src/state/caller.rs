//! The thread that makes a call, and whether it runs.

use rustix::thread::{Pid, gettid};

/// The thread that makes a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(Pid);

/// How often a thread has begun to wait, or made room for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Switches {
    pub(crate) count: u64,
    pub(crate) at: At,
}

/// What a thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    /// It does not wait.
    Work,
    /// It waits for the kernel's own storage, and no signal ends that.
    Storage,
    /// It waits for another process or thread: a server, or a file system in user space.
    Rest,
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
        let at = match value("State:")?.chars().next()? {
            'R' => At::Work,
            'D' => At::Storage,
            _ => At::Rest,
        };
        Some(Self { count, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_about_a_thread_is_understood() {
        let text = "Name:\tx\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t2\n";
        assert_eq!(Switches::parse(text), Some(Switches { count: 7, at: At::Rest }));
        let at = |state: &str| Switches::parse(&text.replace("S (sleeping)", state)).unwrap().at;
        assert_eq!((at("R (running)"), at("D (disk sleep)")), (At::Work, At::Storage));
        assert_eq!(Switches::parse("Name:\tx\n"), None);
        assert_eq!(Caller::this().switches().unwrap().at, At::Work);
    }
}
