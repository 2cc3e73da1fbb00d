//! A file with our process id, locked as long as we run.

use block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file; removed when this is dropped.
#[derive(Debug)]
pub struct Pidfile {
    path: PathBuf,
    _locked: File,
}

impl Pidfile {
    /// Writes our process id to `path`. A file that a dead process left is taken over; one whose process lives is not.
    pub fn create(path: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| Error::io(format!("cannot write the pidfile '{}'", path.display()), error);
        loop {
            let mut file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Err(held_by_another(path, &mut file));
            }
            if !is_still(path, &file) {
                // Its owner removed it between our open and our lock, so the locked file has no name any more.
                continue;
            }
            file.set_len(0).map_err(failed)?;
            writeln!(file, "{}", std::process::id()).map_err(failed)?;
            return Ok(Self { path: path.to_owned(), _locked: file });
        }
    }
}

fn held_by_another(path: &Path, file: &mut File) -> Error {
    let mut owner = String::new();
    // Only for the message; nothing depends on it.
    let _ = file.take(32).read_to_string(&mut owner);
    let message = format!("the pidfile '{}' belongs to the running process {}", path.display(), owner.trim());
    Error::new(ErrorKind::Locked, message)
}

fn is_still(path: &Path, file: &File) -> bool {
    let named = std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    let opened = file.metadata().map(|meta| (meta.dev(), meta.ino()));
    matches!((named, opened), (Ok(named), Ok(opened)) if named == opened)
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("cannot remove the pidfile '{}': {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_file_is_taken_over_and_a_held_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        std::fs::write(&path, "123456789012\n").unwrap();
        let held = Pidfile::create(&path).unwrap();
        let id = std::process::id().to_string();
        assert_eq!(std::fs::read_to_string(&path).unwrap().trim(), id);
        let message = Pidfile::create(&path).unwrap_err().to_string();
        assert!(message.contains(&id), "{message}");
        drop(held);
        assert!(!path.exists());
        assert!(Pidfile::create(Path::new("/nonexistent/pid")).is_err());
    }
}
