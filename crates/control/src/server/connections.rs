//! The connections at the control socket. There is always room for one more: if there are too many, one that does no work
//! makes room.

use axum::Router;
use block::LogLimit;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::task::{AbortHandle, JoinSet};
use tokio_io_timeout::TimeoutStream;

/// Connections at one time: more than may be at work.
pub(super) const CONNECTIONS_MAX: usize = 640;
/// A client that sends its request slower than this is disconnected.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer requests are refused.
const HEADER_MAX_BYTES: usize = 64 << 10;
/// A client that takes nothing of an answer for this time is disconnected.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A connection this young keeps its place: its client may be about to send its request.
const GRACE: Duration = Duration::from_secs(2);
/// How soon to look again for a connection that does no work.
const ROOM_PERIOD: Duration = Duration::from_millis(50);

tokio::task_local! {
    /// What the connection of this task works on.
    static WORK: Work;
}

/// The number of things that a connection works on: calls, and a stream of events.
#[derive(Clone, Default)]
struct Work(Arc<AtomicUsize>);

/// The connection of this task is at work as long as this lives.
pub(crate) struct AtWork(Option<Work>);

impl AtWork {
    pub(crate) fn begin() -> Self {
        // A test calls without a connection.
        let work = WORK.try_with(Work::clone).ok();
        if let Some(Work(count)) = &work {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Self(work)
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if let Some(Work(count)) = &self.0 {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The open connections.
#[derive(Default)]
pub(super) struct Connections {
    tasks: JoinSet<()>,
    /// The oldest first, with the times when they were accepted.
    open: Vec<(AbortHandle, Work, Instant)>,
}

impl Connections {
    /// Waits until one more may be open.
    pub(super) async fn make_room(&mut self) {
        loop {
            while self.tasks.try_join_next().is_some() {}
            self.open.retain(|(task, ..)| !task.is_finished());
            if self.open.len() < CONNECTIONS_MAX {
                return;
            }
            let is_idle = |(_, work, since): &(AbortHandle, Work, Instant)| {
                work.0.load(Ordering::Relaxed) == 0 && since.elapsed() >= GRACE
            };
            let idle = self.open.iter().position(is_idle);
            if let Some(idle) = idle {
                static TIMES: LogLimit = LogLimit::new();
                if let Some(times) = TIMES.admit() {
                    tracing::warn!(times, "too many control connections: one without a call made room for another");
                }
                self.open.remove(idle).0.abort();
                return;
            }
            let _ = tokio::time::timeout(ROOM_PERIOD, self.tasks.join_next()).await;
        }
    }

    pub(super) fn serve(&mut self, stream: UnixStream, router: Router) {
        let work = Work::default();
        let task = self.tasks.spawn(WORK.scope(work.clone(), serve(stream, router)));
        self.open.push((task, work, Instant::now()));
    }

    /// Waits until all have ended, for at most this time. The rest ends when this is dropped.
    pub(super) async fn end(mut self, limit: Duration) {
        let _ = tokio::time::timeout(limit, async { while self.tasks.join_next().await.is_some() {} }).await;
    }
}

async fn serve(stream: UnixStream, router: Router) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(ANSWER_TIMEOUT));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(HEADER_MAX_BYTES)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router));
    if let Err(error) = connection.await {
        tracing::debug!("a control connection ended: {error}");
    }
}
