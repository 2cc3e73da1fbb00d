//! Changes of a layer while it is closed and nobody uses it: its persistent bitmaps, its internal snapshots, and the
//! end of a compaction.

use block::{Error, ErrorKind, File, MetaIo, PastEnd, Result, block_on};
use format_qcow2::{BitmapAction, NewSnapshot, SnapshotName};
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
    pub(crate) fn read(&self, io: &MetaIo, offset: u64, target: &mut [u8]) -> Result<()> {
        let what = || format!("cannot read the machine's state from '{}'", self.file.info().name);
        let read = block_on(io.read(offset, target.len(), PastEnd::Fails));
        let bytes = read.map_err(|error| Error::with_source(ErrorKind::Io, what(), error))?;
        target.copy_from_slice(&bytes);
        Ok(())
    }
}
