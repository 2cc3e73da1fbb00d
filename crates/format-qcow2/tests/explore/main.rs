//! The production allocator, slice cache and epochs under shuttle: seeded schedules of allocate, discard, reuse, flush
//! and read on several threads, down to each atomic access. Built with the feature `explore`; see `block::sync`.
//!
//! `RINGDISK_SCHEDULES=n` widens a run, `RINGDISK_SEED=s` begins at another seed.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod schedules;
mod shared;

use block::{File, FileIo, FileQueue, MetaIo};
use common::{Base, Guest, NAME, open_options};
use format_qcow2::{Barrier, CreateOptions, Qcow2, create};
use schedules::{LONG, Verdict, explore};
use shuttle::future::block_on;
use shuttle::thread;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use testkit::{Dice, SimFile, SimFileOptions, SimStorage, mix, qcow2_check};

const CLUSTER: usize = 512;
/// Two of one slice and one each of two more, over a cache of two slices.
const CLUSTERS: [u64; 4] = [1, 2, 65, 130];
const THREADS: u64 = 3;
const STEPS: u64 = 4;

/// Lets others run before and after each operation on the file.
struct Yielding(Rc<dyn FileQueue>);

impl FileQueue for Yielding {
    fn push(&self, io: FileIo) {
        thread::yield_now();
        self.0.push(io);
        thread::yield_now();
    }
}

fn queue(file: &SimFile) -> MetaIo {
    MetaIo::new(Rc::new(Yielding(file.open_blocking().unwrap())))
}

/// One change of a guest cluster, and when.
struct Change {
    value: u64,
    begun: u64,
    ended: Option<u64>,
}

/// All changes, by guest cluster. Zero is the value of a cluster that was never written, or discarded.
#[derive(Default)]
struct History {
    clock: u64,
    changes: BTreeMap<u64, Vec<Change>>,
}

impl History {
    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn begin(&mut self, cluster: u64, value: u64) -> usize {
        let begun = self.now();
        let changes = self.changes.entry(cluster).or_default();
        changes.push(Change { value, begun, ended: None });
        changes.len() - 1
    }

    fn end(&mut self, cluster: u64, index: usize) {
        let ended = self.now();
        self.changes.get_mut(&cluster).unwrap()[index].ended = Some(ended);
    }

    /// Whether somebody who began to look at `since` may see this: not what was replaced before.
    fn explains(&self, cluster: u64, value: u64, since: u64) -> bool {
        let changes = self.changes.get(&cluster).map_or(&[][..], Vec::as_slice);
        let outdated =
            |ended: u64| changes.iter().any(|later| later.begun > ended && later.ended.is_some_and(|end| end < since));
        let first = (value == 0).then_some(0);
        let ends = changes.iter().filter(|change| change.value == value).map(|change| change.ended);
        ends.chain(first.map(Some)).any(|ended| ended.is_none_or(|ended| !outdated(ended)))
    }
}

/// What a cluster's bytes say: who wrote them. Anything but one whole write is nobody's.
fn value_of(cluster: u64, bytes: &[u8]) -> Result<u64, String> {
    let words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let (of, value) = (words[0], words[1]);
    match words.chunks_exact(2).all(|pair| pair == [of, value]) {
        true if of == cluster || (of, value) == (0, 0) => Ok(value),
        true => Err(format!("cluster {cluster} shows write {value} of cluster {of}")),
        false => Err(format!("cluster {cluster} shows no write at all")),
    }
}

fn bytes_of(cluster: u64, value: u64) -> Vec<u8> {
    [cluster, value].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>().repeat(CLUSTER / 16)
}

/// A cluster as the image in `bytes` has it.
fn durable(bytes: &[u8], cluster: u64) -> Vec<u8> {
    let entry = |at: u64| {
        let at = at as usize;
        bytes.get(at..at + 8).map_or(0, |raw| u64::from_be_bytes(raw.try_into().unwrap()))
    };
    let offset = |raw: u64| raw & 0x00ff_ffff_ffff_fe00;
    let table = offset(entry(entry(40) + cluster / 64 * 8));
    let raw = if table == 0 { 0 } else { entry(table + cluster % 64 * 8) };
    match offset(raw) as usize {
        0 => vec![0; CLUSTER],
        _ if raw & 1 != 0 => vec![0; CLUSTER],
        host => bytes[host..host + CLUSTER].to_vec(),
    }
}

#[derive(Clone)]
struct World {
    storage: SimStorage,
    qcow2: Arc<Qcow2>,
    history: Arc<Mutex<History>>,
    verdict: Verdict,
    seed: u64,
}

