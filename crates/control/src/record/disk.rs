//! One disk of the record: its options, and how its layers came to be.

use super::noted_file::{NotedFile, one_or_more};
use crate::api::{AddExport, FormerTop};
use crate::options::Options;
use block::{Error, ErrorKind, Result};
use daemon::{FileIdentity, TakenOff};
use drive::{FilterOptions, ThrottleOptions, absolute};
use image::{FileName, Format, ThrottleLimits};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

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
    /// Files that jobs and snapshots are making for it, and that are useless if these do not finish.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_more")]
    pub(crate) unfinished: Vec<NotedFile>,
    /// In a record of an older build, which file the only unfinished one is.
    #[serde(default, skip_serializing)]
    pub(crate) unfinished_made: Option<FileIdentity>,
    /// Former tops that go from below the top, the last on top, while its image may still name them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) leaving_tops: Vec<Top>,
    /// How many former tops stay above those.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) leaving_below: usize,
    /// The last backups that the next ones with their bitmaps can rest on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) last_backups: Vec<LastBackup>,
    /// Fleeces of backups and of changes of snapshots, from before they are made until they are gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) fleeces: Vec<NotedFile>,
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
    pub(super) file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<String>,
}

/// A backup with a bitmap that notes what was written since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LastBackup {
    bitmap: String,
    /// The layer that has the bitmap.
    layer: String,
    /// The backup's path.
    pub(crate) backup: String,
    /// The file that has this path. Another one is not that backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<FileIdentity>,
}

impl LastBackup {
    /// Whether its file is there, and no other that got its path.
    pub(crate) fn is_there(&self) -> bool {
        let found = std::fs::metadata(&self.backup).ok().map(|found| FileIdentity::of(&found));
        found.is_some() && found == self.file
    }
}

impl From<&FormerTop> for Top {
    fn from(top: &FormerTop) -> Self {
        Self { file: whole_name(&top.file), format: top.format.clone() }
    }
}

impl Top {
    pub(crate) fn file(&self) -> &str {
        &self.file
    }
}

impl RecordedDisk {
    /// Gives a disk from a record of an older build its present form.
    pub(super) fn bring_up_to_date(&mut self) {
        let made = self.unfinished_made.take();
        if let Some(file) = self.unfinished.first_mut() {
            file.made = file.made.or(made);
        }
    }

