//! The properties that a guest sees of its disk: the disk's own, or overrides.

use block::{DiskInfo, Error, ErrorKind, Result, SECTOR_BYTES};
use virtio::blk::{BlkConfig, Geometry, SECTOR_SHIFT};

/// Most data segments in a request. With header and status it fits a ring of 128 without indirect descriptors, the
/// smallest that monitors use by default.
const SEG_MAX: u16 = 126;

/// The largest logical block: the most that drivers in user space can copy in one piece.
const LOGICAL_BLOCK_BYTES_MAX: u32 = 64 << 10;

/// Properties for the guest in place of the disk's own. `None` leaves the disk's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Overrides {
    /// Cylinders, heads and sectors in a track: all three or none.
    pub geometry: Option<Geometry>,
    /// The smallest unit that the guest may address.
    pub logical_block_bytes: Option<u32>,
    /// Physical block: smaller writes are slow.
    pub physical_block_bytes: Option<u32>,
    /// The offset of the first physical block.
    pub alignment_offset_bytes: Option<u32>,
    /// Smallest I/O that is efficient.
    pub minimum_io_bytes: Option<u32>,
    /// Best I/O size.
    pub optimal_io_bytes: Option<u32>,
    /// Alignment of discards. Zero: no discards are offered.
    pub discard_granularity_bytes: Option<u32>,
    /// Longest data segment. Without it there is no limit.
    pub size_max_bytes: Option<u32>,
    /// Most data segments in a request.
    pub seg_max: Option<u16>,
    /// Secure erases are offered: erased data are overwritten in place. Only a disk that writes in place can offer it
    /// ([`block::Disk::overwrites_in_place`]).
    pub secure_erase: bool,
    /// Whether the cache begins as write-back. The guest may switch it.
    pub write_cache: Option<bool>,
}

/// The constant fields of the configuration space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    geometry: Option<Geometry>,
    block_bytes: u32,
    physical_block_exp: u8,
    alignment_blocks: u8,
    min_io_blocks: u16,
    opt_io_blocks: u32,
    pub(crate) discard_bytes: u32,
    pub(crate) size_max_bytes: u32,
    seg_max: u16,
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::BadOption, message))
}

impl Shown {
    /// Combines the disk's properties with the overrides. Fails if these contradict each other or the disk.
    pub(crate) fn of(info: &DiskInfo, queue_size: u16, wanted: &Overrides) -> Result<Self> {
        let block_bytes = logical_block(info, wanted)?;
        let physical_bytes = physical_block(info, block_bytes, wanted)?;
        let blocks = |bytes: u32| bytes.checked_div(block_bytes).unwrap_or(0);
        check_whole_blocks("min-io-size", wanted.minimum_io_bytes, block_bytes)?;
        check_whole_blocks("opt-io-size", wanted.optimal_io_bytes, block_bytes)?;
        check_whole_blocks("discard-granularity", wanted.discard_granularity_bytes, block_bytes)?;
        let (minimum, optimal) = io_sizes(info, wanted);
        if wanted.minimum_io_bytes.is_some() && blocks(minimum) > u32::from(u16::MAX) {
            let most = u64::from(u16::MAX).saturating_mul(block_bytes.into());
            return refuse(format!("min-io-size={minimum}: the guest can be told of {most} bytes at most"));
        }
        if let (Some(minimum), Some(optimal)) = (wanted.minimum_io_bytes, wanted.optimal_io_bytes)
            && optimal > 0
            && optimal < minimum
        {
            return refuse(format!("opt-io-size={optimal} is smaller than min-io-size={minimum}"));
        }
        if wanted.discard_granularity_bytes.is_some_and(|bytes| bytes > 0) && !info.discard {
            return refuse("discard-granularity is set, and this disk cannot discard".into());
        }
        if wanted.write_cache == Some(true) && (info.read_only || !info.volatile_cache) {
            return refuse("write-cache=on: this disk has no volatile cache that a guest could use".into());
        }
        let discard_bytes = match wanted.discard_granularity_bytes {
            Some(bytes) => bytes,
            None if info.discard => info.discard_granularity_bytes.max(block_bytes),
            None => 0,
        };
        Ok(Self {
            geometry: geometry(wanted)?,
            block_bytes,
            physical_block_exp: blocks(physical_bytes).max(1).ilog2().min(u32::from(u8::MAX)) as u8,
            alignment_blocks: alignment(info, block_bytes, physical_bytes, wanted)?,
            min_io_blocks: u16::try_from(blocks(minimum)).unwrap_or(u16::MAX),
            opt_io_blocks: blocks(optimal),
            discard_bytes,
            size_max_bytes: size_max(block_bytes, wanted)?,
            seg_max: seg_max(queue_size, wanted)?,
        })
    }

