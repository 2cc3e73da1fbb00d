//! What `info` shows about the file that holds an image, as qemu-img does since version 8.

use crate::output::printable;
use drive::human_size;
use serde_json::{Value, json};
use std::os::unix::fs::FileTypeExt;

const SECTOR_BYTES: u64 = 512;

/// Formats the size on disk; an unknown size in qemu-img's word.
pub(super) fn human_disk_size(disk_bytes: Option<u64>) -> String {
    disk_bytes.map_or_else(|| "unavailable".to_owned(), human_size)
}

/// Returns QEMU's word for where a file lies that is not one of the host.
fn protocol_of(name: &str) -> &'static str {
    match name.split_once(':') {
        Some(("nbd" | "nbd+unix" | "nbds" | "nbds+unix", _)) => "nbd",
        Some(("http", _)) => "http",
        Some(("https", _)) => "https",
        Some(("rbd", _)) => "rbd",
        _ => "vhost-user",
    }
}

pub(super) struct ImageFile {
    name: String,
    protocol: &'static str,
    length_bytes: u64,
    /// The space that it takes on its file system, in bytes.
    disk_bytes: Option<u64>,
}

impl ImageFile {
    /// Describes a file. `meta` is `None` if it is no file of the host.
    pub(super) fn new(
        name: String,
        meta: Option<&std::fs::Metadata>,
        length_bytes: u64,
        disk_bytes: Option<u64>,
    ) -> Self {
        // QEMU counts in sectors.
        let length_bytes = length_bytes.next_multiple_of(SECTOR_BYTES);
        let protocol = match meta {
            None => protocol_of(&name),
            Some(meta) if meta.file_type().is_block_device() => "host_device",
            Some(_) => "file",
        };
        Self { name, protocol, length_bytes, disk_bytes }
    }

    pub(super) fn human(&self) -> String {
        let Self { name, length_bytes, disk_bytes, .. } = self;
        format!(
            "Child node '/file':\n    filename: {}\n    protocol type: {}\n    file length: {} ({length_bytes} bytes)\n    \
             disk size: {}\n",
            printable(name),
            self.protocol,
            human_size(*length_bytes),
            human_disk_size(*disk_bytes)
        )
    }

    pub(super) fn machine(&self) -> Value {
        json!([{
            "name": "file",
            "info": {
                "children": [],
                "virtual-size": self.length_bytes,
                "filename": self.name,
                "format": self.protocol,
                "actual-size": self.disk_bytes.unwrap_or_default(),
                "format-specific": { "type": self.protocol, "data": {} },
                "dirty-flag": false,
            },
        }])
    }
}
