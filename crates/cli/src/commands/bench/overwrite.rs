//! Keeps a load from overwriting data, unless the user allows it.

use super::target::Target;
use crate::output::usage;
use block::StatusQuery;
use drive::{DiskOptions, open_disk};
use image::BackingPolicy;
use std::os::unix::fs::FileTypeExt;

/// Refuses targets on which a writing load would destroy data: block devices, disks of servers, files that hold data, and
/// scratch overlays that are kept and exist. A temporary overlay (`snapshot=on`) has nothing to lose, nor has the image
/// below it.
pub(super) fn refuse(targets: &[Target]) -> anyhow::Result<()> {
    for target in targets {
        if let Some(socket) = target.socket() {
            // A server does not say what it holds, and a guest may have used it.
            let what = "is the socket of a server, and what is on its disk would be overwritten";
            return Err(usage(format!("'{}' {what}: give --destroy if that may be lost", socket.display())));
        }
    }
    for target in targets {
        target.disk_options().map_or(Ok(()), refuse_disk)?;
        target.second_disk_options().as_ref().map_or(Ok(()), refuse_disk)?;
    }
    Ok(())
}

fn refuse_disk(disk: &DiskOptions) -> anyhow::Result<()> {
    let Some(file) = disk.file.as_ref().filter(|_| !disk.read_only) else { return Ok(()) };
    if disk.snapshot {
        if let Some(overlay) = drive::kept_overlay(disk)?.filter(|overlay| overlay.exists()) {
            let what = "keeps what was written to the disk, and some of that would be overwritten";
            return Err(usage(format!("'{}' {what}: give --destroy if that may be lost", overlay.display())));
        }
        return Ok(());
    }
    let is_device = file.path().and_then(|path| std::fs::metadata(path).ok());
    let what = match is_device.is_some_and(|meta| meta.file_type().is_block_device()) {
        true => "is a device, and what is on it would be overwritten",
        false if holds_data(disk) => "holds data that would be overwritten",
        false => return Ok(()),
    };
    Err(usage(format!("'{file}' {what}: give --destroy if that may be lost, or another disk")))
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

#[cfg(test)]
mod tests {
    use super::super::target::Parsed;
    use super::*;

    #[test]
    fn the_second_disk_of_a_server_is_looked_at_too() {
        let directory = tempfile::tempdir().unwrap();
        let [empty, full] = ["empty", "full"].map(|name| directory.path().join(name));
        std::fs::File::create(&empty).unwrap().set_len(1 << 20).unwrap();
        std::fs::write(&full, [7; 1 << 16]).unwrap();
        let refusal = |first: &std::path::Path, beside: &std::path::Path, more: &str| {
            let text = format!("serve:server.beside={},format=raw,file={}{more}", beside.display(), first.display());
            let Parsed::Target(target) = Target::parse(&text, "A").unwrap() else { panic!("help") };
            refuse(&[target]).err().map(|error| error.to_string())
        };
        assert_eq!(refusal(&empty, &empty, ""), None);
        for (first, beside) in [(&empty, &full), (&full, &empty)] {
            let said = refusal(first, beside, "").unwrap();
            assert!(said.contains(full.to_str().unwrap()) && said.contains("--destroy"), "{said}");
            assert_eq!(refusal(first, beside, ",readonly=on"), None);
        }
    }
}
