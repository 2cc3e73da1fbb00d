//! The record of what a daemon serves, and the directory that keeps it over restarts.
//!
//! The record is durable before a call is answered: a new file is written beside the old one, synced and renamed, and
//! the directory is synced. A power cut leaves the old record or the new one.

use crate::api::{AddExport, FormerTop};
use crate::options::Options;
use block::{Error, ErrorKind, Result};
use daemon::{NodeId, absolute};
use image::FileName;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The version of the file's format.
const VERSION: u32 = 1;
const FILE: &str = "disks.json";
const NEW_FILE: &str = "disks.json.new";
const LOCK_FILE: &str = "lock";

/// The record of served disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    version: u32,
    pub(crate) disks: Vec<RecordedDisk>,
    /// Keys of configured disks that a call has removed.
    pub(crate) removed: Vec<String>,
}

/// A disk, as the next start serves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordedDisk {
    pub(crate) name: String,
    /// `file` and `format` are those of the top layer.
    pub(crate) options: Options,
    /// Whether it has the export that its options describe.
    pub(crate) own_export: bool,
    /// Its other exports.
    pub(crate) exports: Vec<AddExport>,
    /// The layers below the top that were tops before, the last on top. `file` and `format` become the last of them
    /// when the top layer is taken off.
    pub(crate) former_tops: Vec<Top>,
    /// Images that the user named as its lower layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bases: Vec<String>,
    /// The file that it was added with, if it has moved to a copy since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) moved_from: Option<String>,
    /// A file that a job is making for it, and that is useless if the job does not finish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unfinished: Option<String>,
    /// Fleeces of backups, from before they are made until they are gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) fleeces: Vec<String>,
    /// The directory of its kept scratch overlay, once another layer was put on that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kept_in: Option<String>,
    /// Its key in the command line or the configuration file, if it comes from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) configured: Option<String>,
}

/// The file of a top layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Top {
    file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<String>,
}

impl From<&FormerTop> for Top {
    fn from(top: &FormerTop) -> Self {
        Self { file: whole_name(&top.file), format: top.format.clone() }
    }
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

    /// Drops disks that `configured` no longer gives.
    pub(crate) fn forget_unconfigured(&mut self, configured: &[String]) {
        self.disks.retain(|disk| disk.configured.as_ref().is_none_or(|text| configured.contains(text)));
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
                }
                *old = disk;
            }
            None => self.disks.push(disk),
        }
    }

    pub(crate) fn disk_mut(&mut self, name: &str) -> Option<&mut RecordedDisk> {
        self.disks.iter_mut().find(|disk| disk.name == name)
    }
}

