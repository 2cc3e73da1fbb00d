//! The persistent bitmaps of an open image: those that note writes, and their state.

use crate::layout::bitmap::{AUTOCLEAR_BITMAPS, Bitmap, BitmapBits, directory, flags_byte};
use crate::layout::header::Header;
use crate::live::bitmap_bits::DirtyBits;
use crate::live::refcounts::Piece;
use block::sync::{Mutex, MutexGuard, PoisonError};
use block::{Error, ErrorKind, MetaIo, Result};
use std::collections::BTreeSet;
use std::sync::OnceLock;

/// The most memory for the bits of one image.
const MEMORY_BYTES_MAX: u64 = 64 << 20;

/// The most bitmaps that note writes: each request takes a step for each of them.
const TRACKED_MAX: usize = 64;
/// The most names in a message.
const NAMES_MAX: usize = 8;
const SECTOR_BYTES: usize = 512;
const IN_USE: u8 = 1;

/// The bitmaps of an image that is open for writing.
#[derive(Debug)]
pub(crate) struct BitmapTracking {
    pub(super) directory_offset: u64,
    /// The directory as read at open, when no tracked bitmap was in use.
    pub(super) directory: Vec<u8>,
    pub(super) tracked: Vec<Tracked>,
    /// Tables of bitmaps that do not change: offset and length.
    pub(super) others: Vec<(u64, u64)>,
    /// Whether the bitmaps are kept: nothing else may lie where their directory does. Known before the first write.
    pub(super) kept: OnceLock<bool>,
}

/// A bitmap in which writes are noted.
#[derive(Debug)]
pub(crate) struct Tracked {
    pub(super) bitmap: Bitmap,
    /// Offset in the directory of the flags that hold the mark "in use".
    flags_at: usize,
    /// Loaded before the first write. `None` if they could not be loaded: the bitmap then stays in use.
    pub(super) bits: OnceLock<Option<DirtyBits>>,
    table: Mutex<Table>,
}

/// The table of a bitmap, with the places of its parts.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(super) entries: Vec<u64>,
    /// Parts in new clusters that the file does not name yet.
    pub(super) fresh: Vec<usize>,
    /// Whether the file may have another table.
    pub(super) differs: bool,
}

impl Tracked {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bits(&self) -> Option<&DirtyBits> {
        self.bits.get()?.as_ref()
    }
}

impl BitmapTracking {
    /// Reads the bitmaps of an image that is opened for writing; `None` if it has none to keep.
    pub(crate) async fn open(io: &MetaIo, header: &Header, cluster: &[u8], name: &str) -> Result<Option<Box<Self>>> {
        if header.autoclear_features & AUTOCLEAR_BITMAPS == 0 {
            return Ok(None);
        }
        let found = match directory(io, header, cluster, name).await {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::BadImage => {
                tracing::warn!("{error}. The image is served; the first write to it gives its bitmaps up");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let (mut tracked, mut others, mut inconsistent) = (Vec::new(), Vec::new(), Vec::new());
        let mut memory_bytes = 0u64;
        for (bitmap, row) in found.bitmaps.into_iter().zip(found.rows) {
            if bitmap.in_use {
                inconsistent.push(bitmap.name.escape_debug().to_string());
            }
            if bitmap.in_use || !bitmap.enabled {
                others.push((bitmap.table_offset, bitmap.table_bytes()));
                continue;
            }
            memory_bytes = memory_bytes.saturating_add(bitmap.bits_bytes(header.size_bytes).next_multiple_of(8));
            let flags_at = flags_byte(row);
            tracked.push(Tracked { bitmap, flags_at, bits: OnceLock::new(), table: Mutex::new(Table::default()) });
        }
        if tracked.len() > TRACKED_MAX {
            let what = format!(
                "'{name}': {} enabled bitmaps, and each write is noted in every one: at most {TRACKED_MAX} can be; \
                 disable some (bitmap --disable)",
                tracked.len()
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if memory_bytes > MEMORY_BYTES_MAX {
            let what = format!(
                "'{name}': noting writes in its enabled bitmaps takes {memory_bytes} bytes of memory, more than \
                 {MEMORY_BYTES_MAX}; disable some (bitmap --disable), or make them anew with larger granules"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if !inconsistent.is_empty() {
            let (count, names) =
                (inconsistent.len(), inconsistent.get(..NAMES_MAX).unwrap_or(&inconsistent).join("', '"));
            tracing::warn!(
                count,
                "'{name}': bitmaps are inconsistent, because whoever used them did not come to an end: '{names}'. They \
                 are not updated, and can only be removed (bitmap --remove)"
            );
        }
        Ok(Some(Box::new(Self {
            directory_offset: found.offset,
            directory: found.raw,
            tracked,
            others,
            kept: OnceLock::new(),
        })))
    }

    /// Notes a change of the disk in all tracked bitmaps.
    pub(crate) fn mark(&self, offset: u64, length: u64) {
        for tracked in &self.tracked {
            if let Some(bits) = tracked.bits() {
                bits.mark(offset, length);
            }
        }
    }

    /// Returns the tracked bitmaps whose bits are in memory: name, and written bytes of the disk.
    pub(crate) fn noting(&self, size_bytes: u64) -> Vec<(String, u64)> {
        let dirty = |tracked: &Tracked| Some((tracked.bitmap.name.clone(), tracked.bits()?.dirty_bytes(size_bytes)));
        self.tracked.iter().filter_map(dirty).collect()
    }

    /// Returns the bits of a tracked bitmap, if they are in memory.
    pub(crate) fn bits_of(&self, name: &str, size_bytes: u64) -> Option<BitmapBits> {
        let tracked = self.tracked.iter().find(|tracked| tracked.bitmap.name == name)?;
        let bits = tracked.bits()?;
        let bytes = (0..bits.parts()).flat_map(|part| bits.part_bytes(part)).collect();
        Some(BitmapBits { granularity_bits: tracked.bitmap.granularity_bits, size_bytes, bytes })
    }

    /// Returns the directory's sectors that hold flags of tracked bitmaps.
    pub(super) fn flags(&self, in_use: impl Fn(&Tracked) -> bool) -> Vec<Piece> {
        let mut bytes = self.directory.clone();
        let mut sectors = BTreeSet::new();
        for tracked in &self.tracked {
            if let (true, Some(flags)) = (in_use(tracked), bytes.get_mut(tracked.flags_at)) {
                *flags |= IN_USE;
            }
            sectors.insert(tracked.flags_at / SECTOR_BYTES);
        }
        let piece = |sector: usize| {
            let start = sector.saturating_mul(SECTOR_BYTES);
            let end = start.saturating_add(SECTOR_BYTES).min(bytes.len());
            Some(Piece {
                offset: self.directory_offset.saturating_add(start as u64),
                bytes: bytes.get(start..end)?.to_vec(),
            })
        };
        sectors.into_iter().filter_map(piece).collect()
    }
}
