//! Opening an image that exists, to fill it with other data.

use super::edit::EditWatch;
use super::formats::look_before_writing;
use crate::chain::image::Image;
use crate::file_name::FileName;
use crate::guess::{Format, guess_format};
use crate::open::gate::{Opener, Role};
use crate::open::layers::{ImageOptions, open, read_head};
use crate::open::temporary_files::TemporaryFiles;
use block::{File, Result};
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// As [`open`], for an image that is going to be filled: refuses one whose tables hide data that are in the file, as
/// [`look_before_writing`] does. Each file is opened once: a server may take one client only, and nobody gets between.
pub fn open_to_overwrite(options: &ImageOptions, opener: &dyn Opener, watch: &mut EditWatch<'_>) -> Result<Image> {
    let (has_looked, watch) = (Cell::new(false), RefCell::new(watch));
    open(options, &LooksFirst { inner: opener, format: options.format, has_looked, watch })
}

/// Looks at the first file that is opened for writing, which is the image's own.
struct LooksFirst<'a, 'w> {
    inner: &'a dyn Opener,
    format: Option<Format>,
    has_looked: Cell<bool>,
    watch: RefCell<&'a mut EditWatch<'w>>,
}

impl Opener for LooksFirst<'_, '_> {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let file = self.inner.open(name, role)?;
        if matches!(role, Role::Writable) && !self.has_looked.replace(true) {
            let format = match self.format {
                Some(format) => format,
                None => guess_format(&name.to_string(), &read_head(file.as_ref())?)?.unwrap_or(Format::OF_UNRECOGNISED),
            };
            look_before_writing(&file, format, &mut **self.watch.borrow_mut())?;
        }
        Ok(file)
    }

    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        self.inner.make(path)
    }

    fn unmake(&self, path: &Path) {
        self.inner.unmake(path);
    }

    fn sync_directory_of(&self, path: &Path) -> Result<()> {
        self.inner.sync_directory_of(path)
    }

    fn temporary(&self) -> Result<Box<dyn TemporaryFiles>> {
        self.inner.temporary()
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.inner.canonical(path)
    }
}
