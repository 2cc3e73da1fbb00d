//! Changing the size of a disk whose image is not in use.

use block::{Error, ErrorKind, File, FileOp, Result, block_on};

/// Makes a raw image `size_bytes` long; what is added reads as zeros. Cuts data off only with `shrink`. Durable when this
/// returns.
pub fn resize_raw(file: &dyn File, size_bytes: u64, shrink: bool) -> Result<()> {
    let name = &file.info().name;
    let bad = |what: &str| Error::new(ErrorKind::BadOption, format!("'{name}': {what}"));
    if file.info().block_device {
        return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': a block device cannot be resized")));
    }
    if size_bytes < file.length_bytes()? && !shrink {
        return Err(bad("Use the --shrink option to perform a shrink operation."));
    }
    let queue = file.open_blocking()?;
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot resize '{name}'"), error);
    block_on(async {
        queue.start(FileOp::SetLength { length: size_bytes }).await?;
        queue.start(FileOp::Flush).await
    })
    .map_err(failed)
}