impl RecordedDisk {
    /// Returns the files of its tops, former ones included, and its bases.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        let former = self.former_tops.iter().map(|top| top.file.as_str());
        self.options.get("file").into_iter().chain(former).chain(self.bases.iter().map(String::as_str))
    }

    /// Whether it uses this file, also under another name.
    pub(crate) fn uses(&self, file: &str) -> bool {
        self.files().chain(self.fleeces.iter().map(String::as_str)).any(|used| is_same_file(used, file))
    }

    /// Whether layers were put on it since it was added with this file, also under another name of the file.
    pub(crate) fn has_layers_on(&self, file: Option<&str>) -> bool {
        let first = self.former_tops.first().map(|first| first.file.as_str());
        let mut given = first.into_iter().chain(self.moved_from.as_deref());
        file.is_some_and(|file| given.any(|given| is_same_file(given, file)))
    }

    /// Whether it has left this file: it wrote to it once, and now writes to another.
    pub(crate) fn has_left(&self, file: &str) -> bool {
        let former = self.former_tops.iter().map(|top| top.file.as_str());
        former.chain(self.moved_from.as_deref()).any(|former| is_same_file(former, file))
    }

    /// Whether it has gone to a copy, and the file of that copy is gone. What it has left is no layer of it.
    pub(crate) fn is_gone_copy(&self) -> bool {
        let top = self.options.get("file").and_then(|file| FileName::parse(file).ok());
        let is_gone = top.as_ref().and_then(FileName::path).is_some_and(|path| matches!(path.try_exists(), Ok(false)));
        is_gone && self.files().count() == 1
    }

    /// Whether this is the file of its top layer.
    pub(crate) fn has_top(&self, file: &str) -> bool {
        self.options.get("file").is_some_and(|top| is_same_file(top, file))
    }

    /// Replaces its options. Its layers stay, and so does its socket if the options name none.
    pub(crate) fn set_options(&mut self, options: Options) {
        let layered = !self.former_tops.is_empty() || self.moved_from.is_some();
        let mut options = if layered { self.with_own_top(options) } else { options };
        if let Some(socket) = self.options.get("socket").filter(|_| options.get("socket").is_none()) {
            options.set("socket", socket);
        }
        self.options = options;
    }

    /// Returns `options` with this disk's top layer.
    pub(crate) fn with_own_top(&self, mut options: Options) -> Options {
        for key in ["file", "format"] {
            match self.options.get(key) {
                Some(value) => options.set(key, value),
                None => options.remove(&[key]),
            }
        }
        if self.kept_in.is_some() && self.keeps_in(options.get("keep")) {
            options.remove(&["snapshot", "keep"]);
        }
        options
    }

    /// Whether its kept scratch overlay is in this directory, also under another name, or it has none below its layers.
    pub(crate) fn keeps_in(&self, keep: Option<&str>) -> bool {
        self.kept_in.as_deref().is_none_or(|kept| keep.is_some_and(|keep| is_same_file(kept, keep)))
    }

    /// Records a new qcow2 layer on top.
    pub(crate) fn put_on(&mut self, overlay: &str) {
        self.name_kept_overlay();
        let file = self.options.get("file").unwrap_or_default().to_owned();
        self.former_tops.push(Top { file, format: self.options.get("format").map(str::to_owned) });
        self.options.set("file", overlay);
        self.options.set("format", "qcow2");
    }

    /// It may rest on these, beside its former tops.
    pub(crate) fn may_rest_on(&mut self, bases: &[PathBuf]) {
        for base in bases.iter().map(|base| whole_name(base)) {
            if !self.files().any(|file| file == base) {
                self.bases.push(base);
            }
        }
    }

    /// Names a kept scratch overlay itself as the top: a layer that is put on it rests on it, not on its image.
    fn name_kept_overlay(&mut self) {
        let Ok(Some(index)) = self.options.to_drive().and_then(|drive| drive::kept_overlay(&drive.disk)) else {
            return;
        };
        let index = std::path::absolute(&index).unwrap_or(index).to_string_lossy().into_owned();
        let below = self.options.get("file").unwrap_or_default().to_owned();
        self.kept_in = self.options.get("keep").map(|keep| whole_name(Path::new(keep)));
        self.moved_from = self.moved_from.take().or_else(|| Some(below.clone()));
        self.bases.extend([below, format!("{index}.data")]);
        self.options.remove(&["snapshot", "keep"]);
        self.options.set("file", index);
        self.options.set("format", "scratch");
    }

    /// Removes the layer that was put on last, which does not exist.
    pub(crate) fn undo_put_on(&mut self) {
        if let Some(former) = self.former_tops.last().map(|top| top.file.clone()) {
            self.take_off(&former);
        }
    }

    /// Records that the top will rest on `base`, unless that is one of its layers, and that the `gone` layers above
    /// that will go. Until the image names the new base, it may be opened with its old layers.
    pub(crate) fn rest_on(&mut self, gone: usize, base: Option<String>) {
        let stay = self.former_tops.len().saturating_sub(gone);
        if stay == 0 {
            // It was added with this file.
            let first = self.former_tops.first().map(|first| first.file.clone());
            self.moved_from = self.moved_from.take().or(first);
        }
        let gone = self.former_tops.split_off(stay).into_iter().map(|top| top.file);
        for file in gone.chain(base).collect::<Vec<_>>() {
            if !self.bases.contains(&file) {
                self.bases.push(file);
            }
        }
    }

    /// Moves the disk to a copy of itself. A copy of its top layer rests on the same layers, `below`; a full copy rests
    /// on none.
    pub(crate) fn move_to(&mut self, target: &str, format: &str, below: Option<Vec<String>>) {
        let first = self.former_tops.first().map(|first| first.file.clone());
        let given = first.or_else(|| self.options.get("file").map(str::to_owned));
        self.moved_from = self.moved_from.take().or(given);
        match below {
            Some(below) => below.into_iter().for_each(|file| {
                if !self.bases.contains(&file) {
                    self.bases.push(file);
                }
            }),
            None => (self.former_tops, self.bases) = (Vec::new(), Vec::new()),
        }
        self.options.set("file", target);
        self.options.set("format", format);
        self.unfinished = None;
    }

    /// Records that the top layer was taken off, and that `below` is the new top.
    pub(crate) fn take_off(&mut self, below: &str) {
        let former = self.former_tops.pop().filter(|former| is_same_file(&former.file, below));
        // The record keeps the name that the user gave: layers are compared by their canonical name.
        self.options.set("file", former.as_ref().map_or(below, |former| &former.file));
        match former.and_then(|former| former.format) {
            Some(format) => self.options.set("format", format),
            None => self.options.remove(&["format"]),
        }
    }
}

