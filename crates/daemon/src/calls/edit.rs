//! Persistent bitmaps and internal snapshots of disks in use.

use crate::daemon::Daemon;
use crate::state::status::NodeId;
use block::{Error, ErrorKind, Result};
use image::{ClosedEdit, OnlineBitmap, Snapshot};

impl Daemon {
    /// Returns the persistent bitmaps of a disk's layers, top first.
    pub fn bitmaps(&self, node: NodeId) -> Result<Vec<OnlineBitmap>> {
        let (_work, _, image) = self.image_for("a look at its bitmaps".to_owned(), node, None)?;
        image.online_bitmaps()
    }

    /// Returns the internal snapshots of a disk's top layer.
    pub fn internal_snapshots(&self, node: NodeId) -> Result<Vec<Snapshot>> {
        let (_work, _, image) = self.image_for("a look at its snapshots".to_owned(), node, None)?;
        image.online_snapshots()
    }

    /// Changes bitmaps or internal snapshots of a disk's top layer: see [`image::Image::edit_online`]. A snapshot is applied
    /// only while no guest is connected to the disk.
    pub fn edit_disk(&self, node: NodeId, edit: &ClosedEdit) -> Result<()> {
        let (_work, found, image) = self.image_for("a change of its image".to_owned(), node, None)?;
        let _editing = self.jobs.begin_edit(node, &found.name)?;
        if matches!(edit, ClosedEdit::ApplySnapshot(_))
            && let Some(socket) = self.table.guest_of(node)
        {
            let what = format!(
                "the disk '{}' has a guest at '{}', whose memory would no longer fit the disk: stop it first",
                found.name,
                socket.display()
            );
            return Err(Error::new(ErrorKind::Locked, what));
        }
        image.edit_online(edit)
    }
}
