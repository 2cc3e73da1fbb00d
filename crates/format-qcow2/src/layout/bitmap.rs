//! Persistent dirty bitmaps: their directory, tables and bits (specification, "Bitmaps").
//!
//! A bitmap records which parts of the disk were written since some moment, one bit a granule. It is valid only while
//! the autoclear bit says that the image's last writer kept it up to date.

use crate::layout::entry::entries;
use crate::layout::extensions::header_extensions;
use crate::layout::geometry::{Geometry, MAX_FILE_BYTES};
use crate::layout::header::Header;
use crate::layout::header::read_first_cluster;
use block::{Error, ErrorKind, IoError, MetaIo, PastEnd, Result};
use std::ops::Range;

pub(crate) const EXTENSION_BITMAPS: u32 = 0x2385_2875;
pub(crate) const AUTOCLEAR_BITMAPS: u64 = 1;
pub(crate) const EXTENSION_BYTES: usize = 24;
const ROW_BYTES: usize = 24;
const IN_USE: u32 = 1 << 0;
const AUTO: u32 = 1 << 1;
const EXTRA_COMPATIBLE: u32 = 1 << 2;
const TYPE_DIRTY: u8 = 1;
const TABLE_OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
pub(crate) const TABLE_ALL_ONES: u64 = 1;

pub(crate) const MAX_BITMAPS: u32 = 65535;
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
pub(crate) const MAX_NAME_BYTES: usize = 1023;
/// The most bytes of a bitmap's bits.
pub(crate) const MAX_BITS_BYTES: u64 = 512 << 20;
/// The most bytes of all tables of an image. Rows may name one table again and again, and each time it would be read.
const MAX_TABLES_BYTES: u64 = 64 << 20;

/// A bitmap, as the directory describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bitmap {
    /// Name, unique in the image.
    pub name: String,
    /// Bytes of the disk that one bit stands for, as a power of two: 9 to 31.
    pub granularity_bits: u8,
    /// Whether its writer did not complete it: its bits mean nothing, and it can only be removed.
    pub in_use: bool,
    /// Whether writes are noted in it.
    pub enabled: bool,
    pub(crate) extra: Vec<u8>,
    pub(crate) table_offset: u64,
    pub(crate) table_entries: u32,
}

impl Bitmap {
    /// Returns how many bytes of the disk one bit stands for.
    #[must_use]
    pub fn granularity_bytes(&self) -> u64 {
        1u64.wrapping_shl(u32::from(self.granularity_bits))
    }

    /// Returns the size of the bitmap's table.
    pub(crate) fn table_bytes(&self) -> u64 {
        u64::from(self.table_entries).saturating_mul(8)
    }

    /// Returns the bytes of bits for a disk of this size.
    pub(crate) fn bits_bytes(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.granularity_bytes()).div_ceil(8)
    }

    /// Encodes the bitmap's row of the directory.
    pub(crate) fn row(&self) -> Vec<u8> {
        let flag = |is: bool, bit: u32| if is { bit } else { 0 };
        let flags =
            flag(self.in_use, IN_USE) | flag(self.enabled, AUTO) | flag(!self.extra.is_empty(), EXTRA_COMPATIBLE);
        let mut row = self.table_offset.to_be_bytes().to_vec();
        row.extend(self.table_entries.to_be_bytes());
        row.extend(flags.to_be_bytes());
        row.extend([TYPE_DIRTY, self.granularity_bits]);
        row.extend(u16::try_from(self.name.len()).unwrap_or(0).to_be_bytes());
        row.extend(u32::try_from(self.extra.len()).unwrap_or(0).to_be_bytes());
        row.extend(&self.extra);
        row.extend(self.name.as_bytes());
        row.resize(row.len().next_multiple_of(8), 0);
        row
    }
}

/// The bits of a bitmap. The first is the lowest bit of the first byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitmapBits {
    /// Bytes of the disk that one bit stands for, as a power of two.
    pub granularity_bits: u8,
    /// Size of the disk.
    pub size_bytes: u64,
    pub(crate) bytes: Vec<u8>,
}

impl BitmapBits {
    /// Makes bits for a disk; those of written ranges are set.
    #[must_use]
    pub fn of_ranges(granularity_bits: u8, size_bytes: u64, written: &[Range<u64>]) -> Self {
        let bytes = size_bytes.div_ceil(1u64.wrapping_shl(u32::from(granularity_bits))).div_ceil(8).min(MAX_BITS_BYTES);
        let mut bits = Self { granularity_bits, size_bytes, bytes: vec![0; usize::try_from(bytes).unwrap_or(0)] };
        written.iter().for_each(|range| bits.set(range));
        bits
    }

