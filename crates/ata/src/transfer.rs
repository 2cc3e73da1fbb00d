//! The data of a command: blocks of sectors, each in a window.

use crate::Sectors;
use block::SECTOR_BYTES;
use pio::{Direction, Width, Window};

/// The most bytes that a read fetches at once, if its command reaches that far.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;
/// The port of the Data register.
pub(crate) const DATA: u16 = 0;
const SECTOR: usize = SECTOR_BYTES as usize;

/// The rest of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) direction: Direction,
    /// The first sector that has not moved.
    pub(crate) lba: u64,
    /// The number of sectors that have not moved.
    pub(crate) left: u64,
    /// The sectors of a block, which move without a check of the status in between.
    pub(crate) block: u64,
    /// Whether the address has 48 bits.
    pub(crate) extended: bool,
}

impl Transfer {
    /// Returns the number of sectors in the next block.
    pub(crate) fn block_sectors(&self) -> u64 {
        self.block.min(self.left)
    }

    /// Notes that the next block has moved.
    pub(crate) fn advance(&mut self) {
        let moved = self.block_sectors();
        self.lba = self.lba.saturating_add(moved);
        self.left = self.left.saturating_sub(moved);
    }
}

/// A block could not be read.
#[derive(Debug)]
pub(crate) struct Unreadable;

/// The drive's buffer, and the sectors of the disk that it holds.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    data: Vec<u8>,
    first: u64,
    sectors: u64,
}

impl Buffer {
    /// Takes the buffer's bytes back from a window.
    pub(crate) fn put_back(&mut self, window: Window) {
        self.data = window.into_data();
    }

    /// Returns the bytes, to be filled with a command's answer or with sectors to be written.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        self.sectors = 0;
        self.data.resize(CHUNK_BYTES, 0);
        &mut self.data
    }

    /// Forgets which sectors the buffer holds: they may be outdated.
    pub(crate) fn forget(&mut self) {
        self.sectors = 0;
    }

    /// Makes a window over the first `length_bytes`.
    pub(crate) fn window(&mut self, direction: Direction, length_bytes: usize) -> Option<Window> {
        let data = std::mem::take(&mut self.data);
        Window::new(DATA, direction, Width::Word, data, 0..length_bytes)
    }

    /// Makes a window over the next block to be read. If the block is not in the buffer, also fetches sectors behind
    /// it.
    pub(crate) fn read_block(
        &mut self,
        transfer: &Transfer,
        disk: &mut dyn Sectors,
    ) -> Result<Option<Window>, Unreadable> {
        let block = transfer.block_sectors();
        let end = transfer.lba.saturating_add(block);
        let is_here = self.first <= transfer.lba && end <= self.first.saturating_add(self.sectors);
        if !is_here {
            let ahead = transfer.left.min(CHUNK_BYTES as u64 / SECTOR_BYTES).max(block);
            // A bad sector behind this block must not fail the block.
            if !self.fetch(transfer.lba, ahead, disk) && (ahead == block || !self.fetch(transfer.lba, block, disk)) {
                return Err(Unreadable);
            }
        }
        let start = bytes_of(transfer.lba.saturating_sub(self.first));
        let data = std::mem::take(&mut self.data);
        Ok(Window::new(DATA, Direction::In, Width::Word, data, start..start.saturating_add(bytes_of(block))))
    }

    fn fetch(&mut self, lba: u64, sectors: u64, disk: &mut dyn Sectors) -> bool {
        let bytes = self.bytes().get_mut(..bytes_of(sectors));
        let fetched = bytes.is_some_and(|bytes| disk.read(lba.saturating_mul(SECTOR_BYTES), bytes).is_ok());
        if fetched {
            (self.first, self.sectors) = (lba, sectors);
        }
        fetched
    }
}

/// Returns the size of `sectors` in bytes; for transfers, never more than the buffer.
pub(crate) fn bytes_of(sectors: u64) -> usize {
    usize::try_from(sectors).unwrap_or(usize::MAX).saturating_mul(SECTOR)
}
