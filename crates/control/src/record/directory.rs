//! The directory that keeps the record over restarts.
//!
//! A new file is written beside the old one, synced and renamed, and the directory is synced. A power cut leaves the old
//! record or the new one. If the last step fails, nobody knows which.

use super::{Record, RecordedDisk, VERSION};
use crate::from_json;
use block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
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
    /// For tests: what the next saves meet.
    #[cfg(test)]
    pub(super) met: std::sync::Mutex<std::collections::VecDeque<SaveMeets>>,
}

/// What a save meets, for tests.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SaveMeets {
    /// The new file cannot be written.
    NoSpace,
    /// The new file gets the name of the record, and the directory cannot be synced.
    FailedSync,
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
        Ok(Self {
            path: path.to_owned(),
            directory,
            _lock: lock_file,
            #[cfg(test)]
            met: std::sync::Mutex::default(),
        })
    }

    pub(super) fn load(&self) -> Result<Record> {
        let file = self.path.join(FILE);
        // A daemon that was killed may have left it before it was durable. Files that only it names have to outlive it.
        let read = File::open(&file).and_then(|mut opened| {
            let mut text = Vec::new();
            opened.read_to_end(&mut text)?;
            opened.sync_all().and_then(|()| self.directory.sync_all()).map(|()| text)
        });
        let text = match read {
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

    /// Makes a record durable. `is_in_doubt` says whether the directory may hold another record than the last one that was
    /// saved.
    pub(super) fn save(&self, record: &Record, is_in_doubt: &mut bool) -> Result<()> {
        let (new, file) = (self.path.join(NEW_FILE), self.path.join(FILE));
        let failed = |error| Error::io(format!("cannot write '{}'", new.display()), error);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
        #[cfg(test)]
        let met = self.met.lock().unwrap().pop_front();
        #[cfg(test)]
        if met == Some(SaveMeets::NoSpace) {
            return Err(failed(Errno::NOSPC.into()));
        }
        let mut options = OpenOptions::new();
        let mut written = options.create(true).truncate(true).write(true).mode(0o600).open(&new).map_err(failed)?;
        written.write_all(&text).and_then(|()| written.sync_all()).map_err(failed)?;
        *is_in_doubt = true;
        std::fs::rename(&new, &file).map_err(failed)?;
        #[cfg(test)]
        if met == Some(SaveMeets::FailedSync) {
            return Err(failed(Errno::IO.into()));
        }
        self.directory.sync_all().map_err(failed)?;
        *is_in_doubt = false;
        Ok(())
    }
}
