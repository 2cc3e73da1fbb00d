//! Disks and their exports are apart: a disk has as many exports as wanted, and each comes and goes while others serve.

mod common;

use block::Disk;
use common::{Guest, PATIENCE, SIZE_BYTES, assert_holds, at, connect, create, start};
use drive::{DiskOptions, DriveFormat, DriveOptions, ExportOptions, ParsedDrive, ShownOptions, open_disk};
use driver::{Driver, DriverOptions};
use image::BackingPolicy;
use ringdisk_daemon::{NbdAddress, NbdOptions};
use std::time::{Duration, Instant};

#[test]
fn two_guests_of_one_disk_are_undisturbed_while_exports_and_disks_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let socket = |name: &str| dir.path().join(name);
    let daemon = start(2);
    let options = create(&socket("disk.qcow2"), DriveFormat::Qcow2).disk;
    let disk = daemon.add_disk(&options).unwrap();
    daemon.add_export(disk, &at(&socket("one"))).unwrap();
    let second = daemon.add_export(disk, &at(&socket("two"))).unwrap();
    let (one, two) = (Guest::load(&socket("one"), 0), Guest::load(&socket("two"), 1));
    for round in 0..50 {
        let other = daemon.add_disk(&DiskOptions::null(1 << 20)).unwrap();
        let of_other = daemon.add_export(other, &at(&socket("other"))).unwrap();
        let mut third = at(&socket("three"));
        third.read_only = round % 2 == 0;
        let of_disk = daemon.add_export(disk, &third).unwrap();
        if round % 10 == 0 {
            let guests = (connect(&socket("other"), 1), connect(&socket("three"), 1));
            assert_eq!(guests.1.info().read_only, third.read_only);
        }
        assert_eq!(daemon.exports().len(), 4);
        daemon.remove_export(of_disk).unwrap();
        daemon.remove_export(of_other).unwrap();
        daemon.remove_disk(other, false).unwrap();
    }
    let (disk_of_two, second_half) = two.stop();
    let requests = || {
        let of_exports: u64 = daemon.exports().iter().flat_map(|export| &export.rings).map(|ring| ring.requests).sum();
        let timed: u64 = daemon.latencies()[&disk].kinds.iter().map(|kind| kind.whole.count()).sum();
        (of_exports + daemon.disks()[0].past.requests, timed)
    };
    let before = requests();
    daemon.remove_export(second).unwrap();
    let after = requests();
    assert!(before.0 <= after.0 && before.1 <= after.1, "a disk's counters never fall: {before:?}, {after:?}");
    drop(disk_of_two);
    let (disk_of_one, first_half) = one.stop();
    // What the other guest wrote is in the one disk that both have.
    assert_holds(&disk_of_one, 1, second_half.clone());
    drop(disk_of_one);
    daemon.shutdown().unwrap();
    let opened = open_disk(&options, BackingPolicy::Deny, &[]).unwrap();
    assert_holds(&opened.disk, 0, first_half);
    assert_holds(&opened.disk, 1, second_half);
    opened.close().unwrap();
}

