//! Targeted damage: fields of the header, entries of tables, and values that have a meaning there.

use arbitrary::{Result, Unstructured};
use std::ops::Range;

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
/// The most changes to one image.
const CHANGES_MAX: usize = 12;

/// The places of an image's tables, as far as its header is valid.
#[derive(Debug, Default, Clone)]
pub(crate) struct Tables {
    pub(crate) header: Range<usize>,
    pub(crate) l1: Range<usize>,
    pub(crate) l2: Vec<Range<usize>>,
    pub(crate) refcount_table: Range<usize>,
    pub(crate) blocks: Vec<Range<usize>>,
    snapshots: Range<usize>,
    cluster: u64,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at.saturating_add(8)).and_then(|part| part.try_into().ok()).map_or(0, u64::from_be_bytes)
}

fn half(bytes: &[u8], at: usize) -> u64 {
    word(bytes, at) >> 32
}

impl Tables {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let cluster = 1u64 << half(bytes, 20).clamp(9, 21);
        let range = |offset: u64, length: u64| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
            let end = usize::try_from(offset.saturating_add(length)).unwrap_or(usize::MAX).min(bytes.len());
            start..end
        };
        let l1 = range(word(bytes, 40), (half(bytes, 36) * 8).min(1 << 20));
        let refcount_table = range(word(bytes, 48), (half(bytes, 56) * cluster).min(1 << 20));
        // An invalid entry names no table.
        let named = |table: &Range<usize>, flags: u64| {
            let raw =
                table.clone().step_by(8).map(|at| word(bytes, at)).filter(|raw| raw & !(OFFSET_MASK | flags) == 0);
            let offsets = raw.map(|raw| raw & OFFSET_MASK).filter(|offset| *offset != 0 && offset % cluster == 0);
            offsets.map(|offset| range(offset, cluster)).filter(|range| !range.is_empty()).collect::<Vec<_>>()
        };
        Self {
            header: range(0, 512),
            l2: named(&l1, COPIED),
            blocks: named(&refcount_table, 0),
            snapshots: range(word(bytes, 64), if half(bytes, 60) > 0 { 256 } else { 0 }),
            l1,
            refcount_table,
            cluster,
        }
    }

    /// Returns all tables of the active disk and of the refcounts.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Range<usize>> {
        [&self.header, &self.l1, &self.refcount_table].into_iter().chain(&self.l2).chain(&self.blocks)
    }

    /// As [`Tables::all`].
    pub(crate) fn into_all(self) -> Vec<Range<usize>> {
        [self.header, self.l1, self.refcount_table].into_iter().chain(self.l2).chain(self.blocks).collect()
    }

    fn region(&self, u: &mut Unstructured<'_>, length: usize) -> Result<Range<usize>> {
        let pick = |u: &mut Unstructured<'_>, ranges: &[Range<usize>]| -> Result<Range<usize>> {
            if ranges.is_empty() { Ok(0..length) } else { Ok(u.choose(ranges)?.clone()) }
        };
        Ok(match u.int_in_range(0..=9)? {
            0 => 0..length.min(120),
            1 => self.header.clone(),
            2 => self.l1.clone(),
            3..=5 => pick(u, &self.l2)?,
            6 => self.refcount_table.clone(),
            7 => pick(u, &self.blocks)?,
            8 => self.snapshots.clone(),
            _ => 0..length,
        })
    }

    /// Makes a word that a table may hold: an offset of something, with flags.
    fn entry(&self, u: &mut Unstructured<'_>, length: usize) -> Result<u64> {
        let offset = match u.int_in_range(0..=5)? {
            0 => 0,
            1 => u.int_in_range(0..=(length as u64 / self.cluster).saturating_add(3))? * self.cluster,
            2 => (length as u64).saturating_sub(self.cluster) / self.cluster * self.cluster,
            3 => self.region(u, length)?.start as u64,
            4 => u.arbitrary::<u64>()? & OFFSET_MASK,
            _ => u.int_in_range(0..=length as u64)?,
        };
        let flags = [0, 1 << 63, 1, 1 << 63 | 1, 1 << 62, 1 << 62 | 3 << 54, 1 << 56, 2];
        Ok(offset | u.choose(&flags)?)
    }
}

/// Changes an image according to the input.
pub(crate) fn damage(bytes: &mut Vec<u8>, u: &mut Unstructured<'_>) -> Result<()> {
    let tables = Tables::of(bytes);
    for _ in 0..u.int_in_range(0..=CHANGES_MAX)? {
        let region = tables.region(u, bytes.len())?;
        if region.is_empty() {
            continue;
        }
        let at = region.start + u.choose_index(region.len())?;
        match u.int_in_range(0..=6)? {
            0..=2 => {
                let entry = tables.entry(u, bytes.len())?;
                put(bytes, at & !7, &entry.to_be_bytes());
            }
            3 => put(
                bytes,
                at & !3,
                &(*u.choose(&[0u32, 1, 2, 3, 4, 9, 16, 21, 64, 0x7fff_ffff, u32::MAX])?).to_be_bytes(),
            ),
            4 => put(bytes, at, &[u.arbitrary()?]),
            5 => {
                let bit = u.int_in_range(0..=7)?;
                let old = bytes.get(at).copied().unwrap_or(0);
                put(bytes, at, &[old ^ 1 << bit]);
            }
            _ => {
                let moved = word(bytes, at & !7).wrapping_add(u64::from(u.arbitrary::<u16>()?)).wrapping_sub(0x8000);
                put(bytes, at & !7, &moved.to_be_bytes());
            }
        }
    }
    if u.ratio(1u8, 16)? {
        let length = u.int_in_range(0..=bytes.len())?;
        bytes.truncate(length);
    }
    Ok(())
}

fn put(bytes: &mut [u8], at: usize, new: &[u8]) {
    for (target, byte) in bytes.iter_mut().skip(at).zip(new) {
        *target = *byte;
    }
}
