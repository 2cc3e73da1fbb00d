//! An export: a socket and a thread that serves one peer after another.

use crate::memory_table::MemoryRules;
use crate::own_messages;
use crate::pace::Pace;
use crate::running_rings::RunningRings;
use crate::session::{Served as ServedDevice, Session};
use crate::session_events::SessionEvents;
use crate::socket::{Access, ListenSocket};
use crate::takeover::{PeerWatch, QUIET};
use crate::wire::{Connection, Served};
use block::{Disk, Error, ErrorKind, ReactorHandle, Result};
use memory::{MappingShare, Placement};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use virtio_blk::{Counter, Device, DeviceOptions, Overrides, QueueLatency, RingStats};

/// How long a session's thread may take to end if it waits for no request. Calls that do not depend on its peer are
/// shorter.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// How long a peer may take to read an answer when the export ends.
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);

/// How long a peer may take to send the rest of a message, or to make room for an answer. Long, because the peer loses
/// its disk otherwise, and the host may be busy.
const MESSAGE_PATIENCE: Duration = Duration::from_secs(30);

/// The options of an export.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExportOptions {
    /// For logs and thread names.
    pub name: String,
    /// The number of queues that a guest may use.
    pub max_queues: u16,
    /// Entries that a ring may have: a power of two up to 1024.
    pub queue_size: u16,
    /// The guest may not write, whatever the disk allows: it sees a read-only disk.
    pub read_only: bool,
    /// The socket's permissions.
    pub mode: u32,
    /// The number of the socket's group; by default that of this process.
    pub group: Option<u32>,
    /// The reactor of the first queue; the others follow round robin. So several exports can share reactors evenly.
    pub first_reactor: usize,
    /// Packed rings are offered, too.
    pub packed: bool,
    /// Properties that the guest is told instead of the disk's own.
    pub overrides: Overrides,
    /// Register the guest's memory with the engines that can use that. Its pages are then pinned, so the guest must not
    /// return memory to its host and take it back (a balloon, free page reporting).
    pub fixed_buffers: bool,
    /// The kinds of files that the guest's memory may lie in.
    pub guest_memory: Placement,
    /// The most memory that a peer may share. Untouched pages are charged to this process if it touches them first.
    pub guest_memory_max_bytes: Option<u64>,
}

impl Default for ExportOptions {
    fn default() -> Self {
        let DeviceOptions { name, max_queues, queue_size, read_only, packed, overrides, .. } = DeviceOptions::default();
        Self {
            name,
            max_queues,
            queue_size,
            read_only,
            mode: 0o600,
            group: None,
            first_reactor: 0,
            packed,
            overrides,
            fixed_buffers: false,
            guest_memory: Placement::default(),
            guest_memory_max_bytes: None,
        }
    }
}

impl ExportOptions {
    fn device(&self) -> DeviceOptions {
        let mut device = DeviceOptions::default();
        device.name.clone_from(&self.name);
        (device.max_queues, device.queue_size) = (self.max_queues, self.queue_size);
        (device.read_only, device.packed, device.overrides) = (self.read_only, self.packed, self.overrides);
        device
    }
}

/// A disk on a socket. Dropping it stops it.
pub struct Export {
    shared: Arc<Shared>,
    served: Arc<ServedDevice>,
    socket: Arc<ListenSocket>,
    thread: Option<JoinHandle<()>>,
}

/// Gives up an export's requests; see [`Export::surrender`].
#[derive(Clone)]
pub struct Surrender(Arc<ServedDevice>);

impl Surrender {
    /// Gives up the requests in flight.
    pub fn give_up(&self) {
        self.0.running.give_up();
    }

    /// As [`Export::latency`].
    #[must_use]
    pub fn latency(&self) -> QueueLatency {
        self.0.device.latency()
    }
}

