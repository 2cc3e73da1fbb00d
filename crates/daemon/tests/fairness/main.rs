//! Two disks on one reactor. Whatever the guest of the one asks for, the requests of the other, one at a time, are
//! answered soon.
//!
//! `RINGDISK_FAIRNESS_MS=5 cargo test --release -p ringdisk-daemon --test fairness -- --nocapture` says how much longer
//! than beside an idle guest 99 of 100 requests may take; the default allows for a slow and busy machine. `counted` has no
//! clock. How much work a turn of a single request may be is tested where the work is done.

#[path = "../common/mod.rs"]
mod common;
mod counted;
#[path = "../hostile/ground.rs"]
#[allow(dead_code)]
mod ground;
#[path = "../../../engine/tests/common/loop_device.rs"]
#[allow(dead_code)]
mod loop_device;
mod other_doors;
#[path = "../hostile/wire.rs"]
#[allow(dead_code)]
mod wire;

use block::Disk;
use common::{Client, assert_clean, connect, start};
use drive::{DiskOptions, DriveFormat, DriveOptions, EngineOpener};
use ground::{Desc, Ground, INDIRECT, Ring, chained, header};
use image::{CreateOptions, Opener, Role};
use load::{BenchSpec, Hooks, Latency, Pattern, Stop, run};
use loop_device::LoopDevice;
use ringdisk_daemon::{Daemon, NbdAddress, NbdOptions, NodeId};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wire::{Wire, code, words64};

/// The guest of the other disk has queues of this size, all of which it keeps full.
const QUEUE_SIZE: u16 = 1024;
const QUEUES: u32 = 2;
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
/// The largest range of a discard or write-zeroes: a gibibyte.
const RANGE_SECTORS: u32 = 1 << 21;
const NASTY_BYTES: u64 = 16 << 30;

/// How long each case is watched.
const WATCHED: Duration = Duration::from_secs(2);

fn allowed() -> Duration {
    let text = std::env::var("RINGDISK_FAIRNESS_MS").unwrap_or_else(|_| "60".into());
    Duration::from_millis(text.parse().unwrap())
}

struct Setup {
    daemon: Daemon,
    /// The nasty guest's disk.
    node: NodeId,
    quiet: PathBuf,
    nasty: PathBuf,
    _device: Option<LoopDevice>,
    dir: tempfile::TempDir,
}

fn add_quiet(daemon: &Daemon, socket: &Path) {
    let mut quiet = DriveOptions::of_file("unused");
    quiet.disk = DiskOptions::null(1 << 20);
    (quiet.export.queues, quiet.export.socket) = (Some(1), Some(socket.to_owned()));
    daemon.add(&quiet).unwrap();
}

impl Setup {
    /// A null disk, and a sparse one of clusters of `cluster_bytes`.
    fn new(cluster_bytes: u64) -> Self {
        Self::with(cluster_bytes, |_| {})
    }

    /// As [`Setup::new`], with other options for the nasty guest.
    fn with(cluster_bytes: u64, change: impl FnOnce(&mut DriveOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let daemon = start(1);
        add_quiet(&daemon, &at("quiet.sock"));
        let options = format_qcow2::CreateOptions::default()
            .with(|options| (options.size_bytes, options.cluster_size) = (NASTY_BYTES, cluster_bytes));
        engine::create(&at("nasty"), 0).unwrap();
        let file = EngineOpener::default().open(&at("nasty").as_path().into(), Role::Writable).unwrap();
        image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
        drop(file);
        let mut nasty = DriveOptions::of_file(at("nasty"));
        nasty.disk.format = Some(DriveFormat::Qcow2);
        (nasty.export.queues, nasty.export.socket) = (Some(QUEUES as u16), Some(at("nasty.sock")));
        change(&mut nasty);
        let (node, _) = daemon.add(&nasty).unwrap();
        Self { daemon, node, quiet: at("quiet.sock"), nasty: at("nasty.sock"), _device: None, dir }
    }

    /// The nasty disk is for clients of NBD.
    fn with_nbd(mut self) -> Self {
        self.nasty = self.dir.path().join("nasty.nbd");
        let address = NbdAddress::Unix(self.nasty.clone());
        self.daemon.add_nbd_export(self.node, &NbdOptions::at(address)).unwrap();
        self
    }

    /// A null disk, and one whose blocks are larger than its sectors; `None` where there are no loop devices.
    fn of_large_blocks() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::File::create(at("nasty")).unwrap().set_len(1 << 20).unwrap();
        let Some(device) = LoopDevice::over(&at("nasty"), 4096) else {
            eprintln!("skipped: a loop device takes root and losetup");
            return None;
        };
        let daemon = start(1);
        add_quiet(&daemon, &at("quiet.sock"));
        let mut nasty = DriveOptions::of_file(device.path());
        (nasty.disk.format, nasty.disk.cache) = (Some(DriveFormat::Raw), engine::CacheMode::None);
        (nasty.export.queues, nasty.export.socket) = (Some(1), Some(at("nasty.sock")));
        let (node, _) = daemon.add(&nasty).unwrap();
        let (quiet, nasty) = (at("quiet.sock"), at("nasty.sock"));
        Some(Self { daemon, node, quiet, nasty, _device: Some(device), dir })
    }

