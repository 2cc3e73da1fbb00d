//! What `info` tells of the file that an image is in, as qemu-img does since version 8.

use crate::output::printable;
use drive::human_size;
use serde_json::{Value, json};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

const SECTOR_BYTES: u64 = 512;

pub(super) struct ImageFile {
    path: PathBuf,
    is_device: bool,
    length_bytes: u64,
    /// What it takes on its file system.
    disk_bytes: u64,
}

impl ImageFile {
    pub(super) fn new(path: &Path, meta: &std::fs::Metadata, length_bytes: u64, disk_bytes: u64) -> Self {
        // QEMU counts in sectors.
        let length_bytes = length_bytes.next_multiple_of(SECTOR_BYTES);
        Self { path: path.to_owned(), is_device: meta.file_type().is_block_device(), length_bytes, disk_bytes }
    }

    fn protocol(&self) -> &'static str {
        if self.is_device { "host_device" } else { "file" }
    }

    pub(super) fn human(&self) -> String {
        let Self { path, length_bytes, disk_bytes, .. } = self;
        format!(
            "Child node '/file':\n    filename: {}\n    protocol type: {}\n    file length: {} ({length_bytes} bytes)\n    \
             disk size: {}\n",
            printable(&path.display().to_string()),
            self.protocol(),
            human_size(*length_bytes),
            human_size(*disk_bytes)
        )
    }

    pub(super) fn machine(&self) -> Value {
        json!([{
            "name": "file",
            "info": {
                "children": [],
                "virtual-size": self.length_bytes,
                "filename": self.path.display().to_string(),
                "format": self.protocol(),
                "actual-size": self.disk_bytes,
                "format-specific": { "type": self.protocol(), "data": {} },
                "dirty-flag": false,
            },
        }])
    }
}
