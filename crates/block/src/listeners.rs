//! Listeners that are told when a disk changes.
//!
//! For the control path: the lock here is taken to subscribe and to notify, never by a request.

use crate::{DiskInfo, DiskListener};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

/// The listeners of one disk, for implementations of [`crate::Disk`].
#[derive(Default)]
pub struct Listeners {
    list: Mutex<Vec<Weak<dyn DiskListener>>>,
    /// Held while listeners are called, so that none hears old news after new.
    calling: Mutex<()>,
}

impl Listeners {
    /// Adds a listener. It is forgotten when its owner drops it.
    pub fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        let mut list = self.lock();
        list.retain(|other| other.strong_count() > 0);
        list.push(listener);
    }

    /// Tells all listeners. Call it after the change is visible; `info` is asked once, when it is this call's turn.
    pub fn notify(&self, info: impl FnOnce() -> DiskInfo) {
        let _turn = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        // The list is not locked while they are called: a listener may subscribe another.
        let listeners: Vec<_> = self.lock().iter().filter_map(Weak::upgrade).collect();
        if listeners.is_empty() {
            return;
        }
        let info = info();
        for listener in listeners {
            listener.info_changed(&info);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn DiskListener>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listeners({})", self.lock().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Topology;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn info(size_bytes: u64) -> DiskInfo {
        DiskInfo {
            size_bytes,
            logical_block_bytes: 512,
            topology: Topology::default(),
            read_only: false,
            volatile_cache: true,
            discard: false,
            discard_granularity_bytes: 0,
            write_zeroes: true,
            serial: String::new(),
        }
    }

    /// Keeps the last size that it heard of.
    #[derive(Default)]
    struct Hears(AtomicU64);

    impl DiskListener for Hears {
        fn info_changed(&self, info: &DiskInfo) {
            self.0.store(info.size_bytes, Ordering::SeqCst);
        }
    }

    #[test]
    fn those_who_live_are_told_and_those_who_went_are_forgotten() {
        let listeners = Listeners::default();
        listeners.notify(|| panic!("nobody listens, so nobody asks"));
        let (stays, goes) = (Arc::new(Hears::default()), Arc::new(Hears::default()));
        listeners.subscribe(Arc::downgrade(&stays) as _);
        listeners.subscribe(Arc::downgrade(&goes) as _);
        listeners.notify(|| info(1024));
        assert_eq!((stays.0.load(Ordering::SeqCst), goes.0.load(Ordering::SeqCst)), (1024, 1024));
        drop(goes);
        listeners.notify(|| info(2048));
        assert_eq!(stays.0.load(Ordering::SeqCst), 2048);
        listeners.subscribe(Weak::<Hears>::new());
        listeners.subscribe(Weak::<Hears>::new());
        assert_eq!(listeners.lock().len(), 2, "the list does not grow with those who are gone");
    }

    #[test]
    fn the_last_news_is_the_newest_whoever_changes_the_disk() {
        let listeners = Listeners::default();
        let hears = Arc::new(Hears::default());
        listeners.subscribe(Arc::downgrade(&hears) as _);
        let size_bytes = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        size_bytes.fetch_add(512, Ordering::SeqCst);
                        listeners.notify(|| info(size_bytes.load(Ordering::SeqCst)));
                    }
                });
            }
        });
        assert_eq!(hears.0.load(Ordering::SeqCst), 4 * 1000 * 512);
    }
}
