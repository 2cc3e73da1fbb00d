//! The production allocator, slice cache and epochs under shuttle: seeded schedules of allocate, discard, reuse, flush
//! and read on several threads, down to each atomic access. Built with the feature `explore`; see `block::sync`.
//!
//! `RINGDISK_SCHEDULES=n` widens a run, `RINGDISK_SEED=s` begins at another seed.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod shared;

use block::{File, MetaIo};
use common::{Base, Guest, NAME, open_options};
use ringdisk_format_qcow2::{Barrier, CreateOptions, Qcow2, create};
use shuttle::future::block_on;
use shuttle::thread;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use testkit::histories::{History, Yielding};
use testkit::schedules::{LONG, Verdict, explore, schedules, seed};
use testkit::{Dice, SimFile, SimFileOptions, SimStorage, mix, qcow2_check};

/// What is written at a time: a cluster, or the part of one that an extended entry maps by itself.
const UNIT: usize = 512;
const THREADS: u64 = 3;
const STEPS: u64 = 4;

/// How an image maps its units.
#[derive(Debug, Clone, Copy)]
struct Shape {
    extended: bool,
    size_bytes: u64,
    /// Two of one slice and one each of two more, over a cache of two slices. The two are of one cluster where clusters
    /// have parts.
    units: [u64; 4],
}

const PLAIN: Shape = Shape { extended: false, size_bytes: 192 * 512, units: [1, 2, 65, 130] };
/// A cluster of 16 KiB has 32 parts, a slice 256 clusters.
const IN_PARTS: Shape = Shape { extended: true, size_bytes: 12 << 20, units: [1, 2, 8197, 16394] };

impl Shape {
    fn parts(self) -> u64 {
        if self.extended { 32 } else { 1 }
    }

    fn cluster_bytes(self) -> u64 {
        self.parts() * UNIT as u64
    }

    /// The units that share a cluster with this one.
    fn neighbours(self, unit: u64) -> impl Iterator<Item = u64> {
        self.units.into_iter().filter(move |other| other / self.parts() == unit / self.parts())
    }

    /// A unit as the image in `bytes` has it.
    fn durable(self, bytes: &[u8], unit: u64) -> Vec<u8> {
        let entry = |at: u64| {
            let at = at as usize;
            bytes.get(at..at + 8).map_or(0, |raw| u64::from_be_bytes(raw.try_into().unwrap()))
        };
        let offset = |raw: u64| raw & 0x00ff_ffff_ffff_fe00;
        let (cluster, part) = (unit / self.parts(), unit % self.parts());
        let (entries, entry_bytes) = if self.extended { (1024, 16) } else { (64, 8) };
        let table = offset(entry(entry(40) + cluster / entries * 8));
        let at = table + cluster % entries * entry_bytes;
        let raw = if table == 0 { 0 } else { entry(at) };
        let has_data = match self.extended {
            true => entry(at + 8) & (1 << part) != 0,
            false => raw & 1 == 0,
        };
        match offset(raw) {
            0 => vec![0; UNIT],
            _ if !has_data => vec![0; UNIT],
            host => {
                let host = host as usize + part as usize * UNIT;
                bytes[host..host + UNIT].to_vec()
            }
        }
    }
}

fn queue(file: &SimFile) -> MetaIo {
    MetaIo::new(Rc::new(Yielding(file.open_blocking().unwrap())))
}

/// What a unit's bytes say: who wrote them. Anything but one whole write is nobody's.
fn value_of(unit: u64, bytes: &[u8]) -> Result<u64, String> {
    let words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let (of, value) = (words[0], words[1]);
    match words.chunks_exact(2).all(|pair| pair == [of, value]) {
        true if of == unit || (of, value) == (0, 0) => Ok(value),
        true => Err(format!("unit {unit} shows write {value} of unit {of}")),
        false => Err(format!("unit {unit} shows no write at all")),
    }
}

fn bytes_of(unit: u64, value: u64) -> Vec<u8> {
    [unit, value].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>().repeat(UNIT / 16)
}

#[derive(Clone)]
struct World {
    shape: Shape,
    storage: SimStorage,
    qcow2: Arc<Qcow2>,
    history: Arc<Mutex<History>>,
    verdict: Verdict,
    seed: u64,
}

