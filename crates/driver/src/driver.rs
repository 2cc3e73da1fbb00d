//! The connection as a disk: sets up rings and memory, hands queues out, takes them back.

use crate::layout::{BOUNCE_BYTES, GUEST_BASE, QueueLayout};
use crate::news::News;
use crate::queue::{Queue, Rules};
use crate::ring::{Limits, Ring, bounce_segment_bytes, prepare};
use crate::session::Session;
use crate::watch::QueueFds;
use crate::{DriverOptions, dma::DmaPool};
use block::{Disk, DiskInfo, DiskListener, DiskQueue, Error, ErrorKind, Listeners, ReactorCtx, Result, Topology};
use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use virtio::blk::{BlkConfig, ID_BYTES, RequestHeader, Status, features, request_type};

/// What [`Driver::counters`] tells; they only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Times that the device was kicked: a system call each.
    pub kicks: u64,
    /// Times that a reactor asked for a callback before it slept, and woke.
    pub wakeups: u64,
}

/// A virtio-blk device behind a vhost-user socket, as a disk.
#[derive(Debug)]
pub struct Driver {
    inner: Arc<Inner>,
    _news: Option<News>,
}

/// What queues share with their driver. The last of them to go ends the connection.
pub(crate) struct Inner {
    pub(crate) session: Session,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) pool: Arc<DmaPool>,
    pub(crate) size_bytes: AtomicU64,
    pub(crate) volatile_cache: AtomicBool,
    listeners: Listeners,
    layouts: Vec<QueueLayout>,
    fds: Vec<Arc<QueueFds>>,
    parked: Mutex<Vec<Ring>>,
    serial: String,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "driver of '{}'", self.session.path().display())
    }
}

impl Driver {
    /// Attaches to the server at `path`. Waits for it: not to be called on a reactor that the server needs.
    pub fn connect(path: impl AsRef<Path>, options: DriverOptions) -> Result<Self> {
        options.check()?;
        let mut session = Session::open(path.as_ref(), &options)?;
        check_config(&session)?;
        let limits = limits(&session, &options);
        let indirect = session.has(features::INDIRECT_DESC);
        let entries = if indirect { limits.max_segments.saturating_add(2).min(options.queue_size.into()) } else { 0 };
        let mut layouts: Vec<QueueLayout> = Vec::new();
        for _ in 0..options.queues {
            let start = layouts.last().map_or(0, |layout| layout.end);
            // At most the queue size, which is a `u16`.
            layouts.push(QueueLayout::new(start, options.queue_size, entries as u16, options.bounce_bytes));
        }
        let rings_end = layouts.last().map_or(0, |layout| layout.end);
        let total = rings_end.saturating_add(options.memory_bytes.next_multiple_of(memory::PAGE_BYTES));
        let no_memory = |error| Error::io(format!("cannot make {total} bytes of shared memory"), error);
        let (file, mapping) = Mapping::anonymous_file(c"ringdisk-driver", total).map_err(no_memory)?;
        let mapping = Arc::new(mapping);
        let memory = guest_memory(&mapping)?;
        session.share(&file, &mapping)?;
        let (mut rings, mut fds) = (Vec::new(), Vec::new());
        for (index, layout) in layouts.iter().enumerate() {
            let ring = prepare(&memory, layout, options.queue_size, limits.event_idx)
                .map_err(|error| Error::with_source(ErrorKind::Io, "the driver's shared memory", error))?;
            let ring_fds = session.start_ring(index, options.queue_size, layout, &mapping)?;
            fds.push(Arc::clone(&ring_fds));
            rings.push(Ring::new(index, ring, ring_fds, &memory, *layout, limits)?);
        }
        session.watch.add(&fds);
        let config = session.config();
        let volatile_cache = AtomicBool::new(volatile_cache(&session, &config));
        let serial = match rings.first_mut() {
            Some(ring) => read_serial(&session, ring, &mapping, options.answer_timeout_ms)?,
            None => String::new(),
        };
        let channel = session.take_channel();
        let inner = Arc::new(Inner {
            pool: DmaPool::new(Arc::clone(&mapping), rings_end..total),
            mapping,
            size_bytes: AtomicU64::new(config.capacity_sectors.saturating_mul(512)),
            volatile_cache,
            listeners: Listeners::default(),
            layouts,
            fds,
            parked: Mutex::new(rings),
            serial,
            session,
        });
        let news = channel.map(|channel| News::start(channel, Arc::downgrade(&inner))).transpose()?;
        Ok(Self { inner, _news: news })
    }

    /// A page-aligned buffer in the shared memory: operations on it are not copied. It stays on the calling thread.
    pub fn alloc(&self, length_bytes: usize) -> Result<IoBuf> {
        self.inner.pool.alloc(length_bytes)
    }

