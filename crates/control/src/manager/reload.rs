//! Reads the configuration file again, and adds, removes and changes what differs, while other disks run.
//!
//! A call may remove a configured disk, and another may give its name to another disk. A reload leaves that one alone.

use super::add::NewDisk;
use super::configured::exports_of_calls;
use super::exports::with_absolute_paths;
use super::restore::{
    keep_usual_socket, refuse_forgetting, refuse_forgetting_fleece, refuse_left_file, refuse_left_files,
};
use super::{Configured, Manager, absolute_file, lock};
use crate::api::{AddExport, EventKind, FailedDisk, Reloaded};
use crate::config::Config;
use crate::options::Options;
use crate::record::RecordedDisk;
use block::{Error, ErrorKind, Result};
use daemon::NodeId;
use drive::{FilterOptions, RunningChange};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

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

/// What has the name of a drive of the configuration.
enum Present {
    /// The disk that serves the drive.
    Served(NodeId),
    /// That disk, which could not be opened.
    Failed,
    /// A disk that a call has added.
    OfACall,
    Nothing,
}

impl Manager {
    /// Sets the file that [`Manager::reload`] reads. `present` is its content when it was last read.
    pub fn is_configured_by(&self, path: PathBuf, present: Config) {
        *lock(&self.configuration) = Some(Configuration { path, present });
        self.has_configuration.store(true, Ordering::Release);
    }

