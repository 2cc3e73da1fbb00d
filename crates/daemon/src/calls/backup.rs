//! Starts backups of running disks.

use crate::daemon::Daemon;
use crate::jobs::backup::{Backup, BackupOptions, BackupRecord, check};
use crate::jobs::fleece::Fleece;
use crate::state::status::{JobId, JobKind, NodeId};
use block::Result;
use image::{Aim, CopyWatch};
use std::sync::Arc;
use std::time::Duration;

/// How much longer a request may take while the fleece is taken back.
const STALL: Duration = Duration::from_millis(50);

impl Daemon {
    /// Starts a job that copies a disk as it is at one moment soon after the call. See [`BackupOptions`].
    pub fn start_backup(
        &self,
        node: NodeId,
        options: BackupOptions,
        mut record: impl BackupRecord + 'static,
    ) -> Result<JobId> {
        let (_work, found, image) = self.image_for("a look at it for its backup".to_owned(), node, None)?;
        check(&found.name, &image, &options)?;
        let fleece = Fleece::path_for(&image, &found.name, options.fleece_directory.as_deref())?;
        let mut listed = self.listed_for(&found);
        listed.extend(options.base.clone());
        let (rate, policy) = (options.bytes_per_second, (self.config.allow_backing.clone(), listed));
        drop(image);
        let ending = Arc::new(CopyWatch::that_can_give_up());
        ending.set_aim(Aim { stall: Some(STALL), ..Aim::default() });
        let mut backup = Backup { found, policy, options, fleece, ending: Arc::clone(&ending) };
        self.start_job_with_ending(JobKind::Backup, node, rate, ending, move |image, watch, has_new_top| {
            backup.choose_mode(image, watch, &record)?;
            backup.run(image, watch, has_new_top, &mut record)
        })
    }
}
