//! Copying a running disk to another image, on a call of the control interface.

use crate::api::{Job, MirrorDisk};
use crate::live_jobs::aim_of;
use crate::manager::Manager;
use crate::record::{DiskRecord, FileIdentity, RecordedDisk, recorded_name, target_name};
use block::{Error, ErrorKind, Result};
use daemon::{MirrorOptions, MirrorSwitch, NodeId};
use drive::unmake_file;
use image::{FileName, MirrorEnd, MirrorScope};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

impl Manager {
    /// Starts to copy a disk to another image.
    pub fn mirror(self: &Arc<Self>, name: &str, request: &MirrorDisk) -> Result<Job> {
        let node = self.node(name)?;
        let target = target_name(&request.target)?;
        let text = recorded_name(&target);
        if !request.existing && target.path().is_some_and(Path::exists) {
            let message = format!("'{target}' exists: choose another name, or say that it is to be written over");
            return Err(Error::new(ErrorKind::BadOption, message));
        }
        self.refuse_writing_below(None, std::slice::from_ref(&text))?;
        let format = request.format.as_deref().map(str::parse).transpose()?;
        let options = MirrorOptions::new(target).with(|options| {
            options.format = format;
            options.existing = request.existing;
            options.scope = if request.top { MirrorScope::Top } else { MirrorScope::Full };
            options.end = if request.keep { MirrorEnd::Keep } else { MirrorEnd::Switch };
            options.aim = aim_of(request.within_ms, request.stall_ms);
            options.bytes_per_second = request.bytes_per_second;
        });
        let unfinished = if request.existing { None } else { self.reserve(name, node, &options.target)? };
        let (record, scope) = (self.record_of(name, node), options.scope);
        let (kept_record, made_record) = (record.clone(), record.clone());
        let move_over = move |switch: &MirrorSwitch| {
            // Dropped with this closure, even if it is never called.
            let _unfinished = &unfinished;
            let below = switch.below.iter().map(recorded_name);
            let below = (scope == MirrorScope::Top).then(|| below.collect());
            let move_to = |disk: &mut RecordedDisk| disk.move_to(&text, &switch.format.to_string(), below);
            record.change(move_to)
        };
        // If the file stayed on record, the next run would remove it.
        let kept = move || kept_record.change(RecordedDisk::is_finished);
        let has_made = || made_record.has_made_for_job(&options.target);
        let id = self.daemon.start_mirror_with(node, &options, has_made, move_over, kept)?;
        self.tell_if_behind(name, id, options.aim);
        self.has_started(name, id)
    }

    /// Records a file that is going to be made for a disk, until the job that makes it ends. Returns `None` if another job runs,
    /// because the new one will be refused.
    pub(crate) fn reserve(&self, name: &str, node: NodeId, file: &FileName) -> Result<Option<Unfinished>> {
        let is_busy = self.daemon.jobs().iter().any(|job| job.node == node && is_under_way(&job.state));
        if is_busy { Ok(None) } else { Unfinished::record(self.record_of(name, node), file).map(Some) }
    }

    /// Removes files that jobs of an earlier run were making when it died.
    pub(crate) fn remove_unfinished(&self) -> Result<()> {
        let record = self.records.current();
        for disk in &record.disks {
            let Some(file) = &disk.unfinished else { continue };
            if !record.disks.iter().any(|disk| disk.uses(file)) {
                remove_unfinished_file(&disk.name, file, disk.unfinished_made);
            }
            self.records.change_disk(&disk.name, RecordedDisk::is_finished)?;
        }
        Ok(())
    }
}

