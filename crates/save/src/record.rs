//! The record of a save: which state belongs to which disks. It is replaced in one step.

use block::{Error, ErrorKind, Result};
use control::Options;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const VERSION: u32 = 1;
const FILE: &str = "saved.json";
const NEW_FILE: &str = "saved.json.new";
/// Says that a save is under way, and whether the machine ran when it began.
const UNDER_WAY: &str = "saving.json";
const NEW_UNDER_WAY: &str = "saving.json.new";

/// A machine's state and its disks, as one pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Record {
    version: u32,
    /// One more than the save before.
    pub number: u64,
    /// Milliseconds since 1970.
    pub saved_at_ms: u64,
    /// The file of the machine's state, in the same directory.
    pub state: String,
    /// Whether the machine ran when it was saved.
    pub was_running: bool,
    /// A restore has begun to open the disks' files, which may change their times and no byte that a guest sees.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_being_restored: bool,
    /// Its disks.
    pub disks: Vec<SavedDisk>,
}

/// A disk as it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SavedDisk {
    /// Its name in the daemon.
    pub name: String,
    /// The file that holds it, with the layers below. It does not change any more.
    pub file: PathBuf,
    /// The format of that file.
    pub format: String,
    /// The image into which later saves take back what is above.
    pub base: PathBuf,
    /// The options that the daemon had for it.
    pub options: Options,
    /// The file when it was frozen; `None` while it is taken back into its image, when both show the same.
    pub seen: Option<Seen>,
}

/// What tells whether a file was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Seen {
    inode: u64,
    length_bytes: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl Seen {
    /// How the file is from here on. Its times may be in memory only after a flush of what it holds, so all of it is made
    /// durable: after a power cut it looks the same.
    pub(crate) fn durable(path: &Path) -> Result<Self> {
        let synced = File::open(path).and_then(|file| file.sync_all());
        synced.map_err(|error| failed("make durable", path, error))?;
        Self::of(path)
    }

    /// Whether all but the times is the same.
    fn is_same_file(&self, other: &Self) -> bool {
        (self.inode, self.length_bytes) == (other.inode, other.length_bytes)
    }

    /// How the file is now.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|error| failed("look at", path, error))?;
        Ok(Self {
            inode: meta.ino(),
            length_bytes: meta.len(),
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec(),
        })
    }
}

/// What a save that is under way wants to know if it is run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct UnderWay {
    pub(crate) was_running: bool,
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::io(format!("cannot {what} '{}'", path.display()), error)
}

impl Record {
    /// The next record of `directory`.
    pub(crate) fn next(before: Option<&Self>, was_running: bool) -> Self {
        let number = before.map_or(0, |before| before.number) + 1;
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let saved_at_ms = since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        let state = format!("state-{number}");
        let is_being_restored = false;
        Self { version: VERSION, number, saved_at_ms, state, was_running, is_being_restored, disks: Vec::new() }
    }

    /// The record of `directory`; `None` where nothing was saved.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(FILE);
        let Some(record) = read_json::<Self>(&path)? else { return Ok(None) };
        let bad = |what: String| Error::new(ErrorKind::BadImage, format!("'{}': {what}", path.display()));
        if record.version != VERSION {
            return Err(bad(format!("version {} is not known (this program knows {VERSION})", record.version)));
        }
        let is_plain = Path::new(&record.state).file_name() == Some(record.state.as_ref());
        if is_plain { Ok(Some(record)) } else { Err(bad("the state must be a file in the same directory".to_owned())) }
    }

    /// Puts this record in the place of the one before, durably: after a power cut there is the one or the other.
    pub(crate) fn publish(&self, directory: &Path) -> Result<()> {
        write_json(directory, NEW_FILE, self)?;
        let path = directory.join(FILE);
        std::fs::rename(directory.join(NEW_FILE), &path).map_err(|error| failed("replace", &path, error))?;
        sync_directory(directory)
    }

    /// The machine's state.
    #[must_use]
    pub fn state_path(&self, directory: &Path) -> PathBuf {
        directory.join(&self.state)
    }

    /// Whether the disks' files are as they were when they were saved. With `force`, times count for nothing where a restore
    /// was broken off.
    pub(crate) fn check_disks(&self, force: bool) -> Result<()> {
        let checked = self.disks.iter().try_for_each(|disk| disk.check(force && self.is_being_restored));
        checked.map_err(|error| match self.is_being_restored && !force {
            true => {
                let what = "a restore was broken off while it opened the files. If nobody has written to them since, use \
                            --force";
                Error::new(error.kind(), format!("{error}; {what}"))
            }
            false => error,
        })
    }

    /// Whether all layers were taken back that the save wanted to, and the disks were frozen again.
    pub(crate) fn is_finished(&self) -> bool {
        self.disks.iter().all(|disk| disk.seen.is_some())
    }

    /// Removes states that no record names: of earlier saves, and of those that were broken off.
    pub(crate) fn remove_others(&self, directory: &Path) -> Result<()> {
        remove_states(directory, Some(&self.state))
    }
}

