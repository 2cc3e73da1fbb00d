//! A thread that watches the connection. It notices a server that goes away, rings that it gave up, and missing
//! answers.
//!
//! The vhost crate waits for an answer without limit, so a deadline is kept here. When it passes, the socket is shut
//! down and the wait ends with an error.

use crate::queue_fds::{QueueFds, notify};
use crate::transport::Link;
use block::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long each queue has made no progress although it has requests in flight.
#[derive(Debug, Default)]
struct Silence {
    /// The progress of each queue, and since when it has been the same.
    queues: Vec<(u64, Option<Instant>)>,
    looked_at: Option<Instant>,
}

impl Silence {
    /// Begins a look at all queues. If the last one was long ago, this process did not run: it was stopped, and nobody
    /// took what the device has ended. So that time does not count.
    fn look(&mut self, now: Instant, limit: Duration) {
        let before = self.looked_at.replace(now);
        let pause = before.map_or(Duration::ZERO, |before| now.saturating_duration_since(before));
        // Looks are a quarter of the limit apart, and a busy machine may delay them.
        if pause > (limit / 2).max(Duration::from_secs(1)) {
            self.queues.clear();
        }
    }

    /// Whether queue `index` has been silent for `limit`.
    fn lasts(&mut self, index: usize, progress: u64, limit: Duration, now: Instant) -> bool {
        if self.queues.len() <= index {
            self.queues.resize(index + 1, (0, None));
        }
        let Some((seen, since)) = self.queues.get_mut(index) else { return false };
        let waits = progress & 0xffff > 0;
        if *seen != progress || !waits {
            (*seen, *since) = (progress, None);
        }
        waits && now.saturating_duration_since(*since.get_or_insert(now)) >= limit
    }
}

#[derive(Debug)]
struct Shared {
    socket: UnixStream,
    poke: OwnedFd,
    stop: AtomicBool,
    timed_out: AtomicBool,
    deadline: Mutex<Option<Instant>>,
    /// How long a device may have requests in flight without ending any.
    request_timeout: Option<Duration>,
    link: Arc<Link>,
}

/// The running watch. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(socket: UnixStream, link: Arc<Link>, request_timeout: Option<Duration>) -> Result<Self> {
        let poke = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        let (stop, timed_out) = (AtomicBool::new(false), AtomicBool::new(false));
        let deadline = Mutex::default();
        let shared = Arc::new(Shared { socket, poke, stop, timed_out, deadline, request_timeout, link });
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("driver-watch".into())
            .spawn(move || seen.run())
            .map_err(|error| Error::io("cannot start the driver's watch thread", error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.shared.link
    }

    /// Ends the connection. Every queue fails its requests in flight.
    pub(crate) fn hang_up(&self) {
        self.shared.hang_up();
    }

    /// Whether the connection ended because an answer did not come.
    pub(crate) fn timed_out(&self) -> bool {
        self.shared.timed_out.load(Ordering::Acquire)
    }

    /// Runs `exchange`, which waits for an answer on the socket, for at most `timeout`.
    pub(crate) fn limit<T>(&self, timeout: Duration, exchange: impl FnOnce() -> T) -> T {
        self.set_deadline(Instant::now().checked_add(timeout));
        let result = exchange();
        self.set_deadline(None);
        result
    }

    fn set_deadline(&self, deadline: Option<Instant>) {
        *self.shared.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
        if deadline.is_some() {
            notify(&self.shared.poke);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        notify(&self.shared.poke);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn hang_up(&self) {
        self.link.end();
        // Fails only if the peer has closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn run(&self) {
        let mut silence = Silence::default();
        while !self.stop.load(Ordering::Acquire) {
            let queues = self.link.queues();
            if let Some(limit) = self.request_timeout {
                self.give_up_silent(&queues, &mut silence, limit);
            }
            let watched: Vec<_> = queues.iter().filter(|queue| !queue.given_up.load(Ordering::Relaxed)).collect();
            let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.timed_out.store(true, Ordering::Release);
                return self.hang_up();
            }
            let mut fds = vec![PollFd::new(&self.poke, PollFlags::IN), PollFd::new(&self.socket, PollFlags::RDHUP)];
            fds.extend(watched.iter().map(|queue| PollFd::from_borrowed_fd(queue.error.as_fd(), PollFlags::IN)));
            if poll(&mut fds, self.patience(deadline).as_ref()).is_err() {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready.first() == Some(&true) {
                // Only empties it: the news is in the shared fields.
                let _ = rustix::io::read(&self.poke, &mut [0; 8]);
            }
            if ready.get(1) == Some(&true) {
                return self.hang_up();
            }
            for (queue, _) in watched.iter().zip(ready.iter().skip(2)).filter(|(_, ready)| **ready) {
                // Taken, so that it says nothing about the ring that comes after a reset.
                if queue.take_error() {
                    queue.give_up();
                }
            }
        }
    }

    /// Gives up each queue whose device has requests in flight and ends none.
    fn give_up_silent(&self, queues: &[Arc<QueueFds>], silence: &mut Silence, limit: Duration) {
        let now = Instant::now();
        silence.look(now, limit);
        for (index, queue) in queues.iter().enumerate() {
            let progress = queue.progress.load(Ordering::Relaxed);
            if silence.lasts(index, progress, limit, now) && !queue.given_up.load(Ordering::Relaxed) {
                let in_flight = progress & 0xffff;
                let waited_ms = limit.as_millis();
                tracing::error!(index, in_flight, waited_ms, "the device ends no requests: its queue is given up");
                queue.give_up();
            }
        }
    }

    /// Returns how long to sleep: until a deadline, and a few times within the request timeout.
    fn patience(&self, deadline: Option<Instant>) -> Option<Timespec> {
        let until = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let look = self.request_timeout.map(|limit| limit / 4);
        let first = until.into_iter().chain(look).min()?;
        Timespec::try_from(first).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_silent_only_while_this_process_runs() {
        let (mut silence, limit, begun) = (Silence::default(), Duration::from_secs(60), Instant::now());
        let mut lasts = |seconds, progress| {
            let now = begun + Duration::from_secs(seconds);
            silence.look(now, limit);
            silence.lasts(0, progress, limit, now)
        };
        // Five requests in flight. Then the process is stopped for two minutes.
        for seconds in [0, 15, 135, 150, 165, 180] {
            assert!(!lasts(seconds, 5), "{seconds} s");
        }
        assert!(lasts(195, 5));
        // One of them has ended.
        for seconds in [210, 225, 240, 255] {
            assert!(!lasts(seconds, 1 << 16 | 4), "{seconds} s");
        }
        assert!(lasts(270, 1 << 16 | 4));
    }
}
