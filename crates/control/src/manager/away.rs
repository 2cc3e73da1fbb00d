//! Disks of the record that are not served at the moment. Nobody else may take their names, or write to the files below
//! their layers, although no lock protects those files.

use super::{Manager, lock};
use block::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

/// The disks that are away, by name.
#[derive(Debug, Default)]
pub(super) struct Away(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Disks that could not be opened, and why.
    failed: BTreeMap<String, String>,
    /// Disks that a reload closes or opens.
    changing: BTreeSet<String>,
}

/// A disk that a reload closes or opens. It is away until this is dropped.
pub(super) struct Changing<'a> {
    away: &'a Away,
    name: String,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        lock(&self.away.0).changing.remove(&self.name);
    }
}

impl Away {
    /// Notes why a disk could not be opened.
    pub(super) fn fails(&self, name: &str, why: String) {
        lock(&self.0).failed.insert(name.to_owned(), why);
    }

    /// Returns the disks that could not be opened, and why.
    pub(super) fn failed(&self) -> Vec<(String, String)> {
        lock(&self.0).failed.clone().into_iter().collect()
    }

    pub(super) fn has_failed(&self, name: &str) -> bool {
        lock(&self.0).failed.contains_key(name)
    }

    /// Removes a disk from those that could not be opened. Returns why it could not.
    pub(super) fn take_failed(&self, name: &str) -> Option<String> {
        lock(&self.0).failed.remove(name)
    }

    /// Notes that a reload closes or opens this disk.
    pub(super) fn changes(&self, name: &str) -> Changing<'_> {
        lock(&self.0).changing.insert(name.to_owned());
        Changing { away: self, name: name.to_owned() }
    }

    /// Refuses a new disk of the name of one that is away.
    pub(super) fn refuse_name(&self, name: &str) -> Result<()> {
        if self.has_failed(name) {
            let message = format!("there is a disk '{name}' already, which could not be opened: remove it first");
            return Err(Error::new(ErrorKind::Locked, message));
        }
        self.not_now(name).map_or(Ok(()), Err)
    }

    /// Returns an error if a reload closes or opens the disk just now.
    pub(super) fn not_now(&self, name: &str) -> Option<Error> {
        let what = || format!("the disk '{name}' is being opened anew just now: try again");
        lock(&self.0).changing.contains(name).then(|| Error::new(ErrorKind::Locked, what()))
    }

    /// Says why a disk that is away cannot be used.
    pub(super) fn absence(&self, name: &str) -> Option<Error> {
        if let Some(why) = lock(&self.0).failed.get(name) {
            let message = format!("the disk '{name}' could not be opened, so it can only be removed: {why}");
            return Some(Error::new(ErrorKind::Unsupported, message));
        }
        self.not_now(name)
    }

    pub(super) fn names(&self) -> Vec<String> {
        let state = lock(&self.0);
        state.failed.keys().chain(&state.changing).cloned().collect()
    }
}

impl Manager {
    /// Refuses that the disk `own`, or a job, writes to files that may lie below the layers of a disk that is away.
    pub(crate) fn refuse_writing_below(&self, own: Option<&str>, files: &[String]) -> Result<()> {
        let record = self.records.current();
        let away = self.away.names().into_iter().filter(|name| Some(name.as_str()) != own);
        for disk in away.filter_map(|name| record.disk(&name).cloned()) {
            let Some(file) = files.iter().find(|file| disk.rests_on(file)) else { continue };
            let (name, top) = (&disk.name, image::without_secrets(disk.options.get("file").unwrap_or_default()));
            let file = image::without_secrets(file);
            let message = format!(
                "'{file}' lies below '{top}', the top layer of the disk '{name}', which is not open: writing to the file \
                 would destroy that disk. Open '{name}' again (by a reload or a start), or forget it and its layers by 'ctl \
                 remove {name}'"
            );
            return Err(Error::new(ErrorKind::Locked, message));
        }
        Ok(())
    }
}
