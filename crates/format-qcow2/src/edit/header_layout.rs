//! The first cluster in another version: other fields, then the extensions, then the backing file's name.
//!
//! The bytes behind the first sector are written before that sector. So bytes there that the old header uses must not
//! change.

use crate::edit::create::feature_names;
use crate::layout::header::{EXTENSION_END, EXTENSION_FEATURE_NAMES, HEADER_SECTOR_BYTES};
use std::ops::Range;

pub(super) const V2_HEADER_BYTES: usize = 72;
pub(super) const V3_HEADER_BYTES: usize = 112;
const OFFSET_BACKING: usize = 8;

fn number(bytes: &[u8], offset: usize, length: usize) -> usize {
    let field = bytes.get(offset..offset.saturating_add(length)).unwrap_or_default();
    field.iter().fold(0usize, |value, byte| value.wrapping_shl(8) | usize::from(*byte))
}

/// Returns the extensions of a header, each with its head and padding, without the table of feature names; and the end
/// of all extensions.
fn extensions(cluster: &[u8], header_bytes: usize, end: usize) -> (Vec<u8>, usize) {
    let (mut kept, mut at) = (Vec::new(), header_bytes);
    while at.saturating_add(8) <= end {
        let kind = number(cluster, at, 4) as u32;
        let length = number(cluster, at.saturating_add(4), 4);
        let next = at.saturating_add(8).saturating_add(length.next_multiple_of(8));
        if kind == EXTENSION_END || next > end {
            return (kept, at.saturating_add(8));
        }
        if kind != EXTENSION_FEATURE_NAMES {
            kept.extend(cluster.get(at..next).unwrap_or_default());
        }
        at = next;
    }
    (kept, at)
}

/// Returns the first cluster with `fields` as its whole fixed header, followed by the old extensions and name. `None`
/// if that needs space behind the first sector that the old header uses.
pub(super) fn relaid(old: &[u8], old_header_bytes: usize, fields: &[u8]) -> Option<Vec<u8>> {
    let name_at = number(old, OFFSET_BACKING, 8);
    let name = old.get(name_at..name_at.saturating_add(number(old, 16, 4))).filter(|_| name_at > 0).unwrap_or_default();
    let area_end = if name.is_empty() { old.len() } else { name_at };
    let (kept, extensions_end) = extensions(old, old_header_bytes, area_end);
    let used = old_header_bytes..extensions_end.max(name_at.saturating_add(name.len()));
    let names = feature_names();
    for with_names in [true, false] {
        let mut header = fields.to_vec();
        header.extend(&kept);
        if with_names && fields.len() == V3_HEADER_BYTES {
            header.extend(EXTENSION_FEATURE_NAMES.to_be_bytes());
            header.extend((names.len() as u32).to_be_bytes());
            header.extend(&names);
        }
        header.extend([0; 8]);
        for place in [name_at.max(header.len()), header.len(), used.end.max(header.len())] {
            if let Some(cluster) = assembled(old, &header, name, place)
                && keeps(old, &cluster, &used)
            {
                return Some(cluster);
            }
        }
    }
    None
}

fn assembled(old: &[u8], header: &[u8], name: &[u8], place: usize) -> Option<Vec<u8>> {
    // Behind the first sector, bytes that neither header uses stay as they are.
    let mut cluster = old.to_vec();
    cluster.get_mut(..HEADER_SECTOR_BYTES)?.fill(0);
    cluster.get_mut(..header.len())?.copy_from_slice(header);
    if !name.is_empty() {
        cluster.get_mut(place..place.checked_add(name.len())?)?.copy_from_slice(name);
        cluster
            .get_mut(OFFSET_BACKING..OFFSET_BACKING.saturating_add(8))?
            .copy_from_slice(&(place as u64).to_be_bytes());
    }
    Some(cluster)
}

/// Whether all bytes that the old header uses behind its first sector stay the same.
fn keeps(old: &[u8], new: &[u8], used: &Range<usize>) -> bool {
    let rest = HEADER_SECTOR_BYTES..used.end.max(HEADER_SECTOR_BYTES);
    old.get(rest.clone()) == new.get(rest)
}
