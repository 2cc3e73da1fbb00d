//! What clients see of a disk.

use crate::users::Users;
use block::meter::{QueueLatency, RingStats};
use block::{DirtyBitmaps, Disk, DiskInfo};
use nbd_wire::numbers::{DIRTY_BITMAP, STRING_BYTES_MAX, export};
use std::fmt;
use std::sync::Arc;

/// Bitmaps that an export tells of, at most.
pub const BITMAPS_MAX: usize = 16;

/// A bitmap that clients may ask for.
#[derive(Clone)]
pub struct NbdBitmap {
    /// Its name, which clients know it by: `qemu:dirty-bitmap:NAME`.
    pub name: String,
    /// Who has it.
    pub source: Arc<dyn DirtyBitmaps>,
}

impl fmt::Debug for NbdBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NbdBitmap").field(&self.name).finish()
    }
}

/// A disk under a name. Clones are the same export.
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
    /// Bitmaps that clients can ask for, as well as for what lies where.
    pub bitmaps: Vec<NbdBitmap>,
    /// What the disk is called in logs; by default as its export.
    pub disk_name: Option<String>,
    pub(crate) users: Arc<Users>,
}

impl NbdExport {
    /// A disk that clients may write, if it allows that.
    #[must_use]
    pub fn new(name: impl Into<String>, disk: Arc<dyn Disk>) -> Self {
        let (description, bitmaps, users) = (String::new(), Vec::new(), Arc::default());
        Self { name: name.into(), description, disk, read_only: false, bitmaps, disk_name: None, users }
    }

    /// Changes some of it.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Clients that have chosen it.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.users.count()
    }

    /// What its clients' connections have done, together, those that have ended included.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        self.users.stats()
    }

    /// Has connections that are awake look for their oldest request, for [`NbdExport::latency`].
    pub fn ask_for_oldest(&self) {
        self.users.ask_for_oldest();
    }

    /// How long its clients' requests take: from when one is whole here until its reply is given to the socket.
    #[must_use]
    pub fn latency(&self) -> QueueLatency {
        self.users.latency()
    }

    /// Has nobody wait any more for requests in flight: clients are disconnected, and what the storage does later is thrown
    /// away.
    pub fn give_up(&self) {
        self.users.give_up();
    }

    /// Why a client cannot be told of it, if so.
    pub(crate) fn fault(&self) -> Option<String> {
        let too_long = |what: &str, text: &str| {
            (text.len() > STRING_BYTES_MAX).then(|| {
                format!("the {what} of an NBD export has {} bytes, and may have {STRING_BYTES_MAX}", text.len())
            })
        };
        let of_bitmap = |bitmap: &NbdBitmap| match bitmap.name.len().saturating_add(DIRTY_BITMAP.len()) {
            length if length > STRING_BYTES_MAX => too_long("name of a bitmap", &bitmap.name),
            _ => None,
        };
        let too_many = || {
            let count = self.bitmaps.len();
            (count > BITMAPS_MAX).then(|| format!("an NBD export tells of at most {BITMAPS_MAX} bitmaps, not {count}"))
        };
        let texts = too_long("name", &self.name).or_else(|| too_long("description", &self.description));
        texts.or_else(|| self.bitmaps.iter().find_map(of_bitmap)).or_else(too_many)
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
