//! Opens the files of disks in use anew.

use crate::daemon::Daemon;
use crate::state::status::NodeId;
use block::Result;
use drive::{DiskOptions, EngineOpener, open_again};
use image::FileName;

impl Daemon {
    /// Returns the options of a disk. Its file may be another one by now.
    pub fn disk_options(&self, node: NodeId) -> Result<DiskOptions> {
        Ok(self.table.find(node)?.options)
    }

    /// Returns the canonical names of the layers' own files, top first.
    pub fn layer_files(&self, node: NodeId) -> Result<Vec<FileName>> {
        let found = self.table.find(node)?;
        Ok(found.disk.image.iter().flat_map(|image| image.layer_file_names()).map(|(own, _)| own).collect())
    }

    /// Opens the files of a disk anew while guests use it, after one was replaced or changed behind the disk. Nothing
    /// remembered of the old files is used any more. With `force`, data that cannot be written to the old files are
    /// given up. Waits for requests in flight.
    pub fn reopen(&self, node: NodeId, force: bool) -> Result<()> {
        let options = self.disk_options(node)?;
        self.open_files_with(EngineOpener::of_disk(&options).anew(), node, &options, force)
    }

    /// As [`Daemon::reopen`], with new `options`: another engine, cache mode, or memory for tables. Other options have
    /// no effect until the disk is added anew. On an error the disk goes on as it was.
    pub fn reopen_as(&self, node: NodeId, options: &DiskOptions) -> Result<()> {
        // A base at a server stays the one that the disk was made on.
        self.open_files_with(EngineOpener::of_disk(options), node, options, false)?;
        self.table.has_new_options(node, options.clone());
        Ok(())
    }

    fn open_files_with(&self, opener: EngineOpener, node: NodeId, options: &DiskOptions, force: bool) -> Result<()> {
        let (_work, found, image) = self.image_for("its files being opened anew".to_owned(), node, None)?;
        let opener = opener.with_buffers(image.buffers());
        let (policy, listed) = (self.config.allow_backing.clone(), self.listed_for(&found));
        image.reopen(force, || open_again(&opener, options, &image, policy, &listed))
    }
}
