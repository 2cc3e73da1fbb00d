//! Checking an image's own tables. Opens nothing but the named file.

use crate::guess::Format;
use crate::open::format_of;
use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use format_qcow2::{CheckReport, CheckWatch};
use std::path::Path;
use std::sync::Arc;

/// Checks one file, which was opened for reading; blocks. Formats without tables are Unsupported.
pub fn check(
    path: &Path,
    file: &Arc<dyn File>,
    format: Option<Format>,
    watch: &mut CheckWatch<'_>,
) -> Result<CheckReport> {
    let (format, _) = format_of(path, file.as_ref(), format)?;
    if format == Format::Raw {
        return Err(Error::new(ErrorKind::Unsupported, "This image format does not support checks"));
    }
    let io = MetaIo::new(file.open_blocking()?);
    block_on(format_qcow2::check(&io, file.length_bytes()?, &path.display().to_string(), watch))
}
