//! `kill -9` of the daemon under load, at random moments: the image is valid (leaks at most), it opens again, and all that
//! a flush had promised is there.
//!
//! A dozen moments a format by default; `RINGDISK_KILL9_MOMENTS=50` for more, `RINGDISK_KILL9_SEED` to replay others.

mod common;

use block::{Disk, ReactorHandle};
use common::{Server, assert_valid, at, directory, has_tool, info_after_kill, path_str, run_ok};
use drive::{DiskOptions, DriveFormat, open_disk};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use image::BackingPolicy;
use load::{BenchSpec, Hooks, Initial, Outcome, Pattern, Progress, Stop, Verify, VerifyState, run};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

const DEFAULT_MOMENTS: u64 = 12;
/// Each moment has a part of the disk of its own, so that there is always something to allocate.
const PART_BYTES: u64 = 8 << 20;
const BLOCK_BYTES: u32 = 4096;
/// A killed server has lived at most this long under load.
const LONGEST_LIFE_MS: u64 = 400;
/// If no flush was acknowledged in any of the planned lives, more lives follow, up to this many.
const MORE_LIVES_MS: [u64; 4] = [1000, 2000, 4000, 8000];
const SEED: u64 = 20;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |value| value.parse().expect("a number"))
}

/// A generator that differs a little between neighbouring seeds (splitmix64's finisher).
fn dice(seed: u64) -> u64 {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32
}

/// The size of an image with a part for every moment that there may be.
fn size_of(moments: u64) -> String {
    ((moments + MORE_LIVES_MS.len() as u64) * PART_BYTES).to_string()
}

/// Grows with every block that a flush makes durable.
fn durable(state: &VerifyState) -> u64 {
    state.blocks().iter().map(|block| u64::from(block.durable)).sum()
}

/// One image, and what is known of each part of it.
struct Patient {
    image: PathBuf,
    socket: PathBuf,
    format: DriveFormat,
    lazy: bool,
    options: String,
    reactor: ReactorThread,
    seed: u64,
    parts: Vec<VerifyState>,
}

impl Patient {
    fn new(dir: &tempfile::TempDir, format: DriveFormat, name: &str, seed: u64) -> Self {
        let image = at(dir, name);
        let format_name = if format == DriveFormat::Raw { "raw" } else { "qcow2" };
        let options = format!("file={},format={format_name},queues=1", image.display());
        let config = ReactorConfig::default().with(|config| config.name = "client".into());
        let reactor = Reactor::spawn(config).unwrap();
        Self { image, socket: at(dir, "s"), format, lazy: false, options, reactor, seed, parts: Vec::new() }
    }

    fn handles(&self) -> [Arc<dyn ReactorHandle>; 1] {
        [self.reactor.handle()]
    }

    fn spec(&self, part: u64, initial: Initial) -> BenchSpec {
        BenchSpec::default().with(|spec| {
            spec.queue_depth = 16;
            spec.block_bytes = BLOCK_BYTES;
            spec.offset_bytes = part * PART_BYTES;
            spec.length_bytes = Some(PART_BYTES);
            spec.verify = Some(Verify::new(self.seed, initial));
        })
    }

    /// The image, opened in this process.
    fn with_image<T>(&self, image: &Path, format: DriveFormat, work: impl FnOnce(&Arc<dyn Disk>) -> T) -> T {
        let mut disk = DiskOptions::of_file(image);
        disk.format = Some(format);
        let opened = open_disk(&disk, BackingPolicy::SameDir, &[]).expect("the image opens");
        let value = work(&opened.disk);
        opened.close().expect("the image closes");
        value
    }

