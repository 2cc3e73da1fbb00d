//! Cuts a request's window into pieces.

use memory::Window;

/// A window that is taken piece by piece.
pub(crate) struct Pieces<'a> {
    offset: u64,
    data: &'a Window,
    taken: usize,
}

impl<'a> Pieces<'a> {
    pub(crate) fn new(offset: u64, data: &'a Window) -> Self {
        Self { offset, data, taken: 0 }
    }

    /// Returns the offset and length of the rest; `None` if nothing is left.
    pub(crate) fn rest(&self) -> Option<(u64, u64)> {
        let left = self.data.length_bytes().saturating_sub(self.taken);
        (left > 0).then_some((self.offset.saturating_add(self.taken as u64), left as u64))
    }

    pub(crate) fn remaining(&self) -> Window {
        self.data.slice(self.taken, self.data.length_bytes().saturating_sub(self.taken))
    }

    pub(crate) fn take(&mut self, length_bytes: u64) -> Window {
        let left = self.data.length_bytes().saturating_sub(self.taken);
        let length = usize::try_from(length_bytes).unwrap_or(left).min(left);
        let skip = self.taken;
        self.taken = self.taken.saturating_add(length);
        match (skip, length == self.data.length_bytes()) {
            (0, true) => self.data.clone(),
            _ => self.data.slice(skip, length),
        }
    }
}
