//! Making a new image in a file that exists and is empty.

use crate::edit::EditWatch;
use crate::guess::Format;
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
            let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot create '{name}'"), error);
            block_on(async {
                io.set_length(length).await?;
                io.flush().await
            })
            .map_err(failed)
        }
        CreateOptions::Qcow2(options) => {
            block_on(format_qcow2::create(&io, options))?;
            if let Some(queue) = io.data() {
                let failed = |error| Error::with_source(ErrorKind::Io, "cannot write the data file", error);
                let length = options.size_bytes;
                block_on(queue.start(FileOp::SetLength { length })).map_err(failed)?;
                block_on(queue.start(FileOp::Flush)).map_err(failed)?;
            }
            let info = FileInfo { length_bytes: file.length_bytes()?, ..file.info().clone() };
            block_on(preallocate(&io, &info, options.effective_preallocation(), watch))
        }
    }
}