    /// Makes bits for a disk of words. The first is the lowest bit of the first word.
    #[must_use]
    pub fn of_words(granularity_bits: u8, size_bytes: u64, words: impl IntoIterator<Item = u64>) -> Self {
        let mut bits = Self::of_ranges(granularity_bits, size_bytes, &[]);
        for (bytes, word) in bits.bytes.chunks_mut(8).zip(words) {
            bytes.iter_mut().zip(word.to_le_bytes()).for_each(|(byte, new)| *byte = new);
        }
        clear_behind(&mut bits.bytes, size_bytes.div_ceil(1u64.wrapping_shl(u32::from(granularity_bits))));
        bits
    }

    /// Returns the bits. The first is the lowest bit of the first byte.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Whether the granule that holds this byte of the disk was written.
    #[must_use]
    pub fn is_set(&self, offset: u64) -> bool {
        let granule = offset.wrapping_shr(u32::from(self.granularity_bits));
        let byte = usize::try_from(granule / 8).ok().and_then(|index| self.bytes.get(index)).copied().unwrap_or(0);
        u32::from(byte).wrapping_shr((granule % 8) as u32) & 1 != 0
    }

    /// Returns the same bits for a disk of another size. Bits behind the new end are dropped, and those of added space
    /// are clear.
    pub(crate) fn of_size(mut self, size_bytes: u64) -> Self {
        self.size_bytes = size_bytes;
        let granules = size_bytes.div_ceil(1u64.wrapping_shl(u32::from(self.granularity_bits)));
        self.bytes.resize(usize::try_from(granules.div_ceil(8)).unwrap_or(0), 0);
        clear_behind(&mut self.bytes, granules);
        self
    }

    /// Returns the ranges of the disk whose bits are set, in order, with neighbours joined. Ranges are whole granules,
    /// so the last may reach behind the disk's end.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        for (at, byte) in (0u64..).zip(&self.bytes).filter(|(_, byte)| **byte != 0) {
            for bit in (0u64..8).filter(|bit| u64::from(*byte).wrapping_shr(*bit as u32) & 1 != 0) {
                let granule = at.saturating_mul(8).saturating_add(bit);
                let start = granule.wrapping_shl(u32::from(self.granularity_bits));
                let end = granule.saturating_add(1).wrapping_shl(u32::from(self.granularity_bits));
                match found.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => found.push(start..end),
                }
            }
        }
        found
    }

    /// Sets the bits of every granule that a range touches.
    pub(crate) fn set(&mut self, range: &Range<u64>) {
        let shift = u32::from(self.granularity_bits);
        let end = range.end.min(self.size_bytes);
        let Some(last) = end.checked_sub(1).filter(|last| *last >= range.start) else { return };
        let (first, last) = (range.start.wrapping_shr(shift), last.wrapping_shr(shift));
        let byte_of = |granule: u64| usize::try_from(granule / 8).unwrap_or(usize::MAX);
        let (from, to) = (byte_of(first), byte_of(last));
        let head = u8::MAX.wrapping_shl((first % 8) as u32);
        let tail = u8::MAX.wrapping_shr(7u64.saturating_sub(last % 8) as u32);
        for (at, byte) in self.bytes.iter_mut().enumerate().take(to.saturating_add(1)).skip(from) {
            *byte |= if at == from { head } else { u8::MAX } & if at == to { tail } else { u8::MAX };
        }
    }
}

/// The bitmap directory of an image.
pub(crate) struct Directory {
    pub(crate) bitmaps: Vec<Bitmap>,
    /// The offset of each bitmap's row in the directory.
    pub(crate) rows: Vec<usize>,
    /// The directory's bytes in the file.
    pub(crate) raw: Vec<u8>,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Reads the bitmaps of an image, whether consistent or in use; none if the image's last writer did not keep them.
pub async fn bitmaps(io: &MetaIo, name: &str) -> Result<Vec<Bitmap>> {
    let cluster = read_first_cluster(io).await.map_err(|error| cannot_read(name, error))?;
    let header = Header::parse(&cluster, name, false)?;
    Ok(directory(io, &header, &cluster, name).await?.bitmaps)
}

/// Reads the bits of the bitmap with this name.
pub async fn read_bitmap(io: &MetaIo, name: &str, bitmap: &str) -> Result<BitmapBits> {
    let cluster = read_first_cluster(io).await.map_err(|error| cannot_read(name, error))?;
    let header = Header::parse(&cluster, name, false)?;
    let directory = directory(io, &header, &cluster, name).await?;
    let found = directory.bitmaps.iter().find(|found| found.name == bitmap);
    let found = found.ok_or_else(|| not_found(bitmap))?;
    if found.in_use {
        return Err(in_use(bitmap));
    }
    bits(io, &header.geometry(), found, name).await
}

pub(crate) fn not_found(bitmap: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("Dirty bitmap '{bitmap}' not found"))
}

