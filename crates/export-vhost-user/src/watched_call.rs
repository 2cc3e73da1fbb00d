//! Calls on a peer's descriptor that the peer could make wait, and the thread that interrupts them.
//!
//! The peer and we share an event descriptor. The peer can clear the non-blocking flag and fill the counter between any
//! two steps of ours, so no check before a write proves that the write returns. Writing from another thread, or by a
//! call that cannot wait, would cost more than the write itself. So the reactor writes. One thread for the whole
//! process regularly looks for a call that has begun and not returned, and interrupts it. Without calls, that thread
//! sleeps.

use block::{Error, Result};
use memory::InterruptHandle;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

/// How often the thread looks. It interrupts a call that it has seen twice, so the reactor is held up for twice this
/// time at most. A thread that had no processor for so long is interrupted too, which is harmless: only a waiting call
/// returns `EINTR`.
pub(crate) const PERIOD: Duration = Duration::from_millis(20);

/// One descriptor's calls, made by one thread.
#[derive(Debug)]
pub(crate) struct WatchedCall {
    state: Arc<State>,
    watch: &'static Watch,
}

#[derive(Debug, Default)]
struct State {
    /// The thread that makes the calls.
    thread: OnceLock<InterruptHandle>,
    /// Counts begins and ends of calls: odd during a call.
    steps: AtomicU64,
    /// The value of `steps` at the watch's last look.
    seen: AtomicU64,
}

impl WatchedCall {
    /// Prepares for calls that one thread will make. The first time, starts the watch.
    pub(crate) fn new() -> Result<Self> {
        let watch = Watch::get()?;
        let state = Arc::<State>::default();
        watch.calls().push(Arc::downgrade(&state));
        Ok(Self { state, watch })
    }

    /// Makes a call. If it waits too long, it returns `EINTR`.
    pub(crate) fn make<T>(&self, call: impl FnOnce() -> T) -> T {
        let state = &self.state;
        if state.thread.get().is_none()
            && let Ok(thread) = InterruptHandle::of_this_thread()
        {
            let _ = state.thread.set(thread);
        }
        let steps = state.steps.load(Ordering::Relaxed);
        // Sequentially consistent with the watch's last look before it sleeps: either it sees this step, or we see that
        // it sleeps.
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
            // A call that began meanwhile may not have seen that the watch is about to sleep.
            if self.look() {
                self.awake.store(true, Ordering::SeqCst);
            }
            while !self.awake.load(Ordering::SeqCst) {
                std::thread::park();
            }
        }
    }

    /// Interrupts calls that have not returned since the last look. Returns whether there is a call, or was one since
    /// then.
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
