//! The external data file of an image that changes its size.
//!
//! Each cluster has its place in that file for good, so nothing can be prepared beside it. But nothing uses the part of
//! the file behind the end of the disk. That part is made zeros, as far as the disk will reach, before the header
//! changes. The end that a shorter disk loses is cut off after the new header is durable.

use super::Edit;
use super::resize::{GrowBy, ResizeOptions, Sizes};
use block::{FileOp, IoResult, Result};

/// The change of the data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct DataChange {
    /// The length before the change, if there was one.
    before: Option<u64>,
    /// The length once the change is durable.
    after: Option<u64>,
}

impl Edit<'_, '_> {
    /// Maps the clusters of a raw data file: such a file holds what the guest sees.
    pub(super) fn with_raw_data_mapped(&self, options: &ResizeOptions) -> ResizeOptions {
        let preallocation = match options.preallocation {
            GrowBy::Nothing if self.header.data_file_is_raw() => GrowBy::Tables,
            other => other,
        };
        ResizeOptions { preallocation, ..options.clone() }
    }

    /// Makes the data file as long as the disk will be, by zeros.
    pub(super) async fn grow_data_file(&mut self, sizes: &Sizes, options: &ResizeOptions) -> Result<()> {
        let Some((length, data)) = options.data_file_bytes.zip(self.io.data()) else { return Ok(()) };
        let (old_bytes, new_bytes) = (sizes.old.size_bytes, sizes.new.size_bytes);
        self.data_change.before = Some(length);
        if length > old_bytes {
            let cut = data.start(FileOp::SetLength { length: old_bytes }).await;
            cut.map_err(|error| self.failed(error))?;
        }
        let how = match options.preallocation {
            GrowBy::Nothing => GrowBy::Tables,
            other => other,
        };
        self.fill(data, old_bytes.min(length)..new_bytes, how).await
    }

    /// Plans to cut the data file off, because the disk becomes shorter.
    pub(super) fn shrink_data_file(&mut self, size_bytes: u64) {
        if self.io.data().is_some() {
            self.data_change.after = Some(size_bytes);
        }
    }

    /// Makes the data file durable. Called before the header changes.
    pub(super) async fn flush_data_file(&self) -> IoResult {
        match (self.io.data(), self.data_change.before) {
            (Some(data), Some(_)) => data.start(FileOp::Flush).await,
            _ => Ok(()),
        }
    }

    /// Cuts the data file off, after the header has changed. If that fails, the file is only longer than necessary.
    pub(super) async fn cut_data_file(&self) {
        if let (Some(data), Some(length)) = (self.io.data(), self.data_change.after)
            && let Err(error) = data.start(FileOp::SetLength { length }).await
        {
            tracing::warn!("'{}': its external data file is not cut to {length} bytes: {error}", self.name);
        }
    }

    /// Restores the data file's length. Called if the change is given up.
    pub(super) async fn undo_data_file(&self) {
        if let (Some(data), Some(length)) = (self.io.data(), self.data_change.before) {
            // Only space is lost.
            let _ = data.start(FileOp::SetLength { length }).await;
        }
    }
}
