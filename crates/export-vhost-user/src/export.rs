//! An export: a socket and a thread that serves one peer at a time, again and again.

use crate::session::{Served as ServedDevice, Session, SessionEvents};
use crate::socket::ListenSocket;
use crate::wire::{Connection, Served};
use block::{Disk, Error, ErrorKind, ReactorHandle, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use virtio_blk::{Counter, Device, DeviceOptions, RingStats};

/// How a disk is exported.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExportOptions {
    /// For logs and thread names.
    pub name: String,
    /// Queues that a guest may use.
    pub max_queues: u16,
    /// Entries that a ring may have: a power of two up to 1024.
    pub queue_size: u16,
    /// The guest may not write, whatever the disk allows: it sees a read-only disk.
    pub read_only: bool,
    /// The socket's permissions.
    pub mode: u32,
    /// The reactor of the first queue; the others follow round robin. Lets several exports share reactors evenly.
    pub first_reactor: usize,
    /// Register the guest's memory with the engines that can, where that pays. Its pages are pinned then: the guest must
    /// not return memory to its host and take it back (a balloon, free page reporting).
    pub fixed_buffers: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        let DeviceOptions { name, max_queues, queue_size, read_only, .. } = DeviceOptions::default();
        Self { name, max_queues, queue_size, read_only, mode: 0o600, first_reactor: 0, fixed_buffers: false }
    }
}

impl ExportOptions {
    fn device(&self) -> DeviceOptions {
        let mut device = DeviceOptions::default();
        device.name.clone_from(&self.name);
        (device.max_queues, device.queue_size, device.read_only) = (self.max_queues, self.queue_size, self.read_only);
        device
    }
}

/// A disk on a socket. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the export's thread and its owner share.
#[derive(Debug)]
struct Shared {
    device: Arc<Device>,
    stopping: AtomicBool,
    config_changed: AtomicBool,
    /// Gets the thread out of its wait.
    wake: OwnedFd,
    /// The peer being served: shut down to get the thread out of a half-received message.
    peer: Mutex<Option<UnixStream>>,
}

impl Export {
    /// Creates the socket and serves `disk` on it. When this returns, peers can connect.
    pub fn listen(
        socket: &Path,
        disk: Arc<dyn Disk>,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        options: ExportOptions,
    ) -> Result<Self> {
        let device = device(disk, &reactors, &options)?;
        let socket = ListenSocket::bind(socket, options.mode)?;
        Self::serve(socket, device, reactors, &options)
    }

    /// Serves `disk` on a socket that somebody else made and listens on (a service manager).
    pub fn adopt(
        listener: OwnedFd,
        disk: Arc<dyn Disk>,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        options: ExportOptions,
    ) -> Result<Self> {
        let device = device(disk, &reactors, &options)?;
        let listener = UnixListener::from(listener);
        listener.local_addr().map_err(|error| Error::io("the descriptor passed in is not a Unix socket", error))?;
        Self::serve(ListenSocket::adopt(listener), device, reactors, &options)
    }

