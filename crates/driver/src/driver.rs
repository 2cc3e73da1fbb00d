//! The connection as a disk: sets up rings and memory, hands queues out, and takes them back.

use crate::cache::CacheType;
use crate::control::{Control, Hold};
use crate::facts::{self, DeviceFacts, check_config, limits, volatile_cache};
use crate::inner::Inner;
use crate::layout::{GUEST_BASE, QueueLayout, queue_setup};
use crate::questions::{read_lifetime, read_serial};
use crate::queue::{Queue, RequestQueue};
use crate::queue_fds::QueueFds;
use crate::ring::{Ring, prepare};
use crate::session::Session;
use crate::transport::{SharedMemory, Transport};
use crate::vhost_user::VhostUser;
use crate::{DriverOptions, DriverPath, dma::DmaPool};
use block::{Disk, DiskInfo, DiskListener, DiskQueue, Error, ErrorKind, Lifetime, Listeners, ReactorCtx, Result};
use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec};
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use virtio::blk::features;

/// The counters of [`Driver::counters`]. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Times that the device was kicked; each takes a system call.
    pub kicks: u64,
    /// Times that a reactor asked for a callback before it slept, and woke.
    pub wakeups: u64,
    /// Requests that the device has ended. On the request path several operations may share one.
    pub requests: u64,
}

/// A virtio-blk device, as a disk.
#[derive(Debug)]
pub struct Driver {
    pub(crate) inner: Arc<Inner>,
}

impl Driver {
    /// Attaches to the vhost-user server at `path`. It waits, so it must not be called on a reactor that the server
    /// needs.
    pub fn connect(path: impl AsRef<Path>, options: DriverOptions) -> Result<Self> {
        options.check()?;
        let transport = VhostUser::connect(path.as_ref(), &options)?;
        Self::over(Box::new(transport), options)
    }

    /// Attaches to the device that `transport` leads to.
    pub fn over(transport: Box<dyn Transport>, options: DriverOptions) -> Result<Self> {
        options.check()?;
        let session = Session::open(transport, &options)?;
        check_config(&session)?;
        let limits = limits(&session, &options);
        let layouts = layouts(&session, &options, limits.max_segments);
        let rings_end = layouts.last().map_or(0, |layout| layout.end);
        let total = rings_end.saturating_add(options.memory_bytes.next_multiple_of(memory::PAGE_BYTES));
        let no_memory = |error| Error::io(format!("cannot make {total} bytes of shared memory"), error);
        let (file, mapping) = Mapping::anonymous_file(c"ringdisk-driver", total).map_err(no_memory)?;
        let mapping = Arc::new(mapping);
        let memory = guest_memory(&mapping)?;
        session.share_memory(SharedMemory {
            file: file.as_fd(),
            guest_address: GUEST_BASE,
            user_address: mapping.as_ptr().as_ptr().addr() as u64,
            length_bytes: mapping.length_bytes() as u64,
        })?;
        let fds = layouts.iter().map(|_| QueueFds::new()).collect::<Result<Vec<_>>>()?;
        // Added before the first ring starts: the transport watches them from its next message on.
        session.link.add_queues(&fds);
        let mut rings = Vec::new();
        for (index, (layout, fds)) in layouts.iter().zip(&fds).enumerate() {
            let ring = prepare(&memory, layout, options.queue_size, limits)
                .map_err(|error| Error::with_source(ErrorKind::Io, "the driver's shared memory", error))?;
            let setup = queue_setup(layout, options.queue_size, limits.ring_layout, &mapping);
            session.start_ring(index, &setup, fds)?;
            rings.push(Ring::new(index, ring, Arc::clone(fds), &memory, *layout, limits)?);
        }
        let config = session.config();
        let serial = match rings.first_mut() {
            Some(ring) if !options.without_serial => read_serial(&session, ring, &mapping, options.answer_timeout_ms)?,
            _ => String::new(),
        };
        let lifetime = match rings.first_mut() {
            Some(ring) => read_lifetime(&session, ring, &mapping, options.answer_timeout_ms)?,
            None => None,
        };
        let inner = Arc::new(Inner {
            pool: DmaPool::new(Arc::clone(&mapping), rings_end..total),
            mapping,
            memory,
            size_bytes: AtomicU64::new(config.capacity_sectors.saturating_mul(512)),
            cache: CacheType::new(volatile_cache(&session, &config)),
            following: Mutex::default(),
            has_missed: AtomicBool::new(false),
            listeners: Listeners::default(),
            layouts,
            fds,
            control: Control::new(rings),
            serial,
            lifetime,
            options,
            session,
        });
        let follower = Arc::downgrade(&inner);
        inner.session.link.on_config_change(Box::new(move || {
            if let Some(inner) = follower.upgrade() {
                inner.follow_config();
            }
        }));
        Ok(Self { inner })
    }

    /// Allocates a page-aligned buffer in the shared memory. Operations on it are not copied. It stays on the calling
    /// thread.
    pub fn alloc(&self, length_bytes: usize) -> Result<IoBuf> {
        self.inner.pool.alloc(length_bytes)
    }

    /// Ends the connection in order. The device finishes its requests, and queues can still harvest them. Requests that
    /// it never took fail, and so do all later ones.
    pub fn disconnect(&self) -> Result<()> {
        self.inner.disconnect()
    }

