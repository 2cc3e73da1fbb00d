//! What an image says about itself. Opens nothing but the named file.

use crate::open::file_name::FileName;
use crate::open::gate::Role;
use crate::open::guess::Format;
use crate::open::layers::{format_of, open_layer};
use block::{File, MetaIo, Result, block_on};
use std::sync::Arc;

/// An image as `info` shows it.
#[derive(Debug, Clone)]
pub struct Description {
    /// Its format.
    pub format: Format,
    /// Whether the format is only a guess.
    pub guessed: bool,
    /// What a guest sees.
    pub virtual_size_bytes: u64,
    /// Name of the backing file as the image has it.
    pub backing_file: Option<String>,
    /// Name of its format as the image has it: perhaps one that is not served, or that nobody knows.
    pub backing_format: Option<String>,
    /// The header, for qcow2.
    pub qcow2: Option<format_qcow2::Header>,
    /// Its persistent bitmaps.
    pub bitmaps: Vec<format_qcow2::Bitmap>,
    /// Its internal snapshots.
    pub snapshots: Vec<format_qcow2::Snapshot>,
    /// What would serve the file, and why.
    pub engine: String,
}

/// Looks at one file, which was opened for reading.
pub fn inspect(name: impl Into<FileName>, file: &Arc<dyn File>, format: Option<Format>) -> Result<Description> {
    let name = name.into();
    let (format, guessed) = format_of(&name, file.as_ref(), format)?;
    let layer = open_layer(&name, Arc::clone(file), format, Role::ReadOnly, None)?;
    let qcow2 = layer.mapping.header().cloned();
    let backing = qcow2.as_ref().and_then(|header| Some((header.backing_file.clone()?, header.backing_format.clone())));
    let (backing_file, backing_format) = backing.unzip();
    let snapshots = match &qcow2 {
        None => Vec::new(),
        Some(header) => {
            let io = MetaIo::new(file.open_blocking()?);
            block_on(format_qcow2::snapshots(&io, header, &name.to_string()))?
        }
    };
    Ok(Description {
        bitmaps: crate::bitmaps(file, format)?,
        format,
        guessed,
        virtual_size_bytes: layer.size_bytes,
        backing_file,
        backing_format: backing_format.flatten(),
        qcow2,
        snapshots,
        engine: layer.file_info().engine.clone(),
    })
}