impl World {
    fn new(shape: Shape, seed: u64, skipped: Option<Barrier>, verdict: &Verdict) -> Self {
        let storage = SimStorage::new(seed);
        let file = storage.create(NAME, 0, SimFileOptions::default());
        let io = MetaIo::new(file.open_blocking().unwrap());
        let options = CreateOptions::default().with(|options| {
            options.size_bytes = shape.size_bytes;
            options.cluster_size = shape.cluster_bytes();
            options.extended_l2 = shape.extended;
        });
        let qcow2 = block_on(async {
            create(&io, &options).await.unwrap();
            let file = storage.file(NAME).unwrap();
            Qcow2::open_with_cache(&io, file.info(), open_options(false), 0).await.unwrap()
        });
        if let Some(barrier) = skipped {
            qcow2.skip_barrier_for_test(barrier);
        }
        Self { shape, storage, qcow2: Arc::new(qcow2), history: Arc::default(), verdict: verdict.clone(), seed }
    }

    fn guest(&self) -> Guest {
        let file = self.storage.file(NAME).unwrap();
        Guest { qcow2: Arc::clone(&self.qcow2), io: queue(&file), base: Base::default() }
    }

    async fn write(&self, guest: &Guest, unit: u64, value: u64) {
        let index = self.history.lock().unwrap().begin(unit, value);
        guest.write(unit * UNIT as u64, &bytes_of(unit, value)).await.unwrap();
        self.history.lock().unwrap().end(unit, index);
    }

    /// A write that is durable once it has ended.
    async fn write_durably(&self, guest: &Guest, unit: u64, value: u64) {
        let index = self.history.lock().unwrap().begin(unit, value);
        guest.write_durably(unit * UNIT as u64, &bytes_of(unit, value)).await.unwrap();
        let since = {
            let mut history = self.history.lock().unwrap();
            history.end(unit, index);
            history.now()
        };
        let after = self.storage.power_cut(mix(self.seed, since)).bytes(NAME);
        let left = value_of(unit, &self.shape.durable(&after, unit));
        let may_be = |left: &u64| self.history.lock().unwrap().may_outlive(unit, *left, index);
        if !left.as_ref().is_ok_and(may_be) {
            self.verdict.fail(format!("after a durable write {value} of unit {unit} and a power cut: {left:?}"));
        }
    }

    /// The whole cluster, with whatever else is in it.
    async fn discard(&self, guest: &Guest, unit: u64) {
        let begin = |unit| (unit, self.history.lock().unwrap().begin(unit, 0));
        let begun: Vec<_> = self.shape.neighbours(unit).map(begin).collect();
        let bytes = self.shape.cluster_bytes();
        guest.discard(unit * UNIT as u64 / bytes * bytes, bytes).await.unwrap();
        let mut history = self.history.lock().unwrap();
        begun.into_iter().for_each(|(unit, index)| history.end(unit, index));
    }

    async fn write_zeroes(&self, guest: &Guest, unit: u64) {
        let index = self.history.lock().unwrap().begin(unit, 0);
        guest.write_zeroes(unit * UNIT as u64, UNIT as u64, true).await.unwrap();
        self.history.lock().unwrap().end(unit, index);
    }

    async fn read(&self, guest: &Guest, unit: u64) {
        let since = self.history.lock().unwrap().now();
        let bytes = guest.read(unit * UNIT as u64, UNIT).await.unwrap();
        self.judge("a read", unit, &bytes, since);
    }

    async fn flush(&self, guest: &Guest) {
        let since = self.history.lock().unwrap().now();
        guest.flush().await.unwrap();
        let after = self.storage.power_cut(mix(self.seed, since)).bytes(NAME);
        for unit in self.shape.units {
            self.judge("after a flush and a power cut", unit, &self.shape.durable(&after, unit), since);
        }
        if let Err(damage) = qcow2_check(&after).and_then(|report| report.sound()) {
            self.verdict.fail(damage);
        }
    }

    fn judge(&self, who: &str, unit: u64, bytes: &[u8], since: u64) {
        match value_of(unit, bytes) {
            Err(wrong) => self.verdict.fail(format!("{who}: {wrong}")),
            Ok(value) if !self.history.lock().unwrap().explains(unit, value, since) => {
                self.verdict.fail(format!("{who}: unit {unit} shows write {value}, which was replaced before"));
            }
            Ok(_) => {}
        }
    }

    /// A queue: operations one after the other, each with its place in the epochs, as `image` has it.
    fn work(&self, thread: u64) {
        let guest = self.guest();
        let mut dice = Dice::new(mix(self.seed, thread));
        let mut part = self.qcow2.epochs().join();
        for step in 1..=STEPS {
            let unit = self.shape.units[dice.index(self.shape.units.len())];
            let value = thread * 100 + step;
            let ticket = part.begin(self.qcow2.epochs());
            block_on(async {
                match dice.below(10) {
                    0..3 => self.write(&guest, unit, value).await,
                    3..5 => self.write_durably(&guest, unit, value).await,
                    5 => self.discard(&guest, unit).await,
                    6 => self.write_zeroes(&guest, unit).await,
                    7 => self.read(&guest, unit).await,
                    _ => self.flush(&guest).await,
                }
            });
            part.end(ticket);
        }
    }
}

