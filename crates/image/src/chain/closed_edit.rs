//! Changes of a layer while it is closed and nobody uses it: its persistent bitmaps, its internal snapshots, and the
//! end of a compaction.

use super::layer::Layer;
use super::mapping::Mapping;
use block::{Error, ErrorKind, File, MetaIo, PastEnd, Result, block_on};
use format_qcow2::{Bitmap, BitmapAction, BitmapBits, NewSnapshot, Snapshot, SnapshotChange, SnapshotName, VmState};
use std::ops::Range;
use std::sync::Arc;

/// What to change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClosedEdit {
    /// Changes of bitmaps, each with the bitmap's name. All are made, in order, or none.
    Bitmaps(Vec<(String, BitmapAction)>),
    /// Take an internal snapshot.
    CreateSnapshot(NewSnapshot),
    /// Take an internal snapshot that also keeps the state of a machine.
    SaveState(NewSnapshot, StateSource),
    /// Delete this snapshot.
    DeleteSnapshot(SnapshotName),
    /// Make the disk what it was when this snapshot was taken.
    ApplySnapshot(SnapshotName),
    /// Move tables from the end of the file to its start, and cut the file off behind the last used cluster. In this range
    /// of host clusters, free clusters are cut off whatever they hold: a compaction has checked all entries that lead there.
    Shorten(Range<u64>),
}

/// A file that begins with the state of a machine.
#[derive(Debug, Clone)]
pub struct StateSource {
    /// The file.
    pub file: Arc<dyn File>,
    /// Length of the state.
    pub length_bytes: u64,
}

impl PartialEq for StateSource {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.file, &other.file) && self.length_bytes == other.length_bytes
    }
}

impl Eq for StateSource {}

impl StateSource {
    /// Fills `target` with the state's bytes from `offset` on. Blocks.
    fn read(&self, io: &MetaIo, offset: u64, target: &mut [u8]) -> Result<()> {
        let what = || format!("cannot read the machine's state from '{}'", self.file.info().name);
        let read = block_on(io.read(offset, target.len(), PastEnd::Fails));
        let bytes = read.map_err(|error| Error::with_source(ErrorKind::Io, what(), error))?;
        target.copy_from_slice(&bytes);
        Ok(())
    }
}

impl Layer {
    fn needs_qcow2(&self, what: &str) -> Result<()> {
        match &self.mapping {
            Mapping::Qcow2(_) => Ok(()),
            Mapping::Raw(_) | Mapping::Scratch(_) => {
                let what = format!("'{}': a {} image has no {what}; only qcow2 has", self.name, self.format());
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }
    }

    /// Refuses `edit` if the layer's format cannot store what it changes.
    pub(crate) fn refuse_edit(&self, edit: &ClosedEdit) -> Result<()> {
        if self.has_bitmaps_in_memory() && matches!(edit, ClosedEdit::Bitmaps(_)) {
            return Ok(());
        }
        self.needs_qcow2(match edit {
            ClosedEdit::Bitmaps(_) => "bitmaps",
            ClosedEdit::Shorten(_) => "clusters that can move",
            _ => "internal snapshots",
        })
    }

    /// Whether its bitmaps are in memory only: its format has no room for them.
    pub(crate) fn has_bitmaps_in_memory(&self) -> bool {
        matches!(self.mapping, Mapping::Raw(_))
    }

    /// Changes the layer durably. The layer is closed and nobody uses it. A power cut leaves it before or after the
    /// change.
    pub(crate) async fn edit_closed(&self, edit: &ClosedEdit) -> Result<()> {
        self.refuse_edit(edit)?;
        self.needs_qcow2("tables")?;
        let (io, file, name) = (self.open_blocking()?, &*self.file, self.name.to_string());
        let (io, name, go_on) = (&io, name.as_str(), &mut |_, _| true);
        match edit {
            ClosedEdit::Bitmaps(actions) => {
                format_qcow2::edit_bitmaps_just_closed(io, file, name, actions, go_on).await
            }
            ClosedEdit::Shorten(looked_at) => {
                format_qcow2::shorten_just_closed(io, file, name, looked_at.clone(), go_on).await
            }
            ClosedEdit::CreateSnapshot(new) => format_qcow2::create_snapshot(io, file, name, new, go_on).await,
            ClosedEdit::SaveState(new, source) => {
                let from = MetaIo::of_file(&*source.file)?;
                let mut read = |offset, target: &mut [u8]| source.read(&from, offset, target);
                let mut state = VmState { length_bytes: source.length_bytes, read: &mut read };
                format_qcow2::create_snapshot_with_state(io, file, name, new, &mut state, go_on).await
            }
            ClosedEdit::DeleteSnapshot(which) => format_qcow2::delete_snapshot(io, file, name, which, go_on).await,
            ClosedEdit::ApplySnapshot(which) => format_qcow2::apply_snapshot(io, file, name, which, go_on).await,
        }
    }

    /// Takes or deletes an internal snapshot. The layer is closed and nobody writes to it; guests read it meanwhile.
    /// Returns what became free, for [`Layer::give_back`].
    pub(crate) async fn change_snapshots_beside_readers(&self, edit: &ClosedEdit) -> Result<Vec<Range<u64>>> {
        self.refuse_edit(edit)?;
        let change = match edit {
            ClosedEdit::CreateSnapshot(new) => SnapshotChange::Create(new),
            ClosedEdit::DeleteSnapshot(which) => SnapshotChange::Delete(which),
            _ => {
                let what = format!("'{}': only snapshots are taken or deleted while others read", self.name);
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
        };
        let (io, name, go_on) = (self.open_blocking()?, self.name.to_string(), &mut |_, _| true);
        format_qcow2::change_snapshots_beside_readers(&io, &*self.file, &name, change, go_on).await
    }

    /// Gives back to the host what a change has freed. Nobody reads it any more, and nobody writes to the layer.
    pub(crate) async fn give_back(&self, freed: &[Range<u64>]) {
        let Ok(io) = self.open_blocking() else { return };
        for range in freed.iter().filter(|_| self.file.info().can_discard) {
            // Only space is lost.
            let _ = io.discard(range.start, range.end.saturating_sub(range.start)).await;
        }
    }

    /// Reads the persistent bitmaps from the file.
    pub(crate) async fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        match &self.mapping {
            Mapping::Raw(_) | Mapping::Scratch(_) => Ok(Vec::new()),
            Mapping::Qcow2(_) => format_qcow2::bitmaps(&self.open_blocking()?, &self.name.to_string()).await,
        }
    }

    /// Returns a bitmap's bits, from the file where they are persistent.
    pub(crate) async fn read_bitmap(&self, bitmap: &str) -> Result<BitmapBits> {
        if let Some(found) = self.memory_bitmaps.find(bitmap) {
            return Ok(found.bits());
        }
        self.needs_qcow2("bitmaps")?;
        format_qcow2::read_bitmap(&self.open_blocking()?, &self.name.to_string(), bitmap).await
    }

    /// Reads the internal snapshots from the file.
    pub(crate) async fn internal_snapshots(&self) -> Result<Vec<Snapshot>> {
        self.mapping.snapshots(&self.open_blocking()?, &self.name.to_string()).await
    }
}
