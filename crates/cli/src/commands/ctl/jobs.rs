//! Long work on running disks: starting it, waiting for it, steering it.

use super::duration::parse_ms;
use super::{Ctl, Output, tables, whole_target};
use crate::output::{self, ProgressArgs, Watch};
use control::api::{CommitDisk, CompactDisk, Job, JobState, LimitJob, MirrorDisk, RebaseDisk, StreamDisk};
use control::{CallError, path_segment};
use jobs::{Control, Progress};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How a job runs.
#[derive(clap::Args)]
pub(super) struct How {
    /// Return once the job has started; do not wait for its end. Without it, Ctrl-C cancels the job.
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// Move at most this many bytes a second, such as 50M.
    #[arg(long)]
    rate: Option<String>,
}

/// The limits of a job that copies a disk while guests write to it.
#[derive(clap::Args)]
pub(super) struct AimOf {
    /// Finish in this time (30s, 500ms, 5m), however fast the guest writes: its writes wait a little if the storage is
    /// too slow for both.
    #[arg(long, value_name = "TIME")]
    within: Option<String>,
    /// The longest delay that the job may add to a request of the guest [default: 50ms].
    #[arg(long, value_name = "TIME")]
    stall: Option<String>,
}

impl AimOf {
    fn parse(&self) -> anyhow::Result<(Option<u64>, Option<u64>)> {
        let parse = |text: &Option<String>| text.as_deref().map(parse_ms).transpose();
        Ok((parse(&self.within)?, parse(&self.stall)?))
    }
}

/// The target and options of a copy of a disk.
#[derive(clap::Args)]
pub(super) struct Mirror {
    /// The disk.
    name: String,
    /// The new image: a file, rbd:POOL/IMAGE or nbd://HOST/EXPORT. It must not exist, unless --existing is given; a qcow2
    /// image is also made on a server's disk that is empty. A new file is named TARGET.part until it holds everything.
    target: PathBuf,
    /// Its format, raw or qcow2 [default: that of the disk].
    #[arg(long)]
    format: Option<String>,
    /// Overwrite an existing image that is as large as the disk. It needs --format.
    #[arg(long)]
    existing: bool,
    /// Copy the top layer only: the new image rests on the same layers.
    #[arg(long)]
    top: bool,
    /// Leave a copy of the disk, as it is at one moment. Otherwise the disk moves to the new image.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    aim: AimOf,
    #[command(flatten)]
    how: How,
}

/// The layers that are committed, and how.
#[derive(clap::Args)]
pub(super) struct Commit {
    /// The disk.
    name: String,
    /// Commit this many layers, one after the other.
    #[arg(long, value_name = "N", default_value_t = 1)]
    layers: usize,
    /// The uppermost layer that goes [default: the disk's top].
    #[arg(long, value_name = "FILE")]
    top: Option<PathBuf>,
    /// The layer that takes the data of all layers above it, down from --top.
    #[arg(long, value_name = "FILE", conflicts_with = "layers")]
    base: Option<PathBuf>,
    #[command(flatten)]
    aim: AimOf,
    #[command(flatten)]
    how: How,
}

impl How {
    pub(super) fn bytes_per_second(&self) -> anyhow::Result<Option<u64>> {
        Ok(self.rate.as_deref().map(drive::parse_size).transpose()?)
    }
}

/// Returns the error of who waited for a job when the daemon did not answer any more.
fn without_end(job: &Job, error: CallError) -> anyhow::Error {
    let Job { id, disk, .. } = job;
    match error {
        CallError::Ended(_) => anyhow::anyhow!(
            "the daemon ended, and its next start does not continue job {id}: look at 'ringdisk ctl show {disk}' before \
             you start it again"
        ),
        error => error.into(),
    }
}

impl Ctl {
    pub(super) fn commit(&self, commit: &Commit) -> anyhow::Result<()> {
        let Commit { name, layers, top, base, aim, how } = commit;
        let (bytes_per_second, (within_ms, stall_ms)) = (how.bytes_per_second()?, aim.parse()?);
        let [top, base] = [top, base].map(|file| file.as_deref().map(whole_target));
        self.start(
            name,
            "commit",
            &CommitDisk { layers: *layers, top, base, bytes_per_second, within_ms, stall_ms },
            how,
        )
    }