    /// Whether the connection is over, whoever ended it.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.inner.session.is_gone()
    }

    /// Stops the device, as before a suspend. Its requests end first. Then its rings are dropped, and what is submitted
    /// waits until [`Driver::restore`]. Meanwhile queues cannot be opened, and changes of the device's configuration
    /// are ignored.
    ///
    /// Fails if requests in flight don't end within `answer_timeout_ms`; then all goes on as before. If the device
    /// refuses to stop its rings, the connection ends. It waits, so it must not be called on a reactor that has a queue.
    pub fn freeze(&self) -> Result<()> {
        self.inner.freeze()
    }

    /// Makes the rings anew after [`Driver::freeze`], sends what has waited, and reads what the device changed.
    pub fn restore(&self) -> Result<()> {
        self.inner.restore()
    }

    /// Resets the device's queues, as a driver does that no longer trusts the device. All submitted requests end with
    /// an error, and the rings begin anew. A queue that the device broke works again. It waits, as [`Driver::freeze`]
    /// does. Until it returns, the device may still write to the memory of reads that have ended with an error. If the
    /// device refuses to stop or to start its rings, the connection ends.
    pub fn reset(&self) -> Result<()> {
        self.inner.reset()
    }

    /// Returns facts about the device beyond [`Disk::info`].
    #[must_use]
    pub fn facts(&self) -> DeviceFacts {
        facts::facts(&self.inner.session, self.inner.lifetime)
    }

    /// Returns how often the driver needed the kernel, and how many requests have ended.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let sum = |count: fn(&QueueFds) -> &AtomicU64| {
            self.inner.fds.iter().map(|fds| count(fds).load(Ordering::Relaxed)).sum()
        };
        let requests = self.inner.fds.iter().map(|fds| fds.progress.load(Ordering::Relaxed) >> 16).sum();
        Counters { kicks: sum(|fds| &fds.kicks), wakeups: sum(|fds| &fds.wakeups), requests }
    }
}

impl Disk for Driver {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let inner = &self.inner;
        if inner.session.is_gone() {
            return Err(inner.session.error("the connection is over".into()));
        }
        let ring = {
            let mut rings = inner.control.rings();
            if inner.control.hold() != Hold::None {
                return Err(inner.session.error("the device is frozen".into()));
            }
            let lowest = rings.parked.iter().enumerate().min_by_key(|(_, ring)| ring.index).map(|(at, _)| at);
            lowest.map(|at| rings.parked.swap_remove(at))
        };
        let ring = ring.ok_or_else(|| {
            let message = format!("all {} queues of the driver are open", inner.layouts.len());
            Error::new(ErrorKind::BadOption, format!("'{}': {message}", inner.session.name()))
        })?;
        let queue = Queue::open(inner, ring, ctx)?;
        Ok(match inner.options.path {
            DriverPath::Bio => Box::new(queue),
            DriverPath::Request => Box::new(RequestQueue(queue)),
        })
    }

    fn lifetime(&self) -> Option<Lifetime> {
        self.inner.lifetime
    }

    fn set_volatile_cache(&self, volatile: bool) {
        let inner = &self.inner;
        if !inner.session.has(features::CONFIG_WCE) || !inner.session.has(features::FLUSH) {
            return;
        }
        let following = inner.lock_following();
        let before = inner.cache.now().is_volatile();
        if volatile {
            // Set before the device knows: any write that it takes as volatile must be followed by a flush.
            inner.cache.switch(true);
        }
        let is_volatile = match inner.session.set_writeback(volatile) {
            Ok(()) => volatile_cache(&inner.session, &inner.session.config()),
            Err(error) => {
                tracing::warn!("{error}");
                // It may have switched all the same. A needless flush does no harm.
                before || volatile
            }
        };
        inner.cache.switch(is_volatile);
        drop(following);
        if is_volatile != before {
            inner.listeners.notify(|| inner.info());
        }
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.inner.listeners.subscribe(listener);
    }
}

/// Lays out each queue's part of the shared memory, one behind the other.
fn layouts(session: &Session, options: &DriverOptions, max_segments: u32) -> Vec<QueueLayout> {
    let indirect = session.has(features::INDIRECT_DESC);
    let entries = if indirect { max_segments.saturating_add(2).min(options.queue_size.into()) } else { 0 };
    let mut layouts: Vec<QueueLayout> = Vec::new();
    for _ in 0..options.queues {
        let start = layouts.last().map_or(0, |layout| layout.end);
        // At most the queue size, which is a `u16`.
        layouts.push(QueueLayout::new(start, options.queue_size, entries as u16, options.bounce_bytes));
    }
    layouts
}

fn guest_memory(mapping: &Arc<Mapping>) -> Result<Arc<GuestMemory>> {
    let spec = RegionSpec::new(GUEST_BASE, mapping.length_bytes() as u64)
        .with(|region| region.user_address = mapping.as_ptr().as_ptr().addr() as u64);
    let region = GuestRegion::of_mapping(spec, Arc::clone(mapping), 0);
    GuestMemory::new(region.into_iter().collect())
        .map(Arc::new)
        .map_err(|error| Error::with_source(ErrorKind::Io, "the driver's shared memory", error))
}
