//! How the driver reaches a device: vhost-user, and room for others (VFIO, a device in the same process).

use crate::watch::QueueFds;
use block::Result;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use virtio::blk::BlkConfig;
use virtio::ring_access::RingAddresses;
use vmm_sys_util::eventfd::EventFd;

/// A way to a virtio-blk device. All of it is slow path: requests go through the rings alone.
///
/// The driver calls [`Transport::attach`] first, negotiates, shares its memory, and starts its rings. Each may be stopped
/// and started again.
pub trait Transport: Send + Sync {
    /// What messages call the device: a socket's path, an address on a bus.
    fn name(&self) -> String;

    /// Gives the transport the driver's end of the connection, to say there what the device says by itself.
    fn attach(&self, link: &Arc<Link>) -> Result<()>;

    /// The features that the device offers.
    fn offered_features(&self) -> Result<u64>;

    /// The features that the driver has chosen of them.
    fn choose_features(&self, features: u64) -> Result<()>;

    /// The most rings that can be started.
    fn queues_max(&self) -> Result<u64>;

    /// Reads the configuration space. Fields that the device does not have are zero.
    fn read_config(&self) -> Result<BlkConfig>;

    /// Writes bytes of the configuration space.
    fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Lets the device reach the driver's memory.
    fn share_memory(&self, memory: SharedMemory<'_>) -> Result<()>;

    /// Starts ring `index`.
    fn start_queue(&self, index: usize, queue: &QueueSetup, events: QueueEvents<'_>) -> Result<()>;

    /// Stops ring `index`. When this returns the device is done with what it had taken, and touches the ring no more.
    fn stop_queue(&self, index: usize) -> Result<()>;

    /// Ends the connection.
    fn hang_up(&self);
}

/// The driver's memory. Guest physical addresses in rings and requests lie in it.
#[derive(Debug, Clone, Copy)]
pub struct SharedMemory<'a> {
    /// The file behind it, from its first byte on.
    pub file: BorrowedFd<'a>,
    /// Guest physical address of the first byte.
    pub guest_address: u64,
    /// The same byte's address in this process.
    pub user_address: u64,
    /// Bytes.
    pub length_bytes: u64,
}

/// Where a ring lies, and how long it is.
#[derive(Debug, Clone, Copy)]
pub struct QueueSetup {
    /// Entries.
    pub size: u16,
    /// Where it begins: zero in a split ring; in a packed one, by whose bits see [`virtio::ring_access::PackedPosition`].
    pub first_position: u16,
    /// By guest physical addresses.
    pub guest_addresses: RingAddresses,
    /// By addresses in this process.
    pub user_addresses: RingAddresses,
}

/// A ring's event descriptors. They stay the same when a ring is started again.
#[derive(Debug, Clone, Copy)]
pub struct QueueEvents<'a> {
    /// The driver adds to it for the device.
    pub kick: &'a EventFd,
    /// The device adds to it for the driver.
    pub call: &'a EventFd,
    /// The device adds to it when it gives the ring up.
    pub error: &'a EventFd,
}

type Hears = Box<dyn Fn() + Send + Sync>;

/// The driver's end of a connection, for its transport.
#[derive(Default)]
pub struct Link {
    gone: AtomicBool,
    queues: Mutex<Vec<Arc<QueueFds>>>,
    config_changed: OnceLock<Hears>,
    /// A change that came before anybody heard.
    unheard: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "link, {}", if self.is_gone() { "gone" } else { "up" })
    }
}

impl Link {
    /// The device is gone, or is left: every queue fails what it has in flight.
    pub fn end(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.wake_all();
    }

    /// The device says that its configuration has changed.
    pub fn config_changed(&self) {
        match self.config_changed.get() {
            Some(hears) => hears(),
            None => self.unheard.store(true, Ordering::SeqCst),
        }
    }

    /// Whether the connection is over.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Makes every queue's reactor look.
    pub(crate) fn wake_all(&self) {
        self.queues().iter().for_each(|queue| queue.wake());
    }

    pub(crate) fn queues(&self) -> Vec<Arc<QueueFds>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn add_queues(&self, queues: &[Arc<QueueFds>]) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).extend(queues.iter().cloned());
    }

    /// Who hears of changes; the first call decides.
    pub(crate) fn on_config_change(&self, hears: Hears) {
        let _ = self.config_changed.set(hears);
        if self.unheard.swap(false, Ordering::SeqCst) {
            self.config_changed();
        }
    }
}
