//! Images on real reactors and files: the conformance suite over each engine, and several threads on one qcow2 image
//! against the model.

use block::{Disk, File, ReactorHandle, Result};
use engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{CreateOptions, FileName, Format, Image, ImageOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use testkit::conformance::{Subject, run};
use testkit::{Harness, ModelDisk, Request, ThreadHarness, Workload, qcow2_check};

const SIZE: u64 = 1 << 20;

/// Opens files on the host with one engine and cache mode.
struct HostOpener(EngineKind, CacheMode);

impl Opener for HostOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let read_only = role != Role::Writable;
        engine::open(
            name.path().unwrap(),
            &OpenOptions::default().with(|options| {
                options.engine = self.0;
                options.cache = self.1;
                options.read_only = read_only;
            }),
        )
    }
}

fn reactors(count: usize) -> Vec<ReactorThread> {
    let config = |index| ReactorConfig::default().with(|config| config.name = format!("test-{index}"));
    (0..count).map(|index| Reactor::spawn(config(index)).unwrap()).collect()
}

fn handles(reactors: &[ReactorThread]) -> Vec<Arc<dyn ReactorHandle>> {
    reactors.iter().map(ReactorThread::handle).collect()
}

/// A new image over a base; tiny clusters, so that tables are loaded, written and freed all the time.
fn make(directory: &Path, number: usize, format: Format, size_bytes: u64) -> PathBuf {
    let path = directory.join(format!("image{number}"));
    let opener = HostOpener(EngineKind::Threads, CacheMode::Writeback);
    let options = match format {
        Format::Raw | Format::Scratch => CreateOptions::raw(size_bytes),
        Format::Qcow2 => {
            let base = directory.join(format!("base{number}"));
            let bytes: Vec<u8> = (0..size_bytes / 2).map(|at| (at / 512 % 251) as u8).collect();
            std::fs::write(base, bytes).unwrap();
            CreateOptions::Qcow2(Qcow2Options::default().with(|options| {
                options.size_bytes = size_bytes;
                options.cluster_size = 1024;
                options.backing_file = Some(format!("base{number}"));
                options.backing_format = Some("raw".to_owned());
            }))
        }
    };
    engine::create(&path, 0).unwrap();
    ringdisk_image::create(&opener.open(&(&path).into(), Role::Writable).unwrap(), &options).unwrap();
    path
}

fn open(path: &Path, format: Format, read_only: bool, opener: &HostOpener) -> Result<Arc<Image>> {
    let options = ImageOptions::new(path).with(|options| {
        options.format = Some(format);
        options.read_only = read_only;
    });
    Ok(Arc::new(ringdisk_image::open(&options, opener)?))
}

/// Whether O_DIRECT does what it says there: in memory it copies like the page cache.
fn is_on_a_disk(directory: &Path) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::statfs(directory).is_ok_and(|statfs| statfs.f_type as u64 != TMPFS_MAGIC)
}

fn conforms(engine: EngineKind, cache: CacheMode) {
    let opener = HostOpener(engine, cache);
    for format in [Format::Raw, Format::Qcow2] {
        let directory = tempfile::tempdir().unwrap();
        let mut number = 0;
        let mut make = |read_only| {
            number += 1;
            let path = make(directory.path(), number, format, SIZE);
            let disk = open(&path, format, read_only, &opener);
            Some(disk.unwrap_or_else(|error| panic!("{engine} {cache}: {error}")) as Arc<dyn Disk>)
        };
        let threads = reactors(2);
        let mut subject = Subject { make: &mut make, keeps_data: true, seed: 1 };
        let whole_sectors = cache == CacheMode::None && is_on_a_disk(directory.path());
        let mut harness = ThreadHarness::new(handles(&threads)).with_whole_sectors(whole_sectors);
        let report = run(&mut harness, &mut subject);
        assert!(report.failures.is_empty(), "{engine} {cache} {format}: {:#?}", report.failures);
        assert!(report.skipped.is_empty());
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
    }
}

#[test]
fn images_conform_over_io_uring() {
    conforms(EngineKind::IoUring, CacheMode::Writeback);
}

#[test]
fn images_conform_over_io_uring_with_direct_io() {
    conforms(EngineKind::IoUring, CacheMode::None);
}

#[test]
fn images_conform_over_linux_aio_with_direct_io() {
    conforms(EngineKind::LinuxAio, CacheMode::None);
}

#[test]
fn images_conform_over_threads() {
    conforms(EngineKind::Threads, CacheMode::Writeback);
}

/// Threads that really run at the same time find what the simulator, which takes turns, cannot.
#[test]
fn three_reactors_on_one_qcow2_image_agree_with_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let opener = HostOpener(EngineKind::Auto, CacheMode::Unsafe);
    for seed in 1..6 {
        let path = make(directory.path(), seed as usize, Format::Qcow2, 1 << 18);
        let image = open(&path, Format::Qcow2, false, &opener).unwrap();
        let disk = Arc::clone(&image) as Arc<dyn Disk>;
        let threads = reactors(3);
        let mut harness = ThreadHarness::new(handles(&threads));
        let queues: Vec<_> = (0..6).map(|index| harness.open(&disk, index).unwrap()).collect();
        let mut model = ModelDisk::new(&read_all(&mut harness, queues[0]), true).with_mixed_reads(true);
        let workload = Workload { depth: 12, ..Workload::new(seed, 3000, 1 << 18, 1024) };
        workload.run(&mut harness, &queues, &mut model, &|| 0).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        model.check_live(&read_all(&mut harness, queues[1])).unwrap();
        queues.into_iter().for_each(|queue| harness.close(queue));
        drop(harness);
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
        image.close().unwrap();
        let report = qcow2_check(&std::fs::read(&path).unwrap()).unwrap();
        report.sound().unwrap();
        assert_eq!(report.leaked_clusters, 0, "seed {seed}");
    }
}

fn read_all(harness: &mut ThreadHarness, queue: u64) -> Vec<u8> {
    harness.submit(queue, vec![(u64::MAX, Request::read(0, 1 << 18))]);
    loop {
        let turn = harness.turn();
        assert!(!turn.idle, "the read was lost");
        if let Some((_, reply)) = turn.replies.into_iter().find(|(_, reply)| reply.tag == u64::MAX) {
            reply.result.unwrap();
            return reply.data;
        }
    }
}
