//! Chains that are exchanged on real reactors and files while the conformance suite runs, and while queues come and go.

use block::{Disk, File, ReactorHandle, Result};
use engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{CopyWatch, CreateOptions, FileName, Format, Image, ImageOptions, OpenedOverlay, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use testkit::conformance::{Subject, run};
use testkit::{Harness, Request, ThreadHarness, qcow2_check, stamped};

const SIZE: u64 = 1 << 20;

/// Opens files on the host with one engine.
struct HostOpener(EngineKind);

impl HostOpener {
    fn open_path(&self, path: &Path, read_only: bool) -> Result<Arc<dyn File>> {
        let options = OpenOptions::default().with(|options| {
            options.engine = self.0;
            options.cache = CacheMode::Writeback;
            options.read_only = read_only;
        });
        engine::open(path, &options)
    }
}

impl Opener for HostOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        self.open_path(name.path().unwrap(), role != Role::Writable)
    }
}

fn reactors(count: usize) -> Vec<ReactorThread> {
    let spawn = |index| Reactor::spawn(ReactorConfig::default().with(|config| config.name = format!("test-{index}")));
    (0..count).map(|index| spawn(index).unwrap()).collect()
}

fn handles(reactors: &[ReactorThread]) -> Vec<Arc<dyn ReactorHandle>> {
    reactors.iter().map(ReactorThread::handle).collect()
}

fn create(directory: &Path, name: &str, cluster_size: u64, below: Option<&Path>) -> PathBuf {
    let path = directory.join(name);
    let options = Qcow2Options::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = cluster_size;
        options.backing_file = below.map(|below| below.display().to_string());
        options.backing_format = below.map(|_| "qcow2".to_owned());
    });
    engine::create(&path, 0).unwrap();
    let file = HostOpener(EngineKind::Threads).open_path(&path, false).unwrap();
    ringdisk_image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
    path
}

/// Exchanges the chain of an image until it is dropped.
struct Exchanges {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Exchanges {
    fn of(image: &Arc<Image>, base: &Path, engine: EngineKind, done: &Arc<AtomicU64>) -> Self {
        let (image, base, done) = (Arc::downgrade(image), base.to_owned(), Arc::clone(done));
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for number in 0.. {
                let Some(image) = image.upgrade().filter(|_| !stops.load(Ordering::Relaxed)) else { break };
                let name = format!("{}.{number}", base.file_name().unwrap().display());
                let overlay = create(base.parent().unwrap(), &name, 8192, Some(&base));
                let file = HostOpener(engine).open_path(&overlay, false).unwrap();
                let opened = OpenedOverlay::open(&FileName::from(&overlay), file).unwrap();
                let results = ringdisk_image::put_overlay(vec![(Arc::clone(&image), opened)], || Ok(())).unwrap();
                results.into_iter().for_each(Result::unwrap);
                ringdisk_image::take_back(&image, &CopyWatch::default(), || Ok(())).unwrap();
                std::fs::remove_file(overlay).unwrap();
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Exchanges {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "an exchange failed");
    }
}

fn open(path: &Path, engine: EngineKind) -> Arc<Image> {
    let options = ImageOptions::new(path).with(|options| options.format = Some(Format::Qcow2));
    Arc::new(ringdisk_image::open(&options, &HostOpener(engine)).unwrap())
}

fn conforms(engine: EngineKind) {
    let directory = tempfile::tempdir().unwrap();
    let threads = reactors(3);
    let done = Arc::new(AtomicU64::new(0));
    let mut exchanges = Vec::new();
    let mut number = 0;
    let mut make = |read_only: bool| {
        number += 1;
        exchanges.clear();
        let base = create(directory.path(), &format!("image{number}"), 4096, None);
        let image = open(&base, engine);
        exchanges.push(Exchanges::of(&image, &base, engine, &done));
        (!read_only).then_some(image as Arc<dyn Disk>)
    };
    let mut subject = Subject { make: &mut make, keeps_data: true, seed: 1 };
    let report = run(&mut ThreadHarness::new(handles(&threads)), &mut subject);
    assert!(report.failures.is_empty(), "{engine}: {:#?}", report.failures);
    drop(exchanges);
    eprintln!("{} layers were put on top and taken back", done.load(Ordering::Relaxed));
    assert!(done.load(Ordering::Relaxed) > 5);
}

#[test]
fn a_disk_on_threads_conforms_while_its_chain_is_exchanged() {
    conforms(EngineKind::Threads);
}

#[test]
fn a_disk_on_the_best_engine_conforms_while_its_chain_is_exchanged() {
    conforms(EngineKind::Auto);
}

/// Some reactors sleep, with queues that are idle; on others queues are opened and dropped, with requests in flight.
#[test]
fn idle_queues_on_sleeping_reactors_and_queues_that_come_and_go_take_part() {
    let directory = tempfile::tempdir().unwrap();
    let base = create(directory.path(), "image", 4096, None);
    let image = open(&base, EngineKind::Auto);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
    let done = Arc::new(AtomicU64::new(0));
    let threads = reactors(3);
    {
        let mut harness = ThreadHarness::new(handles(&threads));
        let idle = harness.open(&disk, 0).unwrap();
        let exchanges = Exchanges::of(&image, &base, EngineKind::Auto, &done);
        for round in 0..200 {
            let queue = harness.open(&disk, 1 + round % 2).unwrap();
            let offset = round as u64 * 4096;
            let write = Request::write(offset, stamped(round as u64, offset, 4096));
            harness.submit(queue, vec![(1, write)]);
            while harness.in_flight(queue) > 0 {
                harness.turn();
            }
            harness.submit(queue, vec![(2, Request::read(0, 4096)), (3, Request::Flush)]);
            harness.close(queue);
        }
        drop(exchanges);
        for round in 0..200 {
            let offset = round * 4096;
            harness.submit(idle, vec![(1, Request::read(offset, 4096))]);
            let mut replies = Vec::new();
            while harness.in_flight(idle) > 0 {
                replies.extend(harness.turn().replies);
            }
            assert_eq!(replies[0].1.data, stamped(round, offset, 4096), "round {round}");
        }
    }
    assert!(done.load(Ordering::Relaxed) > 0);
    drop(disk);
    image.close().unwrap();
    qcow2_check(&std::fs::read(base).unwrap()).unwrap().sound().unwrap();
}
