//! Data that a device lends to the bus.

use crate::Width;
use std::ops::Range;

/// The direction of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the guest: `in`.
    In,
    /// From the guest: `out`.
    Out,
}

/// Bytes that a guest reads or writes at one port of a device, in order.
///
/// A window moves *units*: a unit is what the device's port moves at once. A wider access moves several units. A
/// narrower access moves a whole unit, of which the guest reads or writes only the lower bytes. The upper bytes of an
/// `out` are zero. A 16-bit port does the same with a byte access.
///
/// While a window is open, its bytes belong to the bus. [`Window::into_data`] gives them back.
#[derive(Debug, PartialEq, Eq)]
pub struct Window {
    offset: u16,
    direction: Direction,
    unit: Width,
    data: Vec<u8>,
    at: usize,
    end: usize,
}

impl Window {
    /// Makes a window over `range` of `data`, at the device's port `offset`. `None` if the range is empty, ends behind
    /// the data, or is not a multiple of the unit, so that no access could end it.
    #[must_use]
    pub fn new(offset: u16, direction: Direction, unit: Width, data: Vec<u8>, range: Range<usize>) -> Option<Self> {
        let length = range.end.checked_sub(range.start)?;
        let fits = length > 0 && range.end <= data.len() && length.is_multiple_of(unit.bytes());
        fits.then_some(Self { offset, direction, unit, data, at: range.start, end: range.end })
    }

    /// Returns the device's port.
    #[must_use]
    pub fn offset(&self) -> u16 {
        self.offset
    }

    /// Returns the direction of the data.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the unit, which the port moves at once.
    #[must_use]
    pub fn unit(&self) -> Width {
        self.unit
    }

    /// Returns the number of bytes that have not moved.
    #[inline]
    #[must_use]
    pub fn remaining_bytes(&self) -> usize {
        self.end.saturating_sub(self.at)
    }

    /// Whether the last byte has moved.
    #[inline]
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.at >= self.end
    }

    /// Returns the data, including bytes outside the window.
    #[must_use]
    pub fn into_data(self) -> Vec<u8> {
        self.data
    }

    /// Moves a unit to the guest; zero behind the end. A device calls it itself if windows are off.
    #[inline]
    pub fn take_unit(&mut self) -> u32 {
        self.take(self.unit).unwrap_or(0)
    }

    /// Moves a unit from the guest. Does nothing behind the end.
    #[inline]
    pub fn put_unit(&mut self, value: u32) {
        let _ = self.put(self.unit, value);
    }

    /// Carries out an `in`. `None` if the window ends within it.
    #[inline]
    pub(crate) fn take(&mut self, width: Width) -> Option<u32> {
        let value = match width.max(self.unit) {
            Width::Byte => u32::from(*self.advance::<1>()?.first()?),
            Width::Word => u32::from(u16::from_le_bytes(*self.advance()?)),
            Width::Dword => u32::from_le_bytes(*self.advance()?),
        };
        Some(value & width.mask())
    }

    /// Carries out an `out`. `None` if the window ends within it; then nothing has moved.
    #[inline]
    pub(crate) fn put(&mut self, width: Width, value: u32) -> Option<()> {
        let [first, second, third, fourth] = (value & width.mask()).to_le_bytes();
        match width.max(self.unit) {
            Width::Byte => *self.advance()? = [first],
            Width::Word => *self.advance()? = [first, second],
            Width::Dword => *self.advance()? = [first, second, third, fourth],
        }
        Some(())
    }

    /// Copies as many whole accesses as possible to the guest's string, and returns the number of bytes. Accesses that
    /// are narrower than a unit are for [`Window::take`].
    #[inline]
    pub(crate) fn copy_to(&mut self, width: Width, string: &mut [u8]) -> usize {
        let length = self.whole_accesses(width, string.len());
        let source = self.move_on(length);
        if let (Some(source), Some(target)) = (source, string.get_mut(..length)) {
            target.copy_from_slice(source);
        }
        length
    }

    /// Copies from the guest's string in the same way.
    #[inline]
    pub(crate) fn copy_from(&mut self, width: Width, string: &[u8]) -> usize {
        let length = self.whole_accesses(width, string.len());
        if let (Some(target), Some(source)) = (self.move_on(length), string.get(..length)) {
            target.copy_from_slice(source);
        }
        length
    }

    /// Returns the bytes of whole accesses that fit into the window and into a string of `length`.
    fn whole_accesses(&self, width: Width, length: usize) -> usize {
        let both = length.min(self.remaining_bytes());
        // Widths are powers of two.
        if width < self.unit { 0 } else { both & !width.bytes().wrapping_sub(1) }
    }

    #[inline]
    fn advance<const BYTES: usize>(&mut self) -> Option<&mut [u8; BYTES]> {
        if self.remaining_bytes() < BYTES {
            return None;
        }
        self.move_on(BYTES)?.first_chunk_mut()
    }

    #[inline]
    fn move_on(&mut self, length: usize) -> Option<&mut [u8]> {
        let start = self.at;
        self.at = start.saturating_add(length);
        self.data.get_mut(start..self.at)
    }
}