    /// Returns the bytes of a logical block, a power of two.
    pub(crate) fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Returns the fields of the configuration space, for a disk of `capacity_sectors`.
    pub(crate) fn config(&self, capacity_sectors: u64) -> BlkConfig {
        BlkConfig::default().with(|config| {
            config.capacity_sectors = capacity_sectors;
            config.size_max_bytes = self.size_max_bytes;
            config.seg_max = self.seg_max.into();
            config.geometry = self.geometry.unwrap_or_else(|| usual_geometry(capacity_sectors));
            config.blk_size_bytes = self.block_bytes;
            config.physical_block_exp = self.physical_block_exp;
            config.alignment_offset = self.alignment_blocks;
            config.min_io_blocks = self.min_io_blocks;
            config.opt_io_blocks = self.opt_io_blocks;
        })
    }
}

/// Returns the smallest and the best I/O size. The best, if there is one, is no smaller than the smallest: where one is
/// wanted and the other is the disk's own, the disk's own gives way.
fn io_sizes(info: &DiskInfo, wanted: &Overrides) -> (u32, u32) {
    let own = info.topology;
    let minimum = wanted.minimum_io_bytes.unwrap_or(own.minimum_io_bytes);
    match (wanted.minimum_io_bytes, wanted.optimal_io_bytes) {
        (Some(minimum), None) if own.optimal_io_bytes > 0 => (minimum, own.optimal_io_bytes.max(minimum)),
        (None, Some(optimal)) if optimal > 0 => (minimum.min(optimal), optimal),
        (_, optimal) => (minimum, optimal.unwrap_or(own.optimal_io_bytes)),
    }
}

/// Returns the usual geometry of disks that are too large for one: at most 16383 cylinders of 16 heads and 63 sectors.
fn usual_geometry(capacity_sectors: u64) -> Geometry {
    const HEADS: u8 = 16;
    const SECTORS: u8 = 63;
    let cylinders = capacity_sectors.checked_div(u64::from(HEADS).saturating_mul(SECTORS.into())).unwrap_or(0);
    // Between two and 16383, so it fits.
    Geometry { cylinders: cylinders.clamp(2, 16_383) as u16, heads: HEADS, sectors: SECTORS }
}

fn geometry(wanted: &Overrides) -> Result<Option<Geometry>> {
    match wanted.geometry {
        Some(geometry) if geometry.cylinders == 0 || geometry.heads == 0 || geometry.sectors == 0 => {
            refuse("cyls, heads and secs go together, and none is zero".into())
        }
        geometry => Ok(geometry),
    }
}

fn logical_block(info: &DiskInfo, wanted: &Overrides) -> Result<u32> {
    let own = info.logical_block_bytes.max(1).checked_next_power_of_two().unwrap_or(1).max(SECTOR_BYTES as u32);
    let Some(bytes) = wanted.logical_block_bytes else { return Ok(own) };
    if !bytes.is_power_of_two() || !(SECTOR_BYTES as u32..=LOGICAL_BLOCK_BYTES_MAX).contains(&bytes) {
        let most = LOGICAL_BLOCK_BYTES_MAX;
        return refuse(format!("logical-block-size={bytes}: it must be a power of two from 512 to {most}"));
    }
    if bytes < own {
        return refuse(format!("logical-block-size={bytes}: this disk is addressed in blocks of {own} bytes"));
    }
    if !info.size_bytes.is_multiple_of(bytes.into()) {
        let size = info.size_bytes;
        let fits = size.checked_next_multiple_of(bytes.into()).unwrap_or(size);
        return refuse(format!(
            "logical-block-size={bytes}: the disk's {size} bytes are no whole number of blocks. 'ringdisk resize' can make it \
             {fits} bytes"
        ));
    }
    Ok(bytes)
}

fn physical_block(info: &DiskInfo, block_bytes: u32, wanted: &Overrides) -> Result<u32> {
    match wanted.physical_block_bytes {
        None => Ok(info.topology.physical_block_bytes.max(block_bytes)),
        Some(bytes) if !bytes.is_power_of_two() => {
            refuse(format!("physical-block-size={bytes}: it must be a power of two"))
        }
        Some(bytes) if bytes < block_bytes => {
            refuse(format!("physical-block-size={bytes} is smaller than the logical block of {block_bytes} bytes"))
        }
        Some(bytes) => Ok(bytes),
    }
}

