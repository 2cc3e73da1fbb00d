//! Checking an image's own tables, and repairing them. Opens nothing but the named file.

use crate::open::guess::Format;
use crate::open::layers::format_of;
use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use format_qcow2::{CheckReport, CheckWatch, Repair};
use std::path::Path;
use std::sync::Arc;

/// Checks one file, which was opened for reading, or for writing where it is to be repaired; blocks. Formats without tables
/// are Unsupported; an image that cannot be read, because it is encrypted for instance, is a BadImage.
pub fn check(
    path: &Path,
    file: &Arc<dyn File>,
    format: Option<Format>,
    repair: Option<Repair>,
    watch: &mut CheckWatch<'_>,
) -> Result<CheckReport> {
    let (format, _) = format_of(path.display(), file.as_ref(), format)?;
    if format == Format::Raw {
        return Err(Error::new(ErrorKind::Unsupported, "This image format does not support checks"));
    }
    let io = MetaIo::new(file.open_blocking()?);
    let (length, name) = (file.length_bytes()?, path.display().to_string());
    let checked = match repair {
        None => block_on(format_qcow2::check(&io, length, &name, watch)),
        Some(what) => block_on(format_qcow2::repair(&io, length, &name, what, watch)),
    };
    // Unsupported is for formats that have nothing to check. This one has, and could not be read.
    checked.map_err(|error| match error.kind() {
        ErrorKind::Unsupported => Error::new(ErrorKind::BadImage, error.to_string()),
        _ => error,
    })
}
