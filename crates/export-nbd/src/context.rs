//! What a status of bytes may tell.

/// What a status of bytes may tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// Holes and zeros.
    Allocation,
    /// Which layer has the data.
    Depth,
    /// What was written, by one of the export's bitmaps.
    Bitmap(usize),
}

impl Context {
    /// Its number on the wire.
    pub(crate) fn id(self) -> u32 {
        match self {
            Self::Allocation => 1,
            Self::Depth => 2,
            Self::Bitmap(index) => u32::try_from(index).unwrap_or(u32::MAX).saturating_add(3),
        }
    }
}
