//! Reads the configuration file again, and adds, removes and changes what differs, while other disks run.

use super::restore::{keep_usual_socket, refuse_left_file, refuse_left_files};
use super::{Configured, Manager, absolute_file, lock};
use crate::api::{AddExport, EventKind, FailedDisk, Reloaded};
use crate::config::Config;
use crate::options::Options;
use crate::record::RecordedDisk;
use block::{Error, ErrorKind, Result};
use drive::{FilterOptions, RunningChange};
use std::path::PathBuf;

/// The configuration file, and the part of it that is in force.
#[derive(Debug)]
pub(super) struct Configuration {
    path: PathBuf,
    present: Config,
}

/// How a disk gets from its old options to its new ones.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    /// Only options that can change under a running guest differ.
    Running,
    /// The disk is closed and opened.
    Anew,
}

impl Manager {
    /// Sets the file that [`Manager::reload`] reads. `present` is its content when it was last read.
    pub fn is_configured_by(&self, path: PathBuf, present: Config) {
        *lock(&self.configuration) = Some(Configuration { path, present });
    }

    /// Whether there is a configuration file.
    #[must_use]
    pub fn has_configuration(&self) -> bool {
        lock(&self.configuration).is_some()
    }

    /// Reads the configuration file again and applies the differences to its former content. Disks that calls have
    /// added stay as they are. An error leaves everything as it was; a failure for one disk does not stop the changes
    /// of others.
    pub fn reload(&self) -> Result<Reloaded> {
        let mut guard = lock(&self.configuration);
        let none = || {
            let message = "the daemon has no configuration file to read again: start it with --config FILE";
            Error::new(ErrorKind::Unsupported, message)
        };
        let configuration = guard.as_mut().ok_or_else(none)?;
        let new = Config::read(&configuration.path)?;
        let mut outcome = Reloaded::default();
        if new.settings != configuration.present.settings {
            let note = "what holds for the daemon as a whole takes effect when it is started again";
            outcome.notes.push(note.to_owned());
        }
        let mut present = Config { drives: Vec::new(), settings: configuration.present.settings.clone() };
        let fail = |outcome: &mut Reloaded, name: &str, error: Error| {
            tracing::error!(disk = name, "the configuration is not in force for a disk: {error}");
            outcome.failed.push(FailedDisk { name: name.to_owned(), error: error.to_string() });
        };
        let recorded = self.records.current();
        let mut stay: Vec<&RecordedDisk> = Vec::new();
        // Removals come first: new disks may need their sockets and images.
        for old in &configuration.present.drives {
            let name = old.name().unwrap_or_default();
            if new.drive(name).is_some() {
                continue;
            }
            let refused = recorded
                .disk(name)
                .map_or(Ok(()), |disk| refuse_left_files(disk, &new.drives).inspect_err(|_| stay.push(disk)));
            match refused.and_then(|()| self.remove_configured(name)) {
                Ok(true) => outcome.removed.push(name.to_owned()),
                Ok(false) => {}
                Err(error) => {
                    fail(&mut outcome, name, error);
                    present.drives.push(old.clone());
                }
            }
        }
        for given in &new.drives {
            let name = given.name().unwrap_or_default();
            let old = configuration.present.drive(name);
            // A disk that stays may not be open: nothing else keeps others from writing to what it has left.
            let refused = stay.iter().try_for_each(|disk| refuse_left_file(disk, given));
            match refused.and_then(|()| self.bring_to(old, given, &mut outcome)) {
                Ok(()) => present.drives.push(given.clone()),
                Err(error) => {
                    fail(&mut outcome, name, error);
                    // The next reload tries the removal again.
                    present.drives.extend(old.filter(|_| self.daemon.disk_named(name).is_some()).cloned());
                }
            }
        }
        configuration.present = present;
        Ok(outcome)
    }

    /// Removes a disk. Returns whether there was one.
    fn remove_configured(&self, name: &str) -> Result<bool> {
        if !self.knows(name) {
            return Ok(false);
        }
        let key = self.records.current().disk(name).and_then(|disk| disk.configured.clone());
        self.remove_disk(name, true)?;
        self.records.change(|record| record.removed.retain(|removed| Some(removed) != key.as_ref()))?;
        Ok(true)
    }

