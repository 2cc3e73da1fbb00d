//! SIGINT, SIGTERM and SIGHUP: the first asks for an orderly end; a second SIGINT or SIGTERM ends the program at once.
//! SIGUSR1 asks how far it is.

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A flag that SIGINT, SIGTERM and SIGHUP set; a second SIGINT or SIGTERM ends the program at once.
pub(crate) fn interrupted() -> anyhow::Result<Arc<AtomicBool>> {
    let (flag, asked_before) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in ending() {
        // A terminal that goes sends several SIGHUPs, a service manager one after its SIGTERM: none is somebody's impatience.
        if signal != SIGHUP {
            // In this order: the first signal finds the flag unset and sets it, the second finds it set.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&asked_before))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&asked_before)))
                .context("cannot install a signal handler")?;
        }
        signal_hook::flag::register(signal, Arc::clone(&flag)).context("cannot install a signal handler")?;
    }
    Ok(flag)
}

/// The signals that ask for the end. One that was ignored from the start (nohup) goes on being ignored.
fn ending() -> Vec<i32> {
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    [SIGTERM, SIGINT].into_iter().chain(hangup).collect()
}

/// Whether this process ignores a signal. Only the kernel's report tells without unsafe calls; without it none is ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

/// A flag that SIGUSR1 sets: somebody asks how far the job is.
pub(crate) fn asked() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGUSR1, Arc::clone(&flag)).context("cannot install a signal handler")?;
    Ok(flag)
}

/// The same as `interrupted`, for a program that has nothing to do but to wait for the end.
pub(crate) fn orderly() -> anyhow::Result<Signals> {
    interrupted()?;
    Signals::new(ending()).context("cannot install a signal handler")
}
