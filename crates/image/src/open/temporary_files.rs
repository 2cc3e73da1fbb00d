//! Files that a disk needs until it is closed.

use block::{File, Result};
use format_scratch::Space;
use std::path::PathBuf;
use std::sync::Arc;

/// The two files of a scratch overlay, both empty and without names.
pub struct ScratchFiles {
    /// The index. It will be mapped, so it is open for reading and writing.
    pub index: std::fs::File,
    /// The data.
    pub data: Arc<dyn File>,
    /// The space of the index, and that of the data.
    pub spaces: [Arc<dyn Space>; 2],
}

/// Makes files that disappear when nobody has them open any more, even after a crash.
pub trait TemporaryFiles {
    /// Returns their directory, for messages.
    fn directory(&self) -> PathBuf;

    /// Makes the files of a scratch overlay.
    fn scratch(&self) -> Result<ScratchFiles>;

    /// Makes one empty file for an image.
    fn image(&self) -> Result<Arc<dyn File>>;
}