fn execution(shape: Shape, seed: u64, skipped: Option<Barrier>, verdict: &Verdict) {
    let world = World::new(shape, seed, skipped, verdict);
    let guest = world.guest();
    block_on(async {
        for unit in shape.units {
            world.write(&guest, unit, 1).await;
        }
    });
    join(world.start_threads());
    world.end();
}

/// Clusters and tables move to the front of the file beside what queues do.
fn compaction(shape: Shape, seed: u64, skipped: Option<Barrier>, verdict: &Verdict) {
    let world = World::new(shape, seed, skipped, verdict);
    let guest = world.guest();
    block_on(async {
        for unit in FILLER {
            guest.write(unit * UNIT as u64, &bytes_of(unit, 1)).await.unwrap();
        }
        for unit in shape.units {
            world.write(&guest, unit, 1).await;
        }
        for unit in FILLER {
            guest.discard(unit * UNIT as u64, UNIT as u64).await.unwrap();
        }
        guest.flush().await.unwrap();
        guest.flush().await.unwrap();
    });
    let moves = {
        let world = world.clone();
        thread::spawn(move || world.compact())
    };
    join(world.start_threads());
    moves.join().unwrap();
    world.end();
}

/// These units make room in front.
const FILLER: std::ops::Range<u64> = 8..24;

/// Bytes that compactions have moved.
static MOVED: AtomicU64 = AtomicU64::new(0);

fn join(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

impl World {
    fn start_threads(&self) -> Vec<thread::JoinHandle<()>> {
        let start = |thread| {
            let world = self.clone();
            thread::spawn(move || world.work(thread))
        };
        (1..=THREADS).map(start).collect()
    }

    fn compact(&self) {
        let guest = self.guest();
        block_on(async {
            let mut compaction = self.qcow2.begin_compaction(&guest.io).await.unwrap();
            let mut at = 0;
            while at < self.shape.size_bytes {
                let mut patience = 30;
                let waits = async || {
                    thread::yield_now();
                    patience -= 1;
                    patience > 0
                };
                at = self.qcow2.compact_step(&guest.io, &mut compaction, at, waits).await.unwrap().next;
            }
            MOVED.fetch_add(compaction.moved_bytes(), Ordering::Relaxed);
        });
    }

    /// What is left, on a file that is sound.
    fn end(&self) {
        let guest = self.guest();
        block_on(async {
            for unit in self.shape.units {
                self.read(&guest, unit).await;
            }
            guest.close().await.unwrap();
        });
        let report = qcow2_check(&self.storage.bytes(NAME)).unwrap();
        if let Err(damage) = report.sound() {
            self.verdict.fail(damage);
        }
        if report.leaked_clusters > 0 {
            self.verdict.fail(format!("{} clusters leaked", report.leaked_clusters));
        }
    }
}

#[test]
fn allocate_discard_reuse_flush_and_read_keep_to_the_rules_in_every_schedule() {
    explore(seed(), schedules(1500), LONG, |seed, verdict| execution(PLAIN, seed, None, verdict)).unwrap();
}

#[test]
fn clusters_in_parts_keep_to_the_rules_in_every_schedule() {
    explore(seed(), schedules(700), LONG, |seed, verdict| execution(IN_PARTS, seed, None, verdict)).unwrap();
}

#[test]
fn moves_beside_writes_and_discards_keep_to_the_rules_in_every_schedule() {
    explore(seed(), schedules(1500), LONG, |seed, verdict| compaction(PLAIN, seed, None, verdict)).unwrap();
    let moved = MOVED.load(Ordering::Relaxed);
    println!("{moved} bytes moved");
    assert!(moved > 0);
}

fn must_be_found(shape: Shape, skipped: Barrier) {
    let found = explore(seed(), 20_000, LONG, move |seed, verdict| execution(shape, seed, Some(skipped), verdict));
    println!("{}", found.unwrap_err());
}

#[test]
fn a_mutant_that_reuses_space_before_its_epoch_is_over_is_found() {
    must_be_found(PLAIN, Barrier::Epoch);
}

#[test]
fn a_mutant_that_calls_overwrites_durable_whose_tables_are_not_is_found() {
    must_be_found(PLAIN, Barrier::Overwrite);
    must_be_found(IN_PARTS, Barrier::Overwrite);
}

#[test]
fn a_mutant_that_moves_what_is_being_overwritten_is_found() {
    let found = explore(seed(), 20_000, LONG, |seed, verdict| compaction(PLAIN, seed, Some(Barrier::Move), verdict));
    println!("{}", found.unwrap_err());
}