    /// Loads the server and kills it after `life` under load. Returns what is known of the part then.
    fn kill_under_load(&self, part: u64, initial: Initial, life: Duration) -> VerifyState {
        let arguments = ["--drive", &self.options, "--socket", path_str(&self.socket), "--reactors", "1"];
        let server = Server::start(&arguments);
        let driver = Arc::new(Driver::connect(&self.socket, DriverOptions::default()).unwrap());
        let disk = Arc::clone(&driver) as Arc<dyn Disk>;
        let cancel = Arc::new(AtomicBool::new(false));
        let spec = self.spec(part, initial).with(|spec| {
            spec.read_percent = 25;
            spec.pattern = Pattern::Random { seed: self.seed + part };
            spec.stop = Stop::Runtime(common::PATIENCE);
            spec.flush_every = Some(1 + (dice(self.seed ^ part) % 64) as u32);
            spec.drain_timeout = common::PATIENCE;
        });
        let (begin, begun) = channel();
        let killer = std::thread::spawn(move || {
            let _ = begun.recv();
            std::thread::sleep(life);
            server.kill();
        });
        // The first look at the progress begins the server's life; failures end the run.
        let progress = |now: Progress| {
            let _ = begin.send(());
            if now.failures > 0 {
                cancel.store(true, Ordering::Relaxed);
            }
        };
        let hooks = Hooks::default().with(|hooks| {
            hooks.progress = Some(&progress);
            hooks.cancel = Some(Arc::clone(&cancel));
        });
        let outcome = run(&disk, &self.handles(), &spec, &hooks).unwrap();
        killer.join().unwrap();
        let Outcome { report, state, .. } = outcome;
        assert_eq!(report.mismatches, 0, "before the kill: {:?}", report.first_mismatch);
        assert!(report.cancelled && report.errors > 0, "the server was not killed under load: {report:?}");
        state.expect("a verified run").after_crash()
    }

    /// Checks everything that is known of every part.
    fn check(&mut self) {
        for part in 0..self.parts.len() {
            let spec = self.spec(part as u64, Initial::State(self.parts[part].clone())).with(|spec| {
                spec.read_percent = 100;
                spec.pattern = Pattern::Sequential;
                spec.stop = Stop::OnePass;
            });
            let outcome = self.with_image(&self.image, self.format, |disk| {
                run(disk, &self.handles(), &spec, &Hooks::default()).unwrap()
            });
            let report = outcome.report;
            assert_eq!((report.errors, report.mismatches), (0, 0), "part {part}: {:?}", report.first_mismatch);
        }
    }

    fn survive(mut self, moments: u64, initial: impl Fn(u64) -> Initial) {
        let (seed, mut flushed) = (self.seed, false);
        let planned = (0..moments).map(|moment| 10 + dice(seed + 1000 + moment) % LONGEST_LIFE_MS);
        for (moment, life_ms) in (0..).zip(planned.chain(MORE_LIVES_MS)) {
            if moment >= moments && flushed {
                break;
            }
            let initial = initial(moment);
            let durable_before = if let Initial::State(state) = &initial { durable(state) } else { 0 };
            let state = self.kill_under_load(moment, initial, Duration::from_millis(life_ms));
            flushed |= durable(&state) > durable_before;
            self.parts.push(state);
            info_after_kill(&self.image);
            // With lazy refcounts they are stale. They are in order once the image has been opened for writing.
            if self.format == DriveFormat::Qcow2 && !self.lazy {
                assert_valid(&self.image, true);
            }
            self.check();
            if self.format == DriveFormat::Qcow2 {
                assert_valid(&self.image, !self.lazy);
            }
        }
        assert!(flushed, "no flush was ever acknowledged: nothing was tested");
        self.reactor.stop().unwrap();
    }
}

fn seed() -> u64 {
    let seed = number("RINGDISK_KILL9_SEED", SEED);
    eprintln!("RINGDISK_KILL9_SEED={seed}");
    seed
}

fn raw(moments: u64) {
    let dir = directory();
    let patient = Patient::new(&dir, DriveFormat::Raw, "disk.raw", seed());
    run_ok(&["create", "-q", "-f", "raw", path_str(&patient.image), &size_of(moments)]);
    patient.survive(moments, |_| Initial::Zeros);
}

