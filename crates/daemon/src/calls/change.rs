//! Changes of disks in use: their size, and their layers.

use crate::daemon::Daemon;
use crate::jobs::layers::top_of;
use crate::jobs::made::Made;
use crate::state::status::NodeId;
use crate::table::{Found, Table, Work};
use block::{Error, ErrorKind, Result};
use image::{CopyWatch, FileName, Image, put_overlay};
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Daemon {
    /// Makes a disk larger, and tells its guests. The new part reads as zeros. A disk in use never becomes smaller. The
    /// new size must be a whole number of the logical blocks that its guests see.
    /// Guests wait for as long as their requests in flight and a few changes of tables take.
    pub fn resize(&self, node: NodeId, size_bytes: u64) -> Result<()> {
        let (_work, found, image) = self.image_for("its resize".to_owned(), node, None)?;
        let block_bytes =
            u64::from(self.table.block_bytes_of(node).max(found.options.shown.logical_block_bytes.unwrap_or(0)));
        if size_bytes.checked_rem(block_bytes).is_some_and(|rest| rest > 0) {
            let fits = size_bytes.checked_next_multiple_of(block_bytes).unwrap_or(size_bytes);
            let message = format!(
                "the disk '{}' has logical blocks of {block_bytes} bytes: {size_bytes} bytes are no whole number of them, \
                 {fits} are",
                found.name
            );
            return Err(Error::new(ErrorKind::BadOption, message));
        }
        image.grow(size_bytes)
    }

    /// Puts a new, empty qcow2 image on top of each of these disks, on all at one moment. The former tops hold what the
    /// guests had written by then, and no longer change. The files are made here and must not exist. They name their
    /// backing files by absolute paths. Guests go on meanwhile.
    ///
    /// If only one disk fails after all have switched, the others' former tops are safe, and the error says so.
    pub fn put_overlays(&self, overlays: &[(NodeId, &Path)]) -> Result<()> {
        let overlays: Vec<_> = overlays.iter().map(|(node, path)| (*node, FileName::from(*path))).collect();
        self.put_overlays_with(&overlays, |_, _| Ok(()), || Ok(()), || Ok(()))
    }

    /// As [`Daemon::put_overlays`], and calls `has_made` when a file is there, before anything is written to it, and
    /// `commit` when the files are made, before they are layers. There the caller
    /// makes its record of the disks durable, while guests go on. If all goes on as before after an error, `undo` is
    /// called. If that fails, the record may name the files, so they stay. A layer can also be made in a cluster, or on
    /// the empty disk of an NBD server.
    pub fn put_overlays_with(
        &self,
        overlays: &[(NodeId, FileName)],
        has_made: impl Fn(NodeId, &FileName) -> Result<()>,
        commit: impl FnOnce() -> Result<()>,
        undo: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut made = Made::default();
        let mut disks = Vec::new();
        let mut works = Vec::new();
        for (node, name) in overlays {
            let (work, found, image) = self.image_for("a new overlay".to_owned(), *node, None)?;
            let overlay = made.overlay_with(&found, &image, name, || has_made(*node, name), |options| options)?;
            disks.push((image, overlay));
            works.push((work, *node));
        }
        let images: Vec<Arc<Image>> = disks.iter().map(|(image, _)| Arc::clone(image)).collect();
        let results = put_overlay(disks, commit);
        match &results {
            // The new files may hold guests' data.
            Ok(_) => {
                made.keep();
                works.iter().zip(&images).for_each(|((_, node), image)| self.table.has_new_top(*node, top_of(image)));
            }
            Err(failed) => {
                if let Err(error) = undo() {
                    made.keep();
                    tracing::error!(
                        "after '{failed}': the record may name new layers, which stay and are empty: {error}"
                    );
                }
            }
        }
        results?.into_iter().fold(Ok(()), Result::and)
    }

    /// Takes the top layer of a disk back, by a job ([`Daemon::start_take_overlay_back`]), and waits for its end.
    pub fn take_overlay_back(&self, node: NodeId) -> Result<()> {
        self.wait_job(self.start_take_overlay_back(node)?)
    }

    /// Files that images may name which are opened for this disk: those that the user named, for all disks and for this one.
    pub(crate) fn listed_for(&self, found: &Found) -> Vec<PathBuf> {
        self.config.listed.iter().chain(&found.options.bases).cloned().collect()
    }

    /// Returns a disk's image, with a claim that keeps the disk. Removing the disk by force cancels the `watch`.
    pub(crate) fn image_for(
        &self,
        what: String,
        node: NodeId,
        watch: Option<Arc<CopyWatch>>,
    ) -> Result<(Work, Found, Arc<Image>)> {
        let work = Table::begin_work(&self.table, node, what, watch)?;
        let found = self.table.find(node)?;
        let image = found.disk.image.clone().ok_or_else(|| {
            let message = format!("the disk '{}' is not an image: it has no layers and one size", found.name);
            Error::new(ErrorKind::Unsupported, message)
        })?;
        Ok((work, found, image))
    }
}
