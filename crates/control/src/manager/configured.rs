//! The disks that the command line or a configuration file gives, and how the record knows them.

use crate::api::AddExport;
use crate::record::{RecordedDisk, whole_name};
use drive::{DiskOptions, DriveOptions};

/// A disk that the command line or a configuration file gives.
#[derive(Debug, Clone)]
pub struct Configured {
    /// The disk and its export.
    pub drive: DriveOptions,
    /// The same as `key=value,...`. The record identifies the disk by this text, from one start to the next.
    pub text: String,
    /// Whether to serve it at the socket of its options, or beside its image.
    pub serve: bool,
    /// Its other exports. An export that names no disk belongs to this one.
    pub exports: Vec<AddExport>,
}

impl Configured {
    /// Returns the name, if the options give one.
    pub(crate) fn name(&self) -> Option<&str> {
        self.drive.disk.name.as_deref()
    }

    /// Returns its other exports; those without a disk get the disk `name`.
    pub(crate) fn exports_of(&self, name: &str) -> impl Iterator<Item = AddExport> {
        self.exports.iter().cloned().map(move |export| match export.disk.is_empty() {
            true => AddExport { disk: name.to_owned(), ..export },
            false => export,
        })
    }

    /// Returns the text by which the record identifies it.
    pub(crate) fn key(&self) -> String {
        let mut key = self.text.clone();
        if !self.serve {
            key.push_str("#no-export");
        }
        for export in &self.exports {
            key.push('#');
            key.push_str(&serde_json::to_string(export).unwrap_or_default());
        }
        key
    }

    /// Returns the file that it writes to: its image or its kept scratch overlay.
    pub(super) fn written(&self) -> Option<String> {
        written_by(&self.drive.disk)
    }

    /// Returns its image.
    pub(super) fn file(&self) -> Option<String> {
        file_of(&self.drive.disk)
    }
}

/// Returns the file that a disk writes to, by its whole name.
pub(super) fn written_by(disk: &DiskOptions) -> Option<String> {
    match disk.snapshot {
        true => drive::kept_overlay(disk).ok()?.map(|index| whole_name(&index)),
        false => file_of(disk).filter(|_| !disk.read_only),
    }
}

fn file_of(disk: &DiskOptions) -> Option<String> {
    let file = disk.file.as_ref()?;
    Some(file.path().map_or_else(|| file.look_at().to_string_lossy().into_owned(), whole_name))
}

/// Returns the exports of a recorded disk that calls have added: the drive that gave the disk has others.
pub(super) fn exports_of_calls(disk: &RecordedDisk) -> Vec<AddExport> {
    let given = disk.configured.as_deref().map(exports_of_key).unwrap_or_default();
    let is_given = |export: &&AddExport| given.iter().any(|given| is_same_export(given, export));
    disk.exports.iter().filter(|export| !is_given(export)).cloned().collect()
}

/// Returns the exports that the key of a drive names.
fn exports_of_key(key: &str) -> Vec<AddExport> {
    let parse = |text: &str| serde_json::Deserializer::from_str(text).into_iter().next()?.ok();
    key.match_indices("#{").filter_map(|(at, _)| parse(key.get(at + 1..)?)).collect()
}

/// Whether a recorded export is the `given` one, whose path may be relative and which may not name its disk.
fn is_same_export(given: &AddExport, recorded: &AddExport) -> bool {
    let has_same_socket = match (&given.socket, &recorded.socket) {
        (Some(given), Some(recorded)) => recorded.ends_with(given),
        (given, recorded) => given == recorded,
    };
    let given = AddExport { disk: recorded.disk.clone(), socket: recorded.socket.clone(), ..given.clone() };
    has_same_socket && given == *recorded
}
