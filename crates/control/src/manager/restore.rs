//! What a daemon serves when it starts: recorded disks and configured disks.
//!
//! Which recorded disk a configured drive is:
//!
//! 1. The disk that was given in the same words.
//! 2. Else the disk of its name, if it gives the file with which that disk was added.
//! 3. Without a name: the disk that was added with its file, and whose kept scratch overlay is in its `keep` directory,
//!    unless another drive gives the name or the top file of that disk.
//!
//! Rules 2 and 3 only find a disk that has layers or has moved to a copy, and that no drive gives in the same words. A
//! configured disk that no drive gives is forgotten. The start fails if a drive would write to a file that the disk has
//! left. Exceptions: that drive has the disk's name; or the disk has moved to a full copy that some drive gives or that
//! no longer exists. A missing layer is no exception, because its file system may not be mounted.
//!
//! A disk with layers is kept, but not served, while a drive of another name gives a file below them, even for reading.

use super::add::NewDisk;
use super::configured::exports_of_calls;
use super::exports::with_absolute_paths;
use super::{Configured, Manager, absolute_file, lock};
use crate::api::AddExport;
use crate::options::Options;
use crate::record::{Record, RecordedDisk};
use block::{Error, ErrorKind, Result};
use daemon::NodeId;
use drive::{DiskOptions, ExportOptions, absolute};
use std::collections::BTreeMap;

impl Manager {
    /// Serves the disks of the record and of `configured`: the command line or a configuration file. A disk that is in
    /// both is served as the record says. A configured disk that a call removed is not served. A disk that is no longer
    /// configured is forgotten, unless another one would write to a file that it has left: that is an error.
    ///
    /// A recorded disk that cannot be opened does not stop the others: it is logged and listed as failed. The same
    /// holds for a recorded export other than the disk's own; the disk is served without it. A configured disk that
    /// cannot be opened is an error.
    pub fn restore(&self, configured: &[Configured]) -> Result<()> {
        let keys: Vec<String> = configured.iter().map(Configured::key).collect();
        let before = self.records.current();
        let is_forgotten = |disk: &&RecordedDisk| disk.configured.as_ref().is_some_and(|key| !keys.contains(key));
        let mut kept = Record::clone(&before);
        configured.iter().for_each(|given| keep_layers(&mut kept, given, configured));
        let mut not_served = BTreeMap::new();
        for disk in kept.disks.iter().filter(is_forgotten) {
            refuse_left_files(disk, configured)?;
            if let Err(error) = refuse_forgetting(disk, configured).and_then(|()| refuse_forgetting_fleece(disk)) {
                if configured.iter().any(|given| given.name() == Some(&disk.name)) {
                    return Err(error.in_context(format!("another drive has the name '{}'", disk.name)));
                }
                not_served.insert(disk.name.clone(), error.to_string());
            }
        }
        let kept = not_served.keys().cloned().collect();
        self.records.change(|record| {
            configured.iter().for_each(|given| keep_layers(record, given, configured));
            record.forget_unconfigured(&keys, &kept);
        })?;
        self.remove_unfinished()?;
        let record = self.records.current();
        for disk in &record.disks {
            let given = configured.iter().zip(&keys).find(|(_, key)| disk.configured.as_ref() == Some(key));
            let back = match not_served.remove(&disk.name) {
                Some(why) => Err(why),
                None => self.bring_back(disk, given.map(|(given, _)| given)).map_err(|error| error.to_string()),
            };
            if let Err(why) = back {
                tracing::error!(disk = %disk.name, "a disk of the state directory is not served: {why}");
                self.away.fails(&disk.name, why);
            }
        }
        for (given, key) in configured.iter().zip(&keys) {
            if record.removed.contains(key) {
                let text = image::options_without_secrets(&given.text);
                tracing::warn!("{text}: was removed while it was served, and stays away; 'ctl add' brings it back");
            } else if !record.disks.iter().any(|disk| disk.configured.as_ref() == Some(key)) {
                let was_it = |disk: &&RecordedDisk| match given.name() {
                    Some(name) => disk.name == name,
                    None => given.file().is_some_and(|file| disk.has_top(&file)),
                };
                let former = before.disks.iter().filter(is_forgotten).find(was_it);
                self.add_configured(given, former.map(exports_of_calls).unwrap_or_default())?;
            }
        }
        Ok(())
    }