    fn bring_to(&self, old: Option<&Configured>, new: &Configured, outcome: &mut Reloaded) -> Result<()> {
        let name = new.name().unwrap_or_default();
        let has_failed = lock(&self.failed).contains_key(name);
        let Some(old) = old.filter(|_| self.daemon.disk_named(name).is_some()) else {
            let stays_away = old.is_some_and(|old| old.key() == new.key()) && !has_failed;
            if stays_away {
                return Ok(());
            }
            let key = new.key();
            self.records.change(|record| record.removed.retain(|removed| *removed != key))?;
            let before = lock(&self.failed).remove(name);
            self.open_configured(new).inspect_err(|error| {
                if before.is_some() {
                    lock(&self.failed).insert(name.to_owned(), error.to_string());
                }
            })?;
            outcome.added.push(name.to_owned());
            return Ok(());
        };
        if old.key() == new.key() {
            return Ok(());
        }
        let (before, after) = (Options::parse(&old.text)?, Options::parse(&new.text)?);
        if way(&before, &after)? == Way::Anew || old.serve != new.serve {
            self.open_anew(old, new)?;
            outcome.reopened.push(name.to_owned());
            return Ok(());
        }
        self.change_running(name, &before, &after)?;
        self.change_exports(old, new)?;
        self.records.change(|record| {
            if let Some(disk) = record.disk_mut(name) {
                disk.configured = Some(new.key());
            }
        })?;
        outcome.changed.push(name.to_owned());
        Ok(())
    }

    /// Changes the limits of the disk's filters `throttle`, and how its files are opened.
    fn change_running(&self, name: &str, before: &Options, after: &Options) -> Result<()> {
        if before == after {
            return Ok(());
        }
        let node = self.node(name)?;
        let throttles = self.daemon.throttles(node)?;
        let open = self.daemon.disk_options(node)?;
        self.open_files_as(node, &open, &open.with_files_of(&after.to_drive()?.disk))?;
        let limits: Vec<_> = filters(after)?
            .into_iter()
            .filter_map(|filter| match filter {
                FilterOptions::Throttle(options) => Some(options.limits),
                _ => None,
            })
            .collect();
        let options = absolute_file(after.clone())?;
        self.record_of(name, node).change(|disk| disk.set_options(options))?;
        throttles.iter().zip(limits).for_each(|(throttle, limits)| throttle.group().set_limits(limits));
        self.events.publish(EventKind::DiskChanged, Some(name), None, None);
        Ok(())
    }

    fn change_exports(&self, old: &Configured, new: &Configured) -> Result<()> {
        for gone in old.exports.iter().filter(|export| !new.exports.contains(export)) {
            let is_it = |how: &Option<AddExport>| how.as_ref() == Some(gone);
            let id = lock(&self.exports).iter().find(|(_, how)| is_it(how)).map(|(id, _)| id.number());
            match id {
                Some(id) => {
                    self.remove_export(id).map_err(|failure| Error::new(ErrorKind::BadOption, failure.0.message))?;
                }
                None => drop(self.forget_failed_export(|export| export.request == *gone)?),
            }
        }
        let added = new.exports.iter().filter(|export| !old.exports.contains(export));
        added.into_iter().try_for_each(|export| self.add_export(export.clone()).map(drop))
    }

    /// Closes a disk and opens it with its new options, or with the old ones if that fails. Until it is open again, the
    /// record keeps the old state.
    fn open_anew(&self, old: &Configured, new: &Configured) -> Result<()> {
        let name = new.name().unwrap_or_default();
        let recorded = self.records.current().disk(name).map(|disk| disk.exports.clone()).unwrap_or_default();
        let of_calls: Vec<AddExport> = recorded.into_iter().filter(|export| !old.exports.contains(export)).collect();
        self.daemon.remove_disk(self.node(name)?, true)?;
        self.forget_ended_exports();
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
        self.open_configured(new).map_err(|error| match self.open_configured(old) {
            Ok(()) => error.in_context("it was opened again as it was before"),
            Err(second) => {
                lock(&self.failed).insert(name.to_owned(), second.to_string());
                error.in_context(format!("it is not served any more ({second})"))
            }
        })?;
        of_calls.into_iter().try_for_each(|export| self.add_export(export).map(drop))
    }

