//! Making a new image in a file that exists and is empty.

use crate::offline::edit::EditWatch;
use crate::open::guess::Format;
use block::{Error, ErrorKind, File, FileInfo, FileOp, MetaIo, Result, SECTOR_BYTES, block_on};
use format_qcow2::preallocate;
use std::sync::Arc;

/// What to make. The qcow2 part's size is set from `size_bytes`.
#[derive(Debug, Clone)]
pub enum CreateOptions {
    /// A raw image of this size, all of it a hole.
    Raw {
        /// Bytes, rounded up to whole sectors.
        size_bytes: u64,
    },
    /// A qcow2 image.
    Qcow2(format_qcow2::CreateOptions),
}

impl CreateOptions {
    /// The format that these options make.
    #[must_use]
    pub fn format(&self) -> Format {
        match self {
            Self::Raw { .. } => Format::Raw,
            Self::Qcow2(_) => Format::Qcow2,
        }
    }

    /// Whether these options are valid and go together: to be asked before a file is emptied for them.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Raw { .. } => Ok(()),
            Self::Qcow2(options) => options.validate(),
        }
    }
}

/// Makes the image; durable when this returns.
pub fn create(file: &Arc<dyn File>, options: &CreateOptions) -> Result<()> {
    create_with_data(file, None, options)
}

/// As [`create`], with the external data file that the options name, which exists and is empty.
pub fn create_with_data(file: &Arc<dyn File>, data: Option<&Arc<dyn File>>, options: &CreateOptions) -> Result<()> {
    create_watched(file, data, options, &mut |_, _| true)
}

/// As [`create_with_data`]; what is preallocated, `watch` is told of. Given up, it leaves half an image.
pub fn create_watched(
    file: &Arc<dyn File>,
    data: Option<&Arc<dyn File>>,
    options: &CreateOptions,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut io = MetaIo::new(file.open_blocking()?);
    if let Some(data) = data {
        io = io.with_data(data.open_blocking()?);
    }
    let name = &file.info().name;
    match options {
        CreateOptions::Raw { size_bytes } => {
            let too_large = || Error::new(ErrorKind::BadOption, format!("'{name}': {size_bytes} bytes is too large"));
            let length = size_bytes.checked_next_multiple_of(SECTOR_BYTES).ok_or_else(too_large)?;
            set_length(file, length)?;
            let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot create '{name}'"), error);
            block_on(io.flush()).map_err(failed)
        }
        CreateOptions::Qcow2(options) => {
            block_on(format_qcow2::create(&io, options))?;
            if let (Some(data), Some(queue)) = (data, io.data()) {
                set_length(data, options.size_bytes)?;
                let failed = |error| Error::with_source(ErrorKind::Io, "cannot write the data file", error);
                block_on(queue.start(FileOp::Flush)).map_err(failed)?;
            }
            let info = FileInfo { length_bytes: file.length_bytes()?, ..file.info().clone() };
            block_on(preallocate(&io, &info, options.effective_preallocation(), watch))
        }
    }
}

/// Makes the file `length` bytes long; a device keeps its length, which has to be that at least.
fn set_length(file: &Arc<dyn File>, length: u64) -> Result<()> {
    let name = &file.info().name;
    if file.info().block_device {
        let device_bytes = file.length_bytes()?;
        return match device_bytes >= length {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::BadOption,
                format!("'{name}': the device has {device_bytes} bytes, and {length} are needed"),
            )),
        };
    }
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot create '{name}'"), error);
    block_on(file.open_blocking()?.start(FileOp::SetLength { length })).map_err(failed)
}
