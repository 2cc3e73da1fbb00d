//! Images are closed aside: closing waits for the cluster, and neither a reactor nor librbd's own threads may.

use crate::ffi::Image;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the end of a closing is waited for. A cluster that does not answer keeps nobody longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an image that nobody closes yet is waited for at the end. Whoever still has it only looks at something, or its
/// storage hangs.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);

/// How many images are open, or are being closed.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// How many handles to each image are being closed.
static CLOSING: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);
static CLOSED: Condvar = Condvar::new();

thread_local! {
    static IS_REACTOR: Cell<bool> = const { Cell::new(false) };
}

fn closing() -> MutexGuard<'static, Option<HashMap<String, usize>>> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This thread never waits here.
pub(crate) fn this_is_a_reactor() {
    IS_REACTOR.set(true);
}

/// A handle to an image that may be dropped anywhere.
#[derive(Clone)]
pub(crate) struct Closes {
    image: Option<Arc<Image>>,
    /// The same for each handle to this image.
    key: Arc<str>,
}

impl Closes {
    pub(crate) fn new(image: Image, key: &str) -> Self {
        OPEN.fetch_add(1, Ordering::AcqRel);
        Self { image: Some(Arc::new(image)), key: key.into() }
    }

    pub(crate) fn image(&self) -> Option<&Arc<Image>> {
        self.image.as_ref()
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        &self.key
    }
}

impl Drop for Closes {
    fn drop(&mut self) {
        if let Some(image) = self.image.take() {
            let_go(image, &self.key);
        }
    }
}

/// Drops a handle. If it was the last one, a thread closes the image.
pub(crate) fn let_go(image: Arc<Image>, key: &Arc<str>) {
    let Some(image) = Arc::into_inner(image) else { return };
    let begun = {
        let mut closing = closing();
        let count = closing.get_or_insert_default().entry(key.to_string()).or_default();
        *count = count.saturating_add(1);
        Begun(Arc::clone(key))
    };
    // Where there is no thread, it stays open until the process ends: better than to block librbd.
    let image = std::mem::ManuallyDrop::new(image);
    let close = move || {
        drop(std::mem::ManuallyDrop::into_inner(image));
        drop(begun);
    };
    if let Err(error) = std::thread::Builder::new().name("rbd-close".into()).spawn(close) {
        tracing::error!("cannot start a thread to close an image: {error}");
    }
}

struct Begun(Arc<str>);

impl Drop for Begun {
    fn drop(&mut self) {
        let mut closing = closing();
        // Below the lock, so that whoever waits sees it or is woken.
        OPEN.fetch_sub(1, Ordering::AcqRel);
        if let Some(closing) = closing.as_mut()
            && let Some(count) = closing.get_mut(&*self.0)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                closing.remove(&*self.0);
            }
        }
        CLOSED.notify_all();
    }
}

/// Waits until nobody closes any image: the process may end. Otherwise a lock would stay until the cluster misses its owner.
pub fn wait_for_closes() {
    // A thread that ends with the process may be the last that has an image.
    let began = Instant::now();
    let mut waiting = closing();
    while OPEN.load(Ordering::Acquire) > 0
        && let Some(left) = OPEN_PATIENCE.checked_sub(began.elapsed())
    {
        waiting = CLOSED.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    let closed: usize = waiting.iter().flatten().map(|(_, count)| *count).sum();
    let left = OPEN.load(Ordering::Acquire).saturating_sub(closed);
    if left > 0 {
        tracing::warn!(
            "{left} images in a cluster are still in use when the program ends: whoever opens one next may wait half a minute \
             for its lock"
        );
    }
    let keys: Vec<String> = waiting.iter().flatten().map(|(key, _)| key.clone()).collect();
    drop(waiting);
    keys.iter().for_each(|key| wait_for(key));
}

/// Waits until nobody closes the image any more: it can be opened again.
pub(crate) fn wait_for(key: &str) {
    if IS_REACTOR.get() {
        return;
    }
    let Some(deadline) = Instant::now().checked_add(PATIENCE) else { return };
    let mut closing = closing();
    while closing.as_ref().is_some_and(|closing| closing.contains_key(key)) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            tracing::warn!("'{key}': the cluster does not answer, so the image is not closed yet");
            return;
        }
        closing = CLOSED.wait_timeout(closing, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}
