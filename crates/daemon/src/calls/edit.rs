//! Persistent bitmaps and internal snapshots of disks in use.

use crate::daemon::Daemon;
use crate::jobs::fleece::{self, Fleece, FleeceRecord};
use crate::jobs::layers::top_of;
use crate::state::status::NodeId;
use block::{Error, ErrorKind, Result};
use image::{Aim, ClosedEdit, CopyWatch, OnlineBitmap, Snapshot};
use std::time::{Duration, Instant};

/// How much longer a request may take while a fleece is taken back.
const STALL: Duration = Duration::from_millis(5);
/// How often the room that a fleece has is looked at.
const LOOK_AT_ROOM_EVERY: Duration = Duration::from_millis(50);

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
        self.refuse_beside_guests(node, &found.name, edit)?;
        image.edit_online(edit)
    }

    fn refuse_beside_guests(&self, node: NodeId, name: &str, edit: &ClosedEdit) -> Result<()> {
        if matches!(edit, ClosedEdit::ApplySnapshot(_))
            && let Some(socket) = self.table.guest_of(node)
        {
            let what = format!(
                "the disk '{name}' has a guest at '{}', whose memory would no longer fit the disk: stop it first",
                socket.display()
            );
            return Err(Error::new(ErrorKind::Locked, what));
        }
        Ok(())
    }

    /// As [`Daemon::edit_disk`]. While a snapshot of an image with many clusters is taken or deleted, what guests write goes
    /// to a fleece beside the image: they wait for no table. Where no file can lie beside the image, they wait. Calls
    /// `will_edit` when no job runs on the disk, before anything changes.
    pub fn edit_disk_beside(
        &self,
        node: NodeId,
        edit: &ClosedEdit,
        will_edit: impl FnOnce() -> Result<()>,
        record: &mut dyn FleeceRecord,
    ) -> Result<()> {
        let (_work, found, image) = self.image_for("a change of its image".to_owned(), node, None)?;
        // Nobody else makes a fleece of the disk from here on, so the name stays free.
        let _editing = self.jobs.begin_edit(node, &found.name)?;
        self.refuse_beside_guests(node, &found.name, edit)?;
        will_edit()?;
        let can_be_beside = matches!(edit, ClosedEdit::CreateSnapshot(_) | ClosedEdit::DeleteSnapshot(_));
        let path = match can_be_beside && image.has_many_clusters() {
            true => Fleece::path_for(&image, &found.name, None),
            false => Err(Error::new(ErrorKind::Unsupported, "")),
        };
        let begun = path.and_then(|path| Ok((fleece::begin(&found, &image, &path, None, record)?, path)));
        let ((point, mut fleece), path) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                if can_be_beside && image.has_many_clusters() {
                    tracing::warn!(disk = %found.name, "guests wait while its snapshots change: {error}");
                }
                return image.edit_online(edit);
            }
        };
        let watch = CopyWatch::default();
        watch.set_aim(Aim { stall: Some(STALL), ..Aim::default() });
        let has_new_top = || self.table.has_new_top(node, top_of(&image));
        has_new_top();
        let (mut too_large, mut looked) = (Ok(()), Instant::now());
        let has_room = &mut || {
            if looked.elapsed() >= LOOK_AT_ROOM_EVERY {
                (too_large, looked) = (fleece.look_after(), Instant::now());
            }
            too_large.is_ok()
        };
        let edited = point.change_snapshots(edit, has_room);
        let edited = edited.map_err(|error| too_large.err().unwrap_or(error));
        let ended = fleece::end(&found.name, &image, point, &path, &watch, &has_new_top, record);
        fleece.let_go(ended.is_ok());
        match (edited, ended) {
            (edited, Ok(())) => edited,
            (Ok(()), Err(error)) => Err(error.in_context("the snapshots are changed")),
            (Err(edited), Err(error)) => Err(Error::new(edited.kind(), format!("{edited}; {error}"))),
        }
    }
}
