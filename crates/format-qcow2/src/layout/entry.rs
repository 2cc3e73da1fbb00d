//! Bit layouts of L1, L2 and refcount table entries (qcow2 specification, "Cluster mapping" and "Host cluster
//! management").

use crate::layout::geometry::{Geometry, MAX_FILE_BYTES};
use std::ops::Range;

/// The refcount is exactly one: the cluster may be overwritten in place.
pub(crate) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Reads as zeros (version 3).
pub(crate) const ZERO: u64 = 1;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const REFCOUNT_TABLE_RESERVED: u64 = 0x1ff;

/// An entry that breaks the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadEntry;

/// A decoded L2 entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cluster {
    Unallocated,
    Zero,
    /// Reads as zeros, and keeps a host cluster for the next write.
    ZeroAllocated {
        host: u64,
        copied: bool,
    },
    Data {
        host: u64,
        copied: bool,
    },
    Compressed {
        offset: u64,
        length_bytes: u32,
    },
}

impl Cluster {
    #[inline]
    pub(crate) fn decode(raw: u64, geometry: &Geometry) -> Result<Self, BadEntry> {
        if raw & COMPRESSED != 0 {
            // An external data file has no compressed clusters.
            return if geometry.data_file { Err(BadEntry) } else { Self::decode_compressed(raw, geometry) };
        }
        let zero = raw & ZERO != 0;
        let host = raw & OFFSET_MASK;
        let copied = raw & COPIED != 0;
        let reserved = raw & !(COPIED | OFFSET_MASK | ZERO);
        // Extended entries mark zeros in their bitmap.
        let has_zero_flag = geometry.version >= 3 && !geometry.extended_l2;
        if reserved != 0 || geometry.offset_in_cluster(host) != 0 || (zero && !has_zero_flag) {
            return Err(BadEntry);
        }
        // In an external data file, offset 0 belongs to the first cluster.
        let is_first = host == 0 && copied && geometry.data_file;
        Ok(match (host, zero) {
            (0, false) if is_first => Self::Data { host, copied },
            (0, false) => Self::Unallocated,
            (0, true) => Self::Zero,
            (host, true) => Self::ZeroAllocated { host, copied },
            (host, false) => Self::Data { host, copied },
        })
    }

    /// Decodes a compressed cluster descriptor: `62 - (cluster_bits - 8)` bits of offset, then the number of additional
    /// sectors.
    fn decode_compressed(raw: u64, geometry: &Geometry) -> Result<Self, BadEntry> {
        let offset_bits = 62u32.saturating_sub(geometry.cluster_bits.saturating_sub(8));
        let offset = raw & 1u64.wrapping_shl(offset_bits).saturating_sub(1);
        let sectors = (raw & COMPRESSED.saturating_sub(1)).wrapping_shr(offset_bits).saturating_add(1);
        let length = sectors.saturating_mul(512).saturating_sub(offset & 511);
        let length_bytes = u32::try_from(length).map_err(|_| BadEntry)?;
        let outside = offset.saturating_add(length) > MAX_FILE_BYTES || offset < geometry.cluster_bytes();
        if raw & COPIED != 0 || outside {
            return Err(BadEntry);
        }
        Ok(Self::Compressed { offset, length_bytes })
    }

    /// Returns the host clusters that the entry refers to. Those of an external data file are not counted.
    pub(crate) fn host_clusters(&self, geometry: &Geometry) -> Range<u64> {
        match *self {
            _ if geometry.data_file => 0..0,
            Self::Unallocated | Self::Zero => 0..0,
            Self::ZeroAllocated { host, .. } | Self::Data { host, .. } => {
                let first = geometry.cluster_of(host);
                first..first.saturating_add(1)
            }
            Self::Compressed { offset, length_bytes } => {
                let last = offset.saturating_add(u64::from(length_bytes)).saturating_sub(1);
                geometry.cluster_of(offset)..geometry.cluster_of(last).saturating_add(1)
            }
        }
    }
}

/// Encodes the entry of a compressed cluster of `length_bytes` at `offset`; `None` if the offset does not fit.
pub(crate) fn encode_compressed(offset: u64, length_bytes: u64, geometry: &Geometry) -> Option<u64> {
    let offset_bits = 62u32.saturating_sub(geometry.cluster_bits.saturating_sub(8));
    let last = offset.checked_add(length_bytes)?.checked_sub(1)?;
    let more_sectors = (last / 512).saturating_sub(offset / 512);
    let named = last < MAX_FILE_BYTES && offset < 1u64.wrapping_shl(offset_bits);
    named.then(|| COMPRESSED | more_sectors.wrapping_shl(offset_bits) | offset)
}

/// Returns the bits that are clear in every entry of a plain data cluster. In images with extended entries or an
/// external data file, entries need a full decoding. There, all bits are returned, so that no entry passes.
pub(crate) fn more_than_data(geometry: &Geometry) -> u64 {
    match geometry.extended_l2 || geometry.data_file {
        true => u64::MAX,
        false => !(COPIED | OFFSET_MASK) | geometry.cluster_bytes().saturating_sub(1),
    }
}

/// Returns where a plain data cluster lies; `None` if the entry is something else, or needs [`Cluster::decode`].
#[inline]
pub(crate) fn data_only(raw: u64, more_than_data: u64) -> Option<u64> {
    let host = raw & !COPIED;
    (host != 0 && raw & more_than_data == 0).then_some(host)
}