pub(crate) fn in_use(bitmap: &str) -> Error {
    let what = format!("Bitmap '{bitmap}' is inconsistent and cannot be used; remove it (bitmap --remove)");
    Error::new(ErrorKind::Unsupported, what)
}

fn cannot_read(name: &str, error: IoError) -> Error {
    Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the bitmaps"), error)
}

pub(crate) async fn directory(io: &MetaIo, header: &Header, cluster: &[u8], name: &str) -> Result<Directory> {
    let bad = |what: String| Error::new(ErrorKind::BadImage, format!("'{name}': bitmaps: {what}"));
    let nothing = Directory { bitmaps: Vec::new(), rows: Vec::new(), raw: Vec::new(), offset: 0, bytes: 0 };
    let extension = header_extensions(cluster, header.version);
    let extension = extension.into_iter().find(|(kind, _)| *kind == EXTENSION_BITMAPS);
    if header.autoclear_features & AUTOCLEAR_BITMAPS == 0 {
        return Ok(nothing);
    }
    let Some((_, data)) = extension.filter(|(_, data)| data.len() == EXTENSION_BYTES) else {
        return Err(bad("the header says that there are some, and not where".to_owned()));
    };
    let (count, bytes, offset) = (number(&data, 0, 4), number(&data, 8, 8), number(&data, 16, 8));
    if count > u64::from(MAX_BITMAPS) || bytes > MAX_DIRECTORY_BYTES {
        return Err(bad(format!("{count} in a directory of {bytes} bytes are too many")));
    }
    check_place(&header.geometry(), offset, bytes).ok_or_else(|| bad(format!("no directory can be at {offset:#x}")))?;
    let length = usize::try_from(bytes).unwrap_or(0);
    let table = io.read(offset, length, PastEnd::Fails).await.map_err(|error| cannot_read(name, error))?;
    let (mut bitmaps, mut rows) = (Vec::new(), Vec::new());
    let mut at = 0usize;
    for index in 0..count {
        let rest = table.get(at..).unwrap_or_default();
        let (bitmap, length) = parse_row(rest, header).map_err(|what| bad(format!("number {index} {what}")))?;
        rows.push(at);
        at = at.saturating_add(length);
        bitmaps.push(bitmap);
    }
    let tables_bytes = bitmaps.iter().fold(0u64, |sum, bitmap: &Bitmap| sum.saturating_add(bitmap.table_bytes()));
    if tables_bytes > MAX_TABLES_BYTES {
        return Err(bad(format!("tables of {tables_bytes} bytes are too many")));
    }
    Ok(Directory { bitmaps, rows, raw: table.to_vec(), offset, bytes })
}

fn parse_row(row: &[u8], header: &Header) -> std::result::Result<(Bitmap, usize), &'static str> {
    let (name_bytes, extra_bytes) = (number(row, 18, 2) as usize, number(row, 20, 4) as usize);
    let names = ROW_BYTES.saturating_add(extra_bytes);
    let end = names.saturating_add(name_bytes);
    let name = row.get(names..end).ok_or("reaches out of the directory")?;
    let flags = number(row, 12, 4) as u32;
    let bitmap = Bitmap {
        name: std::str::from_utf8(name).map_err(|_| "has a name that is not text")?.to_owned(),
        granularity_bits: number(row, 17, 1) as u8,
        in_use: flags & IN_USE != 0,
        enabled: flags & AUTO != 0,
        extra: row.get(ROW_BYTES..names).unwrap_or_default().to_vec(),
        table_offset: number(row, 0, 8),
        table_entries: number(row, 8, 4) as u32,
    };
    let geometry = header.geometry();
    let table_bytes = bitmap.table_bytes();
    match () {
        () if number(row, 16, 1) != u64::from(TYPE_DIRTY) => Err("is of an unknown type"),
        () if flags & !(IN_USE | AUTO | EXTRA_COMPATIBLE) != 0 => Err("has unknown flags"),
        () if extra_bytes > 0 && flags & EXTRA_COMPATIBLE == 0 => Err("has extra data that has to be understood"),
        () if !(9..=31).contains(&bitmap.granularity_bits) => Err("has an impossible granularity"),
        () if name_bytes == 0 || name_bytes > MAX_NAME_BYTES => Err("has a name of an impossible length"),
        () if table_bytes > MAX_BITS_BYTES => Err("has a table that is too large"),
        () if check_place(&geometry, bitmap.table_offset, table_bytes).is_none() => Err("has its table nowhere"),
        () => Ok((bitmap, end.next_multiple_of(8))),
    }
}

fn check_place(geometry: &Geometry, offset: u64, length: u64) -> Option<()> {
    let end = offset.checked_add(length)?;
    let is_right = geometry.offset_in_cluster(offset) == 0 && offset > 0 && end <= MAX_FILE_BYTES;
    (is_right || length == 0).then_some(())
}