    /// Opens a disk that the record may have with other options. The disk keeps the layers that were put on it, unless
    /// its options name another file than before.
    fn open_configured(&self, given: &Configured) -> Result<()> {
        let mut given = given.clone();
        let key = given.key();
        let mut options = absolute_file(Options::parse(&given.text)?)?;
        let recorded = self.records.current();
        let recorded = recorded.disk(given.name().unwrap_or_default());
        if let Some(disk) = recorded.filter(|disk| disk.has_layers_on(options.get("file"))) {
            keep_usual_socket(&mut given.drive.export, &given.drive.disk);
            options = disk.with_own_top(options);
            let own = options.to_drive()?.disk;
            let disk = &mut given.drive.disk;
            (disk.file, disk.format, disk.snapshot, disk.keep) = (own.file, own.format, own.snapshot, own.keep);
        }
        if let Some(disk) = recorded.filter(|disk| disk.options.get("file") == options.get("file")) {
            given.drive.disk.former_tops = disk.former_tops.len();
            given.drive.disk.bases = disk.files().map(PathBuf::from).collect();
        }
        self.add(&given.drive, Some(options), given.serve, Some(&key), &[])?;
        given.exports.iter().try_for_each(|export| self.add_export(export.clone()).map(drop))
    }
}

fn filters(options: &Options) -> Result<Vec<FilterOptions>> {
    options.pairs().filter(|(key, _)| *key == "filter").map(|(_, text)| FilterOptions::parse(text)).collect()
}

/// Decides how a disk gets its new options. Limits of filters `throttle` can change under a running guest if the
/// filters themselves stay, and so can the options for opening files.
fn way(before: &Options, after: &Options) -> Result<Way> {
    let has_files_to_open_anew = before.get("snapshot") != Some("on") && before.get("format") != Some("null");
    let others = |options: &Options| {
        let mut pairs: Vec<_> = options.pairs().filter(|(key, _)| *key != "filter").collect();
        if has_files_to_open_anew {
            pairs.retain(|(key, _)| !matches!(RunningChange::of_key(key), Ok(RunningChange::Files)));
        }
        pairs.sort_unstable();
        pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect::<Vec<_>>()
    };
    let without_limits = |options: &Options| -> Result<Vec<FilterOptions>> {
        let mut filters = filters(options)?;
        for filter in &mut filters {
            if let FilterOptions::Throttle(options) = filter {
                options.limits = image::ThrottleLimits::default();
            }
        }
        Ok(filters)
    };
    let same = others(before) == others(after) && without_limits(before)? == without_limits(after)?;
    Ok(if same { Way::Running } else { Way::Anew })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_limits_and_ways_to_open_files_leave_a_disk_running() {
        let options = |text: &str| Options::parse(text).unwrap();
        let before = options("file=/a,name=a,filter=throttle:iops-total=5,filter=delay:ms=1");
        for (text, expected) in [
            ("name=a,file=/a,filter=throttle:iops-total=9,filter=delay:ms=1", Way::Running),
            ("file=/a,name=a,filter=throttle:iops-total=5,filter=delay:ms=2", Way::Anew),
            ("file=/a,name=a,filter=delay:ms=1,filter=throttle:iops-total=5", Way::Anew),
            ("file=/a,name=a,filter=throttle:iops-total=5:group=g,filter=delay:ms=1", Way::Anew),
            ("file=/a,name=a,cache=none,filter=throttle:iops-total=5,filter=delay:ms=1", Way::Running),
            ("file=/a,name=a,serial=S,filter=throttle:iops-total=5,filter=delay:ms=1", Way::Anew),
        ] {
            assert_eq!(way(&before, &options(text)).unwrap(), expected, "{text}");
        }
    }
}