/// A decoded L1 entry that names a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) offset: u64,
    pub(crate) copied: bool,
}

/// Decodes an L1 entry; `None` if there is no table.
pub(crate) fn decode_l1(raw: u64, geometry: &Geometry) -> Result<Option<Table>, BadEntry> {
    let offset = raw & OFFSET_MASK;
    if raw & !(COPIED | OFFSET_MASK) != 0 || geometry.offset_in_cluster(offset) != 0 {
        return Err(BadEntry);
    }
    Ok((offset != 0).then_some(Table { offset, copied: raw & COPIED != 0 }))
}

/// Decodes a refcount table entry: the block's offset; `None` if there is no block.
pub(crate) fn decode_refcount_table(raw: u64, geometry: &Geometry) -> Result<Option<u64>, BadEntry> {
    let bad = raw & REFCOUNT_TABLE_RESERVED != 0 || geometry.offset_in_cluster(raw) != 0 || raw >= MAX_FILE_BYTES;
    if bad { Err(BadEntry) } else { Ok((raw != 0).then_some(raw)) }
}

/// Returns the entries of a table: big-endian 64-bit words.
pub(crate) fn entries(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|chunk| chunk.iter().fold(0u64, |value, byte| value.wrapping_shl(8) | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32, version: u32) -> Geometry {
        Geometry {
            version,
            size_bytes: 1 << 30,
            cluster_bits,
            refcount_order: 4,
            has_backing: false,
            extended_l2: false,
            data_file: false,
        }
    }

    #[test]
    fn standard_entries_decode_as_the_specification_says() {
        let g = geometry(16, 3);
        let decode = |raw| Cluster::decode(raw, &g);
        assert_eq!(decode(0), Ok(Cluster::Unallocated));
        assert_eq!(decode(1), Ok(Cluster::Zero));
        assert_eq!(decode(COPIED | 0x50000), Ok(Cluster::Data { host: 0x50000, copied: true }));
        assert_eq!(decode(0x50001), Ok(Cluster::ZeroAllocated { host: 0x50000, copied: false }));
        for bad in [0x50200, 0x50002, 1 << 56, 1 << 61, 1 << 8] {
            assert_eq!(decode(bad), Err(BadEntry), "{bad:#x}");
        }
        assert_eq!(Cluster::decode(1, &geometry(16, 2)), Err(BadEntry), "version 2 has no zero flag");
    }

    #[test]
    fn compressed_descriptors_split_at_the_cluster_size() {
        // 64 KiB clusters: 54 bits of offset. Offset 0x50123, three more sectors.
        let raw = COMPRESSED | (3 << 54) | 0x50123;
        let cluster = Cluster::decode(raw, &geometry(16, 3)).unwrap();
        assert_eq!(cluster, Cluster::Compressed { offset: 0x50123, length_bytes: 4 * 512 - 0x123 });
        assert_eq!(cluster.host_clusters(&geometry(16, 3)), 5..6);
        // 2 MiB clusters: 49 bits; it may reach into a second host cluster.
        let raw = COMPRESSED | (1 << 49) | 0x3f_fe00;
        let cluster = Cluster::decode(raw, &geometry(21, 3)).unwrap();
        assert_eq!(cluster.host_clusters(&geometry(21, 3)), 1..3);
        assert_eq!(Cluster::decode(COMPRESSED | 0x123, &geometry(16, 3)), Err(BadEntry), "inside the header");
        assert_eq!(encode_compressed(0x50123, 3 * 512, &geometry(16, 3)), Some(COMPRESSED | (3 << 54) | 0x50123));
        assert_eq!(encode_compressed(0x50000, 512, &geometry(16, 3)), Some(COMPRESSED | 0x50000));
        assert_eq!(encode_compressed(1 << 49, 512, &geometry(21, 3)), None);
    }

    #[test]
    fn the_short_way_takes_all_plain_data_clusters_and_nothing_else() {
        let plain = [geometry(9, 2), geometry(12, 3), geometry(16, 3), geometry(21, 2)];
        let others = [(true, false), (false, true)].map(|(extended_l2, data_file)| {
            let kind = if extended_l2 { geometry(16, 3) } else { geometry(12, 3) };
            Geometry { extended_l2, data_file, ..kind }
        });
        for geometry in plain.iter().chain(&others) {
            let mask = more_than_data(geometry);
            let mut found = 0;
            for one in 0..64 {
                for other in 0..64 {
                    for more in [0, COPIED, 0x20_0000, COPIED | 0x20_0000] {
                        let raw = more | 1 << one | 1 << other;
                        let decoded = match Cluster::decode(raw, geometry) {
                            Ok(Cluster::Data { host, .. }) if !geometry.extended_l2 && !geometry.data_file => {
                                Some(host)
                            }
                            _ => None,
                        };
                        assert_eq!(data_only(raw, mask), decoded, "{raw:#x} {geometry:?}");
                        found += usize::from(decoded.is_some());
                    }
                }
            }
            assert_eq!(found > 0, !geometry.extended_l2 && !geometry.data_file);
            assert_eq!(data_only(0, mask).or(data_only(COPIED, mask)), None);
        }
    }
}
