//! Filters: disks over disks, each of which does one thing to requests. They can be stacked in any order.
//!
//! A [`Filter`] opens a queue over the queue below and can change the disk's properties. [`FilterDisk`] makes a disk of
//! a filter and a disk, and passes everything else through.

pub(crate) mod delay;
pub(crate) mod error;
pub(crate) mod hold;
pub(crate) mod log;
pub(crate) mod throttle;

use block::{Disk, DiskInfo, DiskListener, DiskQueue, Lifetime, Listeners, ReactorCtx, Result, Runs, StatusQuery};
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// What a filter does to a disk.
pub trait Filter: fmt::Debug + Send + Sync + 'static {
    /// Opens a queue over a queue of the disk below, on the reactor's thread.
    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>>;

    /// Whether it keeps what is written, so that it is still there when it was overwritten below.
    fn keeps_data(&self) -> bool {
        false
    }

    /// Returns the disk's properties as seen from above.
    fn info(&self, below: DiskInfo) -> DiskInfo {
        below
    }
}

/// A disk seen through a filter.
pub struct FilterDisk<F> {
    below: Arc<dyn Disk>,
    filter: Arc<F>,
    relay: Arc<Relay<F>>,
}

/// Hears of changes below and tells the listeners above, through the filter.
struct Relay<F> {
    filter: Arc<F>,
    listeners: Listeners,
}

impl<F: Filter> DiskListener for Relay<F> {
    fn info_changed(&self, info: &DiskInfo) {
        self.listeners.notify(|| self.filter.info(info.clone()));
    }
}

impl<F: Filter> FilterDisk<F> {
    /// Makes a disk that shows `below` through `filter`.
    #[must_use]
    pub fn new(below: Arc<dyn Disk>, filter: F) -> Self {
        let filter = Arc::new(filter);
        let relay = Arc::new(Relay { filter: Arc::clone(&filter), listeners: Listeners::default() });
        let listener: Arc<dyn DiskListener> = Arc::clone(&relay) as _;
        below.subscribe(Arc::downgrade(&listener));
        Self { below, filter, relay }
    }
}

impl<F: Filter> Disk for FilterDisk<F> {
    fn info(&self) -> DiskInfo {
        self.filter.info(self.below.info())
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        self.filter.open_queue(self.below.open_queue(ctx)?, ctx)
    }

    fn set_volatile_cache(&self, volatile: bool) {
        self.below.set_volatile_cache(volatile);
    }

    fn lifetime(&self) -> Option<Lifetime> {
        self.below.lifetime()
    }

    fn overwrites_in_place(&self) -> bool {
        !self.filter.keeps_data() && self.below.overwrites_in_place()
    }

    fn may_pin_memory(&self) -> bool {
        self.below.may_pin_memory()
    }

    fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        self.below.block_status(query)
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.relay.listeners.subscribe(listener);
    }
}

impl<F: Filter> fmt::Debug for FilterDisk<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FilterDisk({:?})", self.filter)
    }
}