/// Reads the table of a bitmap.
pub(crate) async fn table(io: &MetaIo, geometry: &Geometry, bitmap: &Bitmap, name: &str) -> Result<Vec<u64>> {
    let length = usize::try_from(bitmap.table_bytes()).unwrap_or(0);
    if length == 0 {
        return Ok(Vec::new());
    }
    let table = io.read(bitmap.table_offset, length, PastEnd::Fails).await.map_err(|error| cannot_read(name, error))?;
    let table: Vec<u64> = entries(&table).collect();
    match is_damaged_table(&table, geometry) {
        true => {
            Err(Error::new(ErrorKind::BadImage, format!("'{name}': the table of bitmap '{}' is damaged", bitmap.name)))
        }
        false => Ok(table),
    }
}

pub(crate) fn is_damaged_table(table: &[u64], geometry: &Geometry) -> bool {
    table.iter().any(|entry| {
        let offset = entry & TABLE_OFFSET_MASK;
        let reserved =
            entry & !(TABLE_OFFSET_MASK | TABLE_ALL_ONES) != 0 || (offset != 0 && entry & TABLE_ALL_ONES != 0);
        reserved || geometry.offset_in_cluster(offset) != 0
    })
}

/// Returns where the low byte of a row's flags lies in the directory; [`IN_USE`] is one of these flags.
pub(crate) fn flags_byte(row: usize) -> usize {
    row.saturating_add(15)
}

/// Returns the file offset that a table entry gives for its bits.
pub(crate) fn data_offset(entry: u64) -> Option<u64> {
    let offset = entry & TABLE_OFFSET_MASK;
    (offset != 0).then_some(offset)
}

pub(crate) async fn bits(io: &MetaIo, geometry: &Geometry, bitmap: &Bitmap, name: &str) -> Result<BitmapBits> {
    let bytes = bitmap.bits_bytes(geometry.size_bytes);
    let table = table(io, geometry, bitmap, name).await?;
    if bytes > MAX_BITS_BYTES || geometry.clusters_for(bytes) != table.len() as u64 {
        let what = format!("'{name}': bitmap '{}' does not fit the disk", bitmap.name);
        return Err(Error::new(ErrorKind::BadImage, what));
    }
    let cluster_bytes = usize::try_from(geometry.cluster_bytes()).unwrap_or(0);
    let mut found = Vec::new();
    for entry in table {
        match data_offset(entry) {
            Some(offset) => {
                let data = io.read(offset, cluster_bytes, PastEnd::Zeros).await;
                found.extend_from_slice(&data.map_err(|error| cannot_read(name, error))?);
            }
            None => {
                let fill = if entry & TABLE_ALL_ONES != 0 { 0xff } else { 0 };
                found.resize(found.len().saturating_add(cluster_bytes), fill);
            }
        }
    }
    found.resize(usize::try_from(bytes).unwrap_or(0), 0);
    clear_behind(&mut found, geometry.size_bytes.div_ceil(bitmap.granularity_bytes()));
    Ok(BitmapBits { granularity_bits: bitmap.granularity_bits, size_bytes: geometry.size_bytes, bytes: found })
}

/// Clears the bits of the last byte behind the disk's end: they mean nothing.
fn clear_behind(bytes: &mut [u8], granules: u64) {
    if let (Some(last), false) = (bytes.last_mut(), granules.is_multiple_of(8)) {
        *last &= 1u8.wrapping_shl((granules % 8) as u32).wrapping_sub(1);
    }
}

/// Lists everything in the file that the bitmaps use: offset and length of each piece.
pub(crate) async fn space(io: &MetaIo, header: &Header, cluster: &[u8], name: &str) -> Result<Vec<(u64, u64)>> {
    let directory = directory(io, header, cluster, name).await?;
    let geometry = header.geometry();
    let mut pieces = vec![(directory.offset, directory.bytes)];
    for bitmap in &directory.bitmaps {
        pieces.push((bitmap.table_offset, bitmap.table_bytes()));
        let table = match table(io, &geometry, bitmap, name).await {
            // The damaged table's space is not known. The bitmap can still be removed, and the image repaired.
            Err(error) if error.kind() == ErrorKind::BadImage => continue,
            read => read?,
        };
        pieces.extend(table.into_iter().filter_map(data_offset).map(|offset| (offset, geometry.cluster_bytes())));
    }
    Ok(pieces)
}

fn number(bytes: &[u8], offset: usize, length: usize) -> u64 {
    let field = bytes.get(offset..offset.saturating_add(length)).unwrap_or_default();
    field.iter().fold(0, |value, byte| value.wrapping_shl(8) | u64::from(*byte))
}