    /// Returns the files of its tops, former ones included, and its bases.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        let former = self.former_tops.iter().chain(&self.leaving_tops).map(|top| top.file.as_str());
        self.options.get("file").into_iter().chain(former).chain(self.bases.iter().map(String::as_str))
    }

    /// Whether it uses this file, also under another name.
    pub(crate) fn uses(&self, file: &str) -> bool {
        self.files().chain(self.fleeces.iter().map(|fleece| &*fleece.file)).any(|used| is_same_file(used, file))
    }

    /// Whether layers were put on it since it was added with this file, also under another name of the file.
    pub(crate) fn has_layers_on(&self, file: Option<&str>) -> bool {
        let first = self.former_tops.first().map(|first| first.file.as_str());
        let mut given = first.into_iter().chain(self.moved_from.as_deref());
        file.is_some_and(|file| given.any(|given| is_same_file(given, file)))
    }

    /// Whether it has left this file: it wrote to it once, and now writes to another.
    pub(crate) fn has_left(&self, file: &str) -> bool {
        let former = self.former_tops.iter().chain(&self.leaving_tops).map(|top| top.file.as_str());
        former.chain(self.moved_from.as_deref()).any(|former| is_same_file(former, file))
    }

    /// Whether this file may lie below its top layer, also under another name.
    pub(crate) fn rests_on(&self, file: &str) -> bool {
        let tops = usize::from(self.options.get("file").is_some());
        self.files().skip(tops).any(|below| is_same_file(below, file))
    }

    /// Sets the limits of its filters `throttle` that are of a group.
    pub(super) fn set_group_limits(&mut self, group: &str, limits: ThrottleLimits) {
        let is_of_group = |text: &str| match FilterOptions::parse(text) {
            Ok(FilterOptions::Throttle(options)) => options.group.as_deref() == Some(group),
            _ => false,
        };
        let mut new = ThrottleOptions::of_limits(limits);
        new.group = Some(group.to_owned());
        self.options.replace_all("filter", is_of_group, &new.to_text());
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

    /// The fleece that is its top: a job that did not come to its end has left it, with what guests wrote.
    pub(crate) fn fleece_on_top(&self) -> Option<&str> {
        self.options.get("file").filter(|top| self.fleeces.iter().any(|fleece| fleece.file == *top))
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

    /// Records a new layer on top.
    pub(crate) fn put_on(&mut self, overlay: &str) {
        self.name_kept_overlay();
        let file = self.options.get("file").unwrap_or_default().to_owned();
        self.former_tops.push(Top { file, format: self.options.get("format").map(str::to_owned) });
        self.options.set("file", overlay);
        self.options.set("format", Format::OF_OVERLAYS.to_string());
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
        let data = Format::OF_KEPT.data_file_of(Path::new(&index));
        self.bases.push(below);
        self.bases.extend(data.map(|data| data.to_string_lossy().into_owned()));
        self.options.remove(&["snapshot", "keep"]);
        self.options.set("file", index);
        self.options.set("format", Format::OF_KEPT.to_string());
    }

    /// Removes the layer that was put on last, which nothing was written to.
    pub(crate) fn undo_put_on(&mut self) {
        if let Some(former) = self.former_tops.pop() {
            self.set_top(&former.file, former.format.as_deref());
        }
    }

    fn set_top(&mut self, file: &str, format: Option<&str>) {
        self.options.set("file", file);
        match format {
            Some(format) => self.options.set("format", format),
            None => self.options.remove(&["format"]),
        }
    }

    fn may_name(&mut self, files: impl IntoIterator<Item = String>) {
        for file in files {
            if !self.bases.contains(&file) {
                self.bases.push(file);
            }
        }
    }

    /// Records that the top will rest on `base`, unless that is one of its layers, and that the `gone` layers above
    /// that will go. Until [`RecordedDisk::has_moved`] or [`RecordedDisk::stays`], the image may name either base.
    pub(crate) fn rest_on(&mut self, gone: usize, base: Option<String>) {
        self.has_moved();
        let stay = self.former_tops.len().saturating_sub(gone);
        if stay == 0 {
            // It was added with this file.
            let first = self.former_tops.first().map(|first| first.file.clone());
            self.moved_from = self.moved_from.take().or(first);
        }
        self.leaving_tops = self.former_tops.split_off(stay);
        self.may_name(base);
    }

    /// Records that a layer below the top will go: what it holds is in the layer below it. Until
    /// [`RecordedDisk::layer_is_gone`] or [`RecordedDisk::stays`], the image may rest on it or not.
    pub(crate) fn layer_goes(&mut self, layer: &FileName) {
        self.has_moved();
        let layer = recorded_name(layer);
        let place = self.former_tops.iter().position(|former| is_same_file(&former.file, &layer));
        let Some(place) = place else { return };
        let leaving = self.former_tops.remove(place);
        if place == 0 {
            // It was added with this file.
            self.moved_from = self.moved_from.take().or_else(|| Some(leaving.file.clone()));
        }
        self.leaving_tops = vec![leaving];
        self.leaving_below = self.former_tops.len().saturating_sub(place);
    }

    /// Records that the image does not rest on a layer below the top any more. Its file is empty.
    pub(crate) fn layer_is_gone(&mut self, layer: &FileName) {
        let layer = recorded_name(layer);
        (self.leaving_tops, self.leaving_below) = (Vec::new(), 0);
        self.bases.retain(|base| !is_same_file(base, &layer));
    }

    /// Records that the image names its new base.
    pub(crate) fn has_moved(&mut self) {
        let gone = std::mem::take(&mut self.leaving_tops);
        self.leaving_below = 0;
        self.may_name(gone.into_iter().map(|top| top.file));
    }

    /// Records that the image keeps its old base.
    pub(crate) fn stays(&mut self) {
        let place = self.former_tops.len().saturating_sub(std::mem::take(&mut self.leaving_below));
        let above = self.former_tops.split_off(place);
        self.former_tops.append(&mut self.leaving_tops);
        self.former_tops.extend(above);
    }

    /// Whether its image still rests on the former tops that were to go: `below` are the layers below its top.
    pub(crate) fn names_old_base(&self, below: &[FileName]) -> bool {
        let last = self.leaving_tops.last();
        last.zip(below.get(self.leaving_below))
            .is_some_and(|(last, below)| is_same_file(&last.file, &recorded_name(below)))
    }

    /// Moves the disk to a copy of itself. A copy of its top layer rests on the same layers, `below`; a full copy rests
    /// on none.
    pub(crate) fn move_to(&mut self, target: &str, format: &str, below: Option<Vec<String>>) {
        let first = self.former_tops.first().map(|first| first.file.clone());
        let given = first.or_else(|| self.options.get("file").map(str::to_owned));
        self.moved_from = self.moved_from.take().or(given);
        match below {
            Some(below) => self.may_name(below),
            None => {
                (self.former_tops, self.bases, self.leaving_tops) = (Vec::new(), Vec::new(), Vec::new());
                self.leaving_below = 0;
            }
        }
        // Its bitmaps stay in the former image.
        self.last_backups.clear();
        self.options.set("file", target);
        self.options.set("format", format);
    }

    /// Refuses a file that is being made for this disk. `is_there` says whether the name has a file: one that was made
    /// may be gone again. What lies at a server, its maker refuses.
    pub(crate) fn refuse_while_made(&self, file: &str, is_there: bool) -> Result<()> {
        let is_in_the_way = |other: &NotedFile| other.file == file && (other.made.is_none() || is_there);
        if self.unfinished.iter().any(is_in_the_way) {
            let (name, file) = (&self.name, image::without_secrets(file));
            let what = format!("'{file}' is being made for the disk '{name}': wait, or choose another name");
            return Err(Error::new(ErrorKind::Locked, what));
        }
        Ok(())
    }

    /// Records a file that is going to be made.
    pub(crate) fn will_make(&mut self, file: &str) {
        self.unfinished.push(NotedFile::to_be(file));
    }

    /// Records that a file is there, if it was to be made.
    pub(crate) fn has_made(&mut self, file: &str, made: FileIdentity) {
        let to_be = self.unfinished.iter_mut().rfind(|other| other.file == file && other.made.is_none());
        if let Some(to_be) = to_be {
            to_be.made = Some(made);
        }
    }

    /// Records that a file is whole.
    pub(crate) fn is_finished(&mut self, file: &str) {
        self.unfinished.retain(|other| other.file != file);
    }

    /// Records that a file is gone, or that it was not made. If it was to be made and another one has its name, that one
    /// stays on record.
    pub(crate) fn forget_unfinished(&mut self, file: &str) {
        match self.unfinished.iter().rposition(|other| other.file == file && other.made.is_none()) {
            Some(place) => drop(self.unfinished.remove(place)),
            None => self.is_finished(file),
        }
    }

    /// Returns the last backup with this bitmap of its top layer.
    pub(crate) fn last_backup(&self, bitmap: &str) -> Option<&LastBackup> {
        let is_it = |last: &&LastBackup| last.bitmap == bitmap && self.has_top(&last.layer);
        self.last_backups.iter().find(is_it)
    }

    /// Records the last backup with a bitmap, which notes what is written from then on.
    pub(crate) fn set_last_backup(&mut self, bitmap: &str, layer: &str, backup: &str) {
        self.forget_last_backup(bitmap);
        let [bitmap, layer, backup] = [bitmap, layer, backup].map(str::to_owned);
        let file = std::fs::metadata(&backup).ok().map(|found| FileIdentity::of(&found));
        self.last_backups.push(LastBackup { bitmap, layer, backup, file });
    }

    /// Records that a bitmap, in whichever layer, says nothing of a backup any more.
    pub(crate) fn forget_last_backup(&mut self, bitmap: &str) {
        self.last_backups.retain(|last| last.bitmap != bitmap);
    }

    /// Records that the top layer was taken off. Fails if the record names another top.
    pub(crate) fn take_off(&mut self, layers: &TakenOff) -> Result<()> {
        let (off, below) = (recorded_name(&layers.top), recorded_name(&layers.below));
        let top = self.options.get("file").unwrap_or_default().to_owned();
        if !is_same_file(&top, &off) {
            let (name, top) = (&self.name, image::without_secrets(&top));
            let what = format!("the record names '{top}' as the top of the disk '{name}', and not '{}'", layers.top);
            return Err(Error::new(ErrorKind::Locked, what));
        }
        match self.former_tops.iter().rposition(|former| is_same_file(&former.file, &below)) {
            Some(index) => {
                let mut gone = self.former_tops.split_off(index).into_iter();
                // The record keeps the name that the user gave: layers are compared by their canonical name.
                if let Some(former) = gone.next() {
                    self.set_top(&former.file, former.format.as_deref());
                }
                self.may_name(gone.map(|former| former.file));
            }
            None => {
                let first = self.former_tops.first().map_or(top, |first| first.file.clone());
                self.moved_from = self.moved_from.take().or(Some(first));
                self.set_top(&below, layers.below_format.map(|format| format.to_string()).as_deref());
            }
        }
        Ok(())
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
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
