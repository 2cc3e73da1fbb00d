//! Keeps a load from overwriting data, unless the user allows it.

use super::target::Target;
use crate::output::usage;
use block::StatusQuery;
use drive::{DiskOptions, open_disk};
use image::BackingPolicy;
use std::os::unix::fs::FileTypeExt;

/// Refuses targets on which a writing load would destroy data: block devices, disks of servers, and files that hold data.
pub(super) fn refuse(targets: &[Target]) -> anyhow::Result<()> {
    for target in targets {
        if let Some(socket) = target.socket() {
            // A server does not say what it holds, and a guest may have used it.
            let what = "is the socket of a server, and what is on its disk would be overwritten";
            return Err(usage(format!("'{}' {what}: give --destroy if that may be lost", socket.display())));
        }
    }
    for disk in targets.iter().filter_map(Target::disk_options) {
        // What a temporary layer takes is gone afterwards anyhow.
        let keeps = !disk.read_only && (!disk.snapshot || disk.keep.is_some());
        let Some(file) = disk.file.as_ref().filter(|_| keeps) else { continue };
        let is_device = file.path().and_then(|path| std::fs::metadata(path).ok());
        let what = match is_device.is_some_and(|meta| meta.file_type().is_block_device()) {
            true => "is a device, and what is on it would be overwritten",
            false if holds_data(disk) => "holds data that would be overwritten",
            false => continue,
        };
        return Err(usage(format!("'{file}' {what}: give --destroy if that may be lost, or another disk")));
    }
    Ok(())
}

/// Whether any byte of a disk is data. A disk that cannot be opened is reported when it is measured.
fn holds_data(disk: &DiskOptions) -> bool {
    let mut disk = disk.clone();
    disk.read_only = true;
    let Ok(opened) = open_disk(&disk, BackingPolicy::default(), &[]) else { return false };
    let Ok(mut runs) = opened.disk.block_status(&StatusQuery::all()) else { return false };
    // A range whose status is unknown may be data.
    runs.any(|run| run.map_or(true, |run| run.takes_read()))
}
