//! How the driver reaches a device: vhost-user, and room for others (VFIO, a device in the same process).

use crate::queue_fds::{QueueEvents, QueueFds};
use block::Result;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use virtio::blk::BlkConfig;
use virtio::ring_access::RingAddresses;

/// A way to a virtio-blk device. It is slow path only: requests go through the rings.
///
/// The driver calls [`Transport::attach`] first, negotiates, shares its memory, and starts its rings. Each may be stopped
/// and started again.
pub trait Transport: Send + Sync {
    /// Returns the device's name in messages: a socket's path, or an address on a bus.
    fn name(&self) -> String;

    /// Gives the transport the driver's end of the connection, to report events of the device.
    fn attach(&self, link: &Arc<Link>) -> Result<()>;

    /// Returns the features that the device offers.
    fn offered_features(&self) -> Result<u64>;

    /// Tells the device which features the driver has chosen.
    fn choose_features(&self, features: u64) -> Result<()>;

    /// Returns the most rings that can be started.
    fn queues_max(&self) -> Result<u64>;

    /// Reads the configuration space. Fields that the device does not have are zero.
    fn read_config(&self) -> Result<BlkConfig>;

    /// Writes bytes of the configuration space.
    fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Lets the device reach the driver's memory.
    fn share_memory(&self, memory: SharedMemory<'_>) -> Result<()>;

    /// Starts ring `index`.
    fn start_queue(&self, index: usize, queue: &QueueSetup, events: QueueEvents<'_>) -> Result<()>;

    /// Stops ring `index`. When this returns, the device is done with the requests that it had taken, and no longer
    /// touches the ring.
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
    /// Length in bytes.
    pub length_bytes: u64,
}

/// Where a ring lies, and how many entries it has.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct QueueSetup {
    /// Entries.
    pub size: u16,
    /// Where it begins: zero for a split ring; for a packed one, the bits of a [`virtio::ring_access::PackedPosition`].
    pub first_position: u16,
    /// The areas' guest physical addresses.
    pub guest_addresses: RingAddresses,
    /// The areas' addresses in this process.
    pub user_addresses: RingAddresses,
}

type Hears = Box<dyn Fn() + Send + Sync>;

/// The driver's end of a connection, for its transport.
#[derive(Default)]
pub struct Link {
    gone: AtomicBool,
    queues: Mutex<Vec<Arc<QueueFds>>>,
    config_changed: OnceLock<Hears>,
    /// A change that came before anybody listened.
    unheard: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "link, {}", if self.is_gone() { "gone" } else { "up" })
    }
}

impl Link {
    /// Ends the connection, because the device is gone or is left. Every queue fails its requests in flight.
    pub fn end(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.wake_all();
    }

    /// Reports that the device's configuration has changed.
    pub fn config_changed(&self) {
        if let Some(hears) = self.config_changed.get() {
            return hears();
        }
        self.unheard.store(true, Ordering::SeqCst);
        // Whoever has begun to listen meanwhile may have looked before.
        self.tell_unheard();
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

    /// Sets who is told of changes. Only the first call has an effect.
    pub(crate) fn on_config_change(&self, hears: Hears) {
        let _ = self.config_changed.set(hears);
        self.tell_unheard();
    }

    fn tell_unheard(&self) {
        if let Some(hears) = self.config_changed.get()
            && self.unheard.swap(false, Ordering::SeqCst)
        {
            hears();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn a_change_that_comes_just_when_somebody_begins_to_listen_is_heard() {
        for _ in 0..2000 {
            let (link, heard) = (Link::default(), Arc::new(AtomicUsize::new(0)));
            let hears = Arc::clone(&heard);
            let both = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    link.config_changed();
                });
                both.wait();
                link.on_config_change(Box::new(move || {
                    hears.fetch_add(1, Ordering::SeqCst);
                }));
            });
            assert_eq!(heard.load(Ordering::SeqCst), 1);
        }
    }
}
