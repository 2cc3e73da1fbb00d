//! A disk as virtio-blk shows it: the offered features, the configuration space, and the properties that queues need
//! for each request.

use crate::shown::{Overrides, Shown, sectors};
use crate::write_cache::WriteCache;
use block::meter::{Counter, Latency, QueueLatency, RingCounters, RingStats};
use block::{Disk, DiskInfo, DiskListener, Error, ErrorKind, Lifetime, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use virtio::RequestLimits;
use virtio::blk::{BlkConfig, CONFIG_WRITEBACK_OFFSET, LIFETIME_BYTES, SECTOR_SHIFT, features as f};

/// The largest queue that a device offers.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// The most queues that a device offers.
pub const MAX_QUEUES: u16 = 256;

/// Most ranges in a discard, write-zeroes or secure erase.
const MAX_RANGES: u32 = 16;

/// The most sectors in a range: a gibibyte. Guests split longer ranges.
const MAX_RANGE_SECTORS: u32 = 1 << 21;

/// The most sectors in a range of a secure erase: each queue that offers it keeps this many zeros to write.
pub(crate) const MAX_ERASE_SECTORS: u32 = 512;

/// The options of a device.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// The name in logs.
    pub name: String,
    /// Queues that the driver may use, 1 to [`MAX_QUEUES`].
    pub max_queues: u16,
    /// Entries that a queue may have: a power of two from 2 to [`MAX_QUEUE_SIZE`].
    pub queue_size: u16,
    /// The driver may not write, whatever the disk allows.
    pub read_only: bool,
    /// Packed rings are offered, too. The front end must be able to set such rings up.
    pub packed: bool,
    /// Properties that the driver is told instead of the disk's own.
    pub overrides: Overrides,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        let overrides = Overrides::default();
        Self {
            name: "disk".into(),
            max_queues: 4,
            queue_size: MAX_QUEUE_SIZE,
            read_only: false,
            packed: false,
            overrides,
        }
    }
}

impl DeviceOptions {
    fn check(&self) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::BadOption, message));
        let size = self.queue_size;
        if !size.is_power_of_two() || !(2..=MAX_QUEUE_SIZE).contains(&size) {
            return bad(format!("queue_size={size}: it must be a power of two from 2 to {MAX_QUEUE_SIZE}"));
        }
        match (1..=MAX_QUEUES).contains(&self.max_queues) {
            true => Ok(()),
            false => bad(format!("max_queues={}: it must be 1 to {MAX_QUEUES}", self.max_queues)),
        }
    }
}

/// A virtio-blk device, shared by its queues and the front end. Queues read it for each request, without a lock.
pub struct Device {
    /// `None` after [`Device::let_go`].
    disk: Mutex<Option<Arc<dyn Disk>>>,
    options: DeviceOptions,
    /// The disk's properties when the device was made. Later changes count only for its size.
    info: DiskInfo,
    read_only: bool,
    shown: Shown,
    /// The storage's wear, as it was last read: the three fields of the answer in one word. `None` if it does not tell.
    lifetime: Option<AtomicU64>,
    capacity_sectors: AtomicU64,
    /// Sectors in a logical block, less one.
    block_mask: u64,
    cache: WriteCache,
    /// Times that the guest switched its cache.
    cache_switches: Counter,
    /// Called when the configuration space changes, but not because the driver wrote to it.
    on_config_change: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Called when the guest has asked for the storage's wear.
    on_lifetime_query: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// One for each queue.
    counters: Vec<Arc<RingCounters>>,
}

