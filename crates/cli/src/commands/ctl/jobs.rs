//! Long work on running disks: starting it, waiting for it, steering it.

use super::{Ctl, path_segment, tables};
use control::api::{CommitDisk, Job, JobState, LimitJob, RebaseDisk, StreamDisk};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// How a job runs.
#[derive(clap::Args)]
pub(super) struct How {
    /// Return when the job is started; do not wait for its end.
    #[arg(long)]
    no_wait: bool,
    /// Move at most so many bytes in a second, as 50M.
    #[arg(long)]
    rate: Option<String>,
}

impl How {
    pub(super) fn bytes_per_second(&self) -> anyhow::Result<Option<u64>> {
        Ok(self.rate.as_deref().map(drive::parse_size).transpose()?)
    }
}

impl Ctl {
    pub(super) fn commit(&self, name: &str, layers: usize, how: &How) -> anyhow::Result<()> {
        let bytes_per_second = how.bytes_per_second()?;
        self.start(name, "commit", &CommitDisk { layers, bytes_per_second }, how)
    }

    pub(super) fn stream(&self, name: &str, base: Option<&Path>, how: &How) -> anyhow::Result<()> {
        let request = StreamDisk { base: base.map(daemon::absolute), bytes_per_second: how.bytes_per_second()? };
        self.start(name, "stream", &request, how)
    }

    pub(super) fn rebase(&self, name: &str, base: &Path, format: Option<String>, how: &How) -> anyhow::Result<()> {
        let bytes_per_second = how.bytes_per_second()?;
        self.start(name, "rebase", &RebaseDisk { base: daemon::absolute(base), format, bytes_per_second }, how)
    }

    pub(super) fn start(&self, name: &str, what: &str, request: &impl Serialize, how: &How) -> anyhow::Result<()> {
        let mut job: Job = self.client.post(&format!("/v1/disks/{}/{what}", path_segment(name)), request)?;
        while !how.no_wait && matches!(job.state, JobState::Running | JobState::Paused) {
            std::thread::sleep(Duration::from_millis(100));
            job = self.client.get(&format!("/v1/jobs/{}", job.id))?;
        }
        self.show(&job, |job| tables::jobs(std::slice::from_ref(job)))?;
        match (job.state, job.error) {
            (JobState::Failed, error) => Err(anyhow::anyhow!("job {} failed: {}", job.id, error.unwrap_or_default())),
            (JobState::Cancelled, _) => Err(anyhow::anyhow!("job {} was cancelled", job.id)),
            _ => Ok(()),
        }
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
