//! Images are closed aside: closing waits for the cluster, and neither a reactor nor librbd's own threads may.

use crate::ffi::Image;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the end of a closing is waited for. A cluster that does not answer keeps nobody longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an image that nobody closes yet is waited for. Whoever still has it only looks at something, or its storage
/// hangs.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);

/// How often this process has an image open.
#[derive(Default, Clone, Copy)]
struct Handles {
    /// Those in use, and those that are being closed.
    open: usize,
    closing: usize,
}

/// The images that this process has open.
static HANDLES: Mutex<Option<HashMap<String, Handles>>> = Mutex::new(None);
static CLOSED: Condvar = Condvar::new();

thread_local! {
    static IS_REACTOR: Cell<bool> = const { Cell::new(false) };
}

fn handles() -> MutexGuard<'static, Option<HashMap<String, Handles>>> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut handles = handles();
        let count = handles.get_or_insert_default().entry(key.to_owned()).or_default();
        count.open = count.open.saturating_add(1);
        drop(handles);
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
        let mut handles = handles();
        let count = handles.get_or_insert_default().entry(key.to_string()).or_default();
        count.closing = count.closing.saturating_add(1);
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
        // Below the lock, so that whoever waits sees it or is woken.
        let mut handles = handles();
        if let Some(handles) = handles.as_mut()
            && let Some(count) = handles.get_mut(&*self.0)
        {
            *count = Handles { open: count.open.saturating_sub(1), closing: count.closing.saturating_sub(1) };
            if count.open == 0 {
                handles.remove(&*self.0);
            }
        }
        CLOSED.notify_all();
    }
}

/// Waits until nobody closes any image: the process may end. Otherwise a lock would stay until the cluster misses its owner.
pub fn wait_for_closes() {
    // A thread that ends with the process may be the last that has an image.
    let waiting = wait_while(OPEN_PATIENCE, |handles| !handles.is_empty());
    let left: usize = waiting.iter().flatten().map(|(_, count)| count.open.saturating_sub(count.closing)).sum();
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
    let is_closing = |handles: &HashMap<String, Handles>| handles.get(key).is_some_and(|count| count.closing > 0);
    if wait_while(PATIENCE, is_closing).as_ref().is_some_and(is_closing) {
        tracing::warn!("'{key}': the cluster does not answer, so the image is not closed yet");
    }
}

/// Waits until this process has the image open no more. A reactor lets go of what it no longer needs at its next turn.
pub(crate) fn wait_until_let_go(key: &str) {
    if !IS_REACTOR.get() {
        drop(wait_while(OPEN_PATIENCE, |handles| handles.contains_key(key)));
    }
}

fn wait_while(
    patience: Duration,
    goes_on: impl Fn(&HashMap<String, Handles>) -> bool,
) -> MutexGuard<'static, Option<HashMap<String, Handles>>> {
    let began = Instant::now();
    let mut waiting = handles();
    while waiting.as_ref().is_some_and(&goes_on)
        && let Some(left) = patience.checked_sub(began.elapsed())
    {
        waiting = CLOSED.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    waiting
}
