//! Changes of a layer's persistent bitmaps and internal snapshots, and the end of a compaction, while it is closed and nobody uses it.

use super::layer::Layer;
use super::mapping::Mapping;
use block::{Error, ErrorKind, File, MetaIo, PastEnd, Result, block_on};
use format_qcow2::{Bitmap, BitmapAction, BitmapBits, NewSnapshot, Snapshot, SnapshotName, VmState};
use std::ops::Range;
use std::sync::Arc;

/// What to change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClosedEdit {
    /// Bitmaps, each named: all that is asked for, in order, or nothing.
    Bitmaps(Vec<(String, BitmapAction)>),
    /// Take an internal snapshot.
    CreateSnapshot(NewSnapshot),
    /// Take one that keeps the state of a machine, too.
    SaveState(NewSnapshot, StateSource),
    /// Delete this one.
    DeleteSnapshot(SnapshotName),
    /// Make the disk what it was when this one was taken.
    ApplySnapshot(SnapshotName),
    /// Move tables from the end of the file to its start, and cut it off behind what is in use. Of these host clusters, those
    /// that count as free are nobody's, whatever they hold: a compaction has looked at all that could lead there.
    Shorten(Range<u64>),
}

/// A file that begins with the state of a machine.
#[derive(Debug, Clone)]
pub struct StateSource {
    /// The file.
    pub file: Arc<dyn File>,
    /// Bytes of the state.
    pub length_bytes: u64,
}

impl PartialEq for StateSource {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.file, &other.file) && self.length_bytes == other.length_bytes
    }
}

impl Eq for StateSource {}

impl StateSource {
    /// Fills `target` with the bytes from `offset` on; makes calls that block.
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

    /// Whether its format has what `edit` changes.
    pub(crate) fn refuse_edit(&self, edit: &ClosedEdit) -> Result<()> {
        self.needs_qcow2(match edit {
            ClosedEdit::Bitmaps(_) => "bitmaps",
            ClosedEdit::Shorten(_) => "clusters that can move",
            _ => "internal snapshots",
        })
    }

    /// Changes the layer, which is closed and which nobody uses, durably. A power cut leaves it before or after the change.
    pub(crate) async fn edit_closed(&self, edit: &ClosedEdit) -> Result<()> {
        self.refuse_edit(edit)?;
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

    /// The persistent bitmaps as the file has them.
    pub(crate) async fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        match &self.mapping {
            Mapping::Raw(_) | Mapping::Scratch(_) => Ok(Vec::new()),
            Mapping::Qcow2(_) => format_qcow2::bitmaps(&self.open_blocking()?, &self.name.to_string()).await,
        }
    }

    /// The bits that the file has of a bitmap.
    pub(crate) async fn read_bitmap(&self, bitmap: &str) -> Result<BitmapBits> {
        self.needs_qcow2("bitmaps")?;
        format_qcow2::read_bitmap(&self.open_blocking()?, &self.name.to_string(), bitmap).await
    }

    /// The internal snapshots as the file has them now.
    pub(crate) async fn internal_snapshots(&self) -> Result<Vec<Snapshot>> {
        self.mapping.snapshots(&self.open_blocking()?, &self.name.to_string()).await
    }
}
