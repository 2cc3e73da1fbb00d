//! Whether an image's tables agree with each other.

use crate::Control;
use block::{File, Result};
use image::{CheckEvent, CheckReport, Format, Repair};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Checks the image in `file`, which was opened for reading. Each thing that is wrong is told to `finding`. Raw images
/// have nothing to check: Unsupported.
pub fn check(
    name: &str,
    file: &Arc<dyn File>,
    format: Option<Format>,
    repair: Option<Repair>,
    control: &mut Control<'_>,
    finding: &mut dyn FnMut(&str),
) -> Result<CheckReport> {
    image::check(name, file, format, repair, &mut |event| {
        match event {
            CheckEvent::Finding(text) => finding(&text),
            CheckEvent::Progress(done, total) => control.tell(done, total),
        }
        !control.cancel.load(Ordering::Relaxed)
    })
}
