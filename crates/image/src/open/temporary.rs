//! A temporary layer on top of a disk: it is thrown away when the disk is closed.

use super::gate::Role;
use super::layer::{MAX_LAYERS, open_layer};
use super::temporary_files::{ScratchFiles, TemporaryFiles};
use crate::chain::layer::Layer;
use crate::chain::mapping::{Mapping, make_overlay};
use crate::file_name::FileName;
use block::{Error, ErrorKind, MetaIo, Result};
use std::sync::{Arc, OnceLock};

/// Makes a scratch overlay on these layers, or a qcow2 image if a scratch overlay is impossible.
pub(crate) fn temporary_layer(layers: &[Layer], files: &dyn TemporaryFiles) -> Result<Layer> {
    let below = top_with_room(layers)?;
    match scratch_layer(below, files) {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let layer = image_layer(below, files)?;
            tracing::warn!("{error}; a temporary qcow2 image takes what is written instead");
            Ok(layer)
        }
        other => other,
    }
}

/// Returns the top layer. Refuses if another layer would be too many.
pub(super) fn top_with_room(layers: &[Layer]) -> Result<&Layer> {
    let below = layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
    if layers.len() >= MAX_LAYERS {
        let what = format!("the chain of '{}' has {MAX_LAYERS} layers already: none fits on top", below.name);
        return Err(Error::new(ErrorKind::BadImage, what));
    }
    Ok(below)
}

fn scratch_layer(below: &Layer, files: &dyn TemporaryFiles) -> Result<Layer> {
    let name = FileName::Temporary(files.directory());
    let ScratchFiles { index, data, spaces } = files.scratch()?;
    let size_bytes = below.size_bytes;
    let mapping = Mapping::temporary(&name.to_string(), size_bytes, &index, spaces, data.info().in_memory)?;
    let said = name.clone();
    Ok(Layer {
        name,
        said,
        writable: true,
        guessed: false,
        file: data,
        data: None,
        mapping,
        size_bytes,
        memory_bitmaps: Arc::default(),
        empty_clusters: OnceLock::new(),
    })
}

fn image_layer(below: &Layer, files: &dyn TemporaryFiles) -> Result<Layer> {
    let file = files.image()?;
    let format = make_overlay(&MetaIo::of_file(&*file)?, below.size_bytes).map_err(|error| {
        let place = files.directory();
        error.in_context(format!("snapshot=on finds no room in '{}' (choose another TMPDIR)", place.display()))
    })?;
    open_layer(&FileName::Temporary(files.directory()), file, format, Role::Writable, None)
}
