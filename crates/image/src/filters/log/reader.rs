//! Reads a write log back, entry by entry.

use super::record::{LOG_SECTOR_BYTES, LogEntry, read_superblock};
use block::{Error, ErrorKind, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A reader of a write log. Entries are counted from 0.
#[derive(Debug)]
pub struct LogReader {
    file: Arc<File>,
    entries: u64,
    sector_bytes: u64,
    next: u64,
    /// The offset of the next entry.
    at: u64,
}

/// An entry, and the place of its data in the log.
#[derive(Debug, Clone)]
pub struct LoggedRequest {
    /// The number of the entry, from 0.
    pub index: u64,
    /// What the entry records.
    pub entry: LogEntry,
    file: Arc<File>,
    data_at: u64,
}

impl LoggedRequest {
    /// Fills `buf` with the entry's data from `skip_bytes` on.
    pub fn read_data(&self, skip_bytes: u64, buf: &mut [u8]) -> Result<()> {
        let at = self.data_at.saturating_add(skip_bytes);
        self.file.read_exact_at(buf, at).map_err(|error| cut_off(self.index, error))
    }
}

fn cut_off(index: u64, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            Error::new(ErrorKind::BadImage, format!("the write log ends in the midst of entry {index}"))
        }
        _ => Error::io(format!("cannot read entry {index} of the write log"), error),
    }
}

impl LogReader {
    /// Opens a log. The file may still grow.
    pub fn new(file: File) -> Result<Self> {
        let mut bytes = [0; LOG_SECTOR_BYTES];
        file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::new(ErrorKind::BadImage, "it is no write log"),
            _ => Error::io("cannot read the write log", error),
        })?;
        let (entries, sector_bytes) =
            read_superblock(&bytes).map_err(|reason| Error::new(ErrorKind::BadImage, reason))?;
        Ok(Self { file: Arc::new(file), entries, sector_bytes, next: 0, at: sector_bytes })
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Returns the offset in the file behind the last entry that was read.
    pub(super) fn end(&self) -> u64 {
        self.at
    }

    /// Reads the next entry; `None` after the last.
    pub fn next_entry(&mut self) -> Result<Option<LoggedRequest>> {
        if self.next >= self.entries {
            return Ok(None);
        }
        let index = self.next;
        let mut bytes = [0; LOG_SECTOR_BYTES];
        self.file.read_exact_at(&mut bytes, self.at).map_err(|error| cut_off(index, error))?;
        let impossible = || Error::new(ErrorKind::BadImage, format!("entry {index} of the write log is impossible"));
        let entry = LogEntry::from_bytes(&bytes, self.sector_bytes).ok_or_else(impossible)?;
        let data_at = self.at.checked_add(self.sector_bytes).ok_or_else(impossible)?;
        self.at = data_at.checked_add(entry.data_bytes()).ok_or_else(impossible)?;
        self.next = index.saturating_add(1);
        Ok(Some(LoggedRequest { index, entry, file: Arc::clone(&self.file), data_at }))
    }
}
