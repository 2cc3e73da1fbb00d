//! Makes, replaces and removes files so that a power cut leaves either the old state or the new one.
//!
//! Data are durable when they were synced, and a name when its directory was.

use block::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

pub(crate) fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::io(format!("cannot {what} '{}'", path.display()), error)
}

/// Finds a free name for a layer beside its image: the image's name with the first end that is not taken, of a thousand.
pub(crate) fn free_name(image: &Path, end: impl Fn(u32) -> String) -> Result<PathBuf> {
    let named = |number| {
        let mut name = image.as_os_str().to_owned();
        name.push(end(number));
        PathBuf::from(name)
    };
    (0..1000).map(named).find(|path| !path.exists()).ok_or_else(|| {
        let what = format!("'{}' and a thousand more exist: remove those", named(0).display());
        Error::new(ErrorKind::BadOption, what)
    })
}

/// A new file, for its owner only. It must not be relied on before it is durable.
pub(crate) struct NewFile<'a> {
    file: File,
    path: &'a Path,
}

impl<'a> NewFile<'a> {
    /// Creates a file. Fails if there is one of this name.
    pub(crate) fn create(path: &'a Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|error| failed("make", path, error))?;
        note(path, Change::Create);
        Ok(Self { file, path })
    }

    /// Creates a file, or empties one that is no longer needed.
    pub(crate) fn create_or_truncate(path: &'a Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
        let file = file.map_err(|error| failed("write", path, error))?;
        note(path, Change::Create);
        Ok(Self { file, path })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| failed("write", self.path, error))?;
        note(self.path, |name| Change::Write(name, bytes.to_vec()));
        Ok(())
    }

    /// Makes the contents durable, but not the name.
    pub(crate) fn sync(self) -> Result<()> {
        self.file.sync_all().map_err(|error| failed("make durable", self.path, error))?;
        note(self.path, Change::Sync);
        Ok(())
    }
}

/// Puts a file in the place of another of the same directory, durably.
pub(crate) fn replace(directory: &Path, new: &str, old: &str) -> Result<()> {
    let path = directory.join(old);
    std::fs::rename(directory.join(new), &path).map_err(|error| failed("replace", &path, error))?;
    note(&path, |name| Change::Rename(new.to_owned(), name));
    sync_directory(directory)
}

/// Removes a file, which may be gone already.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => {
            note(path, Change::Remove);
            Ok(())
        }
    }
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(directory: &Path) -> Result<()> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("make durable the directory", directory, error))?;
    note(&directory.join("any"), |_| Change::SyncDirectory);
    Ok(())
}

/// A change of a directory, for tests that cut the power.
#[derive(Debug, Clone)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests look at changes"))]
pub(crate) enum Change {
    /// A new, empty file of this name.
    Create(String),
    Write(String, Vec<u8>),
    Sync(String),
    Rename(String, String),
    Remove(String),
    SyncDirectory,
}

#[cfg(not(test))]
#[inline]
fn note(_: &Path, _: impl FnOnce(String) -> Change) {}

#[cfg(test)]
fn note(path: &Path, change: impl FnOnce(String) -> Change) {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if let Some(directory) = path.parent() {
        crate::power_cut::note(directory, change(name));
    }
}
