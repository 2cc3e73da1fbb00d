//! Files that are made for changes of disks, and removed again if nothing came of the change.

use crate::table::Found;
use block::{Disk, File, Result};
use drive::{EngineOpener, check_room, make_file, unmake_file};
use image::{CreateOptions, FileName, Image, OpenedOverlay, Opener, Role};
use std::sync::Arc;

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

    /// Makes an empty overlay for the disk's top. Calls `has_made` when the file is there. `change` changes its options.
    pub(crate) fn overlay_with(
        &mut self,
        found: &Found,
        image: &Image,
        name: &FileName,
        has_made: impl FnOnce() -> Result<()>,
        change: impl FnOnce(CreateOptions) -> CreateOptions,
    ) -> Result<OpenedOverlay> {
        let options = change(CreateOptions::overlay(image.info().size_bytes, image.layer_in_header(0)?));
        self.file(name, 0)?;
        has_made()?;
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
