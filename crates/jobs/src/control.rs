//! Watching and stopping a job.

use block::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// The progress of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the disk behind it.
    pub done_bytes: u64,
    /// Bytes of the disk in all.
    pub total_bytes: u64,
}

/// The caller's side of a job.
#[non_exhaustive]
pub struct Control<'a> {
    /// Set by any thread to stop the job, which then fails.
    pub cancel: &'a AtomicBool,
    /// Called now and then, on the thread that called the job.
    pub progress: &'a mut dyn FnMut(Progress),
}

impl<'a> Control<'a> {
    /// Progress goes to `progress`; setting `cancel` stops the job.
    pub fn new(cancel: &'a AtomicBool, progress: &'a mut dyn FnMut(Progress)) -> Self {
        Self { cancel, progress }
    }

    pub(crate) fn tell(&mut self, done_bytes: u64, total_bytes: u64) {
        (self.progress)(Progress { done_bytes: done_bytes.min(total_bytes), total_bytes });
    }

    /// Fails once the job was cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Cancelled, "interrupted")),
        }
    }
}
