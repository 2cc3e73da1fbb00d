//! Temporary files for a disk whose writes are dropped in the end.

use block::{Error, File, Result};
use engine::{CacheMode, OpenOptions};
use image::{HostSpace, ScratchFiles, Space, TemporaryFiles};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Makes files in the directory for temporary files (`TMPDIR`). They never have a name, so they disappear when their
/// process ends, however it ends.
pub(crate) struct InTemporaryDirectory {
    directory: PathBuf,
    options: OpenOptions,
}

impl InTemporaryDirectory {
    /// Opens files with the engine of `options`. They are never made durable, so they go through the page cache.
    pub(crate) fn new(options: &OpenOptions) -> Self {
        let options = options.clone().with(|options| {
            options.read_only = false;
            options.lock = false;
            options.sync = false;
            options.cache = CacheMode::Unsafe;
        });
        Self { directory: std::env::temp_dir(), options }
    }

    fn file(&self) -> Result<std::fs::File> {
        let file = tempfile::tempfile_in(&self.directory).map_err(|error| {
            let directory = self.directory.display();
            let what = format!("cannot make a temporary file in '{directory}' for snapshot=on (choose another TMPDIR)");
            Error::io(what, error)
        })?;
        // A file system that writes each time to a new place needs more space than was reserved, and may compress. Others
        // refuse this, and have nothing to turn off.
        let _ = engine::disable_copy_on_write_of(&file);
        Ok(file)
    }

    fn opened(&self, what: &str, file: std::fs::File) -> Result<Arc<dyn File>> {
        let name = format!("{what} in {}", self.directory.display());
        engine::open_fd(OwnedFd::from(file), &name, &self.options)
    }
}

impl TemporaryFiles for InTemporaryDirectory {
    fn directory(&self) -> PathBuf {
        self.directory.clone()
    }

    fn scratch(&self) -> Result<ScratchFiles> {
        let (index, data) = (self.file()?, self.file()?);
        let space_of = |file: &std::fs::File| {
            let copy = file.try_clone().map_err(|error| Error::io("cannot duplicate a temporary file", error))?;
            Ok::<Arc<dyn Space>, Error>(Arc::new(HostSpace::of(copy)))
        };
        let spaces = [space_of(&index)?, space_of(&data)?];
        Ok(ScratchFiles { index, data: self.opened("temporary data", data)?, spaces })
    }

    fn image(&self) -> Result<Arc<dyn File>> {
        self.opened("a temporary image", self.file()?)
    }
}
