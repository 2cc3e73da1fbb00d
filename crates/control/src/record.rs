//! The record of what a daemon serves. It is durable before a call is answered.

mod directory;
mod disk;
mod noted_file;
#[cfg(test)]
mod tests;

pub(crate) use self::disk::{RecordedDisk, Top, recorded_name, target_name, whole_name};
pub(crate) use self::noted_file::NotedFile;

#[cfg(test)]
pub(crate) use self::directory::SaveMeets;

use self::directory::StateDirectory;
use block::{Error, ErrorKind, Result};
use daemon::NodeId;
use image::ThrottleLimits;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The version of the file's format.
const VERSION: u32 = 1;

/// The record of served disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    version: u32,
    pub(crate) disks: Vec<RecordedDisk>,
    /// Keys of configured disks that a call has removed.
    pub(crate) removed: Vec<String>,
}

impl Default for Record {
    fn default() -> Self {
        Self { version: VERSION, disks: Vec::new(), removed: Vec::new() }
    }
}

impl Record {
    pub(crate) fn disk(&self, name: &str) -> Option<&RecordedDisk> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// Drops disks that `configured` no longer gives, but not those that are `kept`, by name.
    pub(crate) fn forget_unconfigured(&mut self, configured: &[String], kept: &BTreeSet<String>) {
        let is_given = |disk: &RecordedDisk| disk.configured.as_ref().is_none_or(|text| configured.contains(text));
        self.disks.retain(|disk| is_given(disk) || kept.contains(&disk.name));
        self.removed.retain(|text| configured.contains(text));
    }

    /// Adds a disk, or replaces the one of its name. The disk keeps the old one's layers and fleeces if it has the same
    /// top. Otherwise a fleece may hold the only copy of what guests wrote, and nothing here removes it any more.
    pub(crate) fn put(&mut self, mut disk: RecordedDisk) {
        match self.disks.iter_mut().find(|other| other.name == disk.name) {
            Some(old) => {
                if old.options.get("file") == disk.options.get("file") {
                    if disk.former_tops.is_empty() {
                        disk.former_tops = std::mem::take(&mut old.former_tops);
                    }
                    disk.moved_from = old.moved_from.take();
                    let new = std::mem::replace(&mut disk.bases, std::mem::take(&mut old.bases));
                    for base in new {
                        if !disk.files().any(|file| file == base) {
                            disk.bases.push(base);
                        }
                    }
                    disk.kept_in = old.kept_in.take();
                    disk.fleeces = std::mem::take(&mut old.fleeces);
                    disk.leaving_tops = std::mem::take(&mut old.leaving_tops);
                    disk.leaving_below = old.leaving_below;
                    disk.last_backups = std::mem::take(&mut old.last_backups);
                }
                *old = disk;
            }
            None => self.disks.push(disk),
        }
    }

    /// Gives all disks that share a group of filters `throttle` its limits: when they are opened again, whichever comes
    /// last sets them.
    pub(crate) fn set_group_limits(&mut self, group: &str, limits: ThrottleLimits) {
        self.disks.iter_mut().for_each(|disk| disk.set_group_limits(group, limits));
    }

    pub(crate) fn disk_mut(&mut self, name: &str) -> Option<&mut RecordedDisk> {
        self.disks.iter_mut().find(|disk| disk.name == name)
    }
}

/// The record, in memory and in its directory.
#[derive(Debug, Default)]
pub(crate) struct Records {
    current: Mutex<Arc<Record>>,
    /// Held while a new record is made and written. Readers do not wait for it. Says whether the directory is in doubt: it
    /// may hold another record than the current one, because a save has failed half way.
    changing: Mutex<bool>,
    directory: Option<StateDirectory>,
    /// The disk that has the record under each name.
    nodes: Mutex<BTreeMap<String, NodeId>>,
}

impl Records {
    /// Opens the record in a directory, which is created if it is missing. Two daemons cannot use one directory.
    pub(crate) fn in_directory(path: &Path) -> Result<Self> {
        let directory = StateDirectory::open(path)?;
        let current = Mutex::new(Arc::new(directory.load()?));
        Ok(Self { current, changing: Mutex::default(), directory: Some(directory), nodes: Mutex::default() })
    }

    /// For tests: what the next saves meet.
    #[cfg(test)]
    pub(crate) fn next_saves_meet(&self, met: impl IntoIterator<Item = SaveMeets>) {
        *self.directory.as_ref().unwrap().met.lock().unwrap() = met.into_iter().collect();
    }

    /// Whether the record outlives the process.
    pub(crate) fn is_durable(&self) -> bool {
        self.directory.is_some()
    }

    pub(crate) fn current(&self) -> Arc<Record> {
        Arc::clone(&lock(&self.current))
    }

