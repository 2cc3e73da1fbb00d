//! Checks that an image's tables agree with each other.

use crate::Control;
use block::{File, Result};
use image::{CheckEvent, CheckReport, Format, Repair};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Checks the image in `file`, which was opened for reading. `finding` gets each error. Raw images have nothing to
/// check: Unsupported.
pub fn check(
    name: &str,
    file: &Arc<dyn File>,
    format: Option<Format>,
    repair: Option<Repair>,
    control: &mut Control<'_>,
    finding: &mut dyn FnMut(&str),
) -> Result<CheckReport> {
    let mut progress = Rising { done: 0, total: 1 };
    let report = image::check(name, file, format, repair, &mut |event| {
        match event {
            CheckEvent::Finding(text) => finding(&text),
            CheckEvent::Progress(done, total) if progress.rises_to(done, total) => {
                control.tell(progress.done, progress.total);
            }
            CheckEvent::Progress(..) => {}
        }
        !control.cancel.load(Ordering::Relaxed)
    })?;
    control.tell(progress.total, progress.total);
    Ok(report)
}

/// The progress of several passes over the tables, as one. It never goes back, and ends only with the last pass.
struct Rising {
    done: u64,
    total: u64,
}

impl Rising {
    /// Takes a later report, unless it would go back.
    fn rises_to(&mut self, done: u64, total: u64) -> bool {
        let done = done.min(total.saturating_sub(1));
        let product = |first: u64, second: u64| u128::from(first) * u128::from(second);
        let rises = done >= self.done && product(done, self.total) >= product(self.done, total);
        if rises {
            (self.done, self.total) = (done, total);
        }
        rises
    }
}
