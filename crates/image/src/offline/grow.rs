//! More room in a raw image that is not open.

use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use std::sync::Arc;

/// Makes the raw image in `file` so long, durably. What is added reads as zeros.
pub fn grow_raw(file: &Arc<dyn File>, size_bytes: u64) -> Result<()> {
    let name = &file.info().name;
    if file.info().block_device {
        return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': a block device cannot be resized")));
    }
    let io = MetaIo::new(file.open_blocking()?);
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot resize '{name}'"), error);
    block_on(async {
        io.set_length(size_bytes).await?;
        io.flush().await
    })
    .map_err(failed)
}
