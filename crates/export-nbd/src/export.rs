//! What clients see of a disk.

use block::{Disk, DiskInfo};
use nbd_wire::numbers::{STRING_BYTES_MAX, export};
use std::fmt;
use std::sync::Arc;

/// A disk under a name.
#[derive(Clone)]
#[non_exhaustive]
pub struct NbdExport {
    /// Its name; a client that names none gets the first export.
    pub name: String,
    /// What it is, for people.
    pub description: String,
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Writes are refused, whatever the disk allows.
    pub read_only: bool,
}

impl NbdExport {
    /// A disk that clients may write, if it allows that.
    #[must_use]
    pub fn new(name: impl Into<String>, disk: Arc<dyn Disk>) -> Self {
        Self { name: name.into(), description: String::new(), disk, read_only: false }
    }

    /// Changes some of it.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Why a client cannot be told of it, if so.
    pub(crate) fn fault(&self) -> Option<String> {
        let too_long = |what: &str, text: &str| {
            (text.len() > STRING_BYTES_MAX).then(|| {
                format!("the {what} of an NBD export has {} bytes, and may have {STRING_BYTES_MAX}", text.len())
            })
        };
        too_long("name", &self.name).or_else(|| too_long("description", &self.description))
    }

    pub(crate) fn refuses_writes(&self, info: &DiskInfo) -> bool {
        self.read_only || info.read_only
    }

    /// The transmission flags.
    pub(crate) fn flags(&self, info: &DiskInfo, structured: bool) -> u16 {
        let mut flags = export::HAS_FLAGS
            | export::SEND_FLUSH
            | export::SEND_FUA
            | export::SEND_CACHE
            // A flush of a disk covers what completed on all of its queues.
            | export::CAN_MULTI_CONN;
        if structured {
            flags |= export::SEND_DF;
        }
        flags
            | match self.refuses_writes(info) {
                true => export::READ_ONLY,
                false => export::SEND_TRIM | export::SEND_WRITE_ZEROES | export::SEND_FAST_ZERO,
            }
    }
}

impl fmt::Debug for NbdExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdExport")
            .field("name", &self.name)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}
