//! A disk as virtio-blk shows it: the features on offer, the configuration space, and what a ring asks at each request.

use block::{DiskInfo, SECTOR_BYTES};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use virtio::RequestLimits;
use virtio::blk::{BlkConfig, features as f};

/// Vhost-user's own bit among the virtio features: the peer may ask for protocol features.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Most ranges in a discard or write-zeroes.
const MAX_RANGES: u32 = 16;

/// Most sectors in a range: a gibibyte. Guests split what is longer.
const MAX_RANGE_SECTORS: u32 = 1 << 21;

/// Most data segments in a request. With header and status it fits a ring of 128 without indirect descriptors, the
/// smallest that monitors choose by themselves.
const SEG_MAX: u16 = 126;

/// What the rings and the session share about one disk. Rings read it at each request, without a lock.
#[derive(Debug)]
pub(crate) struct Device {
    /// For logs.
    pub(crate) name: String,
    pub(crate) serial: String,
    pub(crate) read_only: bool,
    info: DiskInfo,
    max_queues: u16,
    queue_size: u16,
    capacity_sectors: AtomicU64,
    /// Sectors in a logical block, less one.
    block_mask: u64,
    /// What the `writeback` byte shows: true is write-back.
    write_back: AtomicBool,
    /// The byte that the guest wrote last. It outlives resets: monitors (QEMU) show later drivers that byte from a copy of
    /// their own, which a reset does not change.
    last_word: AtomicBool,
    /// The guest was there before this program, and has not yet told by a flush or by the byte how it uses the cache.
    unknown_guest: AtomicBool,
    /// Rings ran, so that the guest cannot be an older one that comes back.
    settled: AtomicBool,
    /// Each write has to be durable before it completes.
    write_through: AtomicBool,
}

impl Device {
    pub(crate) fn new(name: String, info: DiskInfo, max_queues: u16, queue_size: u16) -> Self {
        let block_bytes = u64::from(info.logical_block_bytes.max(1).next_power_of_two()).max(SECTOR_BYTES);
        Self {
            name,
            serial: info.serial.clone(),
            read_only: info.read_only,
            max_queues,
            queue_size,
            capacity_sectors: AtomicU64::new(info.size_bytes >> virtio::blk::SECTOR_SHIFT),
            block_mask: (block_bytes >> virtio::blk::SECTOR_SHIFT).saturating_sub(1),
            write_back: AtomicBool::new(info.volatile_cache),
            last_word: AtomicBool::new(info.volatile_cache),
            unknown_guest: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            write_through: AtomicBool::new(false),
            info,
        }
    }

    /// The features on offer. They stay what they were when the export began: a guest that reconnects has negotiated
    /// them already.
    pub(crate) fn features(&self) -> u64 {
        let mut features = f::VERSION_1 | f::INDIRECT_DESC | f::EVENT_IDX | PROTOCOL_FEATURES;
        features |= f::SEG_MAX | f::BLK_SIZE | f::TOPOLOGY | f::MQ;
        let mut offer = |feature, on: bool| features |= if on { feature } else { 0 };
        offer(f::RO, self.info.read_only);
        // CONFIG_WCE must not be offered without FLUSH (5.2.5.2), and FLUSH says that the cache is volatile.
        offer(f::FLUSH | f::CONFIG_WCE, self.info.volatile_cache);
        offer(f::DISCARD, self.serves_discard());
        offer(f::WRITE_ZEROES, self.serves_write_zeroes());
        features
    }

    fn serves_discard(&self) -> bool {
        self.info.discard && !self.info.read_only
    }

    fn serves_write_zeroes(&self) -> bool {
        self.info.write_zeroes && !self.info.read_only
    }

    /// What requests a ring serves.
    pub(crate) fn limits(&self) -> RequestLimits {
        RequestLimits {
            discard: self.serves_discard(),
            write_zeroes: self.serves_write_zeroes(),
            max_ranges: MAX_RANGES,
            max_range_sectors: MAX_RANGE_SECTORS,
        }
    }

