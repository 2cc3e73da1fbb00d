//! SIGINT and SIGTERM: the first asks for an orderly end, a second ends the program at once. SIGUSR1 asks how far it is.

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A flag that SIGINT and SIGTERM set; a second signal ends the program at once.
pub(crate) fn interrupted() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag unset and sets it, the second finds it set.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .context("cannot install a signal handler")?;
    }
    Ok(flag)
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
    Signals::new([SIGTERM, SIGINT]).context("cannot install a signal handler")
}