fn alignment(info: &DiskInfo, block_bytes: u32, physical_bytes: u32, wanted: &Overrides) -> Result<u8> {
    let Some(bytes) = wanted.alignment_offset_bytes else {
        // The disk's own offset is left out if it cannot be expressed in blocks of this size.
        let own = info.topology.alignment_offset_bytes;
        let fits = own < physical_bytes && own.is_multiple_of(block_bytes);
        let blocks = own.checked_div(block_bytes).filter(|_| fits).unwrap_or(0);
        return Ok(u8::try_from(blocks).unwrap_or(0));
    };
    check_whole_blocks("alignment-offset", Some(bytes), block_bytes)?;
    if bytes > 0 && bytes >= physical_bytes {
        return refuse(format!("alignment-offset={bytes}: it must be less than the physical block, {physical_bytes}"));
    }
    let most = u32::from(u8::MAX).saturating_mul(block_bytes);
    let blocks = bytes.checked_div(block_bytes).unwrap_or(0);
    u8::try_from(blocks)
        .or_else(|_| refuse(format!("alignment-offset={bytes}: the guest can be told of {most} at most")))
}

fn size_max(block_bytes: u32, wanted: &Overrides) -> Result<u32> {
    let Some(bytes) = wanted.size_max_bytes else { return Ok(0) };
    check_whole_blocks("size-max", Some(bytes), block_bytes)?;
    match bytes {
        0 => refuse("size-max=0: leave it out for no limit".into()),
        bytes => Ok(bytes),
    }
}

fn seg_max(queue_size: u16, wanted: &Overrides) -> Result<u16> {
    // Header and status take two descriptors.
    let most = queue_size.saturating_sub(2).max(1);
    match wanted.seg_max {
        None => Ok(SEG_MAX.min(most)),
        Some(segments) if (1..=most).contains(&segments) => Ok(segments),
        Some(segments) => refuse(format!("seg-max={segments}: a queue of {queue_size} entries takes 1 to {most}")),
    }
}

fn check_whole_blocks(key: &str, bytes: Option<u32>, block_bytes: u32) -> Result<()> {
    match bytes {
        Some(bytes) if !bytes.is_multiple_of(block_bytes) => {
            refuse(format!("{key}={bytes} is no whole number of logical blocks of {block_bytes} bytes"))
        }
        _ => Ok(()),
    }
}