    /// The configuration space, now.
    pub(crate) fn config(&self) -> BlkConfig {
        let block_bytes = self.info.logical_block_bytes.max(SECTOR_BYTES as u32);
        let blocks = |bytes: u32| bytes.checked_div(block_bytes).unwrap_or(0);
        let topology = self.info.topology;
        let physical_blocks = blocks(topology.physical_block_bytes).max(1);
        let discard_bytes = self.info.discard_granularity_bytes.max(block_bytes);
        let mut config = BlkConfig {
            capacity_sectors: self.capacity_sectors.load(Ordering::Relaxed),
            seg_max: u32::from(SEG_MAX.min(self.queue_size.saturating_sub(2)).max(1)),
            blk_size_bytes: block_bytes,
            physical_block_exp: physical_blocks.ilog2().min(u32::from(u8::MAX)) as u8,
            min_io_blocks: u16::try_from(blocks(topology.minimum_io_bytes)).unwrap_or(u16::MAX),
            opt_io_blocks: blocks(topology.optimal_io_bytes),
            writeback: u8::from(self.write_back.load(Ordering::Relaxed)),
            num_queues: self.max_queues,
            ..BlkConfig::default()
        };
        if self.serves_discard() {
            config.max_discard_sectors = MAX_RANGE_SECTORS;
            config.max_discard_seg = MAX_RANGES;
            config.discard_sector_alignment = discard_bytes >> virtio::blk::SECTOR_SHIFT;
        }
        if self.serves_write_zeroes() {
            config.max_write_zeroes_sectors = MAX_RANGE_SECTORS;
            config.max_write_zeroes_seg = MAX_RANGES;
            config.write_zeroes_may_unmap = u8::from(self.info.discard);
        }
        config
    }

    /// Where `length_bytes` at `sector` begin on the disk, if they lie on it and on its blocks.
    #[inline]
    pub(crate) fn offset(&self, sector: u64, length_bytes: u64) -> Option<u64> {
        let sectors = length_bytes >> virtio::blk::SECTOR_SHIFT;
        let end = sector.checked_add(sectors)?;
        let on_blocks = (sector | sectors) & self.block_mask == 0;
        let inside = end <= self.capacity_sectors.load(Ordering::Relaxed);
        (on_blocks && inside).then(|| sector.wrapping_shl(virtio::blk::SECTOR_SHIFT))
    }

    /// Whether a write has to be durable before it completes.
    #[inline]
    pub(crate) fn write_through(&self) -> bool {
        self.write_through.load(Ordering::Relaxed) || self.unknown_guest.load(Ordering::Relaxed)
    }

    /// What the guest writes to the `writeback` byte.
    pub(crate) fn set_write_back(&self, write_back: bool) {
        self.write_back.store(write_back, Ordering::Relaxed);
        self.last_word.store(write_back, Ordering::Relaxed);
        self.guest_is_known();
    }

    /// What was negotiated just now decides how the cache begins (it may begin either way, 5.2.5): as the guest left it,
    /// but a guest that could choose and cannot flush begins with write-through (5.2.5.2).
    pub(crate) fn negotiated(&self, acked: u64) {
        let cannot_flush = acked & (f::CONFIG_WCE | f::FLUSH) == f::CONFIG_WCE;
        self.write_back.store(!cannot_flush && self.last_word.load(Ordering::Relaxed), Ordering::Relaxed);
        self.apply_features(acked);
    }

    /// A ring goes on where this program never was: another one served this guest before, and may have been told to write
    /// through. Monitors do not tell it again, so writes are durable until the guest shows what it expects.
    pub(crate) fn taken_over(&self, acked: u64) {
        if acked & f::CONFIG_WCE != 0 && self.info.volatile_cache && !self.settled.load(Ordering::Relaxed) {
            self.unknown_guest.store(true, Ordering::Relaxed);
        }
    }

    /// From here on rings go on where we left them.
    pub(crate) fn settle(&self) {
        self.settled.store(true, Ordering::Relaxed);
    }

    /// The guest flushes: it takes the cache for write-back, or has none that it would rely on.
    #[inline]
    pub(crate) fn guest_flushes(&self) {
        if self.unknown_guest.load(Ordering::Relaxed) {
            self.guest_is_known();
        }
    }

    fn guest_is_known(&self) {
        self.settle();
        self.unknown_guest.store(false, Ordering::Relaxed);
    }

    /// Decides whether writes are durable one by one, from what was negotiated: a guest with CONFIG_WCE says so in the
    /// configuration space; one with FLUSH alone flushes itself; one with neither cannot flush (5.2.6.2).
    pub(crate) fn apply_features(&self, acked: u64) {
        let write_back = match acked & f::CONFIG_WCE != 0 {
            true => self.write_back.load(Ordering::Relaxed),
            false => acked & f::FLUSH != 0,
        };
        // Without a volatile cache every write is durable anyhow.
        self.write_through.store(self.info.volatile_cache && !write_back, Ordering::Relaxed);
    }

