//! The driver against Ringdisk's own device in one process, over combinations of features, paths and rings: what a model
//! of a disk says must hold for all of them.

use block::{
    Completion, Disk, DiskInfo, DiskListener, DiskQueue, IoErrorKind, Lifetime, Op, OpFlags, ReactorCtx, ReactorHandle,
    Result, Tag,
};
use engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use export_vhost_user::{Export, ExportOptions};
use image::{CreateOptions, FileName, Format, ImageOptions, Opener, Role};
use ringdisk_driver::{Driver, DriverOptions, DriverPath};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use testkit::{Dice, Harness, ModelDisk, Request, ThreadHarness, Workload};
use virtio::blk::features as f;

const SIZE: u64 = 1 << 20;
/// Longest data segment that the devices take.
const SIZE_MAX: u32 = 8192;
const WORN: Lifetime = Lifetime { end_of_life: 1, worn_a: 2, worn_b: 3 };
/// Every feature that the driver can do without, beside the rings' layout.
const FEATURES: [u64; 15] = [
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
    f::LIFETIME,
    f::INDIRECT_DESC,
    f::EVENT_IDX,
    f::RO,
];
/// Features that only a disk has that can be written.
const WRITING: u64 = f::FLUSH | f::CONFIG_WCE | f::DISCARD | f::WRITE_ZEROES | f::SECURE_ERASE;

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

/// A kind of device, which offers some of the features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Raw,
    /// Its blocks have 4096 bytes.
    Coarse,
    ReadOnly,
    Qcow2,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Raw, Self::Coarse, Self::ReadOnly, Self::Qcow2];

    fn offers(self) -> u64 {
        let all = FEATURES.iter().fold(0, |all, feature| all | feature);
        match self {
            Self::Raw | Self::Coarse => all & !f::RO,
            Self::ReadOnly => all & !WRITING,
            Self::Qcow2 => all & !(f::RO | f::SECURE_ERASE),
        }
    }

    fn block_bytes(self) -> u64 {
        if self == Self::Coarse { 4096 } else { 512 }
    }
}

/// What is on the disk that cannot be written.
fn read_only_contents() -> Vec<u8> {
    (0..SIZE).map(|at| (at / 512 * 7 + at) as u8).collect()
}

/// An image that tells how worn its storage is.
struct Worn(Arc<dyn Disk>);

impl Disk for Worn {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        self.0.open_queue(ctx)
    }

    fn set_volatile_cache(&self, volatile: bool) {
        self.0.set_volatile_cache(volatile);
    }

    fn lifetime(&self) -> Option<Lifetime> {
        Some(WORN)
    }

    fn overwrites_in_place(&self) -> bool {
        self.0.overwrites_in_place()
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.0.subscribe(listener);
    }
}

/// The driver's disk. Where the device can erase, some zeroes are written by secure erases.
struct Erasing(Driver);

struct ErasingQueue {
    below: Box<dyn DiskQueue>,
    erases: bool,
}

impl Disk for Erasing {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(ErasingQueue { below: self.0.open_queue(ctx)?, erases: self.0.facts().secure_erase }))
    }
}

impl DiskQueue for ErasingQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let op = match op {
            Op::WriteZeroes { offset, length, may_unmap: false, flags } if self.erases && flags == OpFlags::NONE => {
                Op::SecureErase { offset, length }
            }
            op => op,
        };
        self.below.submit(tag, op);
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        self.below.harvest(done)
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }
}

