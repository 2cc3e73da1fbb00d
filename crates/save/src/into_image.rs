//! Saving into the images themselves: an internal snapshot of each disk, one of which keeps the machine's state.
//!
//! The snapshot with the state is taken last. So where there is one, all of them are there.

use crate::disks::{Disks, Layer};
use crate::progress::{Progress, Step};
use crate::qmp::Qmp;
use crate::record::{Record, remove_states, sync_directory};
use crate::save::Saving;
use block::{Error, ErrorKind, Result};

/// What cannot be saved so, before the machine stops. `before` is what was saved last.
pub(crate) fn check(disks: &Disks, names: &[String], snapshot: &str, before: Option<&Record>) -> Result<()> {
    if snapshot.is_empty() {
        return Err(Error::new(ErrorKind::BadOption, "the snapshot needs a name"));
    }
    for name in names {
        let layers = disks.layers(name)?;
        if let Some(top) = layers.first().filter(|top| top.format != "qcow2") {
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

/// A layer that a save or a restore has put on goes with the next save, and a snapshot in it would go, too.
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
    /// Puts the machine into its images while it stands still; returns the bytes of its state.
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

        let Some((keeper, others)) = self.names.split_first() else { return Ok(state_bytes) };
        progress.begin(Step::Freeze);
        let mut taken = Vec::new();
        let all = others.iter().try_for_each(|name| {
            self.disks.take_snapshot(name, snapshot, None)?;
            taken.push(name);
            self.check()
        });
        let all = all.and_then(|()| {
            progress.begin(Step::Publish);
            self.disks.take_snapshot(keeper, snapshot, Some((file.as_path(), state_bytes)))
        });
        if all.is_err() {
            // One that stays says that it keeps no state.
            taken.into_iter().for_each(|name| drop(self.disks.delete_snapshot(name, snapshot)));
        }
        self.remove_new_states()?;
        all.map(|()| state_bytes)
    }

    /// Of the pair before, the state stays.
    fn remove_new_states(&self) -> Result<()> {
        remove_states(self.directory, self.before.as_ref().map(|before| before.state.as_str()))
    }
}
