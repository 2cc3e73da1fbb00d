//! How wide an access is.

/// How many bytes one `in` or `out` moves.
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
    /// The width of so many bytes, if there is one.
    #[must_use]
    pub const fn of_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            1 => Some(Self::Byte),
            2 => Some(Self::Word),
            4 => Some(Self::Dword),
            _ => None,
        }
    }

    /// One, two or four.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Word => 2,
            Self::Dword => 4,
        }
    }

    /// The bits that such an access moves.
    #[inline]
    #[must_use]
    pub const fn mask(self) -> u32 {
        match self {
            Self::Byte => 0xff,
            Self::Word => 0xffff,
            Self::Dword => 0xffff_ffff,
        }
    }

    /// The bits of part `index` of a wider access, moved to where the part begins: `of_part` of an `out`.
    #[inline]
    #[must_use]
    pub fn of_part(self, value: u32, index: usize) -> u32 {
        value.checked_shr(self.shift_bits(index)).unwrap_or(0) & self.mask()
    }

    /// Part `index` of a wider access, at its place: the parts of an `in` are joined by `|`.
    #[inline]
    #[must_use]
    pub fn as_part(self, part: u32, index: usize) -> u32 {
        (part & self.mask()).checked_shl(self.shift_bits(index)).unwrap_or(0)
    }

    fn shift_bits(self, index: usize) -> u32 {
        u32::try_from(index.saturating_mul(self.bytes()).saturating_mul(8)).unwrap_or(u32::MAX)
    }
}
