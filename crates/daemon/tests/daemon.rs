//! Disks come and go while a daemon runs. When a disk is gone, all that was written is in its image.

mod common;

use block::{DiskIo, IoErrorKind, Op, ReactorCtx, Task, run_and_wait};
use common::{Client, PATIENCE, assert_clean, at_socket, connect, create, start};
use drive::{DriveFormat, DriveOptions, EngineOpener, FilterOptions, open_disk};
use engine::{CacheMode, EngineKind};
use image::{BackingPolicy, CreateOptions, Opener, Role};
use load::{BenchSpec, Hooks, Initial, Stop, run};
use memory::AlignedBuf;
use ringdisk_daemon::{Daemon, DaemonConfig};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_disk_can_go_while_another_is_used_and_leaves_everything_in_its_image() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(2);
    let going = create(&dir.path().join("going.qcow2"), DriveFormat::Qcow2);
    let (going_id, _) = daemon.add(&going).unwrap();
    let staying_socket = dir.path().join("null.sock");
    let staying = at_socket(DriveOptions::null(1 << 30), &staying_socket);
    let (staying_id, _) = daemon.add(&staying).unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let cancel = Arc::clone(&stop);
    let other_guest = std::thread::spawn(move || {
        let (client, disk) = (Client::new(1), connect(&staying_socket, 1));
        let spec = BenchSpec::default().with(|spec| spec.stop = Stop::Runtime(Duration::from_secs(60)));
        run(&disk, &client.handles, &spec, &Hooks::default().with(|hooks| hooks.cancel = Some(cancel))).unwrap().report
    });

    let (client, disk) = (Client::new(2), connect(&dir.path().join("going.qcow2.sock"), 2));
    let (written, state) = client.pass(&disk, 0, Initial::Zeros);
    assert_clean(&written);
    let rings = &daemon.exports()[0].rings;
    assert!(rings.iter().all(|ring| ring.requests > 0), "both queues were used: {rings:?}");
    assert!(daemon.remove_disk(going_id, false).unwrap_err().to_string().contains("export 0"));
    daemon.remove_disk(going_id, true).unwrap();
    assert!(!dir.path().join("going.qcow2.sock").exists());
    assert!(daemon.remove_disk(going_id, true).is_err());
    assert_eq!(daemon.disks().iter().map(|disk| disk.id).collect::<Vec<_>>(), [staying_id]);

    let (again, _) = daemon.add(&going).unwrap();
    assert_ne!(again, going_id);
    let disk = connect(&dir.path().join("going.qcow2.sock"), 2);
    assert_clean(&client.pass(&disk, 100, Initial::State(state)).0);
    stop.store(true, Ordering::Relaxed);
    let report = other_guest.join().unwrap();
    assert_eq!(report.errors, 0, "{:?}", report.first_error);
    daemon.shutdown().unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the image is left");
}

#[test]
fn every_engine_and_cache_mode_keeps_the_data() {
    let dir = tempfile::tempdir().unwrap();
    let client = Client::new(2);
    let engines = [EngineKind::Auto, EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];
    let caches =
        [CacheMode::Writeback, CacheMode::None, CacheMode::Writethrough, CacheMode::Directsync, CacheMode::Unsafe];
    for (index, engine) in engines.into_iter().enumerate() {
        for cache in caches {
            if engine == EngineKind::LinuxAio && !cache.is_direct() {
                continue;
            }
            let format = if index % 2 == 0 { DriveFormat::Qcow2 } else { DriveFormat::Raw };
            let image = dir.path().join(format!("{engine}-{cache}"));
            let mut drive = create(&image, format);
            (drive.disk.engine, drive.disk.cache) = (engine, cache);
            let daemon = start(2);
            daemon.add(&drive).unwrap();
            let told = daemon.disks()[0].info.volatile_cache;
            assert_eq!(told, cache.has_volatile_cache(), "what a guest is told under cache={cache}");
            let disk = connect(&drive.socket().unwrap(), 2);
            let (written, state) = client.pass(&disk, 0, Initial::Zeros);
            assert_clean(&written);
            daemon.shutdown().unwrap();
            let opened = open_disk(&drive.disk, BackingPolicy::Deny, &[]).unwrap();
            assert_clean(&client.pass(&opened.disk, 100, Initial::State(state)).0);
            opened.close().unwrap();
            std::fs::remove_file(&image).unwrap();
        }
    }
}

