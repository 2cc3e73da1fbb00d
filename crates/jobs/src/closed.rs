//! The end of a job that wrote to an image.

use block::Result;
use image::Image;

/// Closes an image that a job wrote to, also after an error: only a closed image has its tables and bitmaps in order.
/// No queue of the image may be open.
pub(crate) fn closed(done: Result<()>, image: &Image) -> Result<()> {
    let closed = image.close();
    done.and(closed)
}
