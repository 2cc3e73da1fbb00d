//! Bytes that have arrived and were not looked at yet.

use crate::limits::OPTION_BYTES_MAX;
use nbd_wire::Reader;

/// Room for the longest option, or for many headers at once.
const ROOM_BYTES: usize = 2 * OPTION_BYTES_MAX as usize;

#[derive(Debug)]
pub(crate) struct Input {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Input {
    /// Begins with what was read before.
    pub(crate) fn new(said: &[u8]) -> Self {
        let mut bytes = said.to_vec();
        bytes.resize(ROOM_BYTES, 0);
        Self { bytes, start: 0, end: said.len().min(ROOM_BYTES) }
    }

    pub(crate) fn rest(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    pub(crate) fn reader(&self) -> Reader<'_> {
        Reader::new(self.rest())
    }

    /// Leaves only the last `left` bytes to be read.
    pub(crate) fn keep(&mut self, left: usize) {
        self.start = self.end.saturating_sub(left);
        if left == 0 {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Takes at most `most` bytes from the front.
    pub(crate) fn skip(&mut self, most: usize) -> usize {
        let taken = self.rest().len().min(most);
        self.keep(self.rest().len().saturating_sub(taken));
        taken
    }

    /// Appends what `read` puts into the room that it gets; returns what it says.
    pub(crate) fn fill<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<usize, E> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end.saturating_sub(self.start));
        }
        let count = read(self.bytes.get_mut(self.end..).unwrap_or_default())?;
        self.end = self.end.saturating_add(count).min(self.bytes.len());
        Ok(count)
    }
}
