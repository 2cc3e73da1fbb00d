//! The driver against Ringdisk's own device in one process, over combinations of features, paths and rings: what a model
//! of a disk says must hold for all of them.

use block::{Disk, IoErrorKind, ReactorHandle};
use engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use export_vhost_user::{Export, ExportOptions};
use image::{FileName, Format, ImageOptions, Opener, Role};
use ringdisk_driver::{Driver, DriverOptions, DriverPath};
use std::path::Path;
use std::sync::Arc;
use testkit::{Dice, Harness, ModelDisk, Request, ThreadHarness, Workload};
use virtio::blk::features as f;

const SIZE: u64 = 1 << 20;
/// Every feature that the driver can do without, beside the rings' layout.
const FEATURES: [u64; 14] = [
    f::SIZE_MAX,
    f::SEG_MAX,
    f::GEOMETRY,
    f::BLK_SIZE,
    f::FLUSH,
    f::TOPOLOGY,
    f::CONFIG_WCE,
    f::MQ,
    f::DISCARD,
    f::WRITE_ZEROES,
    f::SECURE_ERASE,
    f::INDIRECT_DESC,
    f::EVENT_IDX,
    f::RO,
];

struct Files;

impl Opener for Files {
    fn open(&self, name: &FileName, _: Role) -> block::Result<Arc<dyn block::File>> {
        let options = OpenOptions::default().with(|options| {
            (options.engine, options.cache, options.lock) = (EngineKind::Threads, CacheMode::Writeback, false);
        });
        engine::open(name.path().unwrap(), &options)
    }
}

fn reactors(name: &str, count: usize) -> Vec<ReactorThread> {
    let config = || ReactorConfig::default().with(|config| config.name = name.into());
    (0..count).map(|_| Reactor::spawn(config()).unwrap()).collect()
}

fn handles(threads: &[ReactorThread]) -> Vec<Arc<dyn ReactorHandle>> {
    threads.iter().map(ReactorThread::handle).collect()
}

fn raw_image(directory: &Path) -> Arc<dyn Disk> {
    let path = directory.join("disk.img");
    engine::create(&path, 0).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(SIZE).unwrap();
    let options = ImageOptions::new(&path).with(|options| options.format = Some(Format::Raw));
    Arc::new(image::open(&options, &Files).unwrap())
}

/// What one combination is.
fn options(without: u64, packed: bool, dice: &mut Dice) -> DriverOptions {
    DriverOptions::default().with(|options| {
        (options.without_features, options.packed) = (without, packed);
        options.queues = if without & f::MQ != 0 { 1 } else { 2 };
        options.path = if dice.chance(50) { DriverPath::Request } else { DriverPath::Bio };
        options.keep_callbacks = dice.chance(25);
        options.queue_size = [4, 8, 16, 128][dice.index(4)];
        options.memory_bytes = 1 << 20;
        options.bounce_bytes = 128 << 10;
    })
}

fn holds(socket: &Path, guest: &[ReactorThread], options: DriverOptions, seed: u64) {
    let what = format!("seed {seed}, {options:?}");
    let without = options.without_features;
    let queues = usize::from(options.queues);
    let packed = options.packed;
    let driver = Driver::connect(socket, options).unwrap();
    assert_eq!(driver.facts().packed, packed, "{what}");
    let driver: Arc<dyn Disk> = Arc::new(driver);
    let volatile = driver.info().volatile_cache;
    assert_eq!(volatile, without & f::FLUSH == 0, "{what}");
    let mut harness = ThreadHarness::new(handles(guest));
    let ids: Vec<_> = (0..queues).map(|reactor| harness.open(&driver, reactor).unwrap()).collect();
    // What an earlier combination left is overwritten first.
    harness.submit(ids[0], vec![(0, Request::write(0, vec![0; SIZE as usize]))]);
    while harness.in_flight(ids[0]) > 0 {
        for (_, reply) in harness.turn().replies {
            assert_eq!(reply.result, Ok(()), "{what}");
        }
    }
    let mut model = ModelDisk::new(&vec![0; SIZE as usize], volatile).with_mixed_reads(true);
    let mut workload = Workload::new(seed, 150, SIZE, 4096);
    workload.depth = 24;
    workload.may_fail = without & f::DISCARD != 0;
    let story = workload.run(&mut harness, &ids, &mut model, &|| 0).unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
    for (request, error) in story.errors {
        assert!(matches!(request, Request::Discard { .. }), "{what}: {request:?}: {error}");
        assert_eq!(error.kind(), IoErrorKind::Unsupported, "{what}");
    }
    for id in ids {
        harness.close(id);
    }
    harness.settle();
}

#[test]
fn every_combination_of_features_carries_the_same_disk() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("disk.sock");
    let (server, guest) = (reactors("server", 2), reactors("guest", 2));
    let disk = raw_image(directory.path());
    let mut export = ExportOptions::default();
    export.packed = true;
    let _export = Export::listen(&socket, disk, handles(&server), export).unwrap();
    let mut dice = Dice::new(1);
    let everything = FEATURES.iter().fold(0, |all, feature| all | feature);
    // All of them, none of them, each left out alone, each alone; then any.
    let alone = FEATURES.iter().flat_map(|feature| [*feature, everything & !feature]);
    let mut combinations: Vec<u64> = [0, everything].into_iter().chain(alone).collect();
    combinations.extend((0..24).map(|_| {
        let chosen = FEATURES.iter().filter(|_| dice.chance(50));
        chosen.fold(0, |all, feature| all | feature)
    }));
    for (seed, without) in combinations.into_iter().enumerate() {
        for packed in [false, true] {
            let options = options(without, packed, &mut dice);
            holds(&socket, &guest, options, seed as u64);
        }
    }
}