    /// The quiet guest's latencies.
    fn latency(&self, disk: &std::sync::Arc<dyn Disk>) -> Latency {
        let spec = BenchSpec::default().with(|spec| {
            (spec.queue_depth, spec.read_percent, spec.block_bytes) = (1, 100, 4096);
            (spec.pattern, spec.stop) = (Pattern::Random { seed: 1 }, Stop::Runtime(WATCHED));
        });
        let report = run(disk, &Client::new(1).handles, &spec, &Hooks::default()).unwrap().report;
        assert_clean(&report);
        report.latency_us
    }

    /// Compares the quiet guest's latencies with and without `load`, which goes on until it is told to stop.
    fn compare(self, name: &str, load: impl FnOnce(&Path, &AtomicBool) + Send) {
        let disk = connect(&self.quiet, 1);
        let alone = self.latency(&disk);
        let stop = AtomicBool::new(false);
        let (beside, mut spent) = std::thread::scope(|scope| {
            let loading = scope.spawn(|| load(&self.nasty, &stop));
            // Set up and under way.
            std::thread::sleep(Duration::from_millis(300));
            let beside = self.latency(&disk);
            assert!(!loading.is_finished(), "{name}: the load has ended before");
            stop.store(true, Ordering::Relaxed);
            (beside, Instant::now())
        });
        drop(disk);
        let ended = spent.elapsed();
        spent = Instant::now();
        self.daemon.shutdown().unwrap();
        println!(
            "{name}: p50 {:.0} us and {:.0} us, p99 {:.0} us and {:.0} us, max {:.0} us and {:.0} us; the load ended \
             after {ended:?}, the daemon after {:?}",
            alone.p50,
            beside.p50,
            alone.p99,
            beside.p99,
            alone.max,
            beside.max,
            spent.elapsed()
        );
        let more = Duration::from_secs_f64((beside.p99 - alone.p99).max(0.0) / 1e6);
        assert!(more <= allowed(), "{name}: 99 of 100 requests of the other guest take up to {more:?} longer");
    }
}

/// Where a queue's header, table and data lie, past the rings.
fn area(queue: u32) -> u64 {
    (1 << 20) + (u64::from(queue) << 20)
}

/// The whole guest's memory.
const GROUND_BYTES: u64 = 1 << 23;

/// Keeps all queues full of requests whose chains `table` writes and points a descriptor to, until it is told to stop.
fn keep_full(
    socket: &Path,
    stop: &AtomicBool,
    set_up: impl FnOnce(&Wire, &Ground),
    mut put: impl FnMut(&Ground, &Ring, u16),
) {
    let wire = Wire::connect(socket).unwrap();
    wire.negotiate(0).unwrap();
    let ground = Ground::new(GROUND_BYTES);
    ground.share(&wire).unwrap();
    set_up(&wire, &ground);
    let mut rings: Vec<Ring> =
        (0..QUEUES).map(|index| Ring::new(index, QUEUE_SIZE, u64::from(index) * Ring::bytes(QUEUE_SIZE))).collect();
    for ring in &mut rings {
        ring.start(&wire).unwrap();
        for head in 0..QUEUE_SIZE {
            put(&ground, ring, head);
            ring.offer(&ground, head);
        }
        ring.kick(&ground);
    }
    while !stop.load(Ordering::Relaxed) {
        for ring in &mut rings {
            let used = ring.take_used(&ground);
            for head in &used {
                put(&ground, ring, *head);
                ring.offer(&ground, *head);
            }
            match used.is_empty() {
                true => ring.wait(1),
                false => ring.kick(&ground),
            }
        }
    }
}

/// One request a head, all from one table: its header and status are shared, too, which the server does not mind.
fn one_table(ground: &Ground, ring: &Ring, head: u16, buffers: &[(u64, u32, bool)]) {
    let table = area(ring.index) + 0x8_0000;
    ground.write(table, &chained(buffers));
    let length = 16 * buffers.len() as u32;
    ring.put(ground, head, Desc { address: table, length, flags: INDIRECT, next: 0 });
}

