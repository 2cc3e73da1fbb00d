//! An independent checker of qcow2 images: header, refcounts, L1, L2, snapshots, bitmaps, directly from the bytes.
//!
//! It is written from the format's specification alone and shares nothing with the product, so that both cannot have
//! the same error. It distinguishes leaks (space that nothing refers to) from damage (anything that may cost data).

use crate::dice::mix;
use std::collections::BTreeMap;

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Qcow2Report {
    /// Host clusters whose refcount is higher than their references.
    pub leaked_clusters: u64,
    /// Host clusters with references.
    pub used_clusters: u64,
    /// Guest clusters that have a host cluster.
    pub allocated_clusters: u64,
    /// Compressed guest clusters.
    pub compressed_clusters: u64,
    /// A digest of the contents of all internal snapshots; equal contents give equal digests.
    pub snapshots_digest: u64,
    /// Errors that may cost data.
    pub damage: Vec<String>,
    /// Whether the image marks its refcounts as invalid.
    pub dirty: bool,
}

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
const INCOMPATIBLE_DIRTY: u64 = 1;
const INCOMPATIBLE_CORRUPT: u64 = 2;
const INCOMPATIBLE_DATA_FILE: u64 = 4;
const INCOMPATIBLE_COMPRESSION: u64 = 8;
const INCOMPATIBLE_EXTENDED_L2: u64 = 16;
const AUTOCLEAR_BITMAPS: u64 = 1;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;
/// The most errors that are listed.
const LISTED: usize = 20;

struct Header {
    version: u32,
    cluster_bits: u32,
    size: u64,
    l1_size: u32,
    l1_offset: u64,
    refcount_table_offset: u64,
    refcount_table_clusters: u32,
    snapshots: u32,
    snapshots_offset: u64,
    incompatible: u64,
    autoclear: u64,
    header_bytes: u32,
    refcount_order: u32,
}

struct Checker<'a> {
    bytes: &'a [u8],
    header: Header,
    /// Counted references, by host cluster.
    references: BTreeMap<u64, u64>,
    /// Entries with the flag "refcount is exactly one": host cluster, flag, place of the entry.
    flags: Vec<(u64, bool, String)>,
    report: Qcow2Report,
}

/// Checks the image in `bytes`. The error says why it is not a qcow2 image, or not one that this checker knows.
pub fn qcow2_check(bytes: &[u8]) -> Result<Qcow2Report, String> {
    let header = Header::parse(bytes)?;
    let report = Qcow2Report { dirty: header.incompatible & INCOMPATIBLE_DIRTY != 0, ..Qcow2Report::default() };
    let mut checker = Checker { bytes, header, references: BTreeMap::new(), flags: Vec::new(), report };
    checker.walk();
    checker.compare();
    Ok(checker.report)
}

impl Header {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let word = |at: usize| be32(bytes, at).ok_or("the file ends within the header");
        let long = |at: usize| be64(bytes, at).ok_or("the file ends within the header");
        if word(0)? != 0x5146_49fb {
            return Err("the magic is missing".to_owned());
        }
        let version = word(4)?;
        let cluster_bits = word(20)?;
        if !(2..=3).contains(&version) || !(9..=21).contains(&cluster_bits) {
            return Err(format!("version {version} with cluster bits {cluster_bits}"));
        }
        let new = version == 3;
        let incompatible = if new { long(72)? } else { 0 };
        if incompatible & INCOMPATIBLE_CORRUPT != 0 {
            return Err("the image says that it is corrupt".to_owned());
        }
        let known = INCOMPATIBLE_DIRTY | INCOMPATIBLE_DATA_FILE | INCOMPATIBLE_COMPRESSION | INCOMPATIBLE_EXTENDED_L2;
        if incompatible & !known != 0 || word(32)? != 0 {
            return Err(format!("incompatible features {incompatible:#x}, encryption {}", word(32)?));
        }
        Ok(Self {
            version,
            cluster_bits,
            size: long(24)?,
            l1_size: word(36)?,
            l1_offset: long(40)?,
            refcount_table_offset: long(48)?,
            refcount_table_clusters: word(56)?,
            snapshots: word(60)?,
            snapshots_offset: long(64)?,
            incompatible,
            autoclear: if new { long(88)? } else { 0 },
            header_bytes: if new { word(100)? } else { 72 },
            refcount_order: if new { word(96)? } else { 4 },
        })
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn is_extended(&self) -> bool {
        self.incompatible & INCOMPATIBLE_EXTENDED_L2 != 0
    }