    /// Changes the record of a disk, if there is one. When this returns without an error, the change is durable.
    pub(crate) fn change_disk(&self, name: &str, change: impl FnOnce(&mut RecordedDisk)) -> Result<()> {
        self.change(|record| {
            if let Some(disk) = record.disk_mut(name) {
                change(disk);
            }
        })
    }

    /// Fails while the directory is in doubt, after another try to end that. What the record says is not what the next
    /// daemon finds then, so nobody may open a disk by it.
    pub(crate) fn check_doubt(&self) -> Result<()> {
        self.change(|_| ())
    }

    /// From here on, the record under this name is the one of `node`.
    pub(crate) fn is_of(&self, name: &str, node: NodeId) {
        lock(&self.nodes).insert(name.to_owned(), node);
    }

    /// Takes a disk off the record, unless the record of this name is another disk's by now. With a `key`, the configured
    /// disk stays away.
    pub(crate) fn forget(&self, name: &str, node: Option<NodeId>, key: Option<String>) -> Result<()> {
        self.change(|record| {
            record.removed.extend(key.filter(|key| !record.removed.contains(key)));
            if self.node_of(name) == node {
                record.disks.retain(|disk| disk.name != name);
            }
        })?;
        let mut nodes = lock(&self.nodes);
        if nodes.get(name).copied() == node {
            nodes.remove(name);
        }
        Ok(())
    }

    /// The disk that has the record under this name. A disk that could not be opened may have none.
    pub(crate) fn node_of(&self, name: &str) -> Option<NodeId> {
        lock(&self.nodes).get(name).copied()
    }

    /// Changes the record. When this returns without an error, the change is durable.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        self.try_change(|record| {
            change(record);
            Ok(())
        })
    }

    /// As [`Records::change`]. A change that fails leaves the record as it is. If the directory is in doubt after that, the
    /// error is of the kind [`ErrorKind::Unsure`]: the next daemon may find this change, or one that failed before.
    pub(crate) fn try_change(&self, change: impl FnOnce(&mut Record) -> Result<()>) -> Result<()> {
        let mut is_in_doubt = lock(&self.changing);
        let current = self.current();
        let mut record = Record::clone(&current);
        let save = |record: &Record, is_in_doubt: &mut bool| match &self.directory {
            Some(directory) if *record != *current || *is_in_doubt => directory.save(record, is_in_doubt),
            _ => Ok(()),
        };
        let Err(error) = change(&mut record).and_then(|()| save(&record, &mut is_in_doubt)) else {
            *lock(&self.current) = Arc::new(record);
            return Ok(());
        };
        // The new record may be in the directory, although it is not in force.
        match save(&current, &mut is_in_doubt) {
            Ok(()) => Err(error),
            Err(_) => Err(error.unsure()),
        }
    }
}

/// The record of one disk, for what goes on after the disk was removed and another one has got its name.
#[derive(Debug, Clone)]
pub(crate) struct DiskRecord {
    pub(crate) records: Arc<Records>,
    pub(crate) name: String,
    pub(crate) node: NodeId,
}

impl DiskRecord {
    /// Changes the record of the disk. Another disk of the same name stays as it is.
    pub(crate) fn change(&self, change: impl FnOnce(&mut RecordedDisk)) -> Result<()> {
        self.records.change(|record| {
            if let Some(disk) = record.disk_mut(&self.name).filter(|_| self.is_current()) {
                change(disk);
            }
        })
    }

    /// As [`DiskRecord::change`]. A change that fails leaves the record as it is.
    pub(crate) fn change_if_it_can(&self, change: impl FnOnce(&mut RecordedDisk) -> Result<()>) -> Result<()> {
        let is_current = |_: &&mut RecordedDisk| self.is_current();
        self.records.try_change(|record| record.disk_mut(&self.name).filter(is_current).map_or(Ok(()), change))
    }

    /// As [`DiskRecord::change`], but fails if the disk is gone. A disk that cannot be recorded is not changed.
    pub(crate) fn try_change(&self, change: impl FnOnce(&mut RecordedDisk)) -> Result<()> {
        self.try_change_with(|record| {
            if let Some(disk) = record.disk_mut(&self.name) {
                change(disk);
            }
        })
    }

    /// As [`DiskRecord::try_change`], with what other disks' records say.
    pub(crate) fn try_change_with(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        self.records.try_change(|record| {
            self.check()?;
            change(record);
            Ok(())
        })
    }

    /// Fails if the disk has no record any more.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        let what = format!("the disk '{}' was removed meanwhile; another one may have its name", self.name);
        Err(Error::new(ErrorKind::Locked, what))
    }

    /// Whether the record under its name is this disk's.
    pub(crate) fn is_current(&self) -> bool {
        self.records.node_of(&self.name) == Some(self.node)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
