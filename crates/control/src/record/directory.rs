//! The directory that keeps the record over restarts.
//!
//! A new file is written beside the old one, synced and renamed, and the directory is synced. A power cut leaves the old
//! record or the new one.

use super::{Record, RecordedDisk, VERSION};
use crate::from_json;
use block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub(super) const FILE: &str = "disks.json";
pub(super) const NEW_FILE: &str = "disks.json.new";
const LOCK_FILE: &str = "lock";

#[derive(Debug)]
pub(super) struct StateDirectory {
    path: PathBuf,
    /// The directory itself, for syncs.
    directory: File,
    /// The lock file; the lock lasts as long as it is open.
    _lock: File,
}

impl StateDirectory {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed =
            |what: &str, error| Error::io(format!("cannot {what} the state directory '{}'", path.display()), error);
        let new: Vec<&Path> = path.ancestors().take_while(|path| !path.exists()).collect();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| failed("make", error))?;
        // What is durable in a directory is lost with the directory's own name.
        new.into_iter().try_for_each(daemon::sync_directory_of)?;
        let lock_file =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path.join(LOCK_FILE));
        let lock_file = lock_file.map_err(|error| failed("write in", error))?;
        flock(&lock_file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            if error != Errno::WOULDBLOCK {
                return failed("lock", error.into());
            }
            let message =
                format!("the state directory '{}' is used by another daemon: give each its own", path.display());
            Error::new(ErrorKind::Locked, message)
        })?;
        let directory = File::open(path).map_err(|error| failed("open", error))?;
        Ok(Self { path: path.to_owned(), directory, _lock: lock_file })
    }

    pub(super) fn load(&self) -> Result<Record> {
        let file = self.path.join(FILE);
        let text = match std::fs::read(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Record::default()),
            Err(error) => return Err(Error::io(format!("cannot read '{}'", file.display()), error)),
        };
        let bad = |why: String| {
            let message = format!(
                "'{}' is not a record of disks: {why}. Put a copy of it back, or move it away to begin with the disks \
                 that the command line or the configuration gives",
                file.display()
            );
            Error::new(ErrorKind::BadOption, message)
        };
        let mut record: Record = from_json::object(&text).map_err(|wrong| bad(wrong.to_string()))?;
        record.disks.iter_mut().for_each(RecordedDisk::bring_up_to_date);
        match record.version {
            VERSION => Ok(record),
            other => Err(bad(format!("its version is {other}, this program reads version {VERSION}"))),
        }
    }

    pub(super) fn save(&self, record: &Record) -> Result<()> {
        let (new, file) = (self.path.join(NEW_FILE), self.path.join(FILE));
        let failed = |error| Error::io(format!("cannot write '{}'", new.display()), error);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
        let mut options = OpenOptions::new();
        let mut written = options.create(true).truncate(true).write(true).mode(0o600).open(&new).map_err(failed)?;
        written.write_all(&text).and_then(|()| written.sync_all()).map_err(failed)?;
        std::fs::rename(&new, &file).and_then(|()| self.directory.sync_all()).map_err(failed)
    }
}
