//! One handle, and so one lock, for each file of a job that opens the same files several times.

use block::{File, Result};
use image::{FileName, Opener, Role};
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens every file once. A file that will be written must be opened for writing first: a commit's base is a layer
/// below the top, and also the image that is written.
pub(crate) struct SharedOpener<'a> {
    inner: &'a dyn Opener,
    opened: RefCell<HashMap<FileName, Arc<dyn File>>>,
}

impl<'a> SharedOpener<'a> {
    pub(crate) fn new(inner: &'a dyn Opener) -> Self {
        Self { inner, opened: RefCell::default() }
    }
}

impl Opener for SharedOpener<'_> {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let name = match name.path() {
            Some(path) => self.canonical(path)?.into(),
            None => name.clone(),
        };
        if let Some(file) = self.opened.borrow().get(&name) {
            return Ok(Arc::clone(file));
        }
        let file = self.inner.open(&name, role)?;
        self.opened.borrow_mut().insert(name, Arc::clone(&file));
        Ok(file)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.inner.canonical(path)
    }
}