/// A file's whole path; the name of what lies at a server.
pub(crate) fn whole_name(file: &Path) -> String {
    let is_remote = FileName::parse(file).is_ok_and(|name| name.is_remote());
    let file = if is_remote { file.to_owned() } else { absolute(file) };
    file.to_string_lossy().into_owned()
}

/// Returns the name as its user gave it, which messages may not show: the record is for this user only.
pub(crate) fn recorded_name(name: &FileName) -> String {
    name.look_at().to_string_lossy().into_owned()
}

/// Returns the name of a file that the daemon is to write to, with a whole path.
pub(crate) fn target_name(target: &Path) -> Result<FileName> {
    let name = match FileName::parse(target)? {
        FileName::File(path) => FileName::File(absolute(&path)),
        other => other,
    };
    if name.look_at().to_str().is_none() {
        let message = format!("the path '{name}' is not UTF-8, which the record cannot name");
        return Err(Error::new(ErrorKind::BadOption, message));
    }
    Ok(name)
}

/// Whether two names lead to one file, also through symbolic links.
fn is_same_file(one: &str, other: &str) -> bool {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| absolute(path));
    let name = |name: &str| {
        let name = FileName::parse(name).ok()?;
        name.is_remote().then(|| name.clone()).or_else(|| name.path().map(whole).map(FileName::from))
    };
    one == other || name(one).zip(name(other)).is_some_and(|(one, other)| one.is_same_file(&other))
}

/// The record, in memory and in its directory.
#[derive(Debug, Default)]
pub(crate) struct Records {
    current: Mutex<Arc<Record>>,
    /// Held while a new record is made and written. Readers do not wait for it. Says whether the directory may hold
    /// another record than the current one, because a save has failed half way.
    changing: Mutex<bool>,
    directory: Option<StateDirectory>,
    /// The disks that are served, or were last, under each name.
    nodes: Mutex<BTreeMap<String, NodeId>>,
}