/// Serves a disk of this kind.
fn serve(kind: Kind, directory: &Path, server: &[ReactorThread]) -> (PathBuf, Export) {
    let [path, socket] = ["img", "sock"].map(|end| directory.join(format!("{kind:?}.{end}")));
    engine::create(&path, 0).unwrap();
    let format = if kind == Kind::Qcow2 { Format::Qcow2 } else { Format::Raw };
    let new = match format {
        Format::Qcow2 => CreateOptions::Qcow2(format_qcow2::CreateOptions::default().with(|new| new.size_bytes = SIZE)),
        _ => CreateOptions::raw(SIZE),
    };
    image::create(&engine::open(&path, &OpenOptions::default()).unwrap(), &new).unwrap();
    if kind == Kind::ReadOnly {
        std::fs::write(&path, read_only_contents()).unwrap();
    }
    let options = ImageOptions::new(&path).with(|options| options.format = Some(format));
    let disk = Worn(Arc::new(image::open(&options, &Files).unwrap()));
    let mut export = ExportOptions::default();
    (export.packed, export.read_only) = (true, kind == Kind::ReadOnly);
    export.overrides.size_max_bytes = Some(SIZE_MAX);
    export.overrides.secure_erase = kind.offers() & f::SECURE_ERASE != 0;
    export.overrides.logical_block_bytes = Some(kind.block_bytes() as u32);
    let export = Export::listen(&socket, Arc::new(disk), handles(server), export).unwrap();
    (socket, export)
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

fn holds(kind: Kind, socket: &Path, guest: &[ReactorThread], options: DriverOptions, seed: u64) {
    let what = format!("seed {seed}, {kind:?}, {options:?}");
    let (without, queues, packed) = (options.without_features, usize::from(options.queues), options.packed);
    let driver = Driver::connect(socket, options).unwrap();
    let (facts, info) = (driver.facts(), driver.info());
    let all = FEATURES.iter().fold(0, |all, feature| all | feature);
    let chosen = kind.offers() & !without;
    assert_eq!(facts.features & all, chosen, "{what}");
    assert_eq!(facts.packed, packed, "{what}");
    assert_eq!(facts.max_segment_bytes, (chosen & f::SIZE_MAX != 0).then_some(SIZE_MAX), "{what}");
    assert_eq!(facts.lifetime, (chosen & f::LIFETIME != 0).then_some(WORN), "{what}");
    let block_bytes = if chosen & f::BLK_SIZE != 0 { kind.block_bytes() } else { 512 };
    assert_eq!(u64::from(info.logical_block_bytes), block_bytes, "{what}");
    assert_eq!(info.volatile_cache, chosen & f::FLUSH != 0, "{what}");
    let driver: Arc<dyn Disk> = Arc::new(Erasing(driver));
    let mut harness = ThreadHarness::new(handles(guest));
    let ids: Vec<_> = (0..queues).map(|reactor| harness.open(&driver, reactor).unwrap()).collect();
    let contents = match kind {
        Kind::ReadOnly => read_only_contents(),
        _ => vec![0; SIZE as usize],
    };
    if kind != Kind::ReadOnly {
        // What an earlier combination left is overwritten first.
        harness.submit(ids[0], vec![(0, Request::write(0, contents.clone()))]);
        while harness.in_flight(ids[0]) > 0 {
            for (_, reply) in harness.turn().replies {
                assert_eq!(reply.result, Ok(()), "{what}");
            }
        }
    }
    let mut model = ModelDisk::new(&contents, info.volatile_cache).with_mixed_reads(true);
    let mut workload = Workload::new(seed, 100, SIZE, 4096);
    workload.depth = 24;
    // A driver that does not read the block's size must know it otherwise.
    workload.block_bytes = kind.block_bytes();
    workload.read_percent = if kind == Kind::ReadOnly { 100 } else { workload.read_percent };
    workload.may_fail = chosen & f::DISCARD == 0;
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

/// `RINGDISK_FEATURE_CASES=1000` draws more combinations.
#[test]
fn every_combination_of_features_carries_the_same_disk() {
    let cases = std::env::var("RINGDISK_FEATURE_CASES").map_or(12, |text| text.parse().unwrap());
    // In memory, where flushes cost nothing: what is tested lies between the two sides.
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let (server, guest) = (reactors("server", 2), reactors("guest", 2));
    let exports = Kind::ALL.map(|kind| serve(kind, directory.path(), &server));
    let mut dice = Dice::new(1);
    let everything = FEATURES.iter().fold(0, |all, feature| all | feature);
    // All of them, none of them, each left out alone, each alone; then any.
    let alone = FEATURES.iter().flat_map(|feature| [*feature, everything & !feature]);
    let mut combinations: Vec<u64> = [0, everything].into_iter().chain(alone).collect();
    combinations.extend((0..cases).map(|_| {
        let chosen = FEATURES.iter().filter(|_| dice.chance(50));
        chosen.fold(0, |all, feature| all | feature)
    }));
    for (seed, without) in combinations.into_iter().enumerate() {
        // A disk that offers the feature in question, with either layout; and another kind of disk.
        let only_ro = without == f::RO || without == everything & !f::RO;
        let first = if only_ro { 2 } else { 0 };
        for (packed, at) in [(false, first), (true, first), (dice.chance(50), 1 + seed % 3)] {
            let options = options(without, packed, &mut dice);
            holds(Kind::ALL[at], &exports[at].0, &guest, options, seed as u64);
        }
    }
}
