//! How a conversion copies.

use crate::sources::Salvage;

/// The unit in which data are searched for zeros.
pub(crate) const GRAIN_BYTES: u64 = 4096;

/// How to copy.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Runs of zeros of at least this length are not written as data. Zero: everything is written as data.
    pub sparse_bytes: u64,
    /// The target was made for this copy.
    pub target_is_new: bool,
    /// The target reads as zeros everywhere.
    pub target_is_zero: bool,
    /// The target has a backing file that holds what the source's top layer leaves to the layers below it.
    pub top_only: bool,
    /// Whole clusters are compressed, where that makes them smaller.
    pub compress: bool,
    /// Requests in flight on each reactor.
    pub depth: usize,
    /// The most bytes of data in a second.
    pub rate: Option<u64>,
    /// The host copies what it can (`copy_file_range`). Data are then not searched for zeros.
    pub offload: bool,
    /// What cannot be read becomes zeros in the target.
    pub salvage: Option<Salvage>,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            sparse_bytes: GRAIN_BYTES,
            target_is_new: true,
            target_is_zero: true,
            top_only: false,
            compress: false,
            depth: 8,
            rate: None,
            offload: false,
            salvage: None,
        }
    }
}

impl ConvertOptions {
    /// Changes some of them: `ConvertOptions::default().with(|options| options.compress = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