#[test]
fn a_guest_whose_request_is_held_waits_while_other_exports_of_the_disk_go() {
    let dir = tempfile::tempdir().unwrap();
    let socket = |name: &str| dir.path().join(name);
    let image = socket("disk.raw");
    create(&image, DriveFormat::Raw);
    let filter = "filter=error:kinds=write:after=50:count=1:errno=EIO";
    let words = format!("file={},format=raw,on-error=hold,{filter}", image.display());
    let ParsedDrive::Drive(drive) = DriveOptions::parse(&words).unwrap() else { panic!("no drive") };
    let daemon = start(2);
    let disk = daemon.add_disk(&drive.disk).unwrap();
    daemon.add_export(disk, &at(&socket("one"))).unwrap();
    let guest = Guest::load(&socket("one"), 0);
    let hold = daemon.hold(disk).unwrap().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while hold.held().is_none() {
        assert!(Instant::now() < deadline, "nothing is held");
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..30 {
        let other = daemon.add_export(disk, &at(&socket("two"))).unwrap();
        let others = connect(&socket("two"), 1);
        daemon.remove_export(other).unwrap();
        drop(others);
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(hold.held().map(|held| held.requests), Some(1));
    hold.try_again();
    while hold.held().is_some() {
        assert!(Instant::now() < deadline, "it is held for ever");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(guest.stop());
    daemon.shutdown().unwrap();
}

#[test]
fn status_lists_disks_and_the_exports_of_each() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let mut named = create(&dir.path().join("image"), DriveFormat::Raw).disk;
    named.name = Some("root".to_owned());
    let root = daemon.add_disk(&named).unwrap();
    let mut guest = at(&dir.path().join("a"));
    guest.read_only = true;
    let exports =
        [daemon.add_export(root, &guest).unwrap(), daemon.add_export(root, &ExportOptions::default()).unwrap()];
    let mut scratch = DriveOptions::null(1 << 20);
    scratch.export = at(&dir.path().join("b"));
    let (scratch, _) = daemon.add(&scratch).unwrap();
    let names: Vec<_> = daemon.disks().into_iter().map(|disk| (disk.id, disk.name)).collect();
    assert_eq!(names, [(root, "root".to_owned()), (scratch, "disk1".to_owned())]);
    assert_eq!(daemon.disk_named("root"), Some(root));
    let listed = daemon.exports();
    let of_root: Vec<_> = listed.iter().filter(|export| export.node == root).collect();
    assert_eq!(of_root.iter().map(|export| export.id).collect::<Vec<_>>(), exports);
    assert_eq!(of_root.iter().map(|export| export.read_only).collect::<Vec<_>>(), [true, false]);
    assert_eq!(of_root[1].attachment.socket, dir.path().join("image.sock"), "beside the image");
    daemon.shutdown().unwrap();
}

#[test]
fn a_disk_in_use_is_removed_by_force_only_and_a_name_is_taken_until_its_disk_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let mut options = create(&dir.path().join("image"), DriveFormat::Raw).disk;
    options.name = Some("root".to_owned());
    let disk = daemon.add_disk(&options).unwrap();
    let message = daemon.add_disk(&options).unwrap_err().to_string();
    assert!(message.contains("'root' already"), "{message}");
    let mut again = options.clone();
    again.name = None;
    let message = daemon.add_disk(&again).unwrap_err().to_string();
    assert!(message.contains("by this daemon already, as 'root'"), "{message}");

    let socket = dir.path().join("s");
    let export = daemon.add_export(disk, &at(&socket)).unwrap();
    let _guest = connect(&socket, 1);
    let message = daemon.remove_disk(disk, false).unwrap_err().to_string();
    assert!(message.contains("root") && message.contains(&*socket.to_string_lossy()), "{message}");
    daemon.remove_disk(disk, true).unwrap();
    assert!(!socket.exists() && daemon.disks().is_empty() && daemon.exports().is_empty());
    for gone in [daemon.remove_export(export), daemon.add_export(disk, &at(&socket)).map(drop)] {
        assert!(gone.unwrap_err().to_string().contains("there is no"));
    }
    let next = daemon.add_disk(&options).unwrap();
    assert_ne!(next, disk);
    // An export that nobody uses goes with its disk.
    daemon.add_export(next, &at(&socket)).unwrap();
    daemon.remove_disk(next, false).unwrap();
    assert!(!socket.exists() && daemon.exports().is_empty());
    daemon.shutdown().unwrap();
}

#[test]
fn threads_that_add_and_remove_at_once_leave_a_daemon_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(2);
    let shared = daemon.add_disk(&DiskOptions::null(1 << 20)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (daemon, socket) = (&daemon, dir.path().join(thread.to_string()));
            scope.spawn(move || {
                for _ in 0..25 {
                    let export = daemon.add_export(shared, &at(&socket)).unwrap();
                    let own = daemon.add_disk(&DiskOptions::null(1 << 20)).unwrap();
                    drop(daemon.disks());
                    daemon.remove_export(export).unwrap();
                    daemon.remove_disk(own, true).unwrap();
                }
            });
        }
        // Whoever looks while others change sees whole entries only.
        for _ in 0..100 {
            assert!(daemon.exports().iter().all(|export| export.node == shared));
        }
    });
    assert_eq!((daemon.disks().len(), daemon.exports().len()), (1, 0));
    daemon.shutdown().unwrap();
}