    fn has_data_file(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DATA_FILE != 0
    }

    fn entry_bytes(&self) -> u64 {
        if self.is_extended() { 16 } else { 8 }
    }
}

impl Checker<'_> {
    fn walk(&mut self) {
        self.refer("the header", 0, 1);
        let cluster = self.header.cluster();
        let table_bytes = u64::from(self.header.refcount_table_clusters) * cluster;
        self.refer("the refcount table", self.header.refcount_table_offset, table_bytes);
        for index in 0..table_bytes / 8 {
            let block = be64(self.bytes, (self.header.refcount_table_offset + index * 8) as usize).unwrap_or(0);
            if block & 0x1ff != 0 {
                self.damaged(format!("refcount table entry {index} has reserved bits: {block:#x}"));
            }
            if block & !0x1ff != 0 {
                self.refer(&format!("refcount block {index}"), block & !0x1ff, cluster);
            }
        }
        self.walk_l1("the active L1 table", self.header.l1_offset, self.header.l1_size, true);
        let l2_entries = cluster / self.header.entry_bytes();
        let needed = self.header.size.div_ceil(cluster).div_ceil(l2_entries);
        if u64::from(self.header.l1_size) < needed {
            self.damaged(format!("the L1 table has {} entries, the size needs {needed}", self.header.l1_size));
        }
        self.walk_snapshots();
        self.walk_bitmaps();
    }

    fn walk_snapshots(&mut self) {
        let start = self.header.snapshots_offset;
        let mut at = start;
        for number in 0..self.header.snapshots {
            let field = |skip: u64| be32(self.bytes, (at + skip) as usize);
            let (Some(l1_offset), Some(l1_size), Some(lengths), Some(extra)) =
                (be64(self.bytes, at as usize), field(8), field(12), field(36))
            else {
                return self.damaged(format!("snapshot {number} lies behind the end of the file"));
            };
            self.walk_l1(&format!("the L1 table of snapshot {number}"), l1_offset, l1_size, false);
            let strings = u64::from(lengths >> 16) + u64::from(lengths & 0xffff);
            at = (at + 40 + u64::from(extra) + strings).next_multiple_of(8);
        }
        if at > start {
            self.refer("the snapshot table", start, at - start);
        }
    }

    /// Returns where the data of a header extension lie.
    fn extension(&self, wanted: u32) -> Option<u64> {
        let mut at = u64::from(self.header.header_bytes);
        while at < self.header.cluster() {
            match be32(self.bytes, at as usize)? {
                0 => return None,
                kind if kind == wanted => return Some(at + 8),
                _ => at += 8 + u64::from(be32(self.bytes, at as usize + 4)?).next_multiple_of(8),
            }
        }
        None
    }

    /// Walks the bitmaps, if the header says that they are valid.
    fn walk_bitmaps(&mut self) {
        if self.header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            return;
        }
        let (word, long) = (|at: u64| be32(self.bytes, at as usize), |at: u64| be64(self.bytes, at as usize));
        let found = self.extension(EXTENSION_BITMAPS);
        let Some((count, length, start)) = found.and_then(|at| Some((word(at)?, long(at + 8)?, long(at + 16)?))) else {
            return self.damaged("the header says that there are bitmaps, and not where".to_owned());
        };
        self.refer("the bitmap directory", start, length);
        let mut row = start;
        for number in 0..count {
            let Some((table, entries, lengths, extra)) =
                long(row).and_then(|table| Some((table, word(row + 8)?, word(row + 16)?, word(row + 20)?)))
            else {
                return self.damaged(format!("bitmap {number} lies behind the end of the file"));
            };
            self.refer(&format!("the table of bitmap {number}"), table, u64::from(entries) * 8);
            for index in 0..u64::from(entries) {
                let entry = be64(self.bytes, (table + index * 8) as usize).unwrap_or(0);
                if entry & !(OFFSET_MASK | 1) != 0 || (entry & OFFSET_MASK != 0 && entry & 1 != 0) {
                    self.damaged(format!("entry {index} of bitmap {number} has reserved bits: {entry:#x}"));
                } else if entry & OFFSET_MASK != 0 {
                    self.refer(&format!("part {index} of bitmap {number}"), entry, self.header.cluster());
                }
            }
            row = (row + 24 + u64::from(extra) + u64::from(lengths & 0xffff)).next_multiple_of(8);
        }
        if row != start + length {
            self.damaged(format!("the bitmap directory has {length} bytes, its rows {}", row - start));
        }
    }

    fn walk_l1(&mut self, what: &str, offset: u64, entries: u32, active: bool) {
        if entries == 0 {
            return;
        }
        self.refer(what, offset, u64::from(entries) * 8);
        for index in 0..u64::from(entries) {
            let Some(entry) = be64(self.bytes, (offset + index * 8) as usize) else {
                return self.damaged(format!("{what} ends behind the end of the file"));
            };
            let table = entry & OFFSET_MASK;
            if entry & !(OFFSET_MASK | COPIED) != 0 {
                self.damaged(format!("{what}, entry {index} has reserved bits: {entry:#x}"));
            }
            if table == 0 {
                continue;
            }
            let name = format!("L2 table {index} of {what}");
            self.refer(&name, table, self.header.cluster());
            if active {
                self.flags.push((table >> self.header.cluster_bits, entry & COPIED != 0, name.clone()));
            }
            self.walk_l2(&name, table, index, active);
        }
    }

    fn walk_l2(&mut self, name: &str, table: u64, l1_index: u64, active: bool) {
        let cluster = self.header.cluster();
        let (entry_bytes, extended) = (self.header.entry_bytes(), self.header.is_extended());
        let per_table = cluster / entry_bytes;
        for index in 0..per_table {
            let at = (table + index * entry_bytes) as usize;
            let (Some(entry), Some(bitmap)) = (be64(self.bytes, at), be64(self.bytes, at + entry_bytes as usize - 8))
            else {
                return self.damaged(format!("{name} ends behind the end of the file"));
            };
            let bitmap = if extended { bitmap } else { 0 };
            let what = || format!("entry {index} of {name}");
            if entry & COMPRESSED != 0 {
                self.walk_compressed(&what(), l1_index * per_table + index, entry, active);
                continue;
            }
            let reserved = !(OFFSET_MASK | COPIED | if self.header.version == 3 && !extended { ZERO } else { 0 });
            if entry & reserved != 0 {
                self.damaged(format!("{} has reserved bits: {entry:#x}", what()));
                continue;
            }
            let host = entry & OFFSET_MASK;
            let (alloc, zero) = (bitmap & 0xffff_ffff, bitmap >> 32);
            if self.header.has_data_file() {
                // Clusters of an external data file lie at their offset on the disk, and are not counted.
                let guest = (l1_index * per_table + index) * cluster;
                let wrong = entry & (COMPRESSED | COPIED) != COPIED || host != guest || alloc & zero != 0;
                if wrong && entry & !ZERO != 0 {
                    self.damaged(format!("{} says {entry:#x} {bitmap:#x} of guest offset {guest:#x}", what()));
                }
                self.report.allocated_clusters += u64::from(entry & !ZERO != 0);
                continue;
            }
            if alloc & zero != 0 || (host == 0 && alloc != 0) {
                self.damaged(format!("{} has the bitmap {bitmap:#x} and the host offset {host:#x}", what()));
            }
            if !active && !extended {
                self.digest(l1_index * per_table + index, entry & ZERO, host, cluster);
            }
            for part in (0..32).filter(|_| !active && extended) {
                let (number, length) = ((l1_index * per_table + index) * 32 + part, cluster / 32);
                match (alloc >> part & 1, zero >> part & 1) {
                    (1, _) => self.digest(number, 0, host + part * length, length),
                    (_, zero) => self.digest(number, zero, 0, 0),
                }
            }
            if host == 0 {
                if entry & COPIED != 0 {
                    self.damaged(format!("{} says that nothing has a refcount of one", what()));
                }
                continue;
            }
            let guest = (l1_index * per_table + index) * cluster;
            if active && guest >= self.header.size.next_multiple_of(cluster) {
                self.damaged(format!("{} maps guest offset {guest}, behind the end of the disk", what()));
            }
            self.report.allocated_clusters += u64::from(active);
            self.refer(&what(), host, cluster);
            if active {
                self.flags.push((host >> self.header.cluster_bits, entry & COPIED != 0, what()));
            }
        }
    }

    fn walk_compressed(&mut self, what: &str, number: u64, entry: u64, active: bool) {
        let bits = 62 - (self.header.cluster_bits - 8);
        let offset = entry & ((1 << bits) - 1);
        let sectors = ((entry & (COMPRESSED - 1)) >> bits) + 1;
        if entry & COPIED != 0 {
            self.damaged(format!("{what} is compressed and flagged as copied"));
        }
        self.report.compressed_clusters += u64::from(active);
        // Sectors are counted from the sector in which the data begin.
        let end = (offset & !511) + sectors * 512;
        if !active {
            self.digest(number, entry, offset, end - offset);
        }
        self.refer_anywhere(what, offset & !511, end - (offset & !511));
    }

    /// Adds a snapshot's guest cluster, and the bytes that hold it, to the digest.
    fn digest(&mut self, number: u64, kind: u64, offset: u64, length: u64) {
        if kind == 0 && offset == 0 {
            return;
        }
        let mut digest = mix(mix(self.report.snapshots_digest, number), kind);
        if kind & ZERO == 0 || kind & COMPRESSED != 0 {
            let start = (offset as usize).min(self.bytes.len());
            let end = (offset.saturating_add(length) as usize).min(self.bytes.len());
            for word in self.bytes[start..end].chunks(8) {
                digest = mix(digest, word.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)));
            }
        }
        self.report.snapshots_digest = digest;
    }

    /// Counts a reference to every cluster of a range, which starts at a cluster.
    fn refer(&mut self, what: &str, offset: u64, length: u64) {
        if !offset.is_multiple_of(self.header.cluster()) {
            self.damaged(format!("{what} starts at {offset:#x}, within a cluster"));
        }
        self.refer_anywhere(what, offset, length);
    }

    fn refer_anywhere(&mut self, what: &str, offset: u64, length: u64) {
        let cluster = self.header.cluster();
        let end = offset.saturating_add(length);
        // A cluster may extend beyond the end of the file, but not begin behind it.
        if end.saturating_sub(self.bytes.len() as u64) >= cluster {
            self.damaged(format!("{what} at {offset:#x}+{length:#x} lies behind the end of the file"));
            return;
        }
        for number in offset / cluster..end.div_ceil(cluster) {
            *self.references.entry(number).or_default() += 1;
        }
    }

    fn compare(&mut self) {
        self.report.used_clusters = self.references.len() as u64;
        let cluster = self.header.cluster();
        let per_block = (cluster * 8) >> self.header.refcount_order;
        let table_entries = u64::from(self.header.refcount_table_clusters) * cluster / 8;
        let referred = std::mem::take(&mut self.references);
        for (number, references) in &referred {
            let refcount = self.refcount(*number);
            if refcount < *references && !self.report.dirty {
                self.damaged(format!("cluster {number} has refcount {refcount} and {references} references"));
            }
            self.report.leaked_clusters += u64::from(refcount > *references);
        }
        for block in 0..table_entries {
            let offset = be64(self.bytes, (self.header.refcount_table_offset + block * 8) as usize).unwrap_or(0);
            if offset & !0x1ff == 0 {
                continue;
            }
            for number in block * per_block..(block + 1) * per_block {
                if !referred.contains_key(&number) && self.refcount(number) > 0 {
                    self.report.leaked_clusters += 1;
                }
            }
        }
        for (number, flag, what) in std::mem::take(&mut self.flags) {
            let refcount = self.refcount(number);
            if flag != (refcount == 1) && !self.report.dirty {
                self.damaged(format!("{what} is flagged copied={flag}; the refcount is {refcount}"));
            }
        }
        self.references = referred;
    }

    fn refcount(&self, number: u64) -> u64 {
        let order = self.header.refcount_order;
        let per_block = (self.header.cluster() * 8) >> order;
        let (block, index) = (number / per_block, number % per_block);
        if block * 8 >= u64::from(self.header.refcount_table_clusters) * self.header.cluster() {
            return 0;
        }
        let offset = be64(self.bytes, (self.header.refcount_table_offset + block * 8) as usize).unwrap_or(0) & !0x1ff;
        if offset == 0 {
            return 0;
        }
        let bits = 1u64 << order;
        if bits < 8 {
            let byte = self.bytes.get((offset + index * bits / 8) as usize).copied().unwrap_or(0);
            return u64::from(byte) >> (index * bits % 8) & ((1 << bits) - 1);
        }
        let width = bits / 8;
        (0..width).fold(0, |value, byte| {
            value << 8 | u64::from(self.bytes.get((offset + index * width + byte) as usize).copied().unwrap_or(0))
        })
    }

    fn damaged(&mut self, what: String) {
        if self.report.damage.len() < LISTED {
            self.report.damage.push(what);
        }
    }
}

impl Qcow2Report {
    /// Fails if there is any damage; leaks are allowed.
    pub fn sound(&self) -> Result<(), String> {
        if self.damage.is_empty() { Ok(()) } else { Err(self.damage.join("; ")) }
    }
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}
