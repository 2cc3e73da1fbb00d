//! A drive over a real disk: an image, through the engine.

mod common;

use block::Disk;
use common::Guest;
use drive::{DriveOptions, OpenedDisk, ParsedDrive, open_disk};
use engine::{Reactor, ReactorConfig};
use image::BackingPolicy;
use ringdisk_ata::{DiskSectors, Drive, command};
use std::path::Path;
use std::sync::Arc;

fn open(options: &str) -> OpenedDisk {
    let ParsedDrive::Drive(drive) = DriveOptions::parse(options).unwrap() else { panic!("{options}") };
    open_disk(&drive.disk, BackingPolicy::default(), &[]).unwrap()
}

fn drive_over(disk: &Arc<dyn Disk>, thread: &engine::ReactorThread) -> Drive {
    Drive::new(DiskSectors::open(Arc::clone(disk), thread.handle()).unwrap()).unwrap()
}

fn raw(path: &Path) -> String {
    format!("file={},format=raw", path.display())
}

#[test]
fn what_a_guest_wrote_is_in_the_image() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    let mut contents = vec![0; 256 * 512];
    testkit::fill_seeded(3, &mut contents);
    std::fs::write(&path, &contents).unwrap();
    let opened = open(&raw(&path));
    let thread = Reactor::spawn(ReactorConfig::default()).unwrap();
    let mut guest = Guest::new(Some(drive_over(&opened.disk, &thread)), None, true);
    guest.command(command::READ_SECTORS, 0, 0);
    assert_eq!(guest.read(256 * 512), contents);
    let mut bytes = vec![0; 5 * 512];
    testkit::fill_seeded(4, &mut bytes);
    guest.command(command::SET_MULTIPLE, 0, 4);
    guest.command(command::WRITE_MULTIPLE, 200, 5);
    guest.write(&bytes);
    assert!(guest.is_idle());
    guest.command(command::FLUSH_CACHE, 0, 0);
    assert!(guest.is_idle());
    contents[200 * 512..205 * 512].copy_from_slice(&bytes);
    assert_eq!(std::fs::read(&path).unwrap(), contents);
    drop(guest);
    thread.stop().unwrap();
    opened.close().unwrap();
}

#[test]
fn a_disk_whose_reactor_has_ended_fails_commands_and_no_caller_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![7; 4096]).unwrap();
    let opened = open(&raw(&path));
    let thread = Reactor::spawn(ReactorConfig::default()).unwrap();
    let mut guest = Guest::new(Some(drive_over(&opened.disk, &thread)), None, true);
    thread.stop().unwrap();
    guest.command(command::READ_SECTORS, 0, 1);
    assert_eq!((guest.status() & 0x01, guest.register(1)), (0x01, 0x40));
}