    fn serve(
        socket: ListenSocket,
        device: Arc<Device>,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        options: &ExportOptions,
    ) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        let shared = Arc::new(Shared {
            device: Arc::clone(&device),
            stopping: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            wake,
            peer: Mutex::default(),
        });
        let theirs = Arc::downgrade(&shared);
        device.on_config_change(move || {
            if let Some(shared) = theirs.upgrade() {
                shared.config_changed.store(true, Ordering::Release);
                shared.wake();
            }
        });
        let served = ServedDevice {
            device,
            reactors,
            first_reactor: options.first_reactor,
            fixed_buffers: options.fixed_buffers,
            failed_starts: (0..options.max_queues).map(|_| Counter::default()).collect(),
        };
        socket.listener.set_nonblocking(true).map_err(|error| Error::io("cannot set the socket up", error))?;
        let server = Server {
            socket,
            served: Arc::new(served),
            shared: Arc::clone(&shared),
            sessions: Counter::default(),
            failed_sessions: Counter::default(),
        };
        let thread = std::thread::Builder::new()
            // The standard library panics on a zero byte here.
            .name(format!("vu-{}", options.name.replace('\0', "")))
            .spawn(move || server.run())
            .map_err(|error| Error::io("cannot start the export's thread", error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What each ring has done.
    #[must_use]
    pub fn stats(&self) -> Vec<RingStats> {
        self.shared.device.stats()
    }

    /// Ends the session, if there is one, and waits for its requests in flight; removes the socket.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(peer) = self.shared.peer.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            let _ = peer.shutdown(std::net::Shutdown::Both);
        }
        if thread.join().is_err() {
            tracing::error!(disk = %self.shared.device.name(), "the export's thread panicked");
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.end();
    }
}

fn device(disk: Arc<dyn Disk>, reactors: &[Arc<dyn ReactorHandle>], options: &ExportOptions) -> Result<Arc<Device>> {
    match reactors.is_empty() {
        true => Err(Error::new(ErrorKind::BadOption, "an export needs a reactor")),
        false => Device::new(disk, options.device()),
    }
}

impl Shared {
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn calm(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn set_peer(&self, peer: Option<UnixStream>) {
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = peer;
    }
}

/// The export's thread.
struct Server {
    socket: ListenSocket,
    served: Arc<ServedDevice>,
    shared: Arc<Shared>,
    /// For the log: a peer that comes again and again cannot fill it.
    sessions: Counter,
    failed_sessions: Counter,
}

impl Server {
    fn run(self) {
        let name = self.shared.device.name();
        while !self.shared.is_stopping() {
            wait_readable(&[self.socket.listener.as_fd(), self.shared.wake.as_fd()]);
            self.shared.calm();
            if self.shared.is_stopping() {
                return;
            }
            match self.socket.listener.accept() {
                Ok((stream, _)) => {
                    let times = self.sessions.add_to_log();
                    if let Some(times) = times {
                        tracing::info!(disk = %name, times, "a peer connected");
                    }
                    match self.serve_peer(stream) {
                        Ok(()) if times.is_some() => tracing::info!(disk = %name, "the peer disconnected"),
                        Ok(()) => {}
                        Err(error) => {
                            if let Some(times) = self.failed_sessions.add_to_log() {
                                tracing::warn!(disk = %name, times, "the session ended: {error}");
                            }
                        }
                    }
                    self.shared.set_peer(None);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(disk = %name, "cannot accept a peer: {error}");
                    // Out of descriptors, say: not a reason to spin.
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    fn serve_peer(&self, stream: UnixStream) -> Result<()> {
        let setup = |error| Error::io("cannot set the connection up", error);
        stream.set_nonblocking(false).map_err(setup)?;
        let watched = stream.try_clone().map_err(setup)?;
        self.shared.set_peer(Some(stream.try_clone().map_err(setup)?));
        let events = Arc::new(SessionEvents::new()?);
        let session = Session::new(Arc::clone(&self.served), Arc::clone(&events));
        let mut connection = Connection::new(stream, session);
        let ended = self.serve_messages(&mut connection, watched.as_fd(), &events);
        connection.with_backend(Session::close);
        ended
    }

    fn serve_messages(
        &self,
        connection: &mut Connection<Session>,
        stream: BorrowedFd<'_>,
        events: &SessionEvents,
    ) -> Result<()> {
        loop {
            let [message, ..] = wait_readable(&[stream, self.shared.wake.as_fd(), events.as_fd()]);
            // Calm before looking: a wish that comes later wakes the next wait.
            self.shared.calm();
            if self.shared.is_stopping() {
                return Ok(());
            }
            events.check()?;
            if self.shared.config_changed.swap(false, Ordering::AcqRel) {
                connection.config_changed();
            }
            if message && connection.serve_one(stream)? == Served::Disconnected {
                return Ok(());
            }
        }
    }
}

/// Waits until one of the descriptors is readable (or hung up) and says which are. After an interruption none is.
fn wait_readable(fds: &[BorrowedFd<'_>]) -> [bool; 3] {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let _ = poll(&mut polled, None);
    let mut ready = [false; 3];
    for (ready, fd) in ready.iter_mut().zip(&polled) {
        *ready = !fd.revents().is_empty();
    }
    ready
}
