//! The bytes of a write log, in the format of Linux's device-mapper target `log-writes`, whose tools can read it.
//!
//! All numbers are little-endian. The first sector holds the magic, the version, the number of entries and the sector
//! size. Each entry is a sector with the place, the length, flags and the length of a mark's text, which follows in the
//! sector. Then come a write's data, in whole sectors. A discard and a flush have no data.

use block::SECTOR_BYTES;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// The sector size of logs that we write.
pub(super) const LOG_SECTOR_BYTES: usize = SECTOR_BYTES as usize;

const FLUSH: u64 = 1;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;

/// The kind of an entry of a write log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoggedKind {
    /// Data were written.
    Write {
        /// Whether the data were durable when the request ended.
        fua: bool,
    },
    /// All entries before it were durable when the request ended.
    Flush,
    /// The contents were no longer needed.
    Discard,
    /// A name for this place in the log.
    Mark,
}

/// An entry of a write log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntry {
    /// First byte on the disk.
    pub offset: u64,
    /// Length on the disk.
    pub length_bytes: u64,
    /// What happened to these bytes.
    pub kind: LoggedKind,
}

impl LogEntry {
    /// Returns how many bytes of data follow the entry in the log.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        match self.kind {
            LoggedKind::Write { .. } => self.length_bytes,
            LoggedKind::Flush | LoggedKind::Discard | LoggedKind::Mark => 0,
        }
    }

    /// Encodes the entry's sector in a log that we write.
    pub(super) fn to_bytes(self) -> [u8; LOG_SECTOR_BYTES] {
        let flags = match self.kind {
            LoggedKind::Write { fua: false } => 0,
            LoggedKind::Write { fua: true } => FUA,
            LoggedKind::Flush => FLUSH,
            LoggedKind::Discard => DISCARD,
            LoggedKind::Mark => MARK,
        };
        words_to_bytes(&[self.offset / SECTOR_BYTES, self.length_bytes / SECTOR_BYTES, flags, 0])
    }

    /// Decodes an entry of a log whose sectors have `sector_bytes`; `None` if it lies beyond any disk.
    pub(super) fn from_bytes(bytes: &[u8], sector_bytes: u64) -> Option<Self> {
        let [sector, count, flags] = [0, 1, 2].map(|index| word(bytes, index));
        let flags = flags?;
        let kind = match flags {
            _ if flags & MARK != 0 => LoggedKind::Mark,
            _ if flags & DISCARD != 0 => LoggedKind::Discard,
            _ if flags & FLUSH != 0 && count == Some(0) => LoggedKind::Flush,
            _ => LoggedKind::Write { fua: flags & FUA != 0 },
        };
        let offset = sector?.checked_mul(sector_bytes)?;
        let length_bytes = count?.checked_mul(sector_bytes)?;
        offset.checked_add(length_bytes)?;
        Some(Self { offset, length_bytes, kind })
    }
}

/// Encodes the first sector of a log that we write.
pub(super) fn superblock(entries: u64) -> [u8; LOG_SECTOR_BYTES] {
    words_to_bytes(&[MAGIC, VERSION, entries, LOG_SECTOR_BYTES as u64])
}

/// Decodes the first sector of a log: the number of entries, and the sector size.
pub(super) fn read_superblock(bytes: &[u8]) -> Result<(u64, u64), &'static str> {
    if word(bytes, 0) != Some(MAGIC) {
        return Err("it is no write log");
    }
    if word(bytes, 1) != Some(VERSION) {
        return Err("it is a write log of a version that is not known");
    }
    // The sector size is a field of 32 bits.
    let sector_bytes = word(bytes, 3).unwrap_or(0) & u64::from(u32::MAX);
    match (word(bytes, 2), sector_bytes) {
        (Some(entries), 512 | 1024 | 2048 | 4096) => Ok((entries, sector_bytes)),
        _ => Err("it counts in sectors of an impossible size"),
    }
}

fn words_to_bytes(words: &[u64; 4]) -> [u8; LOG_SECTOR_BYTES] {
    let mut bytes = [0; LOG_SECTOR_BYTES];
    for (field, word) in bytes.chunks_exact_mut(8).zip(words) {
        field.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    bytes.chunks_exact(8).nth(index)?.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_and_the_first_sector_lie_where_device_mapper_has_them() {
        let entry = LogEntry { offset: 512 * 7, length_bytes: 1024, kind: LoggedKind::Write { fua: true } };
        let bytes = entry.to_bytes();
        assert_eq!((bytes[0], bytes[8], bytes[16], bytes[24]), (7, 2, 2, 0));
        assert_eq!(LogEntry::from_bytes(&bytes, 512), Some(entry));
        let first = superblock(3);
        assert_eq!(first[..8], *b"rhswfsj\0");
        assert_eq!((first[8], first[16], first[24..28].to_vec()), (1, 3, vec![0, 2, 0, 0]));
        assert_eq!(read_superblock(&first), Ok((3, 512)));
    }

    #[test]
    fn impossible_bytes_are_refused() {
        assert!(read_superblock(&[0; 512]).is_err());
        assert!(read_superblock(&[]).is_err());
        assert_eq!(LogEntry::from_bytes(&[0xff; 512], 4096), None);
        assert_eq!(LogEntry::from_bytes(&[0; 8], 512), None);
    }
}