    /// Serves a disk of the command line or of the configuration file, also at the exports that calls had added when it
    /// was given in other words.
    fn add_configured(&self, given: &Configured, of_calls: Vec<AddExport>) -> Result<()> {
        // A disk whose names JSON cannot hold is served, but not recorded: the next start gives it again.
        let options = Options::parse(&given.text).and_then(absolute_file).ok();
        let key = given.key();
        let of_calls = of_calls.into_iter().filter(|export| !given.exports.contains(export));
        let added = self.add(NewDisk {
            drive: &given.drive,
            options,
            own_export: given.serve,
            configured: Some(&key),
            former_tops: &[],
            exports: given.exports.iter().cloned().chain(of_calls).collect(),
            comes_back: false,
            moving: None,
        })?;
        for (index, export) in added.exports.iter().enumerate() {
            let begun = self.begin_recorded(added.node, export);
            if index < given.exports.len() {
                // The next start tries again all that was asked for.
                begun.inspect_err(|_| self.undo_add_of(&added.name, added.node))?;
            }
        }
        Ok(())
    }

    fn bring_back(&self, disk: &RecordedDisk, given: Option<&Configured>) -> Result<()> {
        let mut drive = disk.options.to_drive()?;
        if drive.disk.name.is_none() {
            // The kept overlay was named before the disk had a name.
            let kept = drive::kept_overlay(&drive.disk)?;
            drive.disk.keep_as = kept.and_then(|index| Some(index.file_stem()?.to_owned()));
        }
        drive.disk.name = Some(disk.name.clone());
        drive.disk.former_tops = disk.former_tops.len();
        if let Some(given) = given {
            // A socket may have been passed to this run.
            drive.export.clone_from(&given.drive.export);
            keep_usual_socket(&mut drive.export, &given.drive.disk);
        }
        let node = self.add_with_its_base(disk, &mut drive.disk)?;
        self.records.is_of(&disk.name, node);
        if given.is_some() {
            lock(&self.configured).insert(disk.name.clone(), node);
        }
        self.listen_to_hold(node, &disk.name);
        if disk.own_export {
            let id = self.daemon.add_export(node, &drive.export).inspect_err(|_| self.undo_add(node))?;
            lock(&self.exports).insert(id, None);
        }
        self.restore_exports(node, disk);
        self.take_fleece_off(node, &disk.name);
        Ok(())
    }
}

impl Manager {
    /// Opens a recorded disk. If it died while its image was to get another base, the image says which one it names.
    pub(super) fn add_with_its_base(&self, disk: &RecordedDisk, options: &mut DiskOptions) -> Result<NodeId> {
        let node = self.daemon.add_disk(options)?;
        if disk.leaving_tops.is_empty() {
            return Ok(node);
        }
        let layers = self.daemon.layer_files(node).inspect_err(|_| self.undo_add(node))?;
        let below = layers.get(if options.snapshot { 2 } else { 1 }..).unwrap_or_default();
        let is_old = disk.names_old_base(below);
        let noted =
            self.records.change_disk(&disk.name, if is_old { RecordedDisk::stays } else { RecordedDisk::has_moved });
        noted.inspect_err(|_| self.undo_add(node))?;
        if !is_old {
            return Ok(node);
        }
        // The former tops are opened for writing.
        self.daemon.remove_disk(node, true)?;
        options.former_tops = disk.former_tops.len().saturating_add(disk.leaving_tops.len());
        self.daemon.add_disk(options)
    }
}

/// The usual socket lies beside the file that was given, also when layers were put on that file: guests know it.
pub(super) fn keep_usual_socket(export: &mut ExportOptions, given: &DiskOptions) {
    if export.socket.is_none() && export.socket_descriptor.is_none() {
        export.socket = given.default_socket().map(|socket| absolute(&socket));
    }
}

