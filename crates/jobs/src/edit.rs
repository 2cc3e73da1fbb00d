//! Creating images, and changing images that are not in use.

use crate::Control;
use block::{File, Result};
use image::{Amend, CreateOptions, Edit, Format, GrowBy, Image};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Creates an image in an empty file, and its data file if it has one. If it is cancelled while space is preallocated,
/// an incomplete image is left.
pub fn create(
    file: &Arc<dyn File>,
    data: Option<&Arc<dyn File>>,
    options: &CreateOptions,
    control: &mut Control<'_>,
) -> Result<()> {
    image::create_watched(file, data, options, &mut watch(control))
}

/// Takes, applies or deletes an internal snapshot of the image in `file`, which was opened for writing. If it is
/// cancelled, the image is unchanged.
pub fn edit(
    name: &str,
    file: &Arc<dyn File>,
    format: Option<Format>,
    edit: &Edit,
    control: &mut Control<'_>,
) -> Result<()> {
    image::edit(name, file, format, edit, &mut watch(control))
}

/// Changes the size of an image that was opened for writing. If it is cancelled, the image is unchanged. But if the
/// error says that a shorter disk has its new size already, only the file is longer than necessary.
pub fn resize(
    image: Image,
    size_bytes: u64,
    shrink: bool,
    preallocation: GrowBy,
    control: &mut Control<'_>,
) -> Result<()> {
    image.resize(size_bytes, shrink, preallocation, &mut watch(control))
}

/// Changes options of an image that was opened for writing. If it is cancelled, the image is unchanged; a smaller size
/// is handled as by [`resize`].
pub fn amend(image: Image, amend: &Amend, control: &mut Control<'_>) -> Result<()> {
    image.amend(amend, &mut watch(control))
}

/// Makes a callback that reports progress, and returns whether to go on.
fn watch<'a>(control: &'a mut Control<'_>) -> impl FnMut(u64, u64) -> bool + 'a {
    |done, total| {
        control.tell(done, total);
        !control.cancel.load(Ordering::Relaxed)
    }
}
