//! A limit on the speed of a job.

use crate::Control;
use std::time::{Duration, Instant};

/// The longest sleep, so that a cancelled job ends soon.
const NAP: Duration = Duration::from_millis(50);

/// Limits a job to a number of bytes a second.
pub(crate) struct RateLimit {
    bytes_per_second: Option<u64>,
    /// When the bytes counted so far are due.
    due: Option<Instant>,
}

impl RateLimit {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second: bytes_per_second.filter(|rate| *rate > 0), due: None }
    }

    /// Waits until `bytes` more may go.
    pub(crate) fn pass(&mut self, bytes: u64, control: &Control<'_>) {
        let Some(rate) = self.bytes_per_second else { return };
        let now = Instant::now();
        let due = self.due.filter(|due| *due > now).unwrap_or(now);
        self.due = Some(due + Duration::from_secs_f64(bytes as f64 / rate as f64));
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() || control.check().is_err() {
                return;
            }
            std::thread::sleep(left.min(NAP));
        }
    }
}