    /// The disk has a new size; the guest reads it from the configuration space.
    pub(crate) fn set_size(&self, size_bytes: u64) {
        self.capacity_sectors.store(size_bytes >> virtio::blk::SECTOR_SHIFT, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Topology;

    fn info() -> DiskInfo {
        DiskInfo {
            size_bytes: 1 << 20,
            logical_block_bytes: 4096,
            topology: Topology { physical_block_bytes: 8192, minimum_io_bytes: 8192, optimal_io_bytes: 65536 },
            read_only: false,
            volatile_cache: true,
            discard: true,
            discard_granularity_bytes: 65536,
            write_zeroes: true,
            serial: "s".into(),
        }
    }

    fn device(info: DiskInfo) -> Device {
        Device::new("d".into(), info, 4, 256)
    }

    #[test]
    fn the_configuration_space_counts_in_the_units_of_the_specification() {
        let config = device(info()).config();
        assert_eq!((config.capacity_sectors, config.blk_size_bytes, config.num_queues), (2048, 4096, 4));
        assert_eq!((config.physical_block_exp, config.min_io_blocks, config.opt_io_blocks), (1, 2, 16));
        assert_eq!((config.discard_sector_alignment, config.max_discard_seg, config.writeback), (128, 16, 1));
        assert_eq!((config.seg_max, config.write_zeroes_may_unmap), (126, 1));
    }

    #[test]
    fn a_read_only_disk_offers_no_way_to_change_it() {
        let device = device(DiskInfo { read_only: true, ..info() });
        assert_eq!(device.features() & (f::RO | f::DISCARD | f::WRITE_ZEROES), f::RO);
        assert_eq!(device.config().max_discard_seg, 0);
        assert!(!device.limits().discard && !device.limits().write_zeroes);
    }

    #[test]
    fn a_guest_that_cannot_flush_gets_durable_writes() {
        let device = device(info());
        let through = |acked| {
            device.apply_features(acked);
            device.write_through()
        };
        assert!(through(f::VERSION_1));
        assert!(!through(f::FLUSH));
        assert!(!through(f::FLUSH | f::CONFIG_WCE));
        device.set_write_back(false);
        assert!(through(f::FLUSH | f::CONFIG_WCE));
        assert!(!through(f::FLUSH), "without CONFIG_WCE the byte says nothing");
        device.set_write_back(true);
        device.negotiated(f::CONFIG_WCE | f::FLUSH);
        assert!(!device.write_through());
        device.negotiated(f::CONFIG_WCE);
        assert!(device.write_through() && device.config().writeback == 0, "it could choose, but not flush");
        device.negotiated(f::CONFIG_WCE | f::FLUSH);
        assert!(!device.write_through() && device.config().writeback == 1, "the next driver can");
        let durable = Device::new("d".into(), DiskInfo { volatile_cache: false, ..info() }, 1, 256);
        assert_eq!(durable.features() & (f::FLUSH | f::CONFIG_WCE), 0);
        durable.apply_features(0);
        assert!(!durable.write_through());
    }

    #[test]
    fn a_guest_from_before_gets_durable_writes_until_it_shows_what_it_expects() {
        let both = f::FLUSH | f::CONFIG_WCE;
        let taken_over = |acked| {
            let device = device(info());
            device.negotiated(acked);
            device.taken_over(acked);
            device
        };
        assert!(taken_over(both).write_through());
        assert!(!taken_over(f::FLUSH).write_through(), "it could not choose, and flushes");
        let flushed = taken_over(both);
        flushed.guest_flushes();
        flushed.taken_over(both);
        assert!(!flushed.write_through());
        let told = taken_over(both);
        told.set_write_back(true);
        assert!(!told.write_through());
        told.set_write_back(false);
        told.apply_features(both);
        told.guest_flushes();
        assert!(told.write_through(), "what it said holds, whatever it sends");
        let stopped = device(info());
        stopped.settle();
        stopped.taken_over(both);
        assert!(!stopped.write_through(), "the ring was ours");
    }

    #[test]
    fn ranges_off_the_disk_or_its_blocks_have_no_offset() {
        let device = device(info());
        assert_eq!(device.offset(8, 4096), Some(4096));
        assert_eq!(device.offset(2040, 4096), Some(2040 * 512));
        for (sector, length) in [(2048, 4096), (2040, 8192), (u64::MAX, 4096), (!7, 4096), (1, 4096), (8, 512)] {
            assert_eq!(device.offset(sector, length), None, "{sector}+{length}");
        }
        device.set_size(2 << 20);
        assert_eq!(device.offset(2048, 4096), Some(1 << 20));
    }
}
