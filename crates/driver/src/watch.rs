//! A thread that watches the connection: the server going away, rings that it gave up, answers that don't come.
//!
//! The vhost crate waits for an answer without limit, so a deadline is kept here: when it passes, the socket is shut
//! down and the wait ends with an error.

use block::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One queue's descriptors: `kick` tells the device, `call` tells us, `error` says that the device gave the ring up.
#[derive(Debug)]
pub(crate) struct QueueFds {
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) error: OwnedFd,
    /// The device signalled `error`.
    pub(crate) given_up: AtomicBool,
    /// Times that the device was kicked, and that the reactor slept and woke.
    pub(crate) kicks: AtomicU64,
    pub(crate) wakeups: AtomicU64,
}

impl QueueFds {
    pub(crate) fn new(kick: OwnedFd, call: OwnedFd, error: OwnedFd) -> Arc<Self> {
        let (given_up, kicks, wakeups) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { kick, call, error, given_up, kicks, wakeups })
    }

    /// Wakes the reactor that sleeps on `call`, as the device would.
    pub(crate) fn wake(&self) {
        notify(&self.call);
    }
}

/// Adds one to an event descriptor. It can only fail by being full, and then it is readable anyway.
pub(crate) fn notify(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

#[derive(Debug)]
struct Shared {
    socket: UnixStream,
    poke: OwnedFd,
    stop: AtomicBool,
    /// The connection is over, whoever ended it.
    gone: AtomicBool,
    timed_out: AtomicBool,
    deadline: Mutex<Option<Instant>>,
    queues: Mutex<Vec<Arc<QueueFds>>>,
}

/// Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(socket: UnixStream) -> Result<Self> {
        let poke = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        let (stop, gone, timed_out) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let (deadline, queues) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { socket, poke, stop, gone, timed_out, deadline, queues });
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("driver-watch".into())
            .spawn(move || seen.run())
            .map_err(|error| Error::io("cannot start the driver's watch thread", error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Watches these queues from now on.
    pub(crate) fn add(&self, queues: &[Arc<QueueFds>]) {
        self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner).extend(queues.iter().cloned());
        notify(&self.shared.poke);
    }

    /// Whether the connection is over.
    pub(crate) fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Relaxed)
    }

    /// Ends the connection: every queue fails what it has in flight.
    pub(crate) fn hang_up(&self) {
        self.shared.hang_up();
    }

    /// Whether it ended because an answer did not come.
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
        self.gone.store(true, Ordering::SeqCst);
        // Fails only if the peer has closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
        for queue in self.queues.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            queue.wake();
        }
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let watched: Vec<_> = queues.iter().filter(|queue| !queue.given_up.load(Ordering::Relaxed)).collect();
            let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.timed_out.store(true, Ordering::Release);
                return self.hang_up();
            }
            let mut fds = vec![PollFd::new(&self.poke, PollFlags::IN), PollFd::new(&self.socket, PollFlags::RDHUP)];
            fds.extend(watched.iter().map(|queue| PollFd::from_borrowed_fd(queue.error.as_fd(), PollFlags::IN)));
            if poll(&mut fds, timeout(deadline).as_ref()).is_err() {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready.first() == Some(&true) {
                // Only empties it: what there is to know is in the shared fields.
                let _ = rustix::io::read(&self.poke, &mut [0; 8]);
            }
            if ready.get(1) == Some(&true) {
                return self.hang_up();
            }
            for (queue, _) in watched.iter().zip(ready.iter().skip(2)).filter(|(_, ready)| **ready) {
                queue.given_up.store(true, Ordering::SeqCst);
                queue.wake();
            }
        }
    }
}

fn timeout(deadline: Option<Instant>) -> Option<Timespec> {
    let left = deadline?.saturating_duration_since(Instant::now());
    Timespec::try_from(left).ok()
}