#[test]
fn a_running_disk_takes_an_overlay_gives_it_back_and_grows_while_its_guest_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(2);
    let options = create(&dir.path().join("disk.qcow2"), DriveFormat::Qcow2).disk;
    let disk = daemon.add_disk(&options).unwrap();
    let other = daemon.add_disk(&create(&dir.path().join("other.raw"), DriveFormat::Raw).disk).unwrap();
    daemon.add_export(disk, &at(&dir.path().join("s"))).unwrap();
    let guest = Guest::load(&dir.path().join("s"), 0);
    let (overlay, of_other) = (dir.path().join("overlay.qcow2"), dir.path().join("other.qcow2"));
    for _ in 0..3 {
        daemon.put_overlays(&[(disk, &*overlay), (other, &*of_other)]).unwrap();
        let files: Vec<_> = daemon.disks().into_iter().map(|disk| disk.file).collect();
        assert!(files[0].ends_with("overlay.qcow2") && files[1].ends_with("other.qcow2"), "{files:?}");
        assert!(daemon.put_overlays(&[(disk, &*overlay)]).is_err(), "the file exists");
        assert!(overlay.exists(), "and is in use");
        daemon.take_overlay_back(disk).unwrap();
        daemon.take_overlay_back(other).unwrap();
        std::fs::remove_file(&overlay).unwrap();
        std::fs::remove_file(&of_other).unwrap();
    }
    daemon.resize(disk, SIZE_BYTES * 2).unwrap();
    assert!(daemon.resize(disk, SIZE_BYTES).unwrap_err().to_string().contains("smaller"));
    assert_eq!(daemon.disks()[0].info.size_bytes, SIZE_BYTES * 2);
    let (guests_disk, state) = guest.stop();
    assert_holds(&guests_disk, 0, state.clone());
    drop(guests_disk);
    let null = daemon.add_disk(&DiskOptions::null(1 << 20)).unwrap();
    assert!(daemon.resize(null, 2 << 20).unwrap_err().to_string().contains("not an image"));
    daemon.shutdown().unwrap();
    let opened = open_disk(&options, BackingPolicy::Deny, &[]).unwrap();
    assert_eq!(opened.disk.info().size_bytes, SIZE_BYTES * 2);
    assert_holds(&opened.disk, 0, state);
    opened.close().unwrap();
}

fn drive(words: &str) -> DriveOptions {
    match DriveOptions::parse(words).unwrap() {
        ParsedDrive::Drive(drive) => *drive,
        ParsedDrive::Help(help) => panic!("{help}"),
    }
}

#[test]
fn every_export_shows_what_the_disk_s_options_say_unless_it_says_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let socket = |name: &str| dir.path().join(name);
    let image = socket("disk.raw");
    create(&image, DriveFormat::Raw);
    let said = "seg-max=30,write-cache=off,logical-block-size=4096,secure-erase=on,packed=on,queues=1";
    let words = format!("file={},format=raw,socket={},{said}", image.display(), socket("own").display());
    let daemon = start(1);
    let (disk, _) = daemon.add(&drive(&words)).unwrap();
    daemon.add_export(disk, &at(&socket("second"))).unwrap();
    let mut other = at(&socket("other"));
    other.shown =
        ShownOptions::parse([("write-cache", "on"), ("logical-block-size", "512"), ("packed", "off")]).unwrap();
    daemon.add_export(disk, &other).unwrap();
    let mut reader = at(&socket("reader"));
    reader.read_only = true;
    daemon.add_export(disk, &reader).unwrap();
    let seen = |name: &str| {
        let packed = DriverOptions::default().with(|options| options.packed = true);
        let driver = Driver::connect(socket(name), packed).unwrap();
        let (info, facts) = (driver.info(), driver.facts());
        (info.logical_block_bytes, info.volatile_cache, facts.max_segments, facts.packed, facts.secure_erase)
    };
    assert_eq!(seen("own"), (4096, false, 30, true, true));
    assert_eq!(seen("second"), seen("own"));
    assert_eq!(seen("other"), (512, true, 30, false, true));
    assert_eq!(seen("reader"), (4096, false, 30, true, false), "it cannot write");
    // A guest could not reach the end of such a disk, and the next start would refuse it.
    let refused = daemon.resize(disk, SIZE_BYTES + 512).unwrap_err().to_string();
    assert!(refused.contains("4096") && refused.contains(&(SIZE_BYTES + 4096).to_string()), "{refused}");
    daemon.resize(disk, SIZE_BYTES + 4096).unwrap();
    daemon.shutdown().unwrap();
}

#[test]
fn secure_erase_is_for_disks_whose_old_data_are_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let socket = |name: &str| dir.path().join(name).display().to_string();
    let image = dir.path().join("disk.raw");
    let daemon = start(1);
    let disk = daemon.add_disk(&create(&image, DriveFormat::Raw).disk).unwrap();
    let nbd = NbdOptions::at(NbdAddress::Unix(dir.path().join("nbd")));
    daemon.add_nbd_export(disk, &nbd).unwrap();
    let other = dir.path().join("other.raw");
    create(&other, DriveFormat::Raw);
    let (here, log) = (format!("file={},format=raw", other.display()), socket("changes.log"));
    let far = format!("file=nbd+unix:///?socket={},format=raw", socket("nbd"));
    for (what, words) in [("another host's", &far), ("a log of all writes", &format!("{here},filter=log:file={log}"))] {
        let words = format!("{words},secure-erase=on,socket={}", socket("s"));
        let refused = daemon.add(&drive(&words)).unwrap_err().to_string();
        assert!(refused.contains("secure-erase") && refused.contains("of this host"), "{what}: {refused}");
    }
    daemon.add(&drive(&format!("{here},secure-erase=on,socket={}", socket("s")))).unwrap();
    daemon.shutdown().unwrap();
}