/// The state that the export's thread and its owner share.
#[derive(Debug)]
struct Shared {
    device: Arc<Device>,
    stopping: AtomicBool,
    config_changed: AtomicBool,
    /// A guest has asked for the storage's wear since it was last read.
    lifetime_queried: AtomicBool,
    /// Wakes the thread.
    wake: OwnedFd,
    /// The peer being served. It is shut down if it does not read an answer, to free the thread.
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
        let socket = ListenSocket::bind(socket, Access { mode: options.mode, group: options.group })?;
        Self::serve(socket, device, reactors, &options)
    }

    /// Serves `disk` on a listening socket that another program made (a service manager). That program also owns the
    /// socket's file.
    pub fn adopt(
        listener: UnixListener,
        disk: Arc<dyn Disk>,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        options: ExportOptions,
    ) -> Result<Self> {
        let device = device(disk, &reactors, &options)?;
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
            lifetime_queried: AtomicBool::new(false),
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
        let theirs = Arc::downgrade(&shared);
        device.on_lifetime_query(move || {
            if let Some(shared) = theirs.upgrade()
                && !shared.lifetime_queried.swap(true, Ordering::AcqRel)
            {
                shared.wake();
            }
        });
        let share = MappingShare::new().map_err(|error| Error::io("cannot serve another disk", error))?;
        let served = Arc::new(ServedDevice {
            running: RunningRings::default(),
            share,
            device,
            reactors,
            first_reactor: options.first_reactor,
            fixed_buffers: options.fixed_buffers,
            memory_rules: MemoryRules { placement: options.guest_memory, max_bytes: options.guest_memory_max_bytes },
            failed_starts: (0..options.max_queues).map(|_| Counter::default()).collect(),
        });
        let socket = Arc::new(socket);
        socket.listener.set_nonblocking(true).map_err(|error| Error::io("cannot set the socket up", error))?;
        let server = Server {
            socket: Arc::clone(&socket),
            served: Arc::clone(&served),
            shared: Arc::clone(&shared),
            sessions: Counter::default(),
            failed_sessions: Counter::default(),
            failed_accepts: Counter::default(),
            rests: Counter::default(),
        };
        let thread = std::thread::Builder::new()
            .name(thread_name(&options.name))
            .spawn(move || server.run())
            .map_err(|error| Error::io("cannot start the export's thread", error))?;
        Ok(Self { shared, served, socket, thread: Some(thread) })
    }

    /// Returns the bytes of the logical blocks that its guest sees.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.shared.device.config().blk_size_bytes
    }

    /// Returns the counters of each ring.
    #[must_use]
    pub fn stats(&self) -> Vec<RingStats> {
        self.shared.device.stats()
    }

    /// Asks rings that are awake to look for their oldest requests, for [`Export::latency`].
    pub fn ask_for_oldest(&self) {
        self.shared.device.ask_for_oldest();
    }

    /// Returns the latencies of its guests' requests.
    #[must_use]
    pub fn latency(&self) -> QueueLatency {
        self.shared.device.latency()
    }

    /// Whether a peer is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.peer.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Ends the session, if there is one, waits for its requests in flight, and removes the socket.
    pub fn stop(mut self) {
        self.end();
    }

    /// As [`Export::stop`]. Returns the counters and the latencies at the end.
    #[must_use]
    pub fn stop_counted(mut self) -> (Vec<RingStats>, QueueLatency) {
        self.end();
        (self.stats(), self.latency())
    }

    /// Returns a handle that makes [`Export::stop`] wait no longer. Requests in flight then end with errors, and the
    /// storage no longer reaches the guest's memory. The handle stays valid when the export is gone.
    #[must_use]
    pub fn surrender(&self) -> Surrender {
        Surrender(Arc::clone(&self.served))
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake();
        let name = self.shared.device.name();
        if !self.ends_within(&thread, ANSWER_PATIENCE) {
            // The peer does not read an answer. The session is cut only now: a peer that sees it end while requests are
            // in flight repeats them at the next server.
            if let Some(peer) = self.shared.peer.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
                let _ = peer.shutdown(std::net::Shutdown::Both);
            }
        }
        if !self.ends_within(&thread, END_PATIENCE) {
            tracing::error!(
                disk = %name,
                "the session's thread is held up by a descriptor that its peer passed, and is left behind"
            );
            self.served.running.close();
            self.shared.device.let_go();
            return self.socket.remove();
        }
        if thread.join().is_err() {
            tracing::error!(disk = %name, "the export's thread panicked");
        }
    }

    /// Waits until the thread has ended, or has spent `patience` on something other than requests in flight. For those
    /// it may wait for ever. Returns whether it has ended.
    fn ends_within(&self, thread: &JoinHandle<()>, patience: Duration) -> bool {
        let mut since = Instant::now();
        while !thread.is_finished() {
            if self.served.running.is_stopping() {
                since = Instant::now();
            } else if since.elapsed() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("device", &self.shared.device).finish_non_exhaustive()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the thread's name. The kernel keeps 15 bytes, so of a path only the last part is used. The standard library
/// panics on a zero byte.
fn thread_name(name: &str) -> String {
    let name = name.trim_end_matches('/');
    format!("vu-{}", name.rsplit('/').next().unwrap_or(name).replace('\0', ""))
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
    socket: Arc<ListenSocket>,
    served: Arc<ServedDevice>,
    shared: Arc<Shared>,
    /// Counters for the log, so that a peer that connects again and again cannot fill it.
    sessions: Counter,
    failed_sessions: Counter,
    failed_accepts: Counter,
    rests: Counter,
}

/// The pause after a session whose peer made a reactor wait. Each such session costs the reactor's other disks up to 40
/// ms, and its peer may connect again at once.
#[derive(Debug, Default)]
struct Pause {
    times: u32,
}

impl Pause {
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(64);
    /// After a session of this length, earlier ones no longer count.
    const FORGIVEN_AFTER: Duration = Duration::from_secs(300);

    /// Returns the pause after a session of this length, if it has blocked a reactor.
    fn after(&mut self, lasted: Duration, has_blocked: bool) -> Option<Duration> {
        if lasted >= Self::FORGIVEN_AFTER {
            self.times = 0;
        }
        has_blocked.then(|| self.next())
    }

    /// Returns the pause after one more such session.
    fn next(&mut self) -> Duration {
        let pause = Self::FIRST.saturating_mul(1_u32.checked_shl(self.times).unwrap_or(u32::MAX));
        self.times = self.times.saturating_add(1);
        pause.min(Self::LONGEST)
    }
}

impl Server {
    fn run(self) {
        let name = self.shared.device.name();
        let mut pause = Pause::default();
        while !self.shared.is_stopping() {
            wait_readable(&[self.socket.listener.as_fd(), self.shared.wake.as_fd()], None);
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
                    let begun = Instant::now();
                    let (ended, has_blocked) = self.serve_peer(stream);
                    match ended {
                        Ok(()) if times.is_some() => tracing::info!(disk = %name, "the peer disconnected"),
                        Ok(()) => {}
                        Err(error) => {
                            if let Some(times) = self.failed_sessions.add_to_log() {
                                tracing::warn!(disk = %name, times, "the session ended: {error}");
                            }
                        }
                    }
                    self.shared.set_peer(None);
                    if let Some(pause) = pause.after(begun.elapsed(), has_blocked) {
                        if let Some(times) = self.rests.add_to_log() {
                            let pause_s = pause.as_secs();
                            tracing::warn!(disk = %name, times, pause_s, "serves nobody for a while: the peer held a reactor up");
                        }
                        rest(&self.shared.wake, || self.shared.is_stopping(), pause);
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    if let Some(times) = self.failed_accepts.add_to_log() {
                        tracing::warn!(disk = %name, times, "cannot accept a peer: {error}");
                    }
                    // Out of descriptors, for example, which is no reason to spin.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Serves a peer until its session ends. Returns how it ended, and whether the peer made a reactor wait.
    fn serve_peer(&self, stream: UnixStream) -> (Result<()>, bool) {
        match SessionEvents::new().map(Arc::new) {
            Ok(events) => (self.serve_session(stream, &events), events.has_blocked()),
            Err(error) => (Err(error), false),
        }
    }

    fn serve_session(&self, stream: UnixStream, events: &Arc<SessionEvents>) -> Result<()> {
        let setup = |error| Error::io("cannot set the connection up", error);
        stream.set_nonblocking(false).map_err(setup)?;
        // A peer that does not read its answers delays only itself.
        stream.set_write_timeout(Some(MESSAGE_PATIENCE)).map_err(setup)?;
        let watched = stream.try_clone().map_err(setup)?;
        self.shared.set_peer(Some(stream.try_clone().map_err(setup)?));
        let session = Session::new(Arc::clone(&self.served), Arc::clone(events));
        let mut connection = Connection::new(stream, session);
        let ended = self.serve_messages(&mut connection, watched.as_fd(), events);
        connection.with_backend(Session::close);
        ended
    }

    fn serve_messages(
        &self,
        connection: &mut Connection<Session>,
        stream: BorrowedFd<'_>,
        events: &SessionEvents,
    ) -> Result<()> {
        let listener = self.socket.listener.as_fd();
        let mut peer = PeerWatch::of(stream, QUIET);
        self.shared.device.read_lifetime();
        let mut wear = Pace::from(Instant::now());
        loop {
            let (news, limit) = peer.news(listener);
            // A query that already waits does not wake the thread again.
            let is_asked = self.shared.lifetime_queried.load(Ordering::Acquire);
            let limit = limit.into_iter().chain(is_asked.then(|| wear.pause_left(Instant::now()))).min();
            let wanted = [Some(stream), Some(self.shared.wake.as_fd()), Some(events.as_fd()), news];
            let [message, ..] = wait_readable(&wanted.into_iter().flatten().collect::<Vec<_>>(), limit);
            // The wake is taken back before looking: a later event wakes the next wait.
            self.shared.calm();
            if self.shared.is_stopping() {
                return Ok(());
            }
            events.check()?;
            if self.shared.config_changed.swap(false, Ordering::AcqRel) {
                connection.config_changed();
            }
            let now = Instant::now();
            if wear.pause_left(now).is_zero() && self.shared.lifetime_queried.swap(false, Ordering::AcqRel) {
                wear = Pace::from(now);
                self.shared.device.read_lifetime();
            }
            if message {
                peer.heard();
                self.wait_for_whole_message(stream, &peer)?;
                if self.shared.is_stopping() || connection.serve_one(stream)? == Served::Disconnected {
                    return Ok(());
                }
            } else if peer.look(listener, self.requests()) {
                let why = "the process that connected has exited, its guest asks nothing, and another peer waits";
                return Err(Error::new(ErrorKind::Protocol, why));
            }
        }
    }

    /// Returns how many requests the guest has sent so far.
    fn requests(&self) -> u64 {
        self.shared.device.stats().iter().map(|ring| ring.requests).fold(0, u64::saturating_add)
    }

    /// Waits until the whole message has arrived, or nothing more can come, or the export stops. An incomplete message
    /// is not received: its descriptors would be ours, and one of them may be the peer's own end of the session.
    fn wait_for_whole_message(&self, stream: BorrowedFd<'_>, peer: &PeerWatch) -> Result<()> {
        let begun = Instant::now();
        while !own_messages::is_whole(stream) && !self.shared.is_stopping() {
            if begun.elapsed() > MESSAGE_PATIENCE || peer.has_exited() {
                return Err(Error::new(ErrorKind::Protocol, "the peer has begun a message and does not end it"));
            }
            // Rare: peers send their messages in one piece.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// Waits for `pause`, or until the export stops.
fn rest(wake: &OwnedFd, is_stopping: impl Fn() -> bool, pause: Duration) {
    let begun = Instant::now();
    // Checked before the wait: the session may have taken the wake-up of the stop.
    while !is_stopping()
        && let Some(left) = pause.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())
    {
        wait_readable(&[wake.as_fd()], Some(left));
        let _ = rustix::io::read(wake, &mut [0; 8]);
    }
}

/// Waits until one of the descriptors is readable (or hung up), for `limit` at most, and returns which are. After an
/// interruption none is.
fn wait_readable(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> [bool; 4] {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let _ = poll(&mut polled, limit.as_ref());
    let mut ready = [false; 4];
    for (ready, fd) in ready.iter_mut().zip(&polled) {
        *ready = !fd.revents().is_empty();
    }
    ready
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watched_call::PERIOD;

    #[test]
    fn a_peer_that_comes_again_and_again_to_hold_a_reactor_up_takes_little_of_its_time() {
        let mut pause = Pause::default();
        let pauses: Vec<Duration> = (0..100).map(|_| pause.next()).collect();
        let share = |count: usize| {
            let held = 2.0 * PERIOD.as_secs_f64() * count as f64;
            held / pauses[..count].iter().map(Duration::as_secs_f64).sum::<f64>()
        };
        assert!(share(1) < 0.05 && share(10) < 0.005 && share(100) < 0.001, "{pauses:?}");
        assert_eq!(pauses.last(), Some(&Pause::LONGEST), "a guest that means no harm comes back some day");
    }

    /// The session's loop takes the wake, and a request in flight may find the call descriptor full only then.
    #[test]
    fn an_export_that_was_told_to_stop_before_does_not_rest() {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        rest(&wake, || true, Duration::from_secs(24 * 3600));
        let looks = std::cell::Cell::new(0);
        rustix::io::write(&wake, &1_u64.to_ne_bytes()).unwrap();
        rest(&wake, || looks.replace(looks.get() + 1) > 0, Duration::from_secs(24 * 3600));
        assert_eq!(looks.get(), 2, "a wake has it look again");
    }

    #[test]
    fn a_long_session_that_goes_well_makes_up_for_those_before() {
        let mut pause = Pause::default();
        let short = Duration::from_secs(1);
        let doubled = [1, 2, 4].map(|seconds| Some(Duration::from_secs(seconds)));
        assert_eq!([short; 3].map(|lasted| pause.after(lasted, true)), doubled);
        assert_eq!(pause.after(short, false), None);
        assert_eq!(pause.after(short, true), Some(Duration::from_secs(8)), "a short one shows nothing");
        assert_eq!(pause.after(Pause::FORGIVEN_AFTER, false), None);
        assert_eq!(pause.after(short, true), Some(Pause::FIRST));
        assert_eq!(pause.after(Pause::FORGIVEN_AFTER, true), Some(Pause::FIRST));
    }
}
