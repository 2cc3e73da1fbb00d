//! A listening socket, and the thread that accepts clients and hands them to reactors.

use crate::connection::{Choice, Connection, Setup};
use crate::export::NbdExport;
use crate::limits::{Limits, PayloadMemory};
use crate::link::Link;
use crate::tls::{Door, Entered, Tls};
use crate::users::HOPELESS_PATIENCE;
use block::{Error, ErrorKind, LogLimit, ReactorHandle, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What clients in the handshake get to choose an export when one is removed.
const CHOICE_PATIENCE: Duration = Duration::from_millis(500);

/// Where clients come in.
#[derive(Debug)]
pub enum NbdListener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl NbdListener {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(listener) => listener.set_nonblocking(true),
            Self::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                nbd_tls::widen(&stream);
                Ok(stream.into())
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                // A host that is gone without a word does not keep its place for ever.
                rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
                Ok(stream.into())
            }
        }
    }
}

impl AsFd for NbdListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// How a server serves.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ServerOptions {
    /// What clients can make it hold.
    pub limits: Limits,
    /// Memory for payload that it shares with others; by default it has its own, as its limits say.
    pub payload: Option<PayloadMemory>,
    /// Certificates, if clients may or must use TLS.
    pub tls: Option<Tls>,
}

impl ServerOptions {
    /// Changes some of them.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Disks at a socket. Dropping it stops it.
pub struct NbdServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    listener: NbdListener,
    exports: Mutex<Arc<[NbdExport]>>,
    reactors: Vec<Arc<dyn ReactorHandle>>,
    limits: Limits,
    /// Where TLS is served.
    door: Option<Door>,
    payload: PayloadMemory,
    stopping: AtomicBool,
    /// Connections may never end.
    has_given_up: AtomicBool,
    /// Gets the thread out of its wait.
    wake: OwnedFd,
    crowd: Mutex<Crowd>,
    /// A connection has gone.
    gone: Condvar,
}

#[derive(Default)]
struct Crowd {
    links: Vec<Weak<Link>>,
    live: usize,
    /// Connections in the handshake: they have all exports that were there when they came in.
    choosing: BTreeMap<u64, Weak<Link>>,
    next_choosing: u64,
}

/// A connection in the handshake.
struct Choosing(Arc<Shared>, u64);

impl Drop for Choosing {
    fn drop(&mut self) {
        self.0.crowd().choosing.remove(&self.1);
        self.0.gone.notify_all();
    }
}

/// A connection that counts. The last clone that is dropped takes it off.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        let mut crowd = self.0.crowd();
        crowd.live = crowd.live.saturating_sub(1);
        drop(crowd);
        self.0.gone.notify_all();
        self.0.wake();
    }
}

impl Shared {
    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.crowd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exports(&self) -> MutexGuard<'_, Arc<[NbdExport]>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no connection of now is in the handshake. Those that dawdle are ended.
    fn wait_for_choices(&self) {
        let crowd = self.crowd();
        let those: Vec<u64> = crowd.choosing.keys().copied().collect();
        let is_left = |crowd: &mut Crowd| those.iter().any(|number| crowd.choosing.contains_key(number));
        let waited = self.gone.wait_timeout_while(crowd, CHOICE_PATIENCE, is_left);
        let crowd = waited.unwrap_or_else(PoisonError::into_inner).0;
        let left = those.iter().filter_map(|number| crowd.choosing.get(number)?.upgrade());
        let left: Vec<Arc<Link>> = left.collect();
        drop(crowd);
        left.iter().for_each(|link| link.close());
        drop(left);
        drop(self.gone.wait_timeout_while(self.crowd(), HOPELESS_PATIENCE, is_left));
    }

    fn wake(&self) {
        // A counter that is full wakes as well.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn is_full(&self) -> bool {
        self.crowd().live >= self.limits.connections
    }

