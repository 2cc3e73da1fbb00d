//! Backups, and the record of the fleeces that they put on disks.

use crate::api::{BackupDisk, BackupMode, Job};
use crate::manager::Manager;
use crate::record::{DiskRecord, NotedFile, recorded_name, target_name};
use block::{Error, ErrorKind, Result};
use daemon::{BackupOptions, BackupRecord, FileIdentity, FleeceRecord, LastBackup, NodeId, TakenOff, WholeBackup};
use drive::absolute;
use image::{FileName, Format};
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Manager {
    /// Starts a job that copies a disk, as it is at one moment, to another image.
    pub fn backup(self: &Arc<Self>, name: &str, request: BackupDisk) -> Result<Job> {
        if !self.records.is_durable() {
            let what = "a backup needs a daemon with a state directory (serve --state-dir): what guests write meanwhile goes \
                        to another file, which the next daemon has to know after a crash";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let node = self.node(name)?;
        let target = target_name(Path::new(&request.target))?;
        self.refuse_writing_below(None, &[recorded_name(&target)])?;
        let format = request.format.as_deref().map_or(Ok(Format::OF_OVERLAYS), str::parse)?;
        let mode = match request.mode {
            Some(BackupMode::Full) => daemon::BackupMode::Full,
            Some(BackupMode::Top) => daemon::BackupMode::Top,
            Some(BackupMode::Incremental) => daemon::BackupMode::Incremental,
            None if request.bitmap.is_none() => daemon::BackupMode::Full,
            None if request.base.is_some() || request.existing => daemon::BackupMode::Incremental,
            None if format.can_have_backing() => daemon::BackupMode::SinceLast,
            // A new image of another format rests on nothing.
            None => daemon::BackupMode::Full,
        };
        let options = BackupOptions::new(target, format).with(|options| {
            options.existing = request.existing;
            options.mode = mode;
            options.bitmap = request.bitmap;
            options.base = request.base.as_deref().map(absolute);
            options.fleece_directory = request.fleece_directory.as_deref().map(absolute);
            options.fleece_quota_bytes = request.fleece_quota_bytes;
            options.bytes_per_second = request.bytes_per_second;
        });
        let record = RecordOfBackup(self.record_of(name, node));
        let id = self.daemon.start_backup(node, options, record)?;
        self.has_started(name, id)
    }

    /// Takes back the fleece that a backup left on a disk when the daemon died, or when it could not take it back.
    pub(crate) fn take_fleece_off(&self, node: NodeId, name: &str) {
        let current = self.records.current();
        let fleeces = current.disk(name).map(|disk| disk.fleeces.clone()).unwrap_or_default();
        let top = current.disk(name).and_then(|disk| disk.options.get("file").map(str::to_owned));
        for fleece in fleeces {
            let mut record = RecordOfBackup(self.record_of(name, node));
            if top.as_ref() != Some(&fleece.file) {
                if let Err(error) = record.remove(&fleece, None) {
                    tracing::warn!(disk = %name, "{error}");
                }
                continue;
            }
            let file = fleece.file.clone();
            tracing::info!(disk = %name, "a backup or a change of snapshots did not come to its end: '{file}' is taken back");
            // It may have come here from another file system.
            let opened = std::fs::symlink_metadata(&file).ok().map(|found| FileIdentity::of(&found));
            let off = move |layers: &TakenOff| {
                record.is_off(layers)?;
                // From here on nothing needs the fleece, and nothing can fail.
                if let Err(error) = record.remove(&fleece, opened) {
                    tracing::warn!("{error}");
                }
                Ok(())
            };
            if let Err(error) = self.daemon.start_take_overlay_back_with(node, off) {
                tracing::error!(disk = %name, "cannot take '{file}' back: {error}; try 'ctl commit'");
            }
        }
    }
}

/// One backup, its target and its fleece, in the record.
pub(crate) struct RecordOfBackup(pub(crate) DiskRecord);

impl RecordOfBackup {
    /// Removes a fleece that no layer rests on, unless it may be another file that got its name. `opened` is the file that
    /// the disk was opened with, if the fleece was its top.
    fn remove(&mut self, fleece: &NotedFile, opened: Option<FileIdentity>) -> Result<()> {
        let file = &fleece.file;
        let record = self.0.records.current();
        if record.disks.iter().any(|disk| disk.files().any(|used| used == file)) {
            return Ok(());
        }
        let is_it = |found: &Metadata| match opened {
            Some(opened) => opened == FileIdentity::of(found),
            None => fleece.is_surely(found),
        };
        let removed = match std::fs::symlink_metadata(file) {
            Ok(found) if !is_it(&found) => {
                let what = "may be a fleece that is not used any more, or another file of that name";
                tracing::warn!(disk = %self.0.name, "'{file}' {what}: it stays; remove it if nothing needs it");
                Ok(())
            }
            Ok(_) => std::fs::remove_file(file),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("cannot remove the fleece '{file}'"), error));
            }
            _ => {}
        }
        self.is_removed(Path::new(file))
    }
}