/// Keeps the layers of a disk that is given in other words than before: a guest that went on with the file below them
/// would lose its writes and destroy the layers. A disk that is given without a name is known by its file.
fn keep_layers(record: &mut Record, given: &Configured, configured: &[Configured]) {
    let Ok(options) = Options::parse(&given.text).and_then(absolute_file) else { return };
    let key = given.key();
    if record.disks.iter().any(|disk| disk.configured.as_ref() == Some(&key)) {
        return;
    }
    let is_given = |disk: &RecordedDisk| {
        configured.iter().any(|other| other.name() == Some(&disk.name)) || gives_top(configured, disk)
    };
    let is_it = |disk: &&mut RecordedDisk| {
        let is_known = disk.configured.as_ref().is_none_or(|key| configured.iter().any(|other| other.key() == *key));
        let is_called_so = given
            .name()
            .map_or_else(|| disk.keeps_in(options.get("keep")) && !is_given(disk), |name| name == disk.name);
        !is_known && is_called_so && disk.has_layers_on(options.get("file"))
    };
    if let Some(disk) = record.disks.iter_mut().find(is_it) {
        let of_calls = exports_of_calls(disk);
        disk.set_options(options.clone());
        disk.configured = Some(key);
        disk.own_export = given.serve;
        disk.exports = given.exports_of(&disk.name).map(with_absolute_paths).collect();
        let new = of_calls.into_iter().filter(|export| !disk.exports.contains(export)).collect::<Vec<_>>();
        disk.exports.extend(new);
    }
}

/// When `disk` is no longer configured, refuses drives that would write to a file that it has left. What its guest has
/// written since is missing there, and its layers would be destroyed.
pub(super) fn refuse_left_files(disk: &RecordedDisk, configured: &[Configured]) -> Result<()> {
    let is_full_copy = disk.files().count() == 1;
    if disk.is_gone_copy() || (is_full_copy && gives_top(configured, disk)) {
        return Ok(());
    }
    configured.iter().try_for_each(|given| refuse_left_file(disk, given))
}

/// Refuses that `given` writes to a file that `disk` has left, unless it has the name of `disk`, which shows intent.
pub(super) fn refuse_left_file(disk: &RecordedDisk, given: &Configured) -> Result<()> {
    let is_another = given.name() != Some(&disk.name);
    let Some(file) = given.written().filter(|file| is_another && disk.has_left(file)) else { return Ok(()) };
    let (name, top) = (&disk.name, image::without_secrets(disk.options.get("file").unwrap_or_default()));
    let file = image::without_secrets(&file);
    let message = format!(
        "'{file}' was the image of the disk '{name}', whose guest has written to '{top}' since: to go on with that, give \
         '{file}' with name={name}, or give '{top}'; to go on with '{file}' alone, leave it out of one start or reload, \
         which forgets '{name}' and its layers"
    );
    Err(Error::new(ErrorKind::BadOption, message))
}

/// Refuses to forget a disk with layers while a drive of another name gives a file below them, even for reading.
pub(super) fn refuse_forgetting(disk: &RecordedDisk, configured: &[Configured]) -> Result<()> {
    let others = configured.iter().filter(|given| given.name() != Some(&disk.name)).filter_map(Configured::file);
    let has_layers = disk.files().count() > 1 && !disk.is_gone_copy();
    let Some(file) = others.filter(|_| has_layers).find(|file| disk.has_left(file)) else { return Ok(()) };
    let (name, file) = (&disk.name, image::without_secrets(&file));
    let message = format!(
        "the disk '{name}' is not given, but '{file}' is, which lies below its layers: they are kept. To go on with them, \
         give '{file}' with name={name}. To forget the disk and its layers, use 'ctl remove {name}', or leave '{file}' out of \
         one start or reload"
    );
    Err(Error::new(ErrorKind::Locked, message))
}

/// Refuses to forget a disk with a fleece on top. Nobody has asked for that layer, and it holds what its guest wrote.
pub(super) fn refuse_forgetting_fleece(disk: &RecordedDisk) -> Result<()> {
    let Some(fleece) = disk.fleece_on_top() else { return Ok(()) };
    let name = &disk.name;
    let message = format!(
        "the disk '{name}' is not given, but '{fleece}' holds what its guest wrote during a backup or a change of its \
         snapshots: both are kept. Give the disk as before, and that is taken back. To forget both, start without this \
         image and this name, and use 'ctl remove {name}'"
    );
    Err(Error::new(ErrorKind::Locked, message))
}

fn gives_top(configured: &[Configured], disk: &RecordedDisk) -> bool {
    configured.iter().filter_map(Configured::file).any(|file| disk.has_top(&file))
}
