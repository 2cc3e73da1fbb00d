//! Whether two names mean one file. The files are compared, so hard links and nodes of one device are the same.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId(u64, Option<u64>);

impl FileId {
    /// Returns the identity of a file. Fails if there is no such file.
    pub(crate) fn of(path: &Path) -> std::io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        Ok(match meta.file_type().is_block_device() {
            true => Self(meta.rdev(), None),
            false => Self(meta.dev(), Some(meta.ino())),
        })
    }
}
