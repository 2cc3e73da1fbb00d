//! Describes an image from its own file. Opens no other file.

use super::formats::{self, Encrypted};
use crate::file_name::FileName;
use crate::guess::Format;
use crate::open::gate::Role;
use crate::open::layer::open_layer;
use crate::open::layers::format_of;
use block::{File, Result, block_on};
use format_qcow2::Header;
use std::sync::Arc;

/// An image as `info` shows it.
#[derive(Debug, Clone)]
pub struct Description {
    /// Its format.
    pub format: Format,
    /// Whether the format is only a guess.
    pub guessed: bool,
    /// Size of the disk that a guest sees.
    pub virtual_size_bytes: u64,
    /// Name of the backing file, as recorded in the image.
    pub backing_file: Option<String>,
    /// Name of the backing file's format, as recorded in the image. It may be one that is not served or not known.
    pub backing_format: Option<String>,
    /// The header of a qcow2 image.
    pub qcow2: Option<format_qcow2::Header>,
    /// The header of a scratch overlay.
    pub scratch: Option<format_scratch::Header>,
    /// The header of the encryption, if that is LUKS.
    pub luks: Option<format_qcow2::Luks>,
    /// Its persistent bitmaps; not read if it is encrypted.
    pub bitmaps: Vec<format_qcow2::Bitmap>,
    /// Its internal snapshots.
    pub snapshots: Vec<format_qcow2::Snapshot>,
    /// The engine that would serve the file, and why.
    pub engine: String,
}

/// Describes the image in one file, which is open for reading.
pub fn inspect(name: impl Into<FileName>, file: &Arc<dyn File>, format: Option<Format>) -> Result<Description> {
    let name = name.into();
    let (format, guessed) = format_of(&name, file.as_ref(), format)?;
    let layer = open_layer(&name, Arc::clone(file), format, Role::ReadOnly, None)?;
    let qcow2 = layer.mapping.header().cloned();
    let backing = layer.mapping.backing().map(|(file, format)| (file.to_owned(), format.map(str::to_owned)));
    let (backing_file, backing_format) = backing.unzip();
    let snapshots = block_on(layer.mapping.snapshots(&layer.open_blocking()?, &name.to_string()))?;
    Ok(Description {
        luks: None,
        bitmaps: formats::bitmaps(file, format)?,
        format,
        guessed,
        virtual_size_bytes: layer.size_bytes,
        backing_file,
        backing_format: backing_format.flatten(),
        scratch: layer.mapping.kept_header().cloned(),
        qcow2,
        snapshots,
        engine: layer.file_info().engine.clone(),
    })
}

fn backing_of(header: Option<&Header>) -> (Option<String>, Option<String>) {
    let backing = header.and_then(|header| Some((header.backing_file.clone()?, header.backing_format.clone())));
    let (file, format) = backing.unzip();
    (file, format.flatten())
}

/// As [`inspect`], but also describes an encrypted image, as far as this works without its key.
pub fn inspect_encrypted(
    name: impl Into<FileName>,
    file: &Arc<dyn File>,
    format: Option<Format>,
) -> Result<Description> {
    let name = name.into();
    let (found, guessed) = format_of(&name, file.as_ref(), format)?;
    let Some(encrypted) = formats::describe_encrypted(&name.to_string(), file, found)? else {
        return inspect(name, file, format);
    };
    let Encrypted { header, luks, snapshots } = encrypted;
    let (backing_file, backing_format) = backing_of(Some(&header));
    Ok(Description {
        luks,
        scratch: None,
        bitmaps: Vec::new(),
        format: found,
        guessed,
        virtual_size_bytes: header.size_bytes,
        backing_file,
        backing_format,
        snapshots,
        qcow2: Some(header),
        engine: file.info().engine.clone(),
    })
}