    /// Ends the connection in order. The device finishes what it has, and queues can still harvest that. Requests that
    /// it never took fail, and so does everything after.
    pub fn disconnect(&self) -> Result<()> {
        self.inner.disconnect()
    }

    /// Whether the connection is over, whoever ended it.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.inner.session.watch.is_gone()
    }

    /// How often the driver had to ask the kernel for something.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let sum = |count: fn(&QueueFds) -> &AtomicU64| {
            self.inner.fds.iter().map(|fds| count(fds).load(Ordering::Relaxed)).sum()
        };
        Counters { kicks: sum(|fds| &fds.kicks), wakeups: sum(|fds| &fds.wakeups) }
    }
}

impl Disk for Driver {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let inner = &self.inner;
        if inner.session.watch.is_gone() {
            return Err(inner.session.error("the connection is over".into()));
        }
        let ring = {
            let mut parked = inner.lock_parked();
            let lowest = parked.iter().enumerate().min_by_key(|(_, ring)| ring.index).map(|(at, _)| at);
            lowest.map(|at| parked.swap_remove(at))
        };
        let ring = ring.ok_or_else(|| {
            let message = format!("all {} queues of the driver are open", inner.layouts.len());
            Error::new(ErrorKind::BadOption, format!("'{}': {message}", inner.session.path().display()))
        })?;
        Ok(Box::new(Queue::open(inner, ring, ctx)?))
    }

    fn set_volatile_cache(&self, volatile: bool) {
        let inner = &self.inner;
        if !inner.session.has(features::CONFIG_WCE) {
            return;
        }
        if let Err(error) = inner.session.set_writeback(volatile) {
            tracing::warn!("{error}");
        }
        let config = inner.session.config();
        let now = volatile_cache(&inner.session, &config);
        if inner.volatile_cache.swap(now, Ordering::Relaxed) != now {
            inner.listeners.notify(|| inner.info());
        }
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.inner.listeners.subscribe(listener);
    }
}

impl Inner {
    fn info(&self) -> DiskInfo {
        let (session, config) = (&self.session, self.session.config());
        let block = logical_block_bytes(session, &config);
        let rules = self.rules();
        let topology = match session.has(features::TOPOLOGY) {
            true => Topology {
                physical_block_bytes: block.checked_shl(config.physical_block_exp.into()).unwrap_or(0),
                minimum_io_bytes: u32::from(config.min_io_blocks).saturating_mul(block),
                optimal_io_bytes: config.opt_io_blocks.saturating_mul(block),
            },
            false => Topology::default(),
        };
        DiskInfo {
            size_bytes: self.size_bytes.load(Ordering::Relaxed),
            logical_block_bytes: block,
            topology,
            read_only: rules.read_only,
            volatile_cache: self.volatile_cache.load(Ordering::Relaxed),
            discard: rules.max_discard_sectors > 0 && !rules.read_only,
            discard_granularity_bytes: match rules.max_discard_sectors {
                0 => 0,
                _ => config.discard_sector_alignment.saturating_mul(512),
            },
            write_zeroes: !rules.read_only,
            serial: self.serial.clone(),
        }
    }

    /// The device says that its configuration has changed: follows its size.
    pub(crate) fn follow_config(&self) {
        let config = match self.session.read_config() {
            Ok(config) => config,
            Err(error) => return tracing::warn!("{error}"),
        };
        let now = config.capacity_sectors.saturating_mul(512);
        if self.size_bytes.swap(now, Ordering::Relaxed) != now {
            self.listeners.notify(|| self.info());
        }
    }

