//! What queues share with their driver.

use crate::DriverOptions;
use crate::cache::CacheType;
use crate::control::{Control, Hold};
use crate::dma::DmaPool;
use crate::facts;
use crate::layout::QueueLayout;
use crate::queue_fds::QueueFds;
use crate::rules::Rules;
use crate::session::Session;
use block::{DiskInfo, Lifetime, Listeners, Result};
use memory::{GuestMemory, Mapping};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What queues share with their driver. The last one to be dropped ends the connection.
pub(crate) struct Inner {
    pub(crate) session: Session,
    pub(crate) options: DriverOptions,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) pool: Arc<DmaPool>,
    pub(crate) size_bytes: AtomicU64,
    pub(crate) cache: CacheType,
    pub(crate) control: Control,
    pub(crate) fds: Vec<Arc<QueueFds>>,
    /// Locked while the configuration is read, and its size or cache type noted: the last to read is the last to note.
    pub(crate) following: Mutex<()>,
    /// Whether the configuration has changed while the queues were held.
    pub(crate) has_missed: AtomicBool,
    pub(crate) listeners: Listeners,
    pub(crate) layouts: Vec<QueueLayout>,
    pub(crate) serial: String,
    pub(crate) lifetime: Option<Lifetime>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "driver of '{}'", self.session.name())
    }
}

impl Inner {
    pub(crate) fn info(&self) -> DiskInfo {
        let size_bytes = self.size_bytes.load(Ordering::Relaxed);
        facts::info(&self.session, size_bytes, self.cache.now().is_volatile(), &self.serial)
    }

    pub(crate) fn lock_following(&self) -> MutexGuard<'_, ()> {
        self.following.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the device's size when its configuration has changed. Changes while it is frozen are read when it is
    /// restored.
    pub(crate) fn follow_config(&self) {
        let following = self.lock_following();
        if self.control.hold() != Hold::None || self.session.is_gone() {
            self.has_missed.store(true, Ordering::SeqCst);
            return;
        }
        let config = match self.session.read_config() {
            Ok(config) => config,
            Err(error) => return tracing::warn!("{error}"),
        };
        let now = config.capacity_sectors.saturating_mul(512);
        let is_new = self.size_bytes.swap(now, Ordering::Relaxed) != now;
        drop(following);
        if is_new {
            self.listeners.notify(|| self.info());
        }
    }

    /// Follows a change that came while the queues were held. A device that does not answer is asked nothing more without
    /// need: no answer would end the connection.
    pub(crate) fn follow_what_was_missed(&self) {
        if self.has_missed.swap(false, Ordering::SeqCst) {
            self.follow_config();
        }
    }

    /// Waits until a change that is being followed has been. The next one sees whether the device is frozen.
    pub(crate) fn wait_for_follower(&self) {
        drop(self.lock_following());
    }

    pub(crate) fn layout(&self, index: usize) -> QueueLayout {
        // Each ring was made from its layout, so there is one.
        self.layouts.get(index).copied().unwrap_or_else(|| QueueLayout::new(0, 0, 0, 0))
    }

    pub(crate) fn rules(&self) -> Rules {
        facts::rules(&self.session)
    }

    pub(crate) fn disconnect(&self) -> Result<()> {
        let mut result = Ok(());
        if !self.session.is_gone() && !self.is_frozen() {
            for index in 0..self.fds.len() {
                result = result.and(self.session.stop_ring(index));
            }
        }
        self.session.hang_up();
        result
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.disconnect() {
            tracing::debug!("{error}");
        }
    }
}