    /// Whether there is a configuration file. It never waits for a reload.
    #[must_use]
    pub fn has_configuration(&self) -> bool {
        self.has_configuration.load(Ordering::Acquire)
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
        let recorded = self.records.current();
        let (mut stay, mut not_opened): (Vec<&RecordedDisk>, Vec<FailedDisk>) = Default::default();
        // Removals come first: new disks may need their sockets and images.
        for old in &configuration.present.drives {
            let name = old.name().unwrap_or_default();
            if new.drive(name).is_some() {
                continue;
            }
            let disk = recorded.disk(name).filter(|disk| disk.configured.is_some());
            let refused = disk.map_or(Ok(()), |disk| {
                let refused = refuse_left_files(disk, &new.drives).and_then(|()| refuse_forgetting(disk, &new.drives));
                // A disk that is served takes its fleece back when it is closed.
                let refused = refused.and_then(|()| match self.daemon.disk_named(name) {
                    Some(_) => Ok(()),
                    None => refuse_forgetting_fleece(disk),
                });
                refused.inspect_err(|_| stay.push(disk))
            });
            if let Err(error) = refused.and_then(|()| self.remove_configured(name, &mut outcome)) {
                fail(&mut outcome, name, &error);
                // A disk that could not be closed is gone, too.
                present.drives.extend(Some(old).filter(|_| self.knows(name)).cloned());
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
                    fail(&mut outcome, name, &error);
                    if !self.knows(name) {
                        let error = format!("the last reload could not open it: {error}");
                        not_opened.push(FailedDisk { name: name.to_owned(), error });
                    }
                    // The next reload tries the removal again.
                    present.drives.extend(old.filter(|_| self.daemon.disk_named(name).is_some()).cloned());
                }
            }
        }
        configuration.present = present;
        *lock(&self.not_opened) = not_opened;
        Ok(outcome)
    }

    fn present(&self, name: &str) -> Present {
        match self.daemon.disk_named(name) {
            Some(node) if lock(&self.configured).get(name) == Some(&node) => Present::Served(node),
            Some(_) => Present::OfACall,
            None if !self.away.has_failed(name) => Present::Nothing,
            None => match self.records.current().disk(name) {
                Some(disk) if disk.configured.is_none() => Present::OfACall,
                _ => Present::Failed,
            },
        }
    }

    /// Removes the disk of a drive that is no longer given, if it is served or has failed.
    fn remove_configured(&self, name: &str, outcome: &mut Reloaded) -> Result<()> {
        match self.present(name) {
            // If the drive is given again, it is served again.
            Present::Served(node) => self.remove_served(name, node, true, None)?,
            Present::Failed => self.forget_failed(name, None)?,
            Present::OfACall => {
                outcome.notes.push(format!("the disk '{name}' stays: a command has added it"));
                return Ok(());
            }
            Present::Nothing => return Ok(()),
        }
        outcome.removed.push(name.to_owned());
        Ok(())
    }

    fn bring_to(&self, old: Option<&Configured>, new: &Configured, outcome: &mut Reloaded) -> Result<()> {
        let name = new.name().unwrap_or_default();
        let is_same = old.is_some_and(|old| old.key() == new.key());
        let (node, old) = match (self.present(name), old) {
            // A call has removed it.
            (Present::OfACall | Present::Nothing, _) if is_same => return Ok(()),
            (Present::Served(node), _) if is_same => {
                let failed = self.take_failed_exports(node);
                self.begin_all(node, name, &failed, outcome);
                return Ok(());
            }
            (Present::Served(node), Some(old)) => (node, old),
            (Present::Failed | Present::Nothing, _) => {
                self.open_again(new, outcome)?;
                outcome.added.push(name.to_owned());
                return Ok(());
            }
            (Present::OfACall | Present::Served(_), _) => {
                let message = format!(
                    "a disk '{name}' was added by a command, and stays: remove it ('ctl remove {name}'), then reload"
                );
                return Err(Error::new(ErrorKind::Locked, message));
            }
        };
        let (before, after) = (Options::parse(&old.text)?, Options::parse(&new.text)?);
        if way(&before, &after)? == Way::Anew || old.serve != new.serve {
            self.open_anew(node, old, new, outcome)?;
            outcome.reopened.push(name.to_owned());
            return Ok(());
        }
        self.change_running(name, node, &before, &after)?;
        self.change_exports(node, old, new, outcome)?;
        self.record_of(name, node).try_change(|disk| disk.configured = Some(new.key()))?;
        outcome.changed.push(name.to_owned());
        Ok(())
    }

    /// Changes the limits of the disk's filters `throttle`, and how its files are opened.
    fn change_running(&self, name: &str, node: NodeId, before: &Options, after: &Options) -> Result<()> {
        if before == after {
            return Ok(());
        }
        let files = self.changes.files_of(node);
        let _changing = lock(&files);
        let throttles = self.daemon.throttles(node)?;
        let open = self.daemon.disk_options(node)?;
        self.open_files_as(node, &open, &open.with_files_of(&after.to_drive()?.disk))?;
        let limits: Vec<_> = filters(after)?
            .into_iter()
            .filter_map(|filter| match filter {
                FilterOptions::Throttle(options) => Some(options),
                _ => None,
            })
            .collect();
        let options = absolute_file(after.clone())?;
        let _limits = lock(&self.changes.limits);
        self.record_of(name, node).try_change_with(|record| {
            if let Some(disk) = record.disk_mut(name) {
                disk.set_options(options);
            }
            for limits in &limits {
                limits.group.iter().for_each(|group| record.set_group_limits(group, limits.limits));
            }
        })?;
        throttles.iter().zip(limits).for_each(|(throttle, limits)| throttle.group().set_limits(limits.limits));
        self.events.publish(EventKind::DiskChanged, Some(name), None, None);
        Ok(())
    }

    fn change_exports(&self, node: NodeId, old: &Configured, new: &Configured, outcome: &mut Reloaded) -> Result<()> {
        let [old, given] = [old, new].map(|drive| drive.exports.iter().cloned().map(with_absolute_paths));
        let (old, given): (Vec<AddExport>, Vec<AddExport>) = (old.collect(), given.collect());
        for gone in old.iter().filter(|export| !given.contains(export)) {
            match self.export_of(node, gone) {
                Some(id) => {
                    let removed = self.remove_export(id.number());
                    removed.map_err(|failure| Error::new(ErrorKind::BadOption, failure.0.message))?;
                }
                None => {
                    self.forget_failed_export(|export| export.node == node && export.request == *gone)?;
                }
            }
        }
        let name = new.name().unwrap_or_default();
        let mut added = self.take_failed_exports(node);
        let is_new = |export: &AddExport| {
            !old.contains(export) && !added.contains(export) && self.export_of(node, export).is_none()
        };
        let new: Vec<AddExport> = given.into_iter().filter(is_new).collect();
        added.extend(new.iter().cloned());
        self.record_of(name, node).try_change(|disk| disk.exports.extend(new))?;
        self.begin_all(node, name, &added, outcome);
        Ok(())
    }

    /// Begins exports that are in the record. The outcome names those that cannot begin.
    fn begin_all(&self, node: NodeId, name: &str, exports: &[AddExport], outcome: &mut Reloaded) {
        for export in exports {
            if let Err(error) = self.begin_recorded(node, export) {
                fail(outcome, name, &error.in_context("is served, but without one of its exports"));
            }
        }
    }

    /// Closes a disk and opens it with its new options, or with the old ones if that fails. Until it is open again, the
    /// record keeps the old state. Exports that calls have added stay.
    fn open_anew(&self, node: NodeId, old: &Configured, new: &Configured, outcome: &mut Reloaded) -> Result<()> {
        let name = new.name().unwrap_or_default();
        self.records.check_doubt()?;
        let _changing = self.away.changes(name);
        if let Err(error) = self.daemon.remove_disk(node, true) {
            if self.daemon.disk_named(name) == Some(node) {
                return Err(error);
            }
            // A disk that could not be closed is gone, too.
            tracing::error!(disk = name, "could not be closed: {error}");
        }
        self.forget_ended_exports();
        // They are in the record, and are begun again.
        self.take_failed_exports(node);
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
        self.open_configured(new, outcome).map_err(|error| match self.open_configured(old, outcome) {
            Ok(()) => error.in_context("it was opened again as it was before"),
            Err(second) => {
                self.away.fails(name, second.to_string());
                error.in_context(format!("it is not served any more ({second})"))
            }
        })
    }

    /// Opens a disk that is not open: a new one, one that a call has removed, or one that could not be opened.
    fn open_again(&self, given: &Configured, outcome: &mut Reloaded) -> Result<()> {
        let (name, key) = (given.name().unwrap_or_default(), given.key());
        let _changing = self.away.changes(name);
        self.records.change(|record| record.removed.retain(|removed| *removed != key))?;
        let before = self.away.take_failed(name);
        self.open_configured(given, outcome).inspect_err(|error| {
            if before.is_some() {
                self.away.fails(name, error.to_string());
            }
        })
    }

    /// Opens a disk that the record may have with other options. The disk keeps the layers that were put on it, unless
    /// its options name another file than before, and the exports that calls have added. The outcome names exports that
    /// cannot begin.
    fn open_configured(&self, given: &Configured, outcome: &mut Reloaded) -> Result<()> {
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
        let recorded_top = recorded.filter(|disk| disk.options.get("file") == options.get("file"));
        if let Some(disk) = recorded_top {
            given.drive.disk.former_tops = disk.former_tops.len();
            given.drive.disk.bases = disk.files().map(PathBuf::from).collect();
        }
        let moving = recorded_top.filter(|disk| !disk.leaving_tops.is_empty());
        let mut exports = given.exports.clone();
        let of_calls = recorded.map(exports_of_calls).unwrap_or_default();
        exports.extend(of_calls.into_iter().filter(|export| !given.exports.contains(export)));
        let added = self.add(NewDisk {
            drive: &given.drive,
            options: Some(options),
            own_export: given.serve,
            configured: Some(&key),
            former_tops: &[],
            exports,
            comes_back: true,
            moving,
        })?;
        self.begin_all(added.node, &added.name, &added.exports, outcome);
        self.take_fleece_off(added.node, &added.name);
        Ok(())
    }
}

fn fail(outcome: &mut Reloaded, name: &str, error: &Error) {
    tracing::error!(disk = name, "the configuration is not in force for a disk: {error}");
    outcome.failed.push(FailedDisk { name: name.to_owned(), error: error.to_string() });
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
