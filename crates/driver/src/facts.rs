//! Reads facts from the configuration space, with the specification's defaults for fields without their feature.

use crate::DriverOptions;
use crate::layout::BOUNCE_BYTES;
use crate::ring::{Limits, bounce_segment_bytes};
use crate::rules::{RangeRules, Rules};
use crate::session::Session;
use block::{DiskInfo, Lifetime, Result, Topology};
use virtio::blk::{BlkConfig, Geometry, features};
use virtio::ring_access::RingLayout;

/// Facts about the device beyond [`DiskInfo`], such as the limits of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// The features that were negotiated.
    pub features: u64,
    /// Its rings are packed.
    pub packed: bool,
    /// The most pieces of memory in a request: SEG_MAX, or one if that is absent or zero.
    pub max_segments: u32,
    /// The longest piece: SIZE_MAX; `None` if there is no limit.
    pub max_segment_bytes: Option<u32>,
    /// GEOMETRY, or else 64 heads of 32 sectors, and cylinders to match the disk's size.
    pub geometry: Geometry,
    /// First aligned logical block, in bytes.
    pub alignment_offset_bytes: u32,
    /// How worn the storage is, if the device says so.
    pub lifetime: Option<Lifetime>,
    /// The device serves [`block::Op::SecureErase`].
    pub secure_erase: bool,
}

const DEFAULT_HEADS: u8 = 64;
const DEFAULT_SECTORS: u8 = 32;

pub(crate) fn facts(session: &Session, lifetime: Option<Lifetime>) -> DeviceFacts {
    let config = session.config();
    let longest = max_segment_bytes(session, &config);
    let cylinder_sectors = u64::from(DEFAULT_HEADS) * u64::from(DEFAULT_SECTORS);
    let cylinders = u16::try_from(config.capacity_sectors / cylinder_sectors).unwrap_or(u16::MAX);
    let usual = Geometry { cylinders, heads: DEFAULT_HEADS, sectors: DEFAULT_SECTORS };
    DeviceFacts {
        features: session.features,
        lifetime,
        secure_erase: rules(session).secure_erase.is_served() && !session.has(features::RO),
        packed: session.has(features::RING_PACKED),
        max_segments: max_segments(session, &config),
        max_segment_bytes: (longest < u32::MAX).then_some(longest),
        geometry: if session.has(features::GEOMETRY) { config.geometry } else { usual },
        alignment_offset_bytes: alignment_offset_bytes(session, &config),
    }
}

/// Returns the rules for requests, which never change.
pub(crate) fn rules(session: &Session) -> Rules {
    let config = session.config();
    // A device that has a feature and names no limit has none.
    let range = |feature, max_sectors: u32, align_sectors| match max_sectors {
        _ if !session.has(feature) => RangeRules { max_sectors: 0, align_sectors },
        0 => RangeRules { max_sectors: u32::MAX, align_sectors },
        _ => RangeRules { max_sectors, align_sectors },
    };
    Rules {
        block_bytes: u64::from(logical_block_bytes(session, &config)),
        read_only: session.has(features::RO),
        flush: session.has(features::FLUSH),
        discard: range(features::DISCARD, config.max_discard_sectors, config.discard_sector_alignment),
        secure_erase: range(
            features::SECURE_ERASE,
            config.max_secure_erase_sectors,
            config.secure_erase_sector_alignment,
        ),
        write_zeroes: range(features::WRITE_ZEROES, config.max_write_zeroes_sectors, 1),
    }
}

pub(crate) fn info(session: &Session, size_bytes: u64, volatile_cache: bool, serial: &str) -> DiskInfo {
    let (config, rules) = (session.config(), rules(session));
    let block = logical_block_bytes(session, &config);
    let topology = match session.has(features::TOPOLOGY) {
        true => Topology {
            physical_block_bytes: block.checked_shl(config.physical_block_exp.into()).unwrap_or(0),
            minimum_io_bytes: u32::from(config.min_io_blocks).saturating_mul(block),
            optimal_io_bytes: config.opt_io_blocks.saturating_mul(block),
            alignment_offset_bytes: alignment_offset_bytes(session, &config),
        },
        false => Topology::default(),
    };
    DiskInfo {
        size_bytes,
        logical_block_bytes: block,
        topology,
        read_only: rules.read_only,
        volatile_cache,
        discard: rules.discard.is_served() && !rules.read_only,
        discard_granularity_bytes: match rules.discard.is_served() {
            false => 0,
            true => config.discard_sector_alignment.saturating_mul(512),
        },
        write_zeroes: !rules.read_only,
        serial: serial.to_owned(),
    }
}

fn alignment_offset_bytes(session: &Session, config: &BlkConfig) -> u32 {
    let skipped_blocks = if session.has(features::TOPOLOGY) { config.alignment_offset } else { 0 };
    u32::from(skipped_blocks).saturating_mul(logical_block_bytes(session, config))
}

fn max_segments(session: &Session, config: &BlkConfig) -> u32 {
    // 5.2.5: without SEG_MAX, one segment.
    if session.has(features::SEG_MAX) { config.seg_max.max(1) } else { 1 }
}

pub(crate) fn limits(session: &Session, options: &DriverOptions) -> Limits {
    let config = session.config();
    let max_segments = max_segments(session, &config);
    let max_segment_bytes = max_segment_bytes(session, &config);
    let room = u32::from(options.queue_size).saturating_sub(2);
    Limits {
        ring_layout: RingLayout::from_bits(session.features),
        event_idx: session.has(features::EVENT_IDX),
        max_segments: max_segments.min(room),
        max_segment_bytes,
    }
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

pub(crate) fn volatile_cache(session: &Session, config: &BlkConfig) -> bool {
    // 5.2.5.2: with CONFIG_WCE the field decides; else a device that offers FLUSH has a cache to flush.
    let writeback = !session.has(features::CONFIG_WCE) || config.writeback != 0;
    session.has(features::FLUSH) && writeback
}

/// Refuses a configuration that no driver could work with.
pub(crate) fn check_config(session: &Session) -> Result<()> {
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