    fn lock_parked(&self) -> std::sync::MutexGuard<'_, Vec<Ring>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn park(&self, ring: Ring) {
        self.lock_parked().push(ring);
    }

    pub(crate) fn layout(&self, index: usize) -> QueueLayout {
        // Rings are made from the layouts, one each.
        self.layouts.get(index).copied().unwrap_or_else(|| QueueLayout::new(0, 0, 0, 0))
    }

    pub(crate) fn rules(&self) -> Rules {
        let (session, config) = (&self.session, self.session.config());
        let offered = |feature, most| if session.has(feature) { most } else { 0 };
        Rules {
            block_bytes: u64::from(logical_block_bytes(session, &config)),
            read_only: session.has(features::RO),
            flush: session.has(features::FLUSH),
            max_discard_sectors: offered(features::DISCARD, config.max_discard_sectors),
            max_write_zeroes_sectors: offered(features::WRITE_ZEROES, config.max_write_zeroes_sectors),
        }
    }

    fn disconnect(&self) -> Result<()> {
        let mut result = Ok(());
        if !self.session.watch.is_gone() {
            for index in 0..self.fds.len() {
                result = result.and(self.session.stop_ring(index));
            }
        }
        self.session.watch.hang_up();
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

fn guest_memory(mapping: &Arc<Mapping>) -> Result<Arc<GuestMemory>> {
    let spec = RegionSpec {
        guest_address: GUEST_BASE,
        length_bytes: mapping.length_bytes() as u64,
        user_address: mapping.as_ptr().as_ptr().addr() as u64,
        file_offset: 0,
    };
    let region = GuestRegion::of_mapping(spec, Arc::clone(mapping), 0);
    GuestMemory::new(region.into_iter().collect())
        .map(Arc::new)
        .map_err(|error| Error::with_source(ErrorKind::Io, "the driver's shared memory", error))
}

fn limits(session: &Session, options: &DriverOptions) -> Limits {
    let config = session.config();
    // 5.2.5: without SEG_MAX one segment; without SIZE_MAX no limit.
    let max_segments = if session.has(features::SEG_MAX) { config.seg_max.max(1) } else { 1 };
    let max_segment_bytes = max_segment_bytes(session, &config);
    let room = u32::from(options.queue_size).saturating_sub(2);
    Limits { event_idx: session.has(features::EVENT_IDX), max_segments: max_segments.min(room), max_segment_bytes }
}

fn max_segment_bytes(session: &Session, config: &BlkConfig) -> u32 {
    // Some servers offer SIZE_MAX and leave the field zero: they have no limit.
    match config.size_max_bytes {
        1.. if session.has(features::SIZE_MAX) => config.size_max_bytes,
        _ => u32::MAX,
    }
}

fn logical_block_bytes(session: &Session, config: &BlkConfig) -> u32 {
    if session.has(features::BLK_SIZE) { config.blk_size_bytes } else { 512 }
}

fn volatile_cache(session: &Session, config: &BlkConfig) -> bool {
    // 5.2.5.2: with CONFIG_WCE the field tells; else a device that offers FLUSH has a cache to flush.
    let writeback = !session.has(features::CONFIG_WCE) || config.writeback != 0;
    session.has(features::FLUSH) && writeback
}

/// Refuses what no driver could work with.
fn check_config(session: &Session) -> Result<()> {
    let config = session.config();
    let block = logical_block_bytes(session, &config);
    if !block.is_power_of_two() || block < 512 || block as usize > BOUNCE_BYTES {
        return Err(session.error(format!("the device has blocks of {block} bytes, which cannot be served")));
    }
    let longest = max_segment_bytes(session, &config);
    if bounce_segment_bytes(longest, block as usize) == 0 {
        return Err(session.error(format!("the device takes segments of {longest} bytes, less than its block")));
    }
    if config.capacity_sectors > u64::MAX >> 9 {
        return Err(session.error(format!("the device claims {} sectors", config.capacity_sectors)));
    }
    Ok(())
}

/// Asks for the serial (GET_ID) on a ring that no queue uses yet.
fn read_serial(session: &Session, ring: &mut Ring, mapping: &Arc<Mapping>, timeout_ms: u64) -> Result<String> {
    ring.begin();
    if ring.push_bounce(ID_BYTES, 1, true) != ID_BYTES {
        return Ok(String::new());
    }
    let bounce = ring.next_bounce_offset().unwrap_or(0);
    let header = RequestHeader { kind: request_type::GET_ID, priority: 0, sector: 0 };
    let broken = |why: String| session.error(format!("reading its serial: {why}"));
    ring.start(header, 0, 0, ID_BYTES).map_err(|error| broken(error.to_string()))?;
    let until = Instant::now() + Duration::from_millis(timeout_ms);
    ring.publish();
    let ended = loop {
        if let Some(ended) = ring.pop().map_err(|error| broken(error.to_string()))? {
            break ended;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || session.watch.is_gone() {
            return Err(broken(format!("no answer within {timeout_ms} ms")));
        }
        if !ring.enable_callbacks() {
            let mut fds = [PollFd::new(&ring.fds.call, PollFlags::IN)];
            let left = Timespec::try_from(left).ok();
            // Whatever it says, the ring is looked at again.
            let _ = poll(&mut fds, left.as_ref());
            let _ = rustix::io::read(&ring.fds.call, &mut [0; 8]);
        }
    };
    ring.disable_callbacks();
    let mut id = [0; ID_BYTES];
    if let Some(buffer) = IoBuf::in_mapping(mapping, bounce, ID_BYTES, Box::new(())) {
        buffer.whole().copy_to_slice(0, &mut id);
    }
    ring.free_bounce(ended.head);
    if ended.status != Status::Ok {
        return Ok(String::new());
    }
    let text = id.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}
