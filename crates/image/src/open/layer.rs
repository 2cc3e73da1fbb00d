//! Opening one layer of a chain.

use super::gate::Role;
use crate::chain::layer::Layer;
use crate::chain::mapping::Mapping;
use crate::file_name::FileName;
use crate::guess::Format;
use block::{File, FileInfo, Result};
use format_qcow2::SnapshotName;
use std::sync::{Arc, OnceLock};

/// The most layers in a chain.
pub const MAX_LAYERS: usize = 256;

pub(crate) fn open_layer(
    name: &FileName,
    file: Arc<dyn File>,
    format: Format,
    role: Role,
    snapshot: Option<&SnapshotName>,
) -> Result<Layer> {
    let read_only = !matches!(role, Role::Writable);
    let info = FileInfo { length_bytes: file.length_bytes()?, ..file.info().clone() };
    let mapping = Mapping::open(name.to_string(), &*file, &info, format, read_only, snapshot)?;
    let size_bytes = mapping.size_bytes();
    let (name, said, writable) = (name.clone(), name.clone(), !read_only);
    Ok(Layer {
        name,
        said,
        writable,
        guessed: false,
        file,
        data: None,
        mapping,
        size_bytes,
        memory_bitmaps: Arc::default(),
        empty_clusters: OnceLock::new(),
    })
}