fn qcow2(moments: u64) {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let patient = Patient::new(&dir, DriveFormat::Qcow2, "disk.qcow2", seed());
    run_ok(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", path_str(&patient.image), &size_of(moments)]);
    patient.survive(moments, |_| Initial::Zeros);
}

/// Refcounts are written only at the end, which never comes.
fn lazy(moments: u64) {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let patient = Patient { lazy: true, ..Patient::new(&dir, DriveFormat::Qcow2, "disk.qcow2", seed()) };
    let options = "cluster_size=4k,lazy_refcounts=on";
    run_ok(&["create", "-q", "-f", "qcow2", "-o", options, path_str(&patient.image), &size_of(moments)]);
    patient.survive(moments, |_| Initial::Zeros);
}

/// Makes a base for the patient, with patterned data in its parts, and returns those.
fn patterned_base(patient: &Patient, base: &Path, moments: u64) -> Vec<VerifyState> {
    run_ok(&["create", "-q", "-f", "raw", path_str(base), &size_of(moments)]);
    let fill = |part: u64| {
        let spec = patient.spec(part, Initial::Unknown).with(|spec| {
            spec.read_percent = 0;
            spec.pattern = Pattern::Sequential;
            spec.stop = Stop::OnePass;
            // They count as promised from here on, because later states are cut back to what was promised.
            spec.flush_every = Some(64);
        });
        let fill = |disk: &Arc<dyn Disk>| run(disk, &patient.handles(), &spec, &Hooks::default()).unwrap();
        patient.with_image(base, DriveFormat::Raw, fill).state.expect("a verified run")
    };
    (0..moments).map(fill).collect()
}

fn initial_of(states: &[VerifyState]) -> impl Fn(u64) -> Initial {
    |part| states.get(part as usize).map_or(Initial::Zeros, |state| Initial::State(state.clone()))
}

/// On a base with patterned data, which copy-on-write has to keep around what is written.
fn overlay(moments: u64) {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let patient = Patient::new(&dir, DriveFormat::Qcow2, "disk.qcow2", seed());
    let states = patterned_base(&patient, &at(&dir, "base.raw"), moments);
    run_ok(&["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&patient.image)]);
    patient.survive(moments, initial_of(&states));
}

/// What is written on top of an image, and kept beside it. Each daemon goes on with what the killed one has left.
fn kept(moments: u64) {
    let dir = directory();
    let base = at(&dir, "base.raw");
    let keep = dir.path().display();
    let options = format!("name=disk,file={},format=raw,snapshot=on,keep={keep},queues=1", base.display());
    let patient = Patient { options, ..Patient::new(&dir, DriveFormat::Scratch, "disk.scratch", seed()) };
    let states = patterned_base(&patient, &base, moments);
    let before = std::fs::read(&base).unwrap();
    patient.survive(moments, initial_of(&states));
    assert!(std::fs::read(&base).unwrap() == before, "the image was changed");
}

#[test]
fn raw_keeps_what_was_flushed() {
    raw(number("RINGDISK_KILL9_MOMENTS", DEFAULT_MOMENTS));
}

#[test]
fn qcow2_keeps_what_was_flushed_and_leaks_at_most() {
    qcow2(number("RINGDISK_KILL9_MOMENTS", DEFAULT_MOMENTS));
}

#[test]
fn with_lazy_refcounts_what_was_flushed_is_kept_and_nothing_leaks() {
    lazy(number("RINGDISK_KILL9_MOMENTS", DEFAULT_MOMENTS / 2));
}

#[test]
fn an_overlay_keeps_what_was_flushed_and_what_its_base_holds_around_it() {
    overlay(number("RINGDISK_KILL9_MOMENTS", DEFAULT_MOMENTS));
}

#[test]
fn a_kept_scratch_overlay_keeps_what_was_flushed_and_what_its_image_holds_around_it() {
    kept(number("RINGDISK_KILL9_MOMENTS", DEFAULT_MOMENTS));
}