impl Records {
    /// Opens the record in a directory, which is created if it is missing. Two daemons cannot use one directory.
    pub(crate) fn in_directory(path: &Path) -> Result<Self> {
        let directory = StateDirectory::open(path)?;
        let current = Mutex::new(Arc::new(directory.load()?));
        Ok(Self { current, changing: Mutex::default(), directory: Some(directory), nodes: Mutex::default() })
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

    /// From here on, the record under this name is the one of `node`.
    pub(crate) fn is_of(&self, name: &str, node: NodeId) {
        lock(&self.nodes).insert(name.to_owned(), node);
    }

    /// The disk that has the record under this name, or had it last.
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

    /// As [`Records::change`]. A change that fails leaves the record as it is.
    pub(crate) fn try_change(&self, change: impl FnOnce(&mut Record) -> Result<()>) -> Result<()> {
        let mut may_differ = lock(&self.changing);
        let mut record = Record::clone(&self.current());
        change(&mut record)?;
        if record == *self.current() && !*may_differ {
            return Ok(());
        }
        if let Some(directory) = &self.directory {
            if let Err(error) = directory.save(&record) {
                // The new record may still be in the directory, although it is not in force.
                *may_differ = directory.save(&self.current()).is_err();
                return Err(error);
            }
            *may_differ = false;
        }
        *lock(&self.current) = Arc::new(record);
        Ok(())
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
    /// As [`Records::change_disk`]. Another disk of the same name stays as it is.
    pub(crate) fn change(&self, change: impl FnOnce(&mut RecordedDisk)) -> Result<()> {
        self.records.change_disk(&self.name, |disk| {
            if self.records.node_of(&self.name) == Some(self.node) {
                change(disk);
            }
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct StateDirectory {
    path: PathBuf,
    /// The directory itself, for syncs.
    directory: File,
    /// The lock file; the lock lasts as long as it is open.
    _lock: File,
}

impl StateDirectory {
    fn open(path: &Path) -> Result<Self> {
        let failed =
            |what: &str, error| Error::io(format!("cannot {what} the state directory '{}'", path.display()), error);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| failed("make", error))?;
        let lock_file =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path.join(LOCK_FILE));
        let lock_file = lock_file.map_err(|error| failed("write in", error))?;
        flock(&lock_file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let message =
                format!("the state directory '{}' is used by another daemon: give each its own", path.display());
            Error::new(ErrorKind::Locked, message)
        })?;
        let directory = File::open(path).map_err(|error| failed("open", error))?;
        Ok(Self { path: path.to_owned(), directory, _lock: lock_file })
    }

    fn load(&self) -> Result<Record> {
        let file = self.path.join(FILE);
        let text = match std::fs::read(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Record::default()),
            Err(error) => return Err(Error::io(format!("cannot read '{}'", file.display()), error)),
        };
        let bad = |why: String| {
            let message =
                format!("'{}' is not a record of disks: {why}; move it away to begin with none", file.display());
            Error::new(ErrorKind::BadOption, message)
        };
        let record: Record = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        match record.version {
            VERSION => Ok(record),
            other => Err(bad(format!("its version is {other}, this program reads version {VERSION}"))),
        }
    }

    fn save(&self, record: &Record) -> Result<()> {
        let (new, file) = (self.path.join(NEW_FILE), self.path.join(FILE));
        let failed = |error| Error::io(format!("cannot write '{}'", new.display()), error);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
        let mut options = OpenOptions::new();
        let mut written = options.create(true).truncate(true).write(true).mode(0o600).open(&new).map_err(failed)?;
        written.write_all(&text).and_then(|()| written.sync_all()).map_err(failed)?;
        std::fs::rename(&new, &file).and_then(|()| self.directory.sync_all()).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(file: &str) -> RecordedDisk {
        let options = Options::parse(&format!("file={file},format=raw")).unwrap();
        RecordedDisk {
            name: "a".into(),
            options,
            own_export: true,
            exports: Vec::new(),
            former_tops: Vec::new(),
            bases: Vec::new(),
            moved_from: None,
            unfinished: None,
            fleeces: Vec::new(),
            kept_in: None,
            configured: None,
        }
    }

    #[test]
    fn a_layer_on_a_kept_overlay_rests_on_that_whatever_the_configuration_says() {
        let given = Options::parse("file=/a.raw,format=raw,name=a,snapshot=on,keep=/kept,cache=none").unwrap();
        let mut disk = RecordedDisk { options: given.clone(), ..disk("/a.raw") };
        disk.put_on("/b.qcow2");
        assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2,name=a,cache=none");
        assert!(disk.files().eq(["/b.qcow2", "/kept/a.scratch", "/a.raw", "/kept/a.scratch.data"]));
        assert!(disk.has_layers_on(Some("/a.raw")));
        disk.set_options(given.clone());
        assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2,name=a,cache=none");
        disk.take_off("/kept/a.scratch");
        disk.set_options(given);
        assert_eq!(disk.options.to_text(), "file=/kept/a.scratch,format=scratch,name=a,cache=none");
    }

    #[test]
    fn an_export_says_nothing_of_memory_unless_that_was_set() {
        let plain = serde_json::to_value(AddExport::default()).unwrap();
        assert!(plain.get("guest_memory").is_none() && plain.get("guest_memory_max").is_none(), "{plain}");
        let guest_memory = crate::api::GuestMemory::Locked;
        let set = serde_json::to_value(AddExport { guest_memory, ..AddExport::default() }).unwrap();
        assert_eq!(set["guest_memory"], "locked");
    }

    #[test]
    fn a_former_top_at_a_server_keeps_its_name_and_a_file_gets_its_whole_path() {
        let mut disk = disk("/top");
        let top = |file: &str| FormerTop { file: file.into(), format: None };
        let own = absolute(Path::new("own")).display().to_string();
        disk.former_tops = ["https://h/a", "rbd:pool/x", "/a:b", "own"].map(|file| Top::from(&top(file))).to_vec();
        assert!(disk.files().eq(["/top", "https://h/a", "rbd:pool/x", "/a:b", own.as_str()]));
    }

    #[test]
    fn a_record_comes_back_and_only_one_daemon_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let records = Records::in_directory(&path).unwrap();
        records.change(|record| record.disks.push(disk("/a.raw"))).unwrap();
        let kept = records.current();
        assert_eq!(Records::in_directory(&path).unwrap_err().kind(), ErrorKind::Locked);
        drop(records);
        assert_eq!(*Records::in_directory(&path).unwrap().current(), *kept);
    }

    #[test]
    fn layers_go_on_and_come_off_with_their_formats() {
        let mut disk = disk("/a.raw");
        disk.put_on("/b.qcow2");
        assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2");
        disk.put_on("/c.qcow2");
        disk.take_off("/b.qcow2");
        assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2");
        disk.take_off("/a.raw");
        assert_eq!(disk.options.to_text(), "file=/a.raw,format=raw");
    }

    #[test]
    fn a_disk_that_went_over_to_a_copy_keeps_it_whatever_else_its_options_say() {
        let mut moved = disk("/a.raw");
        moved.put_on("/b.qcow2");
        moved.unfinished = Some("/c.qcow2".to_owned());
        let mut top = moved.clone();
        moved.move_to("/c.qcow2", "qcow2", None);
        assert_eq!(moved.options.to_text(), "file=/c.qcow2,format=qcow2");
        assert_eq!((moved.files().count(), &moved.unfinished), (1, &None));
        assert!(moved.has_layers_on(Some("/a.raw")) && !moved.has_layers_on(Some("/b.qcow2")));
        moved.set_options(Options::parse("file=/a.raw,format=raw,cache=none").unwrap());
        assert_eq!(moved.options.get("file"), Some("/c.qcow2"));

        top.move_to("/d.qcow2", "qcow2", Some(vec!["/a.raw".to_owned()]));
        top.take_off("/a.raw");
        assert_eq!(top.options.to_text(), "file=/a.raw,format=raw");
    }

    #[test]
    fn a_disk_whose_top_took_in_all_layers_keeps_it() {
        let mut merged = disk("/a.raw");
        merged.put_on("/b.qcow2");
        merged.rest_on(1, None);
        assert!(merged.has_layers_on(Some("/a.raw")) && merged.has_left("/a.raw"));
        merged.set_options(Options::parse("file=/a.raw,format=raw,cache=none").unwrap());
        assert_eq!(merged.options.to_text(), "file=/b.qcow2,format=qcow2,cache=none");
        let mut alone = disk("/a.raw");
        alone.rest_on(0, Some("/base.raw".to_owned()));
        assert_eq!(alone.moved_from, None);
    }

    #[test]
    fn a_layer_comes_off_a_disk_that_was_given_by_a_link_and_leaves_it_as_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let (own, link) = (dir.path().canonicalize().unwrap().join("own"), dir.path().join("link"));
        std::fs::write(&own, "").unwrap();
        std::os::unix::fs::symlink(&own, &link).unwrap();
        let mut disk = disk(link.to_str().unwrap());
        let given = disk.clone();
        disk.put_on("/fleece");
        disk.take_off(own.to_str().unwrap());
        assert_eq!(disk, given);
        disk.put_on("/b.qcow2");
        assert!(disk.uses(own.to_str().unwrap()) && !disk.uses("/other"));
    }

    #[test]
    fn a_disk_of_another_file_does_not_take_over_a_fleece() {
        let mut old = disk("/a.raw");
        old.fleeces.push("/fleece".into());
        old.put_on("/fleece");
        let mut record = Record { disks: vec![old], ..Record::default() };
        record.put(disk("/fleece"));
        assert_eq!(record.disks[0].fleeces, ["/fleece"]);
        record.put(disk("/b.raw"));
        assert!(record.disks[0].fleeces.is_empty());
    }

    #[test]
    fn a_record_that_is_none_is_refused_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "{\"version\": 1}").unwrap();
        let error = Records::in_directory(dir.path()).unwrap_err();
        assert!(error.to_string().contains(FILE), "{error}");
        std::fs::write(dir.path().join(FILE), r#"{"version": 2, "disks": [], "removed": []}"#).unwrap();
        assert!(Records::in_directory(dir.path()).unwrap_err().to_string().contains("version is 2"));
    }

    #[test]
    fn a_change_that_cannot_be_written_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::in_directory(dir.path()).unwrap();
        std::fs::create_dir(dir.path().join(NEW_FILE)).unwrap();
        assert!(records.change(|record| record.disks.push(disk("/a.raw"))).is_err());
        assert!(records.current().disks.is_empty());
        // Whatever the directory holds, the next change writes the current record.
        std::fs::remove_dir(dir.path().join(NEW_FILE)).unwrap();
        records.change(|_| ()).unwrap();
        assert!(dir.path().join(FILE).exists());
    }
}
