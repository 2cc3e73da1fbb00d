//! Bitmaps and internal snapshots of running disks.

use super::Manager;
use crate::api::{
    BitmapChange, BitmapVerb, Bitmaps, ChangeBitmaps, DirtyBitmap, EventKind, InternalSnapshot, InternalSnapshots,
    VmState,
};
use crate::backups::RecordOfBackup;
use crate::record::RecordedDisk;
use block::{Error, ErrorKind, Result};
use drive::EngineOpener;
use image::{BitmapAction, ClosedEdit, NewSnapshot, Opener, Role, SnapshotName, StateSource};
use std::time::{SystemTime, UNIX_EPOCH};

impl Manager {
    /// Returns the persistent bitmaps of a disk.
    pub fn bitmaps(&self, name: &str) -> Result<Bitmaps> {
        let bitmaps = self.daemon.bitmaps(self.node(name)?)?.into_iter().map(|bitmap| DirtyBitmap {
            name: bitmap.name,
            file: bitmap.file.to_string(),
            granularity: bitmap.granularity_bytes,
            recording: bitmap.recording,
            inconsistent: bitmap.inconsistent,
            persistent: bitmap.persistent,
            dirty_bytes: bitmap.dirty_bytes,
        });
        Ok(Bitmaps { bitmaps: bitmaps.collect() })
    }

    /// Changes persistent bitmaps of a disk's top layer: all of them, in order, or none.
    pub fn change_bitmaps(&self, name: &str, request: &ChangeBitmaps) -> Result<Bitmaps> {
        let actions = request.actions.iter().map(action).collect::<Result<Vec<_>>>()?;
        if actions.is_empty() {
            return Err(Error::new(ErrorKind::BadOption, "no change is asked for"));
        }
        // A backup rests on the last one only if its bitmap has noted all that was written since.
        let changes = request.actions.iter().filter(|change| change.action != BitmapVerb::Merge);
        self.edit(name, &ClosedEdit::Bitmaps(actions), |disk| {
            changes.for_each(|change| disk.forget_last_backup(&change.bitmap));
        })?;
        self.bitmaps(name)
    }

    /// Returns the internal snapshots of a disk's top layer.
    pub fn internal_snapshots(&self, name: &str) -> Result<InternalSnapshots> {
        let snapshots = self.daemon.internal_snapshots(self.node(name)?)?.into_iter().map(|found| InternalSnapshot {
            id: found.id,
            name: found.name,
            date_seconds: found.date_seconds,
            disk_bytes: found.disk_bytes,
            vm_state_bytes: found.vm_state_bytes,
        });
        Ok(InternalSnapshots { snapshots: snapshots.collect() })
    }

    /// Takes an internal snapshot, and keeps the state of a machine with it if there is one.
    pub fn create_internal_snapshot(
        &self,
        name: &str,
        snapshot: &str,
        vm_state: Option<&VmState>,
    ) -> Result<InternalSnapshots> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let new = NewSnapshot::new(snapshot).with(|new| {
            new.date_seconds = u32::try_from(since.as_secs()).unwrap_or(u32::MAX);
            new.date_nanoseconds = since.subsec_nanos();
        });
        let edit = match vm_state {
            Some(vm_state) => ClosedEdit::SaveState(new, source_of(vm_state)?),
            None => ClosedEdit::CreateSnapshot(new),
        };
        self.edit(name, &edit, |_| ())?;
        self.internal_snapshots(name)
    }

    /// Deletes an internal snapshot.
    pub fn delete_internal_snapshot(&self, name: &str, snapshot: &str) -> Result<()> {
        self.edit(name, &ClosedEdit::DeleteSnapshot(SnapshotName::Any(snapshot.to_owned())), |_| ())
    }

    /// Returns a disk that no guest uses to its contents when the snapshot was taken.
    pub fn apply_internal_snapshot(&self, name: &str, snapshot: &str) -> Result<InternalSnapshots> {
        let edit = ClosedEdit::ApplySnapshot(SnapshotName::Any(snapshot.to_owned()));
        // Bitmaps do not note what that changes.
        self.edit(name, &edit, |disk| disk.last_backups.clear())?;
        self.internal_snapshots(name)
    }

    /// Changes the top layer of a disk, and its record before that. Meanwhile no job runs on the disk: a backup that ended
    /// in between would record that the next one can rest on it.
    fn edit(&self, name: &str, edit: &ClosedEdit, forget: impl FnOnce(&mut RecordedDisk)) -> Result<()> {
        let node = self.node(name)?;
        let record = self.record_of(name, node);
        match self.records.is_durable() {
            true => {
                let mut of_fleece = RecordOfBackup(record.clone());
                self.daemon.edit_disk_beside(node, edit, || record.change(forget), &mut of_fleece)?;
            }
            // What guests write meanwhile goes to another file, which the next daemon has to know after a crash. Nor are
            // there backups to forget.
            false => self.daemon.edit_disk(node, edit)?,
        }
        let what = match edit {
            ClosedEdit::Bitmaps(_) => "its bitmaps were changed",
            ClosedEdit::CreateSnapshot(_) | ClosedEdit::SaveState(..) => "an internal snapshot was taken",
            ClosedEdit::DeleteSnapshot(_) => "an internal snapshot was deleted",
            _ => "an internal snapshot was applied",
        };
        self.events.publish(EventKind::DiskChanged, Some(name), None, Some(what.to_owned()));
        Ok(())
    }
}

fn source_of(state: &VmState) -> Result<StateSource> {
    let file = EngineOpener::default().without_locks().open(&state.file.as_path().into(), Role::ReadOnly)?;
    let (there, wanted) = (file.length_bytes()?, state.length_bytes);
    if wanted == 0 || there < wanted {
        let what = format!("'{}' has {there} bytes, and no machine's state of {wanted}", state.file.display());
        return Err(Error::new(ErrorKind::BadOption, what));
    }
    Ok(StateSource { file, length_bytes: wanted })
}

fn action(change: &BitmapChange) -> Result<(String, BitmapAction)> {
    let bad = |what: &str| {
        let verb = serde_json::to_value(change.action).unwrap_or_default();
        let verb = verb.as_str().unwrap_or_default().to_owned();
        Err(Error::new(ErrorKind::BadOption, format!("{verb} bitmap '{}': {what}", change.bitmap)))
    };
    if change.granularity.is_some() && change.action != BitmapVerb::Add {
        return bad("a granularity is for 'add' only");
    }
    if change.source.is_some() != (change.action == BitmapVerb::Merge) {
        return bad("a source is for 'merge', which needs one");
    }
    let action = match change.action {
        BitmapVerb::Add => BitmapAction::Add { granularity_bytes: change.granularity },
        BitmapVerb::Remove => BitmapAction::Remove,
        BitmapVerb::Enable => BitmapAction::Enable,
        BitmapVerb::Disable => BitmapAction::Disable,
        BitmapVerb::Clear => BitmapAction::Clear,
        BitmapVerb::Merge => BitmapAction::MergeOwn(change.source.clone().unwrap_or_default()),
    };
    Ok((change.bitmap.clone(), action))
}
