//! Naming another backing file in an image that is not open.

use crate::open::guess::Format;
use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use std::sync::Arc;

/// Records another backing file (none: `None`) in the header of the image in `file`, durably; opens nothing else. What
/// the guest sees changes with it unless the caller has seen to that.
pub fn set_backing(file: &Arc<dyn File>, format: Format, backing: Option<&format_qcow2::Backing>) -> Result<()> {
    let name = &file.info().name;
    match format {
        Format::Raw => {
            Err(Error::new(ErrorKind::Unsupported, format!("'{name}': a raw image cannot have a backing file")))
        }
        Format::Qcow2 => {
            let io = MetaIo::new(file.open_blocking()?);
            block_on(format_qcow2::set_backing(&io, file.as_ref(), name, backing))
        }
    }
}
