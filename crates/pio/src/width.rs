//! The width of an access.

/// The number of bytes that one `in` or `out` moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Width {
    /// One byte: `inb`, `outb`.
    Byte,
    /// Two bytes: `inw`, `outw`.
    Word,
    /// Four bytes: `inl`, `outl`.
    Dword,
}

impl Width {
    /// Returns the width of this many bytes; `None` if there is none.
    #[must_use]
    pub const fn of_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            1 => Some(Self::Byte),
            2 => Some(Self::Word),
            4 => Some(Self::Dword),
            _ => None,
        }
    }

    /// Returns the number of bytes: one, two or four.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Word => 2,
            Self::Dword => 4,
        }
    }

    /// Returns a mask of the bits that such an access moves.
    #[inline]
    #[must_use]
    pub const fn mask(self) -> u32 {
        match self {
            Self::Byte => 0xff,
            Self::Word => 0xffff,
            Self::Dword => 0xffff_ffff,
        }
    }

    /// Returns part `index` of the value of a wider `out`, moved to the lowest bits.
    #[inline]
    #[must_use]
    pub fn of_part(self, value: u32, index: usize) -> u32 {
        value.checked_shr(self.shift_bits(index)).unwrap_or(0) & self.mask()
    }

    /// Moves part `index` of a wider `in` to its place in the value. The parts are joined by `|`.
    #[inline]
    #[must_use]
    pub fn as_part(self, part: u32, index: usize) -> u32 {
        (part & self.mask()).checked_shl(self.shift_bits(index)).unwrap_or(0)
    }

    fn shift_bits(self, index: usize) -> u32 {
        u32::try_from(index.saturating_mul(self.bytes()).saturating_mul(8)).unwrap_or(u32::MAX)
    }
}
