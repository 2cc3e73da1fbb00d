//! Sets up a ring in the best way that this kernel offers, and describes that setup.

use io_uring::{IoUring, opcode};
use std::io;

/// How completions reach the ring. The reactor submits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Completions come when the reactor fetches them (Linux 6.1).
    Deferred,
    /// Completions come whenever the reactor enters the kernel (Linux 5.19).
    Cooperative,
    /// Completions come at any time: the kernel interrupts the reactor.
    Plain,
}

impl Setup {
    pub(crate) fn build(self, submission_entries: u32, completion_entries: u32) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(completion_entries);
        match self {
            Self::Deferred => {
                builder.setup_submit_all().setup_taskrun_flag().setup_single_issuer().setup_defer_taskrun();
            }
            Self::Cooperative => {
                builder.setup_submit_all().setup_taskrun_flag().setup_coop_taskrun();
            }
            Self::Plain => {}
        }
        builder.build(submission_entries)
    }

    /// Describes the setup, for logs and `info`.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Deferred => "single issuer, deferred task work",
            Self::Cooperative => "cooperative task work: deferred task work needs Linux 6.1",
            Self::Plain => "task work by interruption: cooperative needs Linux 5.19, deferred 6.1",
        }
    }
}

/// Sets a ring up in the best way that the kernel offers.
pub(crate) fn build(submission_entries: u32, completion_entries: u32) -> io::Result<(IoUring, Setup)> {
    for setup in [Setup::Deferred, Setup::Cooperative] {
        match setup.build(submission_entries, completion_entries) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => return Ok((other?, setup)),
        }
    }
    Ok((Setup::Plain.build(submission_entries, completion_entries)?, Setup::Plain))
}

/// Finds out whether this process may use io_uring here, and with which setup.
pub(crate) fn probe() -> io::Result<Setup> {
    let (ring, setup) = build(2, 4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match has_what_is_needed(|code| probe.is_supported(code)) {
        true => Ok(setup),
        false => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old (5.8 or later is needed)"))
        }
    }
}

/// Whether a kernel with these operations is new enough.
fn has_what_is_needed(is_supported: impl Fn(u8) -> bool) -> bool {
    // `Tee` is not used, but it is as old as the completion ring's flags (5.8). Without these flags, switching off the
    // event descriptor's signals would write to the submission ring's head.
    [opcode::Read::CODE, opcode::Write::CODE, opcode::Tee::CODE].into_iter().all(is_supported)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_flags_in_its_completion_ring_is_too_old() {
        assert!(has_what_is_needed(|_| true));
        assert!(!has_what_is_needed(|code| code < opcode::Tee::CODE), "5.7");
    }

    #[test]
    fn a_kernel_that_defers_task_work_does_so_for_every_reactor() {
        let uname = rustix::system::uname();
        let mut numbers = uname.release().to_str().unwrap().split('.').map_while(|part| part.parse::<u32>().ok());
        if (numbers.next(), numbers.next()) >= (Some(6), Some(1)) {
            assert_eq!(build(8, 16).unwrap().1, Setup::Deferred);
        }
    }
}
