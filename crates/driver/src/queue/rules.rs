//! What a queue's requests have to keep to.

/// What requests need to know of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) block_bytes: u64,
    pub(crate) read_only: bool,
    pub(crate) flush: bool,
    pub(crate) discard: RangeRules,
    pub(crate) secure_erase: RangeRules,
    pub(crate) write_zeroes: RangeRules,
}

/// What a request for a range, without data, may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeRules {
    /// Zero where the device serves none.
    pub(crate) max_sectors: u32,
    /// Where a range is cut, it is cut at a multiple of this.
    pub(crate) align_sectors: u32,
}

impl RangeRules {
    pub(crate) fn is_served(self) -> bool {
        self.max_sectors > 0
    }
}
