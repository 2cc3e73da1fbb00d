//! The device's rules for requests.

/// The rules for requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) block_bytes: u64,
    pub(crate) read_only: bool,
    pub(crate) flush: bool,
    pub(crate) discard: RangeRules,
    pub(crate) secure_erase: RangeRules,
    pub(crate) write_zeroes: RangeRules,
}

/// The rules for requests that name a range and have no data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeRules {
    /// Zero if the device serves no such requests.
    pub(crate) max_sectors: u32,
    /// A range is cut only at a multiple of this.
    pub(crate) align_sectors: u32,
}

impl RangeRules {
    pub(crate) fn is_served(self) -> bool {
        self.max_sectors > 0
    }
}