impl World {
    fn new(seed: u64, skipped: Option<Barrier>, verdict: &Verdict) -> Self {
        let storage = SimStorage::new(seed);
        let file = storage.create(NAME, 0, SimFileOptions::default());
        let io = MetaIo::new(file.open_blocking().unwrap());
        let options = CreateOptions { size_bytes: 192 * 512, cluster_size: 512, ..CreateOptions::default() };
        let qcow2 = block_on(async {
            create(&io, &options).await.unwrap();
            let file = storage.file(NAME).unwrap();
            Qcow2::open_with_cache(&io, file.info(), open_options(false), 0).await.unwrap()
        });
        if let Some(barrier) = skipped {
            qcow2.skip_barrier_for_test(barrier);
        }
        Self { storage, qcow2: Arc::new(qcow2), history: Arc::default(), verdict: verdict.clone(), seed }
    }

    fn guest(&self) -> Guest {
        let file = self.storage.file(NAME).unwrap();
        Guest { qcow2: Arc::clone(&self.qcow2), io: queue(&file), base: Base::default() }
    }

    async fn change(&self, guest: &Guest, cluster: u64, value: u64) {
        let index = self.history.lock().unwrap().begin(cluster, value);
        let at = cluster * CLUSTER as u64;
        match value {
            0 => guest.discard(at, CLUSTER as u64).await.unwrap(),
            _ => guest.write(at, &bytes_of(cluster, value)).await.unwrap(),
        }
        self.history.lock().unwrap().end(cluster, index);
    }

    async fn read(&self, guest: &Guest, cluster: u64) {
        let since = self.history.lock().unwrap().now();
        let bytes = guest.read(cluster * CLUSTER as u64, CLUSTER).await.unwrap();
        self.judge("a read", cluster, &bytes, since);
    }

    async fn flush(&self, guest: &Guest) {
        let since = self.history.lock().unwrap().now();
        guest.flush().await.unwrap();
        let after = self.storage.power_cut(mix(self.seed, since)).bytes(NAME);
        for cluster in CLUSTERS {
            self.judge("after a flush and a power cut", cluster, &durable(&after, cluster), since);
        }
        if let Err(damage) = qcow2_check(&after).and_then(|report| report.sound()) {
            self.verdict.fail(damage);
        }
    }

    fn judge(&self, who: &str, cluster: u64, bytes: &[u8], since: u64) {
        match value_of(cluster, bytes) {
            Err(wrong) => self.verdict.fail(format!("{who}: {wrong}")),
            Ok(value) if !self.history.lock().unwrap().explains(cluster, value, since) => {
                self.verdict.fail(format!("{who}: cluster {cluster} shows write {value}, which was replaced before"));
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
            let cluster = CLUSTERS[dice.index(CLUSTERS.len())];
            let ticket = part.begin(self.qcow2.epochs());
            block_on(async {
                match dice.below(8) {
                    0..3 => self.change(&guest, cluster, thread * 100 + step).await,
                    3..5 => self.change(&guest, cluster, 0).await,
                    5 => self.read(&guest, cluster).await,
                    _ => self.flush(&guest).await,
                }
            });
            part.end(ticket);
        }
    }
}

fn execution(seed: u64, skipped: Option<Barrier>, verdict: &Verdict) {
    let world = World::new(seed, skipped, verdict);
    let guest = world.guest();
    block_on(async {
        for cluster in CLUSTERS {
            world.change(&guest, cluster, 1).await;
        }
    });
    let work = |thread| {
        let world = world.clone();
        thread::spawn(move || world.work(thread))
    };
    let threads: Vec<_> = (1..=THREADS).map(work).collect();
    for thread in threads {
        thread.join().unwrap();
    }
    block_on(async {
        for cluster in CLUSTERS {
            world.read(&guest, cluster).await;
        }
        guest.close().await.unwrap();
    });
    let report = qcow2_check(&world.storage.bytes(NAME)).unwrap();
    if let Err(damage) = report.sound() {
        verdict.fail(damage);
    }
    if report.leaked_clusters > 0 {
        verdict.fail(format!("{} clusters leaked", report.leaked_clusters));
    }
}

fn seed() -> u64 {
    std::env::var("RINGDISK_SEED").map_or(1, |text| text.parse().unwrap())
}

fn schedules(by_default: u64) -> u64 {
    std::env::var("RINGDISK_SCHEDULES").map_or(by_default, |text| text.parse().unwrap())
}

#[test]
fn allocate_discard_reuse_flush_and_read_keep_to_the_rules_in_every_schedule() {
    explore(seed(), schedules(1500), LONG, |seed, verdict| execution(seed, None, verdict)).unwrap();
}

#[test]
fn a_mutant_that_reuses_space_before_its_epoch_is_over_is_found() {
    let found = explore(seed(), 20_000, LONG, |seed, verdict| execution(seed, Some(Barrier::Epoch), verdict));
    println!("{}", found.unwrap_err());
}
