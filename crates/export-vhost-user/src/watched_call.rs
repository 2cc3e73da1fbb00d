//! Calls on a peer's descriptor that the peer could make wait, and the thread that gets us out of them.
//!
//! An event descriptor is one object that the peer and we share. It can clear the non-blocking flag and fill the counter
//! between any two steps of ours, so no check before a write proves that the write returns. Writing by another thread, or
//! through a call that cannot wait, would cost each notification more than the write itself. So the reactor writes, and one
//! thread for the whole process looks from time to time whether a call has begun and not come back: it interrupts that call.
//! While nobody calls, that thread sleeps.

use block::{Error, Result};
use memory::InterruptHandle;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

/// A call is interrupted when it has been seen twice; so the reactor is held up for twice as long at most. A thread that
/// had no processor for so long is interrupted too, which harms nothing: only a call that waits comes back with `EINTR`.
pub(crate) const PERIOD: Duration = Duration::from_millis(20);

/// One descriptor's calls, made by one thread.
#[derive(Debug)]
pub(crate) struct WatchedCall {
    state: Arc<State>,
    watch: &'static Watch,
}

#[derive(Debug, Default)]
struct State {
    /// The thread that calls.
    thread: OnceLock<InterruptHandle>,
    /// Calls begun and ended: odd while one is going on.
    steps: AtomicU64,
    /// The steps when the watch looked last.
    seen: AtomicU64,
}

impl WatchedCall {
    /// For calls that one thread is going to make. Starts the watch, the first time.
    pub(crate) fn new() -> Result<Self> {
        let watch = Watch::get()?;
        let state = Arc::<State>::default();
        watch.calls().push(Arc::downgrade(&state));
        Ok(Self { state, watch })
    }

    /// Makes a call. Where it waits too long it comes back with `EINTR`.
    pub(crate) fn make<T>(&self, call: impl FnOnce() -> T) -> T {
        let state = &self.state;
        if state.thread.get().is_none()
            && let Ok(thread) = InterruptHandle::of_this_thread()
        {
            let _ = state.thread.set(thread);
        }
        let steps = state.steps.load(Ordering::Relaxed);
        // In one order with the watch's look before it sleeps: either it sees this step, or we see that it sleeps.
        state.steps.store(steps.wrapping_add(1), Ordering::SeqCst);
        self.watch.wake();
        let result = call();
        state.steps.store(steps.wrapping_add(2), Ordering::Release);
        result
    }
}

#[derive(Debug)]
struct Watch {
    calls: Mutex<Vec<Weak<State>>>,
    awake: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Watch {
    fn get() -> Result<&'static Self> {
        static WATCH: Watch =
            Watch { calls: Mutex::new(Vec::new()), awake: AtomicBool::new(true), thread: OnceLock::new() };
        let watch = &WATCH;
        let _one_at_a_time = watch.calls();
        if watch.thread.get().is_none() {
            let thread = std::thread::Builder::new().name("vu-watch".into()).spawn(|| watch.run());
            let thread = thread.map_err(|error| Error::io("cannot start the thread that watches calls", error))?;
            let _ = watch.thread.set(thread.thread().clone());
        }
        Ok(watch)
    }

    fn calls(&self) -> MutexGuard<'_, Vec<Weak<State>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if !self.awake.load(Ordering::SeqCst) {
            self.awake.store(true, Ordering::SeqCst);
            if let Some(thread) = self.thread.get() {
                thread.unpark();
            }
        }
    }

    fn run(&self) {
        loop {
            std::thread::sleep(PERIOD);
            if self.look() {
                continue;
            }
            self.awake.store(false, Ordering::SeqCst);
            // A call that began meanwhile may not have seen that we are about to sleep.
            if self.look() {
                self.awake.store(true, Ordering::SeqCst);
            }
            while !self.awake.load(Ordering::SeqCst) {
                std::thread::park();
            }
        }
    }

    /// Interrupts what has not come back since the last look. Returns whether anybody calls, or has called since.
    fn look(&self) -> bool {
        let mut busy = false;
        self.calls().retain(|call| {
            let Some(state) = call.upgrade() else { return false };
            let steps = state.steps.load(Ordering::SeqCst);
            let is_calling = !steps.is_multiple_of(2);
            let has_moved = state.seen.swap(steps, Ordering::Relaxed) != steps;
            if is_calling
                && !has_moved
                && let Some(thread) = state.thread.get()
            {
                thread.interrupt();
            }
            busy |= is_calling || has_moved;
            true
        });
        busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{Errno, write};

    #[test]
    fn a_call_that_waits_comes_back_again_and_again() {
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let calls = WatchedCall::new().unwrap();
        for _ in 0..3 {
            let result = calls.make(|| write(&full, &1_u64.to_ne_bytes()));
            assert_eq!(result, Err(Errno::INTR));
            // Long enough for the watch to have gone to sleep.
            std::thread::sleep(PERIOD * 4);
        }
    }
}
