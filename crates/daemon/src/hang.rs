//! Storage that hangs: how long the removal of a disk waits for it, and what happens then.
//!
//! First the files are asked to give up requests in flight; a connection to a server can. If that does not help, the
//! requests end with errors without the storage, and the guest's memory is cut off from it.

use crate::fronts::front::FrontSurrender;
use crate::state::status::ExportId;
use crate::table::Found;
use block::{Error, ErrorKind, Result};
use image::Image;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

/// How long files get after they were asked to give up.
const CANCEL_PATIENCE: Duration = Duration::from_secs(1);
/// If some requests end, the others are waited for, up to so many times the limit: the storage is only slow.
const SLOW_TIMES: u32 = 3;
/// How often within the limit it is looked whether requests have ended.
const LOOKS: u32 = 20;
/// How long a disk may take to close: it may have much to write. After that, connections to servers are given up. If an
/// export has given up requests before, the caller waits only [`HOPELESS_PATIENCE`] longer than this.
pub(crate) const CLOSE_PATIENCE: Duration = Duration::from_secs(30);
/// How long the jobs of a disk may make no progress before such a connection is given up. While they make progress,
/// they are waited for: they may have to write as much as guests did in hours. Calls that make progress get this time
/// in all.
pub(crate) const JOBS_PATIENCE: Duration = Duration::from_secs(600);
/// How long jobs, calls and closing may take if requests were given up, because the storage most likely does not
/// answer.
pub(crate) const HOPELESS_PATIENCE: Duration = Duration::from_secs(2);

