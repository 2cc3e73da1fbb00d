//! More room in an image that is not open.

use crate::guess::Format;
use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use format_qcow2::ResizeOptions;
use std::sync::Arc;

/// Makes the disk of the image in `file` so long, durably. What is added reads as zeros where the image has no backing
/// file.
pub fn grow(file: &Arc<dyn File>, format: Format, size_bytes: u64) -> Result<()> {
    let name = &file.info().name;
    if file.info().block_device {
        return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': a block device cannot be resized")));
    }
    match format {
        Format::Raw => {
            let io = MetaIo::new(file.open_blocking()?);
            let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot resize '{name}'"), error);
            block_on(async {
                io.set_length(size_bytes).await?;
                io.flush().await
            })
            .map_err(failed)
        }
        Format::Qcow2 => {
            let options = ResizeOptions { size_bytes, ..ResizeOptions::default() };
            let io = MetaIo::new(file.open_blocking()?);
            block_on(format_qcow2::resize(&io, file.as_ref(), name, &options, &mut |_, _| true))
        }
    }
}