#[test]
fn buffers_of_a_disk_and_of_the_layers_that_it_gets_later_find_room_in_the_daemons_budget() {
    let dir = tempfile::tempdir().unwrap();
    let daemon =
        Daemon::start(DaemonConfig::default().with(|config| config.buffer_memory_bytes = Some(1 << 20))).unwrap();
    let drive = create(&dir.path().join("disk.qcow2"), DriveFormat::Qcow2);
    let (node, _) = daemon.add(&drive).unwrap();
    let (client, disk) = (Client::new(2), connect(&drive.socket().unwrap(), 2));
    assert_clean(&client.pass(&disk, 0, Initial::Zeros).0);
    daemon.put_overlays(&[(node, &*dir.path().join("overlay"))]).unwrap();
    // Parts of clusters are written, so the rest is copied.
    let (written, state) = client.pass(&disk, 0, Initial::Zeros);
    assert_clean(&written);
    let stats = daemon.buffer_stats();
    assert!(stats.peak_bytes > 0 && stats.peak_bytes <= stats.total_bytes, "{stats:?}");
    assert_eq!((stats.total_bytes, stats.used_bytes, stats.waiting), (1 << 20, 0, 0));
    assert_clean(&client.pass(&disk, 100, Initial::State(state)).0);
    daemon.shutdown().unwrap();
}

#[test]
fn a_disk_that_cannot_be_served_says_why_and_leaves_the_daemon_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let drive = create(&dir.path().join("disk.raw"), DriveFormat::Raw);
    daemon.add(&drive).unwrap();
    let twice = at_socket(drive.clone(), &dir.path().join("other.sock"));
    let message = daemon.add(&twice).unwrap_err().to_string();
    assert!(message.contains("by this daemon already"), "{message}");
    for (refused, part) in [
        (DriveOptions::null(1 << 20), "no path to put a socket beside"),
        (DriveOptions::of_file(dir.path().join("missing")), "missing"),
        (DriveOptions::of_file("/"), "/"),
    ] {
        let message = daemon.add(&refused).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(daemon.disks().len(), 1);
    assert!(!dir.path().join("other.sock").exists());
    assert_eq!(daemon.reactors().len(), 1);
    daemon.shutdown().unwrap();
}

#[test]
fn a_disk_whose_requests_hang_does_not_keep_the_others_from_being_closed() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let socket = dir.path().join("hanging.sock");
    // Nothing that was sent to it ends while this test runs.
    let mut hanging = at_socket(DriveOptions::null(1 << 20), &socket);
    hanging.disk.delay_ms = Some(u32::MAX);
    daemon.add(&hanging).unwrap();
    let healthy = create(&dir.path().join("healthy.qcow2"), DriveFormat::Qcow2);
    daemon.add(&healthy).unwrap();
    std::thread::spawn(move || {
        let (client, disk) = (Client::new(1), connect(&socket, 1));
        run(&disk, &client.handles, &BenchSpec::default(), &Hooks::default()).map(|_| ())
    });
    while daemon.exports()[0].rings.iter().all(|ring| ring.requests == 0) {
        std::thread::yield_now();
    }
    let client = Client::new(2);
    let (written, state) = client.pass(&connect(&healthy.socket().unwrap(), 2), 0, Initial::Zeros);
    assert_clean(&written);
    let ending = std::thread::spawn(move || daemon.shutdown());
    // Its lock is let go of when it is closed.
    let deadline = Instant::now() + PATIENCE;
    let opened = loop {
        match open_disk(&healthy.disk, BackingPolicy::Deny, &[]) {
            Ok(opened) => break opened,
            Err(error) => assert!(Instant::now() < deadline, "it is not closed: {error}"),
        }
    };
    assert!(!ending.is_finished(), "the other one does not hang");
    assert_clean(&client.pass(&opened.disk, 100, Initial::State(state)).0);
    opened.close().unwrap();
}

