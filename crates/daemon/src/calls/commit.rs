//! Starts commits of layers of running disks.

use crate::daemon::Daemon;
use crate::jobs::commit::{Commit, CommitOptions, CommitRecord, places};
use crate::state::status::{JobId, JobKind, NodeId};
use block::{Error, ErrorKind, Result};
use drive::EngineOpener;
use image::FileName;

impl Daemon {
    /// Returns the files of the layers that a commit with these options uses: the layer above those that go, if there is
    /// one, those that go, and the layer that takes their data.
    pub fn layers_of_commit(&self, node: NodeId, options: &CommitOptions) -> Result<Vec<FileName>> {
        let (_work, found, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
        self.jobs.lock().refuse_second(node, &found.name)?;
        let layers: Vec<FileName> = image.layer_file_names().map(|(own, _)| own).collect();
        let (top, base) = places(&found.name, &layers, options)?;
        Ok(layers.into_iter().take(base.saturating_add(1)).skip(top.saturating_sub(1)).collect())
    }

    /// Starts to commit layers of a disk into the layer below them, one after the other. Guests go on meanwhile. Layers
    /// that were open for reading are opened for writing, unless somebody else uses them. The files that go are emptied
    /// and stay. If the job ends early, layers that have gone stay away.
    pub fn start_commit(
        &self,
        node: NodeId,
        options: CommitOptions,
        mut record: impl CommitRecord + 'static,
    ) -> Result<JobId> {
        let (_work, found, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
        self.jobs.lock().refuse_second(node, &found.name)?;
        let layers: Vec<FileName> = image.layer_file_names().map(|(own, _)| own).collect();
        let (top, base) = places(&found.name, &layers, &options)?;
        if top > 0 && options.aim.within.is_some() {
            let what = "a time limit (--within) is for the top layer: no guest writes to the layers below";
            return Err(Error::new(ErrorKind::BadOption, what));
        }
        let opener = EngineOpener::of_disk(&found.options).with_buffers(image.buffers());
        let commit = Commit { gone: layers.into_iter().take(base).skip(top).collect(), is_from_top: top == 0, opener };
        drop((found, image));
        self.start_job(JobKind::TakeOverlayBack, node, options.bytes_per_second, move |image, watch, has_new_top| {
            watch.set_aim(options.aim);
            commit.run(image, watch, has_new_top, &mut record)
        })
    }
}
