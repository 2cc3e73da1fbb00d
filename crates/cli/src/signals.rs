//! SIGINT, SIGTERM and SIGHUP: the first asks for an orderly end; a second SIGINT or SIGTERM ends the program at once.
//! SIGUSR1 asks for the progress.
//!
//! After an interrupted command has cleaned up, it ends by the signal, so that a shell does not go on. A daemon that
//! was told to stop has done its work, and ends with 0.

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The signal that interrupted the command, zero before.
static INTERRUPTED_BY: AtomicUsize = AtomicUsize::new(0);

/// Returns a flag that SIGINT, SIGTERM and SIGHUP set; a second SIGINT or SIGTERM ends the program at once.
pub(crate) fn interrupted() -> anyhow::Result<Arc<AtomicBool>> {
    let (flag, asked_before) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in ending() {
        // A closing terminal sends several SIGHUPs, and a service manager one after its SIGTERM. So SIGHUP never ends
        // the program at once.
        if signal != SIGHUP {
            // The order matters: the first signal finds the flag unset and then sets it; the second finds it set.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&asked_before))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&asked_before)))
                .context(CANNOT_INSTALL)?;
        }
        // The order matters: the signal is stored before the flag is set.
        let number = usize::try_from(signal).unwrap_or_default();
        signal_hook::flag::register_usize(signal, &INTERRUPTED_BY, number)
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .context(CANNOT_INSTALL)?;
    }
    Ok(flag)
}

const CANNOT_INSTALL: &str = "cannot install a signal handler";

/// Whether the command was interrupted.
pub(crate) fn has_interrupted() -> bool {
    INTERRUPTED_BY.load(Ordering::SeqCst) != 0
}

/// Ends the program by the signal that interrupted it, if one did. Call it when everything is closed.
pub(crate) fn end_if_interrupted() {
    if let Ok(signal @ 1..) = i32::try_from(INTERRUPTED_BY.load(Ordering::SeqCst)) {
        // It fails only for signals without a default action.
        let _ = signal_hook::low_level::emulate_default_handler(signal);
    }
}

/// Returns the signals that ask for the end. SIGHUP stays ignored if it was ignored from the start (nohup).
fn ending() -> Vec<i32> {
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    [SIGTERM, SIGINT].into_iter().chain(hangup).collect()
}

/// Whether this process ignores a signal. Without unsafe calls only the kernel's report shows it; without the report,
/// none counts as ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

/// Returns a flag that SIGUSR1 sets, to ask for the progress of a job.
pub(crate) fn asked() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGUSR1, Arc::clone(&flag)).context(CANNOT_INSTALL)?;
    Ok(flag)
}

/// Returns the signals that ask a daemon for its end. A second SIGINT or SIGTERM ends it at once, as a failure, because
/// its disks are not closed.
pub(crate) fn orderly() -> anyhow::Result<Signals> {
    let asked_before = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The order matters: the first signal finds the flag unset and then sets it; the second finds it set.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&asked_before))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&asked_before)))
            .context(CANNOT_INSTALL)?;
    }
    Signals::new(ending()).context(CANNOT_INSTALL)
}