    pub(super) fn mirror(&self, mirror: &Mirror) -> anyhow::Result<()> {
        let Mirror { name, target, format, existing, top, keep, aim, how } = mirror;
        let (bytes_per_second, (within_ms, stall_ms)) = (how.bytes_per_second()?, aim.parse()?);
        let (target, format) = (whole_target(target), format.clone());
        let (existing, top, keep) = (*existing, *top, *keep);
        let request = MirrorDisk { target, format, existing, top, keep, bytes_per_second, within_ms, stall_ms };
        self.start(name, "mirror", &request, how)
    }

    pub(super) fn stream(&self, name: &str, base: Option<&Path>, how: &How) -> anyhow::Result<()> {
        let request = StreamDisk { base: base.map(drive::absolute), bytes_per_second: how.bytes_per_second()? };
        self.start(name, "stream", &request, how)
    }

    pub(super) fn rebase(&self, name: &str, base: &Path, format: Option<String>, how: &How) -> anyhow::Result<()> {
        let bytes_per_second = how.bytes_per_second()?;
        self.start(name, "rebase", &RebaseDisk { base: drive::absolute(base), format, bytes_per_second }, how)
    }

    pub(super) fn compact(&self, name: &str, how: &How) -> anyhow::Result<()> {
        self.start(name, "compact", &CompactDisk { bytes_per_second: how.bytes_per_second()? }, how)
    }

    pub(super) fn start(&self, name: &str, what: &str, request: &impl Serialize, how: &How) -> anyhow::Result<()> {
        // It watches before the job begins: an interrupt meanwhile cancels the job as soon as it has a number.
        let watch = (!how.no_wait).then(|| Watch::start(&how.progress)).transpose()?;
        let mut job: Job = self.client.post(&format!("/v1/disks/{}/{what}", path_segment(name)), request)?;
        if let Some(watch) = watch {
            // Standard output is for the job alone if a program reads it.
            let mut watch = if self.output == Output::Json { watch.on_standard_error() } else { watch };
            job = watch.run(|control| self.end_of(job, control))?;
        }
        if !how.progress.quiet || self.output == Output::Json {
            self.show(&job, |job| tables::jobs(std::slice::from_ref(job)))?;
        }
        match (job.state, job.error) {
            (JobState::Failed, error) => Err(anyhow::anyhow!("job {} failed: {}", job.id, error.unwrap_or_default())),
            (JobState::Cancelled, _) => Err(anyhow::anyhow!("job {} was cancelled", job.id)),
            _ => Ok(()),
        }
    }

    /// Waits for the end of a job, and shows how far it is. Who interrupts this program cancels the job, and learns what
    /// has become of it.
    fn end_of(&self, mut job: Job, control: &mut Control<'_>) -> anyhow::Result<Job> {
        let mut is_asked = false;
        while job.state.is_under_way() {
            if control.cancel.load(Ordering::Relaxed) && !is_asked {
                is_asked = true;
                output::warn(&format!("interrupted: job {} is cancelled", job.id));
                // It may be done by now, or nearly; then it ends by itself.
                if let Err(error) = self.client.post_nothing::<Job>(&format!("/v1/jobs/{}/cancel", job.id)) {
                    output::warn(&format!("{error}"));
                }
            }
            let total_bytes = job.total_bytes;
            (control.progress)(Progress { done_bytes: job.done_bytes.min(total_bytes), total_bytes });
            std::thread::sleep(Duration::from_millis(100));
            job = self.client.get(&format!("/v1/jobs/{}", job.id)).map_err(|error| without_end(&job, error))?;
        }
        if job.state == JobState::Done {
            let total_bytes = job.total_bytes.max(job.done_bytes);
            (control.progress)(Progress { done_bytes: total_bytes, total_bytes });
        }
        Ok(job)
    }

    /// Pauses, resumes or cancels a job.
    pub(super) fn steer(&self, job: u64, how: &str) -> anyhow::Result<()> {
        let job: Job = self.client.post_nothing(&format!("/v1/jobs/{job}/{how}"))?;
        self.show(&job, |job| tables::jobs(std::slice::from_ref(job)))
    }

    pub(super) fn limit(&self, job: u64, rate: &str) -> anyhow::Result<()> {
        let request = LimitJob { bytes_per_second: drive::parse_size(rate)? };
        let job: Job = self.client.post(&format!("/v1/jobs/{job}/limit"), &request)?;
        self.show(&job, |job| tables::jobs(std::slice::from_ref(job)))
    }
}
