//! Saving into the images themselves: an internal snapshot of each disk, one of which keeps the machine's state.
//!
//! The snapshot with the state is taken last. So if it exists, all of them exist.

use super::Saving;
use crate::disks::{Disks, Layer};
use crate::files::sync_directory;
use crate::progress::{Progress, Step};
use crate::qmp::Qmp;
use crate::record::{Record, remove_states};
use block::{Error, ErrorKind, Result};
use control::api::InternalSnapshot;
use image::Format;
use std::path::Path;

fn keeps_snapshots(format: &str) -> bool {
    format.parse().is_ok_and(Format::has_snapshots)
}

/// Refuses a save that is impossible, before the machine stops. `before` is the last save.
pub(crate) fn check(disks: &dyn Disks, names: &[String], snapshot: &str, before: Option<&Record>) -> Result<()> {
    if snapshot.is_empty() {
        return Err(Error::new(ErrorKind::BadOption, "the snapshot needs a name"));
    }
    for name in names {
        let layers = disks.layers(name)?;
        if let Some(top) = layers.first().filter(|top| !keeps_snapshots(&top.format)) {
            let (format, file) = (&top.format, top.file.display());
            let what = format!("disk '{name}': '{file}' is {format}, and only qcow2 images keep snapshots");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        refuse_above_base(name, &layers, before)?;
        if disks.snapshots(name)?.iter().any(|own| own.name == snapshot || own.id == snapshot) {
            let what = format!("disk '{name}' has a snapshot '{snapshot}' already: delete it, or choose another name");
            return Err(Error::new(ErrorKind::BadOption, what));
        }
    }
    match names.is_empty() {
        true => Err(Error::new(ErrorKind::BadOption, "the machine has no disk whose image could keep its state")),
        false => Ok(()),
    }
}

/// Whether the snapshot exists with all of the machine's state.
fn kept(found: &[InternalSnapshot], snapshot: &str, state_bytes: u64) -> bool {
    found.iter().any(|own| own.name == snapshot && own.vm_state_bytes == state_bytes)
}

/// Refuses a top layer that a save or a restore has put on: the next save removes it, and a snapshot in it with it.
fn refuse_above_base(name: &str, layers: &[Layer], before: Option<&Record>) -> Result<()> {
    let saved = before.and_then(|before| before.disks.iter().find(|disk| disk.name == name));
    let above = saved.and_then(|saved| layers.iter().position(|layer| layer.file == saved.base)).unwrap_or(0);
    let (Some(saved), Some(top), 1..) = (saved, layers.first(), above) else { return Ok(()) };
    let (top, base) = (top.file.display(), saved.base.display());
    let what = format!(
        "disk '{name}': what the guest writes goes to '{top}' since it was saved or restored, and a snapshot belongs into \
         '{base}'. Take {above} back first ('ringdisk ctl commit {name} --layers {above}'): what was saved before is of no \
         use then"
    );
    Err(Error::new(ErrorKind::Unsupported, what))
}

impl Saving<'_> {
    /// Saves the machine into its images while it is stopped. Returns the size of its state, in bytes.
    pub(crate) fn put_into_images(
        &mut self,
        snapshot: &str,
        qmp: &mut Qmp,
        progress: &mut Progress<'_>,
    ) -> Result<u64> {
        progress.begin(Step::State);
        self.remove_new_states()?;
        let state_bytes = self.state(qmp, progress)?;
        let file = self.record.state_path(self.directory);
        let file = std::path::absolute(&file).map_err(|error| Error::io("there is no working directory", error))?;
        sync_directory(self.directory)?;
        self.check()?;

        let taken = self.take_all(snapshot, &file, state_bytes, progress);
        match (taken, self.remove_new_states()) {
            (Ok(()), Ok(())) => Ok(state_bytes),
            (Ok(()), Err(error)) => {
                self.notes.push(format!("the state is in the image, and its file stays: {error}"));
                Ok(state_bytes)
            }
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(second)) => Err(error.in_context(second.to_string())),
        }
    }

    /// Takes all snapshots, the one with the state last. If that fails, all are removed.
    fn take_all(&mut self, snapshot: &str, file: &Path, state_bytes: u64, progress: &mut Progress<'_>) -> Result<()> {
        let Some((keeper, others)) = self.names.split_first() else { return Ok(()) };
        progress.begin(Step::Freeze);
        for (index, name) in others.iter().enumerate() {
            if let Err(error) = self.disks.take_snapshot(name, snapshot, None).and_then(|()| self.check()) {
                let tried = others.get(..=index).unwrap_or(others);
                return Err(self.without(tried, snapshot, error));
            }
        }
        progress.begin(Step::Publish);
        let Err(error) = self.disks.take_snapshot(keeper, snapshot, Some((file, state_bytes))) else { return Ok(()) };
        // The snapshot may exist although the call has failed, for example if the answer was lost.
        match self.disks.snapshots(keeper).map(|found| kept(&found, snapshot, state_bytes)) {
            Ok(true) => {
                self.notes.push(format!("disk '{keeper}' has the snapshot with the whole state, but: {error}"));
                Ok(())
            }
            Ok(false) => Err(self.without(&self.names, snapshot, error)),
            Err(second) => Err(error.in_context(format!(
                "nobody can say whether disk '{keeper}' has the snapshot '{snapshot}' ({second}), so those of the other \
                 disks stay"
            ))),
        }
    }

    /// Deletes the snapshots of this name on these disks. The error names those that stay.
    fn without(&self, names: &[String], snapshot: &str, error: Error) -> Error {
        let delete = |name: &String| {
            let is_there = self.disks.snapshots(name)?.iter().any(|own| own.name == snapshot);
            if is_there { self.disks.delete_snapshot(name, snapshot) } else { Ok(()) }
        };
        let failures = names.iter().filter_map(|name| Some((name, delete(name).err()?)));
        failures.fold(error, |error, (name, failed)| {
            error.in_context(format!("disk '{name}' may keep a snapshot '{snapshot}' without a state ({failed})"))
        })
    }

    /// Removes all states but that of the pair before.
    fn remove_new_states(&self) -> Result<()> {
        remove_states(self.directory, self.before.as_ref().map(|before| before.state.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::SavedDisk;
    use control::Options;

    #[test]
    fn a_snapshot_belongs_into_the_image_and_counts_with_its_whole_state_only() {
        let layer = |file: &str| Layer { format: "qcow2".to_owned(), file: file.into() };
        let mut record = Record::next(None, true);
        record.disks.push(SavedDisk {
            name: "root".to_owned(),
            file: "/image".into(),
            format: "qcow2".to_owned(),
            base: "/image".into(),
            options: Options::default(),
            seen: None,
            below: Vec::new(),
            others: Vec::new(),
        });
        let check = |layers: &[Layer], record| refuse_above_base("root", layers, record);
        let above = [layer("/image.save-2"), layer("/image.save-1"), layer("/image"), layer("/below")];
        let refused = check(&above, Some(&record)).unwrap_err().to_string();
        assert!(refused.contains("'/image.save-2'") && refused.contains("commit root --layers 2"), "{refused}");
        check(&above[2..], Some(&record)).unwrap();
        check(&above, None).unwrap();
        check(&[layer("/other")], Some(&record)).unwrap();

        let snapshot = |name: &str, vm_state_bytes| {
            let (id, name) = ("1".to_owned(), name.to_owned());
            InternalSnapshot { id, name, date_seconds: 0, disk_bytes: 512, vm_state_bytes }
        };
        let found = [snapshot("one", 7), snapshot("two", 0)];
        assert!(kept(&found, "one", 7));
        assert!(!kept(&found, "one", 8) && !kept(&found, "two", 7) && !kept(&found, "1", 7));
    }
}