/// Returns the fields of a `GET_LIFETIME` answer in a word: its lower six bytes, in the order of the answer.
fn word_of(Lifetime { end_of_life, worn_a, worn_b }: Lifetime) -> u64 {
    u64::from(end_of_life) | u64::from(worn_a) << 16 | u64::from(worn_b) << 32
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Device {
    /// Makes a device over `disk`, and follows the disk's size. Fails if the options are out of range, or if the
    /// overrides contradict each other or the disk.
    pub fn new(disk: Arc<dyn Disk>, options: DeviceOptions) -> Result<Arc<Self>> {
        options.check()?;
        let info = disk.info();
        let read_only = info.read_only || options.read_only;
        let seen = DiskInfo { read_only, ..info.clone() };
        let shown = Shown::of(&seen, options.queue_size, &options.overrides)?;
        if options.overrides.secure_erase && (read_only || !disk.overwrites_in_place()) {
            let why = if read_only {
                "this disk is read-only"
            } else {
                "only a raw image without layers, in a file or device of this host, is overwritten in place"
            };
            return Err(Error::new(ErrorKind::BadOption, format!("secure-erase=on: {why}")));
        }
        // A guest that cannot write has nothing to lose.
        let volatile = info.volatile_cache && !read_only;
        let begins_write_back = volatile && options.overrides.write_cache != Some(false);
        let device = Arc::new(Self {
            disk: Mutex::new(Some(Arc::clone(&disk))),
            read_only,
            lifetime: disk.lifetime().map(|worn| AtomicU64::new(word_of(worn))),
            capacity_sectors: AtomicU64::new(info.size_bytes >> SECTOR_SHIFT),
            block_mask: u64::from(sectors(shown.block_bytes())).saturating_sub(1),
            shown,
            cache: WriteCache::new(volatile, begins_write_back),
            cache_switches: Counter::default(),
            on_config_change: OnceLock::new(),
            on_lifetime_query: OnceLock::new(),
            counters: (0..options.max_queues).map(|_| Arc::default()).collect(),
            info,
            options,
        });
        disk.subscribe(Arc::downgrade(&device) as Weak<dyn DiskListener>);
        // The disk may have changed before the subscription. If a listener's call came first, its value is newer and
        // stays.
        let (told, now) = (device.info.size_bytes, disk.info().size_bytes);
        let [told, now] = [told, now].map(|size_bytes| size_bytes >> SECTOR_SHIFT);
        let _ = device.capacity_sectors.compare_exchange(told, now, Ordering::Relaxed, Ordering::Relaxed);
        Ok(device)
    }

    /// Sets `tell`, which is called on any thread when the disk's size, and with it the configuration space, has
    /// changed. The front end sets it once. `tell` must not wait, and notifies the driver.
    pub fn on_config_change(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_config_change.set(Box::new(tell));
    }

    /// Returns its name in logs.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns its options.
    #[must_use]
    pub fn options(&self) -> &DeviceOptions {
        &self.options
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the offered virtio features. They never change, because a guest that reconnects has already negotiated
    /// them.
    #[must_use]
    pub fn features(&self) -> u64 {
        let mut features = f::VERSION_1 | f::INDIRECT_DESC | f::EVENT_IDX;
        features |= f::SEG_MAX | f::GEOMETRY | f::BLK_SIZE | f::TOPOLOGY | f::MQ;
        let mut offer = |feature, on: bool| features |= if on { feature } else { 0 };
        offer(f::RO, self.read_only);
        offer(f::RING_PACKED, self.options.packed);
        offer(f::SIZE_MAX, self.shown.size_max_bytes > 0);
        // CONFIG_WCE must not be offered without FLUSH (5.2.5.2), and FLUSH says that the cache is volatile.
        offer(f::FLUSH | f::CONFIG_WCE, self.cache.is_volatile());
        offer(f::DISCARD, self.serves_discard());
        offer(f::WRITE_ZEROES, self.serves_write_zeroes());
        offer(f::SECURE_ERASE, self.serves_secure_erase());
        offer(f::LIFETIME, self.lifetime.is_some());
        features
    }

    /// Notes the features that the driver chose among those offered; zero after a reset.
    pub fn negotiated(&self, features: u64) {
        self.cache.negotiated(features);
    }

    /// Notes that a queue begins at an entry other than the first. Unless it ran here before, another program served
    /// this guest, and may know settings that we do not. Called after [`Device::negotiated`].
    pub fn taken_over(&self) {
        self.cache.taken_over();
    }

    /// Notes that queues have run here. Their later positions say nothing about other programs.
    pub fn settle(&self) {
        self.cache.settle();
    }

    fn serves_discard(&self) -> bool {
        self.shown.discard_bytes > 0 && !self.read_only
    }

    pub(crate) fn serves_secure_erase(&self) -> bool {
        self.options.overrides.secure_erase
    }

    /// Whether overwritten data are gone. If a layer was put on the disk since, the data below it stay.
    pub(crate) fn overwrites_in_place(&self) -> bool {
        self.disk().is_ok_and(|disk| disk.overwrites_in_place())
    }

    /// Returns the answer to `GET_LIFETIME`: the wear as it was last read. Has it read again for the next question.
    pub(crate) fn lifetime(&self) -> [u8; LIFETIME_BYTES] {
        let worn = self.lifetime.as_ref().map_or(0, |worn| worn.load(Ordering::Relaxed));
        if let Some(tell) = self.on_lifetime_query.get() {
            tell();
        }
        let [a, b, c, d, e, f, ..] = worn.to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Sets `tell`, which is called on a reactor's thread when a guest has asked for the storage's wear. The front end
    /// sets it once. `tell` must not wait; it has another thread call [`Device::read_lifetime`].
    pub fn on_lifetime_query(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_lifetime_query.set(Box::new(tell));
    }

    /// Reads the storage's wear again. It may wait, so reactors do not call it.
    pub fn read_lifetime(&self) {
        let now = || self.disk().ok()?.lifetime();
        if let Some(worn) = &self.lifetime
            && let Some(now) = now()
        {
            worn.store(word_of(now), Ordering::Relaxed);
        }
    }

    fn serves_write_zeroes(&self) -> bool {
        self.info.write_zeroes && !self.read_only
    }

    /// Returns which requests a queue serves, and their limits.
    pub(crate) fn limits(&self) -> RequestLimits {
        let mut limits = RequestLimits::NONE;
        limits.discard = self.serves_discard();
        limits.write_zeroes = self.serves_write_zeroes();
        limits.secure_erase = self.serves_secure_erase();
        limits.lifetime = self.lifetime.is_some();
        limits.max_ranges = MAX_RANGES;
        limits.max_range_sectors = MAX_RANGE_SECTORS;
        limits.max_erase_sectors = MAX_ERASE_SECTORS;
        limits
    }

    /// Returns the configuration space at this moment.
    #[must_use]
    pub fn config(&self) -> BlkConfig {
        let mut config = self.shown.config(self.capacity_sectors.load(Ordering::Relaxed));
        config.writeback = u8::from(self.cache.is_write_back());
        config.num_queues = self.options.max_queues;
        if self.serves_discard() {
            config.max_discard_sectors = MAX_RANGE_SECTORS;
            config.max_discard_seg = MAX_RANGES;
            config.discard_sector_alignment = sectors(self.shown.discard_bytes);
        }
        if self.serves_secure_erase() {
            config.max_secure_erase_sectors = MAX_ERASE_SECTORS;
            config.max_secure_erase_seg = MAX_RANGES;
            config.secure_erase_sector_alignment = sectors(self.shown.block_bytes());
        }
        if self.serves_write_zeroes() {
            config.max_write_zeroes_sectors = MAX_RANGE_SECTORS;
            config.max_write_zeroes_seg = MAX_RANGES;
            config.write_zeroes_may_unmap = u8::from(self.info.discard);
        }
        config
    }

    /// Fills `bytes` from the configuration space at `offset`. Fields of later versions of the specification read as zero.
    pub fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        bytes.fill(0);
        let config = self.config().to_bytes();
        let field = config.get(offset..).unwrap_or_default();
        bytes.iter_mut().zip(field).for_each(|(byte, ours)| *byte = *ours);
    }

    /// Writes to the configuration space, for the driver. It may change only `writeback`. Other bytes that a monitor
    /// writes along with it must be unchanged. Any other write fails and changes nothing.
    pub fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut wanted = vec![0; bytes.len()];
        self.read_config(offset, &mut wanted);
        let at = CONFIG_WRITEBACK_OFFSET.checked_sub(offset);
        let write_back = at.and_then(|at| bytes.get(at)).copied();
        if let (Some(byte), Some(ours)) = (write_back, at.and_then(|at| wanted.get_mut(at))) {
            *ours = byte;
        }
        match write_back {
            Some(byte) if byte <= 1 && self.cache.is_volatile() && wanted == bytes => {
                self.set_write_back(byte == 1);
                Ok(())
            }
            _ => {
                let length = bytes.len();
                let message =
                    format!("the driver writes {length} bytes of configuration at {offset}: none is writable");
                Err(Error::new(ErrorKind::Protocol, message))
            }
        }
    }

    fn set_write_back(&self, write_back: bool) {
        self.cache.set_write_back(write_back);
        if let Some(times) = self.cache_switches.add_to_log() {
            let mode = if write_back { "write-back" } else { "write-through" };
            tracing::info!(disk = %self.name(), times, "the guest switched to {mode}");
        }
    }

    /// Returns the byte offset of `sector`, if `length_bytes` from there lie on the disk and consist of whole blocks.
    #[inline]
    pub(crate) fn offset(&self, sector: u64, length_bytes: u64) -> Option<u64> {
        let sectors = length_bytes >> SECTOR_SHIFT;
        let end = sector.checked_add(sectors)?;
        let on_blocks = (sector | sectors) & self.block_mask == 0;
        let inside = end <= self.capacity_sectors.load(Ordering::Relaxed);
        (on_blocks && inside).then(|| sector.wrapping_shl(SECTOR_SHIFT))
    }

    /// Whether a write must be durable before it completes.
    #[inline]
    pub(crate) fn write_through(&self) -> bool {
        self.cache.write_through()
    }

    /// Returns how often the device has switched to durable writes. Writes that completed before the last switch may be
    /// volatile until a flush has ended that began after it.
    #[inline]
    pub(crate) fn durable_writes_begun(&self) -> u32 {
        self.cache.begun()
    }

    /// Returns the last value of [`Device::durable_writes_begun`] for which all earlier writes are durable. A flush that
    /// began then has ended well, on any queue.
    pub(crate) fn durable_writes_flushed(&self) -> u32 {
        self.cache.flushed()
    }

    /// Notes the end of such a flush.
    pub(crate) fn has_flushed(&self, begun: u32) {
        self.cache.has_flushed(begun);
    }

    /// Notes that the guest sends a flush.
    #[inline]
    pub(crate) fn guest_flushes(&self) {
        self.cache.guest_flushes();
    }

    pub(crate) fn disk(&self) -> Result<Arc<dyn Disk>> {
        let disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner).clone();
        disk.ok_or_else(|| Error::new(ErrorKind::Io, "the disk is served no more"))
    }

    /// Drops the disk, so that it can be closed although the device may be kept. No queue may run any more, and none
    /// starts.
    pub fn let_go(&self) {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Returns the answer to `GET_ID`.
    pub(crate) fn serial(&self) -> &str {
        &self.info.serial
    }

    pub(crate) fn counters(&self, index: u16) -> Arc<RingCounters> {
        self.counters.get(usize::from(index)).cloned().unwrap_or_default()
    }

    /// Returns the counters of each queue.
    #[must_use]
    pub fn stats(&self) -> Vec<RingStats> {
        self.counters.iter().map(|counters| counters.snapshot()).collect()
    }

    /// Asks each queue that is awake to look for its oldest request, for the next [`Device::latency`].
    pub fn ask_for_oldest(&self) {
        self.counters.iter().filter_map(|counters| counters.latency_if_any()).for_each(Latency::ask);
    }

    /// Returns how long the requests of all queues have taken.
    #[must_use]
    pub fn latency(&self) -> QueueLatency {
        let mut sum = QueueLatency::default();
        let queues = self.counters.iter().filter_map(|counters| counters.latency_if_any());
        queues.for_each(|latency| sum.merge(latency.snapshot()));
        sum
    }
}

impl DiskListener for Device {
    fn info_changed(&self, info: &DiskInfo) {
        let sectors = info.size_bytes >> SECTOR_SHIFT;
        if self.capacity_sectors.swap(sectors, Ordering::Relaxed) != sectors
            && let Some(tell) = self.on_config_change.get()
        {
            tell();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{DiskQueue, ReactorCtx, SECTOR_BYTES, Topology};
    use std::rc::Rc;
    use std::sync::Mutex;

    struct Described(DiskInfo);

    impl Disk for Described {
        fn info(&self) -> DiskInfo {
            self.0.clone()
        }

        fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
            Err(Error::new(ErrorKind::Unsupported, "no queue is opened here"))
        }
    }

    fn info() -> DiskInfo {
        DiskInfo {
            size_bytes: 1 << 20,
            logical_block_bytes: 4096,
            topology: Topology {
                physical_block_bytes: 8192,
                minimum_io_bytes: 8192,
                optimal_io_bytes: 65536,
                alignment_offset_bytes: 4096,
            },
            read_only: false,
            volatile_cache: true,
            discard: true,
            discard_granularity_bytes: 65536,
            write_zeroes: true,
            serial: "s".into(),
        }
    }

    fn device(info: DiskInfo, read_only: bool) -> Arc<Device> {
        let options = DeviceOptions { queue_size: 256, read_only, ..DeviceOptions::default() };
        Device::new(Arc::new(Described(info)), options).unwrap()
    }

    #[test]
    fn the_configuration_space_counts_in_the_units_of_the_specification() {
        let config = device(info(), false).config();
        assert_eq!((config.capacity_sectors, config.blk_size_bytes, config.num_queues), (2048, 4096, 4));
        assert_eq!((config.physical_block_exp, config.min_io_blocks, config.opt_io_blocks), (1, 2, 16));
        assert_eq!((config.discard_sector_alignment, config.max_discard_seg, config.writeback), (128, 16, 1));
        assert_eq!((config.seg_max, config.write_zeroes_may_unmap), (126, 1));
    }

    #[test]
    fn a_read_only_device_offers_no_way_to_change_its_disk() {
        for device in [device(DiskInfo { read_only: true, ..info() }, false), device(info(), true)] {
            let writing = f::DISCARD | f::WRITE_ZEROES | f::FLUSH | f::CONFIG_WCE;
            assert_eq!(device.features() & (f::RO | writing), f::RO);
            assert_eq!(device.config().max_discard_seg, 0);
            assert!(!device.limits().discard && !device.limits().write_zeroes);
            device.negotiated(device.features());
            assert!(device.write_config(CONFIG_WRITEBACK_OFFSET, &[0]).is_err());
        }
    }

    #[test]
    fn a_disk_whose_writes_are_durable_offers_no_cache() {
        let device = device(DiskInfo { volatile_cache: false, ..info() }, false);
        assert_eq!(device.features() & (f::FLUSH | f::CONFIG_WCE), 0);
    }

    /// A disk that grows during `info`: listeners are told of the newest size before the caller gets an older one.
    #[derive(Default)]
    struct Growing {
        listener: Mutex<Option<Weak<dyn DiskListener>>>,
        tells: bool,
    }

    impl Disk for Growing {
        fn info(&self) -> DiskInfo {
            let listener = self.listener.lock().unwrap().as_ref().and_then(Weak::upgrade);
            let Some(listener) = listener else { return info() };
            if self.tells {
                listener.info_changed(&DiskInfo { size_bytes: 3 << 20, ..info() });
            }
            DiskInfo { size_bytes: 2 << 20, ..info() }
        }

        fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
            Err(Error::new(ErrorKind::Unsupported, "no queue is opened here"))
        }

        fn subscribe(&self, listener: Weak<dyn DiskListener>) {
            *self.listener.lock().unwrap() = Some(listener);
        }
    }

    #[test]
    fn a_disk_that_grows_while_its_device_is_made_has_its_newest_size() {
        for (tells, size_bytes) in [(false, 2 << 20), (true, 3 << 20)] {
            let disk = Growing { tells, ..Growing::default() };
            let device = Device::new(Arc::new(disk), DeviceOptions::default()).unwrap();
            assert_eq!(device.config().capacity_sectors, size_bytes / SECTOR_BYTES);
        }
    }

    #[test]
    fn any_part_of_the_configuration_can_be_read_and_what_lies_behind_it_is_zero() {
        let device = device(info(), false);
        let mut bytes = [0xff; 4];
        device.read_config(20, &mut bytes);
        assert_eq!(u32::from_le_bytes(bytes), 4096);
        device.read_config(usize::MAX, &mut bytes);
        assert_eq!(bytes, [0; 4]);
    }

    /// A disk that tells its wear.
    #[derive(Clone, Default)]
    struct Worn(Arc<std::sync::atomic::AtomicU16>);

    impl Disk for Worn {
        fn info(&self) -> DiskInfo {
            info()
        }

        fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
            Err(Error::new(ErrorKind::Unsupported, "no queue is opened here"))
        }

        fn lifetime(&self) -> Option<Lifetime> {
            Some(Lifetime { end_of_life: 0x0102, worn_a: 0x0304, worn_b: self.0.load(Ordering::Relaxed) })
        }
    }

    #[test]
    fn wear_is_read_again_when_a_guest_has_asked_for_it() {
        let disk = Worn::default();
        let device = Device::new(Arc::new(disk.clone()), DeviceOptions::default()).unwrap();
        let queries = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&queries);
        device.on_lifetime_query(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        disk.0.store(0x0506, Ordering::Relaxed);
        assert_eq!(device.lifetime(), [2, 1, 4, 3, 0, 0], "a reactor does not wait for the storage");
        assert_eq!(queries.load(Ordering::Relaxed), 1);
        device.read_lifetime();
        assert_eq!(device.lifetime(), [2, 1, 4, 3, 6, 5]);
    }

    #[test]
    fn ranges_off_the_disk_or_its_blocks_have_no_offset() {
        let device = device(info(), false);
        assert_eq!(device.offset(8, 4096), Some(4096));
        assert_eq!(device.offset(2040, 4096), Some(2040 * 512));
        for (sector, length) in [(2048, 4096), (2040, 8192), (u64::MAX, 4096), (!7, 4096), (1, 4096), (8, 512)] {
            assert_eq!(device.offset(sector, length), None, "{sector}+{length}");
        }
        device.info_changed(&DiskInfo { size_bytes: 2 << 20, ..info() });
        assert_eq!(device.offset(2048, 4096), Some(1 << 20));
    }
}
