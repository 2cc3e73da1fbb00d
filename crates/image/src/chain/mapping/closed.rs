//! Changes of a layer that is closed and that nobody uses: its size, its options, its backing file, its persistent
//! bitmaps, its internal snapshots, and the end of a compaction.

use super::Mapping;
use crate::chain::closed_edit::ClosedEdit;
use crate::file_name::FileName;
use block::{Error, ErrorKind, File, MetaIo, Result};
use format_qcow2::{
    AmendOptions, Backing, Bitmap, BitmapBits, EditWatch, GrowBy, ResizeOptions, Snapshot, SnapshotChange, VmState,
};
use format_raw::NewSpace;
use std::ops::Range;

/// What lasts longer than a layer is open. `io` and `file` are the layer's, which messages call `name`.
impl Mapping {
    /// Changes the size of a closed image that nobody uses. Open the image again afterwards, even if this fails.
    pub(crate) async fn resize_looked_at(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &str,
        options: &ResizeOptions,
        watch: &mut EditWatch<'_>,
    ) -> Result<()> {
        match self {
            Self::Raw(_) => {
                let space = raw_space(options.preallocation)?;
                format_raw::resize(io, file, options.size_bytes, options.shrink, space, watch).await
            }
            Self::Qcow2(_) => format_qcow2::resize_looked_at(io, file, name, options, watch).await,
            Self::Scratch(_) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "'{name}': a disk with snapshot=on keeps its size; resize the image below while nobody uses it"
                ),
            )),
        }
    }

    /// Changes options of a closed image that nobody uses.
    pub(crate) async fn amend_closed(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &str,
        options: &AmendOptions,
        watch: &mut EditWatch<'_>,
    ) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => {
                let what = format!("'{name}': a {} image has no options to change", self.format());
                Err(Error::new(ErrorKind::Unsupported, what))
            }
            Self::Qcow2(_) => format_qcow2::amend(io, file, name, options, watch).await,
        }
    }

    /// Refuses a layer whose refcounts deny data that are there. Nobody writes to it meanwhile.
    pub(crate) async fn look_before_writing(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &str,
        watch: &mut EditWatch<'_>,
    ) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Ok(()),
            Self::Qcow2(_) => format_qcow2::look_before_writing(io, file, name, watch).await,
        }
    }

    /// Refuses a layer whose format cannot store what `edit` changes.
    pub(crate) fn refuse_edit(&self, name: &FileName, edit: &ClosedEdit) -> Result<()> {
        if self.has_bitmaps_in_memory() && matches!(edit, ClosedEdit::Bitmaps(_)) {
            return Ok(());
        }
        self.refuse_without_tables(
            name,
            match edit {
                ClosedEdit::Bitmaps(_) => "bitmaps",
                ClosedEdit::Shorten(_) => "clusters that can move",
                _ => "internal snapshots",
            },
        )
    }

    /// Refuses a layer whose format has no `what`.
    fn refuse_without_tables(&self, name: impl std::fmt::Display, what: &str) -> Result<()> {
        match self {
            Self::Qcow2(_) => Ok(()),
            Self::Raw(_) | Self::Scratch(_) => {
                let what = format!("'{name}': a {} image has no {what}; only qcow2 has", self.format());
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }
    }

    /// Makes this change durably. A power cut leaves the layer before or after it.
    pub(crate) async fn edit_closed(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &FileName,
        edit: &ClosedEdit,
    ) -> Result<()> {
        self.refuse_edit(name, edit)?;
        self.refuse_without_tables(name, "tables")?;
        let (name, go_on) = (name.to_string(), &mut |_, _| true);
        let name = name.as_str();
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

    /// Takes or deletes an internal snapshot of a layer that nobody writes to; guests read it meanwhile. Returns what
    /// became free, in bytes of the file. It keeps its contents.
    pub(crate) async fn change_snapshots_beside_readers(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &FileName,
        edit: &ClosedEdit,
        watch: &mut EditWatch<'_>,
    ) -> Result<Vec<Range<u64>>> {
        self.refuse_edit(name, edit)?;
        let change = match edit {
            ClosedEdit::CreateSnapshot(new) => SnapshotChange::Create(new),
            ClosedEdit::DeleteSnapshot(which) => SnapshotChange::Delete(which),
            _ => {
                let what = format!("'{name}': only snapshots are taken or deleted while others read");
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
        };
        format_qcow2::change_snapshots_beside_readers(io, file, &name.to_string(), change, watch).await
    }

    /// Records another backing file, or none, in the header.
    pub(crate) async fn set_backing(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &str,
        backing: Option<&Backing>,
    ) -> Result<()> {
        self.refuse_without_tables(name, "backing file that could change")?;
        format_qcow2::set_backing(io, file, name, backing).await
    }

    /// Reads the persistent bitmaps from the file.
    pub(crate) async fn bitmaps(&self, io: &MetaIo, name: &str) -> Result<Vec<Bitmap>> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Ok(Vec::new()),
            Self::Qcow2(_) => format_qcow2::bitmaps(io, name).await,
        }
    }

    /// Reads the bits of a persistent bitmap from the file.
    pub(crate) async fn read_bitmap(&self, io: &MetaIo, name: &str, bitmap: &str) -> Result<BitmapBits> {
        self.refuse_without_tables(name, "bitmaps")?;
        format_qcow2::read_bitmap(io, name, bitmap).await
    }

    /// Reads the image's internal snapshots.
    pub(crate) async fn snapshots(&self, io: &MetaIo, name: &str) -> Result<Vec<Snapshot>> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Ok(Vec::new()),
            Self::Qcow2(qcow2) => format_qcow2::snapshots(io, qcow2.header(), name).await,
        }
    }
}

/// Translates how space is added to a raw image.
pub(crate) fn raw_space(space: GrowBy) -> Result<NewSpace> {
    match space {
        GrowBy::Nothing => Ok(NewSpace::Hole),
        GrowBy::Space => Ok(NewSpace::Allocated),
        GrowBy::Zeros => Ok(NewSpace::Zeros),
        GrowBy::Tables => {
            let what = "a raw image has no metadata to preallocate; use off, falloc or full";
            Err(Error::new(ErrorKind::BadOption, what))
        }
    }
}