#[test]
fn an_export_whose_requests_hang_is_removed_and_then_its_disk_and_the_daemon_end() {
    let dir = tempfile::tempdir().unwrap();
    let config = DaemonConfig::default().with(|config| config.give_up_after = Duration::from_millis(200));
    let daemon = Arc::new(Daemon::start(config).unwrap());
    let socket = dir.path().join("hanging.sock");
    let mut hanging = at_socket(DriveOptions::null(1 << 20), &socket);
    hanging.disk.delay_ms = Some(u32::MAX);
    let (node, export) = daemon.add(&hanging).unwrap();
    std::thread::spawn(move || {
        let (client, disk) = (Client::new(1), connect(&socket, 1));
        run(&disk, &client.handles, &BenchSpec::default(), &Hooks::default()).map(|_| ())
    });
    while daemon.latencies().get(&node).is_none_or(|latency| latency.oldest_ns < 100_000_000) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (sender, ended) = std::sync::mpsc::channel();
    let (its, removing) = (sender.clone(), Arc::clone(&daemon));
    std::thread::spawn(move || its.send(removing.remove_export(export).map(|()| "export")));
    // The disk is removed while the export is going.
    while !daemon.exports().is_empty() {
        std::thread::yield_now();
    }
    let removing = Arc::clone(&daemon);
    std::thread::spawn(move || sender.send(removing.remove_disk(node, true).map(|()| "disk")));
    let mut gone = [(); 2].map(|()| ended.recv_timeout(PATIENCE).expect("the storage is waited for").unwrap());
    gone.sort_unstable();
    assert_eq!(gone, ["disk", "export"]);
    daemon.end_disks().unwrap();
}

#[test]
fn what_a_filter_fails_is_an_io_error_to_the_guest_and_nothing_else_is_disturbed() {
    const BLOCK: usize = 4096;
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let mut drive = create(&dir.path().join("disk.qcow2"), DriveFormat::Qcow2);
    drive.disk.filters = ["error:kinds=write:every=3:errno=ENOSPC", "delay:us=200"]
        .map(|text| FilterOptions::parse(text).unwrap())
        .into();
    daemon.add(&drive).unwrap();
    let (client, disk) = (Client::new(1), connect(&drive.socket().unwrap(), 1));
    let (sender, ended) = std::sync::mpsc::channel();
    let job = move |ctx: &Rc<dyn ReactorCtx>| {
        let io = DiskIo::open(&*disk, ctx).unwrap();
        ctx.spawn(Task::new(async move {
            let mut failed = Vec::new();
            for index in 0..9 {
                let mut bytes = AlignedBuf::copy_of(&[index as u8 + 1; BLOCK]);
                if let Err(error) = io.write(index * BLOCK as u64, &mut bytes, 0..BLOCK).await {
                    failed.push((index, error.kind()));
                }
            }
            io.run(Op::Flush).await.unwrap();
            let mut bytes = AlignedBuf::zeroed(9 * BLOCK);
            io.read(0, &mut bytes, 9 * BLOCK).await.unwrap();
            let found: Vec<_> = bytes.chunks(BLOCK).map(|block| (block[0], block[BLOCK - 1])).collect();
            sender.send((failed, found)).unwrap();
        }));
    };
    run_and_wait(&*client.handles[0], job).unwrap();
    let (failed, found) = ended.recv().unwrap();
    assert_eq!(failed, [2, 5, 8].map(|index| (index, IoErrorKind::Io)));
    assert_eq!(found, [1, 2, 0, 4, 5, 0, 7, 8, 0].map(|byte| (byte, byte)));
    daemon.shutdown().unwrap();
}

/// As in QEMU: enough for all tables, up to 32 MiB; or what the drive says.
#[test]
fn tables_in_memory_have_room_for_the_whole_disk_up_to_a_limit_unless_the_drive_says_how_much() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large");
    engine::create(&path, 0).unwrap();
    let file = EngineOpener::default().open(&(&path).into(), Role::Writable).unwrap();
    image::create(&file, &CreateOptions::overlay(1 << 40, None)).unwrap();
    drop(file);
    let small = dir.path().join("small");
    let small = create(&small, DriveFormat::Qcow2);
    let mut large = DriveOptions::of_file(&path);
    large.disk.format = Some(DriveFormat::Qcow2);
    let limit_of = |drive: DriveOptions| {
        let daemon = start(1);
        daemon.add(&at_socket(drive, &dir.path().join("s"))).unwrap();
        let limit = daemon.disks()[0].tables.unwrap().limit_bytes;
        daemon.shutdown().unwrap();
        limit
    };
    let (of_small, of_large) = (limit_of(small), limit_of(large.clone()));
    large.disk.l2_cache_bytes = Some(256 << 10);
    let of_large_with_little = limit_of(large);
    println!("{of_small} {of_large} {of_large_with_little}");
    // Eight bytes a cluster, and an eighth more for refcounts.
    assert!(of_small <= 1 << 20, "{of_small}");
    assert!((32 << 20..=36 << 20).contains(&of_large), "{of_large}");
    assert!((256 << 10..=512 << 10).contains(&of_large_with_little), "{of_large_with_little}");
}