impl BackupRecord for RecordOfBackup {
    fn last_with(&self, bitmap: &str) -> Option<LastBackup> {
        let record = self.0.records.current();
        let last = record.disk(&self.0.name)?.last_backup(bitmap)?;
        Some(LastBackup { path: PathBuf::from(&last.backup), is_there: last.is_there() })
    }

    fn will_make_target(&mut self, target: &FileName) -> Result<()> {
        self.0.will_make(target)
    }

    fn has_made_target(&mut self, target: &FileName) -> Result<()> {
        self.0.has_made_for_job(target)
    }

    fn is_whole(&mut self, backup: &WholeBackup<'_>) -> Result<()> {
        self.0.change(|disk| {
            if let Some(made) = backup.made {
                disk.is_finished(&recorded_name(made));
            }
            let Some(bitmap) = backup.bitmap else { return };
            disk.forget_last_backup(bitmap);
            // The fleece is on top of the layer that has the bitmap.
            let layer = disk.former_tops.last().map(|top| top.file().to_owned());
            if let Some((layer, backup)) = layer.zip(backup.base_of_next.and_then(Path::to_str)) {
                disk.set_last_backup(bitmap, &layer, backup);
            }
        })
    }

    fn is_given_up(&mut self, target: &FileName) -> Result<()> {
        self.0.forget_unfinished(target)
    }
}

impl FleeceRecord for RecordOfBackup {
    fn will_make(&mut self, fleece: &Path) -> Result<()> {
        self.0.change(|disk| disk.fleeces.push(NotedFile::to_be(fleece.to_string_lossy())))
    }

    fn has_made(&mut self, fleece: &Path) -> Result<()> {
        let made = FileIdentity::at(fleece)?;
        let text = fleece.to_string_lossy();
        self.0.change(|disk| {
            if let Some(its) = disk.fleeces.iter_mut().rfind(|other| other.file == text) {
                its.made = Some(made);
            }
        })
    }

    fn is_on_top(&mut self, fleece: &Path) -> Result<()> {
        self.0.change(|disk| disk.put_on(&fleece.to_string_lossy()))
    }

    fn is_off(&mut self, layers: &TakenOff) -> Result<()> {
        self.0.change_if_it_can(|disk| disk.take_off(layers))
    }

    fn is_unmade(&mut self, fleece: &Path) -> Result<()> {
        let text = fleece.to_string_lossy();
        self.0.change(|disk| {
            if let Some(place) = disk.fleeces.iter().rposition(|other| other.file == text) {
                disk.fleeces.remove(place);
            }
        })
    }

    fn is_removed(&mut self, fleece: &Path) -> Result<()> {
        let text = fleece.to_string_lossy();
        self.0.change(|disk| {
            if disk.options.get("file") == Some(&*text) {
                disk.undo_put_on();
            }
            disk.fleeces.retain(|other| other.file != text);
        })
    }
}