impl DiskRecord {
    /// Notes a file that a job is going to make. Refused while another one is noted that is not made yet: the record
    /// has room for one.
    pub(crate) fn will_make(&self, file: &FileName) -> Result<()> {
        let text = recorded_name(file);
        self.change_if_it_can(|disk| {
            if let Some(other) = disk.unfinished.as_ref().filter(|_| disk.unfinished_made.is_none()) {
                let (name, other) = (&disk.name, image::without_secrets(other));
                let what = format!("a job of the disk '{name}' is about to make '{other}': try again");
                return Err(Error::new(ErrorKind::Locked, what));
            }
            (disk.unfinished, disk.unfinished_made) = (Some(text), None);
            Ok(())
        })
    }

    /// Notes that the file is there, if it is on record.
    pub(crate) fn has_made(&self, file: &FileName) -> Result<()> {
        let made = match file.path() {
            Some(path) => {
                let found = std::fs::symlink_metadata(path);
                FileIdentity::of(&found.map_err(|error| Error::io(format!("cannot look at '{file}'"), error))?)
            }
            None => FileIdentity::AT_A_SERVER,
        };
        let text = recorded_name(file);
        self.change(|disk| {
            if disk.unfinished.as_ref() == Some(&text) {
                disk.unfinished_made = Some(made);
            }
        })
    }

    /// As [`Self::has_made`], for a job. Logs what a kill means for the file.
    pub(crate) fn has_made_for_job(&self, file: &FileName) -> Result<()> {
        self.has_made(file)?;
        if file.path().is_some() {
            tracing::info!(
                disk = %self.name,
                "made '{file}': if the daemon is killed before the job ends, the next one removes it, also if somebody has \
                 finished it in place meanwhile"
            );
        }
        Ok(())
    }

    /// Forgets the file, which the job has left or removed.
    pub(crate) fn forget_unfinished(&self, file: &FileName) -> Result<()> {
        let text = recorded_name(file);
        self.change(|disk| disk.forget_unfinished(&text))
    }
}

/// A file that a job makes, in the record until the job has ended. A run that finds it in the record removes it.
pub(crate) struct Unfinished {
    record: DiskRecord,
    file: FileName,
}

impl Unfinished {
    fn record(record: DiskRecord, file: &FileName) -> Result<Self> {
        record.will_make(file)?;
        Ok(Self { record, file: file.clone() })
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Err(error) = self.record.forget_unfinished(&self.file) {
            tracing::warn!("'{}' is still on record as a copy that is not finished: {error}", self.file);
        }
    }
}

/// Removes a copy that was not finished, unless this may be another file that got its name. One that was not noted as
/// made was not written to.
fn remove_unfinished_file(disk: &str, file: &str, made: Option<FileIdentity>) {
    let Ok(name) = FileName::parse(file) else { return };
    // Somebody may have finished it since, or made another image of that name.
    if let FileName::Rbd(_) = name {
        tracing::warn!(
            disk,
            "'{name}' may hold a copy that was not finished: it stays; remove it with 'rbd rm' if nothing needs it, or say \
             that the next copy writes over it (--existing)"
        );
        return;
    }
    if name.is_remote() {
        tracing::warn!(
            disk,
            "'{name}' may hold a copy that was not finished: before the next one, overwrite its first MiB with zeros, or say \
             that it is to be written over (--existing)"
        );
        return;
    }
    let Ok(found) = std::fs::symlink_metadata(file) else { return };
    let is_it = match made {
        Some(made) => made.is_surely(&FileIdentity::of(&found)),
        None => found.is_file() && found.len() == 0 && found.blocks() == 0,
    };
    if !is_it {
        let what = "may be a copy that was not finished, or another file of that name";
        tracing::warn!(disk, "'{name}' {what}: it stays; remove it if nothing needs it");
        return;
    }
    match unmake_file(&name) {
        Ok(()) => tracing::warn!(disk, "removed '{name}', a copy that was not finished"),
        Err(error) => tracing::warn!(disk, "cannot remove '{name}', a copy that was not finished: {error}"),
    }
}

fn is_under_way(state: &daemon::JobState) -> bool {
    matches!(state, daemon::JobState::Running | daemon::JobState::Paused)
}
