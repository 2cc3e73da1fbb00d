//! The control socket, on a thread of its own.

mod connections;

pub(crate) use self::connections::AtWork;
use self::connections::{CONNECTIONS_MAX, Connections};

use crate::manager::Manager;
use crate::routes::router;
use crate::storage_calls::{HELD_CONNECTIONS_MAX, HELD_THREADS_MAX};
use axum::Router;
use block::{Error, ErrorKind, LogLimit, Result};
use export_vhost_user::ListenSocket;
use rustix::process::geteuid;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

/// Only its owner can connect.
const SOCKET_MODE: u32 = 0o600;
/// Threads for calls that may block: enough for those that storage may keep, and for others beside them.
const THREADS_MAX: usize = 128;
const _: () = assert!(HELD_THREADS_MAX + 32 <= THREADS_MAX && HELD_CONNECTIONS_MAX + 32 <= CONNECTIONS_MAX);
/// Connections that wait to be accepted. Connecting fails beyond that. The kernel's own limit is 4096.
const BACKLOG: i32 = 4096;
/// How long connections may stay open when the server ends.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// A served control socket.
#[derive(Debug)]
pub struct ControlServer {
    stop: Option<oneshot::Sender<()>>,
    /// Ends when no more calls are taken.
    closed: Option<oneshot::Receiver<()>>,
    /// How long calls in progress are waited for at the end; without a limit if nobody says.
    patience: Option<Sender<Duration>>,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Serves `manager` at the socket `path`. Only processes of this user and of root are answered.
    pub fn listen(path: &Path, manager: Arc<Manager>) -> Result<Self> {
        let socket = ListenSocket::of_mode(path, SOCKET_MODE)?;
        let failed = |error| Error::io(format!("cannot serve the control socket '{}'", path.display()), error);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(THREADS_MAX)
            .thread_name("control-call")
            .build()
            .map_err(failed)?;
        socket.listener().set_nonblocking(true).map_err(failed)?;
        // A monitor's socket has a short one.
        rustix::net::listen(socket.listener(), BACKLOG).map_err(|error| failed(error.into()))?;
        let listener = socket.listener().try_clone().map_err(failed)?;
        let listener = {
            let _inside = runtime.enter();
            UnixListener::from_std(listener).map_err(failed)?
        };
        let (stop, stopped) = oneshot::channel();
        let (closing, closed) = oneshot::channel::<()>();
        let (patience, limit) = channel();
        let run = move || {
            runtime.block_on(accept(listener, router(manager), stopped));
            drop(socket);
            drop(closing);
            match limit.recv() {
                Ok(limit) => runtime.shutdown_timeout(limit),
                // Waits for calls in progress.
                Err(_) => drop(runtime),
            }
        };
        let thread = std::thread::Builder::new().name("control".into()).spawn(run).map_err(failed)?;
        Ok(Self { stop: Some(stop), closed: Some(closed), patience: Some(patience), thread: Some(thread) })
    }

    /// Takes no more calls, and waits a moment for those in progress. Calls that take longer go on, and nobody gets
    /// their answers.
    pub fn close(&mut self) {
        drop(self.stop.take());
        // An error says that it is closed.
        let _ = self.closed.take().map(oneshot::Receiver::blocking_recv);
    }

    /// Takes no more calls, and waits for those in progress.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    /// As [`ControlServer::stop`], but waits for calls in progress no longer than this.
    pub fn stop_within(mut self, limit: Duration) -> Result<()> {
        // The thread has ended if it does not listen.
        let _ = self.patience.take().map(|patience| patience.send(limit));
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        drop(self.stop.take());
        drop(self.patience.take());
        let ended = self.thread.take().map_or(Ok(()), JoinHandle::join);
        ended.map_err(|_| Error::new(ErrorKind::Io, "the control socket's thread panicked"))
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!("{error}");
        }
    }
}

async fn accept(listener: UnixListener, router: Router, mut stopped: oneshot::Receiver<()>) {
    let mut connections = Connections::default();
    loop {
        let accepted = tokio::select! {
            _ = &mut stopped => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) if may_call(&stream) => {
                tokio::select! {
                    _ = &mut stopped => break,
                    () = connections.make_room() => connections.serve(stream, router.clone()),
                }
            }
            Ok(_) => {
                static TIMES: LogLimit = LogLimit::new();
                if let Some(times) = TIMES.admit() {
                    tracing::warn!(times, "a process of another user was refused at the control socket");
                }
            }
            Err(error) => {
                static TIMES: LogLimit = LogLimit::new();
                if let Some(times) = TIMES.admit() {
                    tracing::warn!(times, "cannot accept at the control socket: {error}");
                }
                // Mostly, descriptors have run out: some may become free soon.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    connections.end(END_TIMEOUT).await;
}

/// Whether the peer is this user or root.
fn may_call(stream: &UnixStream) -> bool {
    let own = geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