/// The directory, which is made if it is not there. One program at a time saves to it or restores from it.
pub(crate) fn lock_directory(directory: &Path) -> Result<File> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| failed("make", directory, error))?;
    let lock = File::open(directory).map_err(|error| failed("open", directory, error))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let what = format!("'{}': a save or a restore is under way", directory.display());
        return Err(Error::new(ErrorKind::Locked, what));
    }
    Ok(lock)
}

/// Removes states but one.
pub(crate) fn remove_states(directory: &Path, but: Option<&str>) -> Result<()> {
    let entries = std::fs::read_dir(directory).map_err(|error| failed("read", directory, error))?;
    for entry in entries {
        let name = entry.map_err(|error| failed("read", directory, error))?.file_name();
        let Some(name) = name.to_str() else { continue };
        let number = name.strip_prefix("state-").and_then(|number| number.parse::<u64>().ok());
        if number.is_some() && but != Some(name) {
            let path = directory.join(name);
            std::fs::remove_file(&path).map_err(|error| failed("remove", &path, error))?;
        }
    }
    Ok(())
}

impl SavedDisk {
    /// Whether its file is as it was when it was saved, perhaps but for its times.
    fn check(&self, without_times: bool) -> Result<()> {
        let Some(seen) = &self.seen else { return Seen::of(&self.file).map(drop) };
        let now = Seen::of(&self.file)?;
        if now == *seen || (without_times && now.is_same_file(seen)) {
            return Ok(());
        }
        let what = "was changed since it was saved: it no longer belongs to the machine's state";
        Err(Error::new(ErrorKind::BadImage, format!("disk '{}': '{}' {what}", self.name, self.file.display())))
    }
}

impl UnderWay {
    pub(crate) fn read(directory: &Path) -> Result<Option<Self>> {
        read_json(&directory.join(UNDER_WAY))
    }

    pub(crate) fn write(self, directory: &Path) -> Result<()> {
        // A full disk leaves the note that was there.
        write_json(directory, NEW_UNDER_WAY, &self)?;
        let path = directory.join(UNDER_WAY);
        std::fs::rename(directory.join(NEW_UNDER_WAY), &path).map_err(|error| failed("replace", &path, error))?;
        sync_directory(directory)
    }

    pub(crate) fn remove(directory: &Path) -> Result<()> {
        let path = directory.join(UNDER_WAY);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed("remove", &path, error)),
            _ => Ok(()),
        }
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| failed("read", path, error))?,
    };
    let bad = |error| Error::new(ErrorKind::BadImage, format!("'{}': {error}", path.display()));
    serde_json::from_slice(&text).map(Some).map_err(bad)
}

fn write_json(directory: &Path, name: &str, value: &impl Serialize) -> Result<()> {
    let path = directory.join(name);
    let text = serde_json::to_vec_pretty(value).map_err(|error| failed("write", &path, error.into()))?;
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
    let written = file.and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    written.map_err(|error| failed("write", &path, error))
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(directory: &Path) -> Result<()> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("make durable the directory", directory, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_replaces_the_one_before_and_names_files_that_did_not_change() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, "one").unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), None);
        let mut first = Record::next(None, true);
        first.disks.push(SavedDisk {
            name: "root".to_owned(),
            file: image.clone(),
            format: "raw".to_owned(),
            base: image.clone(),
            options: Options::default(),
            seen: Some(Seen::of(&image).unwrap()),
        });
        first.publish(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap().as_ref(), Some(&first));
        let mode = std::fs::metadata(dir.path().join(FILE)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "others may not read it");
        first.check_disks(false).unwrap();
        std::fs::write(&image, "two").unwrap();
        let restored = Record { is_being_restored: true, ..first.clone() };
        assert!(restored.check_disks(false).unwrap_err().to_string().contains("--force"));
        restored.check_disks(true).unwrap();
        std::fs::write(&image, "other").unwrap();
        assert!(restored.check_disks(true).is_err());
        assert!(first.check_disks(true).unwrap_err().to_string().contains("was changed"));
        let second = Record::next(Some(&first), false);
        for name in ["state-1", "state-2", "state-7", "state-x"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        second.publish(dir.path()).unwrap();
        second.remove_others(dir.path()).unwrap();
        let is_there = |name: &str| dir.path().join(name).exists();
        assert_eq!(["state-1", "state-2", "state-7", "state-x"].map(is_there), [false, true, false, true]);
        std::fs::write(dir.path().join(FILE), r#"{"version": 1}"#).unwrap();
        assert!(Record::read(dir.path()).is_err());
    }
}
