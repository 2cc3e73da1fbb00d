//! Opens the files of an overlay that is kept, and makes them.

use super::common::{Chain, SimOpener};
use super::{DATA, INDEX, open_on};
use block::{Error, ErrorKind, File, Locks, Result};
use ringdisk_image::{FileName, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use testkit::{Request, Session, SimFileOptions, SimStorage};

/// Simulated files, to which others can be added. What is below an overlay is never opened for writing.
pub(super) struct Making(pub(super) SimOpener, pub(super) Mutex<Vec<PathBuf>>, pub(super) Locks);

impl Making {
    pub(super) fn of(storage: &SimStorage) -> Self {
        Self(SimOpener(storage.clone()), Mutex::default(), Locks::Held)
    }
}

impl Opener for Making {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let is_own = [INDEX, DATA].contains(&name.to_string().as_str());
        if role == Role::Writable && !is_own {
            return Err(Error::new(ErrorKind::Denied, format!("'{name}' is opened for writing")));
        }
        self.0.open(name, role)
    }

    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        let path = path.to_str().unwrap();
        let storage = &self.0.0;
        if storage.file(path).is_some() {
            return Ok(None);
        }
        Ok(Some(storage.create(path, 0, SimFileOptions { locks: self.2, ..SimFileOptions::default() })))
    }

    fn unmake(&self, path: &Path) {
        self.1.lock().unwrap().push(path.to_owned());
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// Files of which others are faster: between the making of the index and its lock, they make the overlay and use it.
pub(super) struct Slower {
    pub(super) files: Making,
    pub(super) chain: Chain,
    pub(super) written: Mutex<Vec<u8>>,
}

impl Opener for Slower {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        self.files.open(name, role)
    }

    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        let made = self.files.make(path)?;
        if made.is_some() && path == Path::new(INDEX) {
            let open = |storage: &SimStorage| open_on(&self.chain, storage);
            let mut session = Session::open(&self.files.0.0, &open, 1, 1).unwrap();
            session.call(Request::write(4096, vec![1; 4096])).unwrap();
            *self.written.lock().unwrap() = session.read_all().unwrap();
            session.close().unwrap();
        }
        Ok(made)
    }

    fn unmake(&self, path: &Path) {
        self.files.unmake(path);
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.files.canonical(path)
    }
}