/// Guards a wait, for as long as this lives. If it lasts too long, an action is taken.
pub(crate) struct Patience(#[allow(dead_code, reason = "dropped to say that the wait is over")] Sender<()>);

impl Patience {
    fn begin(limit: Duration, act: impl FnOnce(&Receiver<()>) + Send + 'static) -> Option<Self> {
        Self::watch(move |over| {
            if over.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                act(over);
            }
        })
    }

    fn watch(watch: impl FnOnce(&Receiver<()>) + Send + 'static) -> Option<Self> {
        let (sender, over) = channel();
        let watch = move || watch(&over);
        match std::thread::Builder::new().name("patience".into()).spawn(watch) {
            Ok(_) => Some(Self(sender)),
            Err(error) => {
                tracing::warn!("cannot start a thread: storage that hangs is waited for: {error}");
                None
            }
        }
    }

    /// Guards the wait for requests in flight of a disk's exports.
    pub(crate) fn with_requests(
        limit: Duration,
        found: &Found,
        exports: Vec<FrontSurrender>,
        given_up: &Arc<AtomicBool>,
    ) -> Option<Self> {
        let (image, given_up, name) = (found.disk.image.clone(), Arc::clone(given_up), found.name.clone());
        Self::watch(move |over| {
            if !hang(limit, over, || exports.iter().map(FrontSurrender::ended).fold(0, u64::wrapping_add)) {
                return;
            }
            tracing::warn!(disk = %name, "requests in flight do not end: they are given up");
            image.iter().for_each(|image| image.cancel());
            if over.recv_timeout(CANCEL_PATIENCE) == Err(RecvTimeoutError::Timeout) {
                given_up.store(true, Ordering::Release);
                exports.iter().for_each(FrontSurrender::give_up);
            }
        })
    }

    /// Guards the wait for requests in flight of one export. The disk stays, so its files are not asked to give up:
    /// they would fail the requests of others. Calls `before` if the requests are given up.
    pub(crate) fn with_export(
        limit: Duration,
        id: ExportId,
        export: FrontSurrender,
        before: impl FnOnce() + Send + 'static,
    ) -> Option<Self> {
        Self::watch(move |over| {
            if !hang(limit, over, || export.ended()) {
                return;
            }
            tracing::warn!("requests in flight of export {id} do not end: they are given up");
            before();
            export.give_up();
        })
    }

    /// Guards the wait for the jobs of a disk. `moved_bytes` says how many bytes they have moved.
    pub(crate) fn with_jobs(found: &Found, moved_bytes: impl Fn() -> u64 + Send + 'static) -> Option<Self> {
        let image = found.disk.image.clone();
        let mut before_bytes = moved_bytes();
        Self::begin(JOBS_PATIENCE, move |over| {
            loop {
                let now_bytes = moved_bytes();
                if now_bytes == before_bytes {
                    break image.iter().for_each(|image| image.cancel());
                }
                before_bytes = now_bytes;
                if over.recv_timeout(JOBS_PATIENCE) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
        })
    }

    /// Guards the closing of a disk.
    pub(crate) fn with_end(found: &Found) -> Option<Self> {
        let image: Option<Arc<Image>> = found.disk.image.clone();
        Self::begin(CLOSE_PATIENCE, move |_| image.iter().for_each(|image| image.cancel()))
    }
}

/// Waits until the wait of others is `over`, or their requests have ended too slowly. Returns whether the storage hangs.
/// `ended` returns how many requests have ended.
fn hang(limit: Duration, over: &Receiver<()>, ended: impl Fn() -> u64) -> bool {
    let mut pace = Pace::from(Instant::now(), ended());
    while over.recv_timeout(limit / LOOKS) == Err(RecvTimeoutError::Timeout) {
        if pace.is_too_slow(limit, Instant::now(), ended()) {
            return true;
        }
    }
    false
}

/// Tells storage that hangs from storage that is slow.
struct Pace {
    begun: Instant,
    last_end: Instant,
    ended: u64,
}

impl Pace {
    fn from(now: Instant, ended: u64) -> Self {
        Self { begun: now, last_end: now, ended }
    }

    fn is_too_slow(&mut self, limit: Duration, now: Instant, ended: u64) -> bool {
        if ended != self.ended {
            (self.last_end, self.ended) = (now, ended);
        }
        now - self.last_end >= limit || now - self.begun >= limit.saturating_mul(SLOW_TIMES)
    }
}

/// Closes a disk that had requests given up, if its storage answers after all. Waits for that until the `limit`.
pub(crate) fn close_within(
    limit: Duration,
    found: Found,
    close: impl FnOnce(&Found) -> Result<()> + Send + 'static,
) -> Result<()> {
    let file = found.file.clone();
    let (sender, closed) = sync_channel(1);
    let end = move || {
        // The caller may no longer wait.
        let _ = sender.send(close(&found));
    };
    let failed = |error| Error::io("cannot start a thread", error);
    std::thread::Builder::new().name("closing".into()).spawn(end).map_err(failed)?;
    closed.recv_timeout(limit).unwrap_or_else(|_| {
        let message = format!(
            "the storage of '{file}' hangs: the disk is gone, but was not closed, and what was not flushed may be lost. \
             Look at the image with check when its storage answers again"
        );
        Err(Error::new(ErrorKind::Io, message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_hangs_if_no_request_ends_within_the_limit_or_not_all_within_three_times_the_limit() {
        let (limit, begun) = (Duration::from_secs(20), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut pace = Pace::from(begun, 7);
        assert!(!pace.is_too_slow(limit, at(19), 7));
        assert!(pace.is_too_slow(limit, at(20), 7));
        let mut pace = Pace::from(begun, 7);
        assert!(!pace.is_too_slow(limit, at(15), 8));
        assert!(!pace.is_too_slow(limit, at(34), 8));
        assert!(pace.is_too_slow(limit, at(35), 8), "the last one ended 20 seconds ago");
        let mut pace = Pace::from(begun, 7);
        assert!((1..60).all(|second| !pace.is_too_slow(limit, at(second), 7 + second)));
        assert!(pace.is_too_slow(limit, at(60), 100));
    }

    #[test]
    fn a_wait_that_is_over_is_no_hang() {
        let (waits, over) = channel();
        drop(waits);
        assert!(!hang(Duration::from_secs(3600), &over, || 0));
        let (_waits, over) = channel();
        assert!(hang(Duration::ZERO, &over, || 0), "without patience");
    }
}