/// Returns how many sectors `bytes` are.
pub(crate) fn sectors(bytes: u32) -> u32 {
    bytes >> SECTOR_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Topology;

    fn info() -> DiskInfo {
        DiskInfo {
            size_bytes: 1 << 30,
            logical_block_bytes: 512,
            topology: Topology {
                physical_block_bytes: 4096,
                minimum_io_bytes: 4096,
                optimal_io_bytes: 65536,
                alignment_offset_bytes: 3584,
            },
            read_only: false,
            volatile_cache: true,
            discard: true,
            discard_granularity_bytes: 4096,
            write_zeroes: true,
            serial: String::new(),
        }
    }

    fn shown(change: impl FnOnce(&mut Overrides)) -> Result<Shown> {
        let mut wanted = Overrides::default();
        change(&mut wanted);
        Shown::of(&info(), 128, &wanted)
    }

    #[test]
    fn without_overrides_the_disk_speaks_for_itself() {
        let config = shown(|_| {}).unwrap().config(1 << 21);
        assert_eq!((config.blk_size_bytes, config.physical_block_exp, config.alignment_offset), (512, 3, 7));
        let coarse = shown(|wanted| wanted.logical_block_bytes = Some(4096)).unwrap().config(1 << 21);
        assert_eq!(coarse.alignment_offset, 0, "it begins inside of such a block");
        assert_eq!((config.min_io_blocks, config.opt_io_blocks, config.seg_max), (8, 128, 126));
        assert_eq!(config.geometry, Geometry { cylinders: 2080, heads: 16, sectors: 63 });
        assert_eq!(shown(|_| {}).unwrap().config(1 << 40).geometry.cylinders, 16_383);
        assert_eq!(config.size_max_bytes, 0);
    }

    #[test]
    fn what_is_wanted_is_shown_in_the_units_of_the_specification() {
        let geometry = Geometry { cylinders: 7, heads: 8, sectors: 9 };
        let config = shown(|wanted| {
            wanted.geometry = Some(geometry);
            wanted.logical_block_bytes = Some(4096);
            wanted.physical_block_bytes = Some(16384);
            wanted.alignment_offset_bytes = Some(8192);
            wanted.minimum_io_bytes = Some(16384);
            wanted.optimal_io_bytes = Some(1 << 20);
            wanted.size_max_bytes = Some(65536);
            wanted.seg_max = Some(32);
        });
        let config = config.unwrap().config(1);
        assert_eq!((config.geometry, config.size_max_bytes, config.seg_max), (geometry, 65536, 32));
        assert_eq!((config.blk_size_bytes, config.physical_block_exp, config.alignment_offset), (4096, 2, 2));
        assert_eq!((config.min_io_blocks, config.opt_io_blocks), (4, 256));
        let larger = shown(|wanted| wanted.logical_block_bytes = Some(8192)).unwrap().config(1);
        assert_eq!((larger.blk_size_bytes, larger.physical_block_exp), (8192, 0), "a block is never less than logical");
    }

    #[test]
    fn the_disk_s_own_io_size_gives_way_to_the_one_that_is_wanted() {
        let sizes = |change: &dyn Fn(&mut Overrides)| {
            let config = shown(|wanted| change(wanted)).unwrap().config(1 << 21);
            (u32::from(config.min_io_blocks) * 512, config.opt_io_blocks * 512)
        };
        assert_eq!(sizes(&|wanted| wanted.minimum_io_bytes = Some(1 << 20)), (1 << 20, 1 << 20));
        assert_eq!(sizes(&|wanted| wanted.optimal_io_bytes = Some(2048)), (2048, 2048));
        assert_eq!(sizes(&|wanted| wanted.optimal_io_bytes = Some(0)), (4096, 0), "none is said");
        assert_eq!(sizes(&|wanted| wanted.minimum_io_bytes = Some(8192)), (8192, 65536));
    }

    /// An override, and part of the reason why it is refused.
    type Case<'a> = (&'a dyn Fn(&mut Overrides), &'a str);

    #[test]
    fn contradictions_are_refused_with_their_reason() {
        let reason = |change: &dyn Fn(&mut Overrides)| shown(|wanted| change(wanted)).unwrap_err().to_string();
        let cases: [Case<'_>; 14] = [
            (&|wanted| wanted.logical_block_bytes = Some(1000), "power of two from 512"),
            (&|wanted| wanted.logical_block_bytes = Some(1 << 20), "power of two from 512"),
            (&|wanted| wanted.physical_block_bytes = Some(256), "smaller than the logical block"),
            (&|wanted| wanted.physical_block_bytes = Some(5000), "power of two"),
            (&|wanted| wanted.alignment_offset_bytes = Some(100), "no whole number of logical blocks"),
            (&|wanted| wanted.alignment_offset_bytes = Some(4096), "less than the physical block"),
            (&|wanted| wanted.minimum_io_bytes = Some(100 << 20), "at most"),
            (&|wanted| wanted.optimal_io_bytes = Some(700), "no whole number"),
            (
                &|wanted| (wanted.minimum_io_bytes, wanted.optimal_io_bytes) = (Some(8192), Some(4096)),
                "smaller than min",
            ),
            (&|wanted| wanted.discard_granularity_bytes = Some(513), "no whole number"),
            (&|wanted| wanted.size_max_bytes = Some(0), "leave it out"),
            (&|wanted| wanted.seg_max = Some(127), "takes 1 to 126"),
            (&|wanted| wanted.seg_max = Some(0), "takes 1 to 126"),
            (&|wanted| wanted.geometry = Some(Geometry { cylinders: 1, heads: 0, sectors: 1 }), "none is zero"),
        ];
        for (change, expected) in cases {
            let said = reason(change);
            assert!(said.contains(expected), "{said}");
        }
        let of = |info: &DiskInfo, wanted: Overrides| Shown::of(info, 128, &wanted).unwrap_err().to_string();
        let coarse = DiskInfo { logical_block_bytes: 4096, ..info() };
        let logical = Overrides { logical_block_bytes: Some(512), ..Overrides::default() };
        assert!(of(&coarse, logical).contains("blocks of 4096 bytes"));
        let odd = DiskInfo { size_bytes: 512 * 9, ..info() };
        let logical = Overrides { logical_block_bytes: Some(4096), ..Overrides::default() };
        assert!(of(&odd, logical).contains("no whole number of blocks"));
        let fixed = DiskInfo { discard: false, ..info() };
        let discard = Overrides { discard_granularity_bytes: Some(4096), ..Overrides::default() };
        assert!(of(&fixed, discard).contains("cannot discard"));
        let durable = DiskInfo { volatile_cache: false, ..info() };
        let cache = Overrides { write_cache: Some(true), ..Overrides::default() };
        assert!(of(&durable, cache).contains("no volatile cache"));
    }
}
