//! Layers that are made on top of an open one: for a disk whose writes are thrown away, or kept apart.

use super::Mapping;
use crate::guess::Format;
use block::{MetaIo, Result, block_on};
use format_scratch::{Scratch, Space};
use std::sync::Arc;

pub(crate) use format_scratch::{Header as KeptHeader, create_kept as make_kept};

/// The most that the index of a kept layer has before its first table is made: the header, and the bits of the largest
/// disk.
pub(crate) const KEPT_HEADER_MAX_BYTES: u64 = 513 * format_scratch::PAGE_BYTES;

impl Mapping {
    /// Makes the mapping of a layer that is thrown away, for a disk of this size. The index, and the data behind it, are
    /// empty. Unsupported where the host cannot map the index.
    pub(crate) fn temporary(
        name: &str,
        size_bytes: u64,
        index: &std::fs::File,
        spaces: [Arc<dyn Space>; 2],
        in_memory: bool,
    ) -> Result<Self> {
        Scratch::new(name, size_bytes, index, spaces, in_memory).map(Self::Scratch)
    }
}

/// Makes an overlay in an empty file, for a disk of this size whose layers are open: nobody opens the backing file that
/// its header names. Returns its format. Blocks.
pub(crate) fn make_overlay(io: &MetaIo, size_bytes: u64) -> Result<Format> {
    let options = format_qcow2::CreateOptions::default().with(|options| {
        options.size_bytes = size_bytes;
        options.backing_file = Some("below".to_owned());
        options.backing_format = Some(Format::Raw.to_string());
    });
    block_on(format_qcow2::create(io, &options))?;
    Ok(Format::Qcow2)
}