    fn run(self: &Arc<Self>) {
        let mut next_reactor = 0_usize;
        while !self.stopping.load(Ordering::Acquire) {
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
            // Those who find no room wait in the socket's own queue.
            if !self.is_full() {
                fds.push(PollFd::new(&self.listener, PollFlags::IN));
            }
            let polled = poll(&mut fds, None);
            let accepts = fds.len() > 1;
            drop(fds);
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            if polled.is_err() || !accepts || self.stopping.load(Ordering::Acquire) {
                continue;
            }
            let index = next_reactor.checked_rem(self.reactors.len()).unwrap_or(0);
            let Some(reactor) = self.reactors.get(index) else { return };
            match self.listener.accept().and_then(|socket| self.admit(socket, reactor)) {
                Ok(()) => next_reactor = next_reactor.wrapping_add(1),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    static TIMES: LogLimit = LogLimit::new();
                    if let Some(times) = TIMES.admit() {
                        tracing::warn!(times, "cannot accept an NBD client: {error}");
                    }
                    // Out of descriptors, say: not a reason to spin.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Counts a client, and lets it in. One that is still in the handshake of TLS counts, so that there are never more threads
    /// than connections.
    fn admit(self: &Arc<Self>, socket: OwnedFd, reactor: &Arc<dyn ReactorHandle>) -> io::Result<()> {
        {
            let mut crowd = self.crowd();
            crowd.live = crowd.live.saturating_add(1);
        }
        let guard = Arc::new(Counted(Arc::clone(self)));
        let now = Instant::now();
        let until = now.checked_add(self.limits.handshake).unwrap_or(now);
        let Some(door) = &self.door else {
            self.connect(Entered::new(socket), until, guard, reactor);
            return Ok(());
        };
        let (shared, reactor) = (Arc::clone(self), Arc::clone(reactor));
        door.admit(socket, until, move |entered| shared.connect(entered, until, guard, &reactor))
    }

    fn connect(
        self: &Arc<Self>,
        entered: Entered,
        until: Instant,
        guard: Arc<Counted>,
        reactor: &Arc<dyn ReactorHandle>,
    ) {
        let link = Arc::new(Link::new(Arc::clone(reactor)));
        let guard_of_choice = {
            let mut crowd = self.crowd();
            if self.stopping.load(Ordering::Acquire) {
                // The server has looked for those to end, or is about to, and would not find this one.
                return;
            }
            crowd.links.retain(|link| link.strong_count() > 0);
            crowd.links.push(Arc::downgrade(&link));
            let number = crowd.next_choosing;
            crowd.next_choosing = number.wrapping_add(1);
            crowd.choosing.insert(number, Arc::downgrade(&link));
            Box::new(Choosing(Arc::clone(self), number))
        };
        // Taken when the connection is counted: a removal waits for it, or it does not see the export.
        let exports = Arc::clone(&self.exports());
        let setup = Setup {
            entered,
            until,
            choice: Choice { exports, guard: guard_of_choice },
            limits: self.limits.clone(),
            payload: self.payload.clone(),
            link,
            guard,
        };
        let begun = reactor.run(Box::new(move |ctx| {
            if let Err(error) = Connection::start(ctx, setup) {
                warn_unserved(&error);
            }
        }));
        if let Err(error) = begun {
            warn_unserved(&error);
        }
    }
}

fn warn_unserved(error: &Error) {
    static TIMES: LogLimit = LogLimit::new();
    if let Some(times) = TIMES.admit() {
        tracing::warn!(times, "cannot serve an NBD client: {error}");
    }
}

impl NbdServer {
    /// Serves `exports` to whoever connects. Connections go to the reactors in turn.
    pub fn start(
        listener: NbdListener,
        exports: Vec<NbdExport>,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        options: ServerOptions,
    ) -> Result<Self> {
        if exports.is_empty() || reactors.is_empty() {
            return Err(Error::new(ErrorKind::BadOption, "an NBD server needs an export and a reactor"));
        }
        for (index, export) in exports.iter().enumerate() {
            check(exports.get(..index).unwrap_or_default(), export)?;
        }
        let failed = |what: &str, error| Error::io(format!("cannot {what}"), error);
        listener.set_nonblocking().map_err(|error| failed("set the socket up", error))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed("make an event descriptor", error.into()))?;
        let door = options.tls.map(Door::new).transpose().map_err(|error| failed("begin TLS", error))?;
        let own_payload = PayloadMemory::new(options.limits.total_bytes);
        let shared = Arc::new(Shared {
            listener,
            exports: Mutex::new(exports.into()),
            reactors,
            limits: options.limits,
            door,
            payload: options.payload.unwrap_or(own_payload),
            stopping: AtomicBool::new(false),
            has_given_up: AtomicBool::new(false),
            wake,
            crowd: Mutex::default(),
            gone: Condvar::new(),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || theirs.run())
            .map_err(|error| failed("start the server's thread", error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Serves one more disk to those who connect from now on.
    pub fn add(&self, export: NbdExport) -> Result<()> {
        let mut exports = self.shared.exports();
        check(&exports, &export)?;
        *exports = exports.iter().cloned().chain([export]).collect();
        Ok(())
    }

    /// Whether it has any exports.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        !self.shared.exports().is_empty()
    }

    /// Serves a disk no longer: its clients' requests in flight end, then they are disconnected. Others go on.
    pub fn remove(&self, name: &str) {
        let removed = {
            let mut exports = self.shared.exports();
            let (removed, left): (Vec<_>, Vec<_>) = exports.iter().cloned().partition(|export| export.name == name);
            *exports = left.into();
            removed
        };
        if removed.is_empty() {
            return;
        }
        self.shared.wait_for_choices();
        removed.iter().for_each(|export| export.users.close());
        let has_given_up = removed.iter().any(|export| export.users.is_given_up());
        self.shared.has_given_up.fetch_or(has_given_up, Ordering::AcqRel);
    }

    /// Connections that are there.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.crowd().live
    }

    /// Accepts nobody any more, lets requests in flight end, and disconnects.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake();
        if thread.join().is_err() {
            tracing::error!("the NBD server's thread panicked");
        }
        self.shared.door.iter().for_each(Door::close);
        let links: Vec<_> = self.shared.crowd().links.iter().filter_map(Weak::upgrade).collect();
        links.iter().for_each(|link| link.close());
        let is_left = |crowd: &mut Crowd| crowd.live > 0;
        match self.shared.has_given_up.load(Ordering::Acquire) {
            false => drop(self.shared.gone.wait_while(self.shared.crowd(), is_left)),
            true => drop(self.shared.gone.wait_timeout_while(self.shared.crowd(), HOPELESS_PATIENCE, is_left)),
        }
    }
}

/// Whether an export can be served beside others.
fn check(others: &[NbdExport], export: &NbdExport) -> Result<()> {
    let bad = |message: String| Err(Error::new(ErrorKind::BadOption, message));
    match export.fault() {
        Some(fault) => bad(fault),
        None if others.iter().any(|other| other.name == export.name) => {
            bad(format!("two NBD exports are called '{}': give each a name of its own", export.name))
        }
        None => Ok(()),
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdServer").field("exports", &*self.shared.exports()).finish_non_exhaustive()
    }
}