#[test]
fn a_guest_that_scatters_its_requests_over_many_regions_does_not_hold_up_another() {
    const REGIONS: u64 = 250;
    let far = |index: u64| (1 << 40) + (index << 21);
    Setup::new(64 << 10).compare("scattered", |socket, stop| {
        let add = |wire: &Wire, ground: &Ground| {
            for index in 0..REGIONS {
                let mut body = words64(&[0]);
                body.extend(words64(&[far(index), 4096, far(index), GROUND_BYTES / 2 + 4096 * index]));
                wire.tell(code::ADD_MEM_REG, &body, &[ground.file.as_fd()]).unwrap();
            }
        };
        keep_full(socket, stop, add, |ground, ring, head| {
            let at = area(ring.index);
            ground.write(at, &header(READ, 0));
            let scattered = (0..1021).map(|index| (far(index * 97 % REGIONS) + index, 1, true));
            let mut buffers = vec![(at, 16, false)];
            buffers.extend(scattered);
            buffers.extend([(at + 32, 3, true), (at + 64, 1, true)]);
            one_table(ground, ring, head, &buffers);
        });
    });
}

#[test]
fn a_guest_that_zeroes_and_discards_all_of_its_disk_at_once_does_not_hold_up_another() {
    Setup::new(512).compare("zeroed", |socket, stop| {
        let mut turn = 0_u64;
        keep_full(
            socket,
            stop,
            |_, _| {},
            |ground, ring, head| {
                turn += 1;
                let at = area(ring.index) + u64::from(head % 256) * 0x800;
                let kind = [WRITE, DISCARD, WRITE, WRITE_ZEROES, FLUSH][turn as usize % 5];
                let (mut length, mut sector) = (0x4_0000, turn % 512 * 512);
                match kind {
                    DISCARD | WRITE_ZEROES => {
                        for range in 0..16 {
                            let mut bytes = (range * u64::from(RANGE_SECTORS)).to_le_bytes().to_vec();
                            bytes.extend(RANGE_SECTORS.to_le_bytes());
                            bytes.extend([0; 4]);
                            ground.write(at + 0x100 + 16 * range, &bytes);
                        }
                        (length, sector) = (256, 0);
                    }
                    FLUSH => length = 0,
                    _ => {}
                }
                ground.write(at, &header(kind, sector));
                let data = if kind == WRITE { GROUND_BYTES / 2 } else { at + 0x100 };
                let mut buffers = vec![(at, 16, false)];
                if length > 0 {
                    buffers.push((data, length, false));
                }
                buffers.push((at + 0x80, 1, true));
                ground.write(at + 0x300, &chained(&buffers));
                let length = 16 * buffers.len() as u32;
                ring.put(ground, head, Desc { address: at + 0x300, length, flags: INDIRECT, next: 0 });
            },
        );
    });
}

#[test]
fn a_guest_whose_requests_wait_for_each_other_does_not_hold_up_another() {
    Setup::new(2 << 20).compare("waiting", |socket, stop| {
        let mut turn = 0_u64;
        keep_full(
            socket,
            stop,
            |_, _| {},
            |ground, ring, head| {
                turn += 1;
                // Now and then the cluster goes, and all that write to it wait for the first.
                let kind = if turn.is_multiple_of(300) { DISCARD } else { WRITE };
                let at = area(ring.index) + u64::from(head % 256) * 0x800;
                ground.write(at, &header(kind, turn % 4096));
                let mut range = 0_u64.to_le_bytes().to_vec();
                range.extend(4096_u32.to_le_bytes());
                range.extend([0; 4]);
                ground.write(at + 0x100, &range);
                let length = if kind == DISCARD { 16 } else { 512 };
                let buffers = [(at, 16, false), (at + 0x100, length, false), (at + 0x80, 1, true)];
                ground.write(at + 0x300, &chained(&buffers));
                ring.put(ground, head, Desc { address: at + 0x300, length: 48, flags: INDIRECT, next: 0 });
            },
        );
    });
}

#[test]
fn a_guest_that_reads_long_ranges_of_nothing_does_not_hold_up_another() {
    Setup::new(64 << 10).compare("long reads", |socket, stop| {
        keep_full(
            socket,
            stop,
            |_, _| {},
            |ground, ring, head| {
                let at = area(ring.index);
                ground.write(at, &header(READ, u64::from(head) * 2048));
                // The same memory again and again: 256 MiB a request.
                let mut buffers = vec![(at, 16, false)];
                buffers.extend((0..64).map(|_| (GROUND_BYTES / 2, (GROUND_BYTES / 2) as u32, true)));
                buffers.push((at + 32, 1, true));
                one_table(ground, ring, head, &buffers);
            },
        );
    });
}
