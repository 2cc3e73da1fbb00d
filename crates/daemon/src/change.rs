//! Changes of disks in use: their size, and their layers.

use crate::daemon::Daemon;
use crate::status::NodeId;
use crate::table::{Found, Table, Work};
use block::{Disk, Error, ErrorKind, File, Result};
use drive::{EngineOpener, check_room, make_file, unmake_file};
use image::{CopyWatch, CreateOptions, FileName, Format, Image, OpenedOverlay, Opener, Role, put_overlay};
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
        self.put_overlays_with(&overlays, || Ok(()), || Ok(()))
    }

    /// As [`Daemon::put_overlays`], and calls `commit` when the files are made, before they are layers. There the caller
    /// makes its record of the disks durable, while guests go on. If all goes on as before after an error, `undo` is
    /// called. If that fails, the record may name the files, so they stay. A layer can also be made in a cluster, or on
    /// the empty disk of an NBD server.
    pub fn put_overlays_with(
        &self,
        overlays: &[(NodeId, FileName)],
        commit: impl FnOnce() -> Result<()>,
        undo: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut made = Made::default();
        let mut disks = Vec::new();
        let mut works = Vec::new();
        for (node, name) in overlays {
            let (work, found, image) = self.image_for("a new overlay".to_owned(), *node, None)?;
            let overlay = made.overlay(&found, &image, name)?;
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

/// The two top layers of a disk, of which the upper one is taken off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenOff {
    /// The file of the layer that is taken off, by its canonical name.
    pub top: FileName,
    /// The file of the layer below, which becomes the top.
    pub below: FileName,
    /// The format of the layer below; `None` if it was guessed.
    pub below_format: Option<Format>,
}

impl TakenOff {
    /// Returns those of a disk; `None` if it has one layer.
    pub(crate) fn of(image: &Image) -> Option<Self> {
        let mut names = image.layer_file_names().map(|(own, _)| own);
        let (top, below) = names.next().zip(names.next())?;
        Some(Self { top, below, below_format: image.said_formats().nth(1).flatten() })
    }
}

/// Keeps a record of what a disk rests on, while that changes.
pub trait BaseRecord: Send {
    /// Notes, durably, that so many layers below the top will go. Until [`BaseRecord::has_moved`] or
    /// [`BaseRecord::stays`] is called, the image may name either base. On an error it keeps the old one.
    fn will_move(&mut self, gone: usize) -> Result<()>;
    /// Notes that the image names its new base.
    fn has_moved(&mut self);
    /// Notes that the image keeps its old base.
    fn stays(&mut self);
}

/// Keeps no record.
impl BaseRecord for () {
    fn will_move(&mut self, _gone: usize) -> Result<()> {
        Ok(())
    }

    fn has_moved(&mut self) {}

    fn stays(&mut self) {}
}

pub(crate) fn top_of(image: &Image) -> Option<FileName> {
    image.file_names().next()
}

/// Files that were made. They are removed again unless they are kept.
#[derive(Default)]
pub(crate) struct Made(Vec<FileName>);

impl Made {
    /// Makes a file, which must not exist. Its name is durable: a record of disks is going to name it.
    pub(crate) fn file(&mut self, name: &FileName, length_bytes: u64) -> Result<()> {
        make_file(name, length_bytes)?;
        self.0.push(name.clone());
        name.path().map_or(Ok(()), engine::sync_directory_of)
    }

    fn overlay(&mut self, found: &Found, image: &Image, name: &FileName) -> Result<OpenedOverlay> {
        self.overlay_with(found, image, name, |options| options)
    }

    /// As [`Made::overlay`], with changed options.
    pub(crate) fn overlay_with(
        &mut self,
        found: &Found,
        image: &Image,
        name: &FileName,
        change: impl FnOnce(CreateOptions) -> CreateOptions,
    ) -> Result<OpenedOverlay> {
        let options = change(CreateOptions::overlay(image.info().size_bytes, image.layer_in_header(0)?));
        self.file(name, 0)?;
        let file: Arc<dyn File> =
            EngineOpener::of_disk(&found.options).with_buffers(image.buffers()).open(name, Role::Writable)?;
        check_room(&*file, &options)?;
        image::create(&file, &options)?;
        OpenedOverlay::open(name, file)
    }

    pub(crate) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for name in &self.0 {
            if let Err(error) = unmake_file(name) {
                tracing::warn!("cannot remove '{name}', which is not used: {error}");
            }
        }
    }
}
