//! Copying a running disk to another image, on a call of the control interface.

use crate::api::{Job, MirrorDisk};
use crate::live_jobs::aim_of;
use crate::manager::Manager;
use crate::record::{DiskRecord, NotedFile, recorded_name, target_name};
use block::{Error, ErrorKind, Result};
use daemon::{FileIdentity, MirrorOptions, MirrorSwitch, NodeId, name_until_whole, refuse_part};
use drive::unmake_file;
use image::{FileName, MirrorEnd, MirrorScope};
use std::path::Path;
use std::sync::Arc;

impl Manager {
    /// Starts to copy a disk to another image.
    pub fn mirror(self: &Arc<Self>, name: &str, request: &MirrorDisk) -> Result<Job> {
        let node = self.node(name)?;
        let target = target_name(&request.target)?;
        let text = recorded_name(&target);
        if !request.existing && target.path().is_some_and(Path::exists) {
            let message =
                format!("'{target}' exists: choose another name, or say that it is to be written over (--existing)");
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
        let part = name_until_whole(&options.target);
        let unfinished = (!request.existing).then(|| self.reserve(name, node, &part)).transpose()?;
        let (record, scope) = (self.record_of(name, node), options.scope);
        let (kept_record, made_record) = (record.clone(), record.clone());
        let copy = recorded_name(&part);
        let moved = copy.clone();
        let move_over = move |switch: &MirrorSwitch| {
            let below = switch.below.iter().map(recorded_name);
            let below = (scope == MirrorScope::Top).then(|| below.collect());
            record.change(|disk| {
                disk.move_to(&text, &switch.format.to_string(), below);
                disk.is_finished(&moved);
            })
        };
        let kept = move || kept_record.change(|disk| disk.is_finished(&copy));
        let has_made = || made_record.has_made_for_job(&part);
        let id = self.daemon.start_mirror_with(node, &options, has_made, move_over, kept, unfinished)?;
        self.tell_if_behind(name, id, options.aim);
        self.has_started(name, id)
    }

    /// Records a file that is going to be made for a disk, until the result is dropped.
    pub(crate) fn reserve(&self, name: &str, node: NodeId, file: &FileName) -> Result<Unfinished> {
        let record = self.record_of(name, node);
        record.will_make(file)?;
        Ok(Unfinished { record, file: file.clone() })
    }

    /// Removes files that jobs of an earlier run were making when it died.
    pub(crate) fn remove_unfinished(&self) -> Result<()> {
        let record = self.records.current();
        for disk in &record.disks {
            for unfinished in &disk.unfinished {
                if !record.disks.iter().any(|disk| disk.uses(&unfinished.file)) {
                    remove_unfinished_file(&disk.name, unfinished);
                }
            }
            self.records.change_disk(&disk.name, |disk| disk.unfinished.clear())?;
        }
        Ok(())
    }
}

impl DiskRecord {
    /// Notes a file that is going to be made. Refused while one of this name is being made for any disk, and if the name
    /// has a file: the question and the note are one step.
    pub(crate) fn will_make(&self, file: &FileName) -> Result<()> {
        // All changes of the record wait for a change, and this may wait for a server.
        let unless_there = refuse_part(file);
        let text = recorded_name(file);
        self.records.try_change(|record| {
            record.disks.iter().try_for_each(|disk| disk.refuse_while_made(&text, unless_there.is_err()))?;
            unless_there?;
            if let Some(disk) = record.disk_mut(&self.name).filter(|_| self.is_current()) {
                disk.will_make(&text);
            }
            Ok(())
        })
    }

    /// Notes that the file is there, if it is on record.
    pub(crate) fn has_made(&self, file: &FileName) -> Result<()> {
        let made = file.path().map_or(Ok(FileIdentity::AT_A_SERVER), FileIdentity::at)?;
        self.change(|disk| disk.has_made(&recorded_name(file), made))
    }

    /// As [`Self::has_made`], for a job. Logs what a kill means for the file.
    pub(crate) fn has_made_for_job(&self, file: &FileName) -> Result<()> {
        self.has_made(file)?;
        if file.path().is_some() {
            let after_a_kill = match self.records.is_durable() {
                true => "if the daemon is killed before, the next one removes it",
                false => "if the daemon is killed before, it stays: there is no state directory",
            };
            tracing::info!(disk = %self.name, "made '{file}': it gets its own name when it is whole; {after_a_kill}");
        }
        Ok(())
    }

    /// Forgets the file, which the job has left or removed.
    pub(crate) fn forget_unfinished(&self, file: &FileName) -> Result<()> {
        self.change(|disk| disk.forget_unfinished(&recorded_name(file)))
    }
}

/// A file that a job makes, in the record until the job has ended. A run that finds it in the record removes it.
pub(crate) struct Unfinished {
    record: DiskRecord,
    file: FileName,
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
fn remove_unfinished_file(disk: &str, unfinished: &NotedFile) {
    let Ok(name) = FileName::parse(&unfinished.file) else { return };
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
    let Ok(found) = std::fs::symlink_metadata(&unfinished.file) else {
        tell_if_whole(disk, unfinished);
        return;
    };
    if !unfinished.is_surely(&found) {
        let what = "may be a copy that was not finished, or another file of that name";
        tracing::warn!(disk, "'{name}' {what}: it stays; remove it if nothing needs it");
        return;
    }
    match unmake_file(&name) {
        Ok(()) => {
            tracing::warn!(disk, "removed '{name}', a copy that was not finished");
            // The part may have been its second name.
            tell_if_whole(disk, unfinished);
        }
        Err(error) => tracing::warn!(disk, "cannot remove '{name}', a copy that was not finished: {error}"),
    }
}

/// A copy that was whole has its own name, and the disk may not have gone over to it.
fn tell_if_whole(disk: &str, unfinished: &NotedFile) {
    let whole = Path::new(&unfinished.file).with_extension("");
    if whole.symlink_metadata().is_ok_and(|found| unfinished.made.is_some() && unfinished.is_surely(&found)) {
        let what = "is a whole copy whose job was not recorded as done; the disk stays on its own image, and a bitmap was \
                    not cleared";
        tracing::warn!(disk, "'{}' {what}: remove the copy if nothing needs it", whole.display());
    }
}
