//! The power cut at every write and flush of random workloads on qcow2, on several queues; and, as a test of the test,
//! the same with an ordering barrier left out.
//!
//! `RINGDISK_SEEDS=n` widens a run, `RINGDISK_SEED=s` begins at another seed: what fails names its own.

mod common;

use block::{Disk, Error, ErrorKind, File, OpFlags, Result};
use common::{Chain, Layer, SimOpener, made_by_qemu, name};
use format_qcow2::Barrier;
use ringdisk_image::{FileName, Format, ImageOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use testkit::{OpenedDisk, PowerCutTest, Request, Session, SimFileOptions, SimStorage, Summary, Workload, stamped};

struct Case {
    chain: Chain,
    requests: u64,
    queues: usize,
    outcomes: u64,
    stride: u64,
    /// Bytes at the end of the disk that are written beforehand.
    filled_bytes: u64,
    /// Whether the guest was told of a cache that it has to flush.
    volatile_cache: bool,
    /// Whether the process is killed first, and the power is cut under the next one.
    killed: bool,
}

impl Case {
    fn new(chain: Chain) -> Self {
        let (requests, queues, outcomes, stride) = (60, 2, 2, 1);
        Self { chain, requests, queues, outcomes, stride, filled_bytes: 0, volatile_cache: true, killed: false }
    }

    fn run(&self, seed: u64, skipped: &[Barrier]) -> Result<Summary, String> {
        let chain = Chain { seed, used: self.chain.used || seed.is_multiple_of(2), ..self.chain.clone() };
        let original = chain.storage();
        let storage = self.fill(&chain, seed)?;
        let at_start = refcount_table(&storage);
        let test = PowerCutTest {
            storage: storage.clone(),
            open: &|storage| {
                let opened = chain.open_without(storage, skipped)?;
                opened.disk.set_volatile_cache(self.volatile_cache);
                Ok(opened)
            },
            check: &|storage| chain.check(storage, &original),
            workload: Workload {
                read_percent: 5,
                flush_percent: 20,
                ..Workload::new(seed, self.requests, chain.top().size_bytes(), chain.top().granule_bytes())
            },
            queues: self.queues,
            outcomes: self.outcomes,
            stride: self.stride,
        };
        let summary = if self.killed { test.run_with_kills()? } else { test.run()? };
        if self.filled_bytes > 0 && refcount_table(&storage) == at_start {
            return Err("the refcount table did not move: this test tests nothing".to_owned());
        }
        Ok(summary)
    }

    fn fill(&self, chain: &Chain, seed: u64) -> Result<SimStorage, String> {
        let storage = chain.storage();
        let mut session = Session::open(&storage, &|storage| chain.open(storage), seed, 1)?;
        let size = chain.top().size_bytes();
        for offset in (size - self.filled_bytes..size).step_by(1 << 16) {
            let length = (size - offset).min(1 << 16);
            session.call(Request::write(offset, stamped(9000, offset, length as usize)))?;
        }
        session.close()?;
        Ok(storage.process_killed(0))
    }

    fn survives(&self, seeds: u64) {
        let mut moments = 0;
        for seed in common::seeds(seeds) {
            let summary = self.run(seed, &[]);
            let summary =
                summary.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{:?}", self.chain.layers));
            moments += summary.moments;
        }
        eprintln!("the power was cut at {moments} moments");
        assert!(moments > 0);
    }
}

/// Where the header says that the refcount table lies.
fn refcount_table(storage: &SimStorage) -> Vec<u8> {
    storage.bytes(&name(0))[48..60].to_vec()
}

#[test]
fn tiny_clusters_with_new_refcount_blocks_and_a_growing_refcount_table() {
    // A block of 512 bytes with 64-bit refcounts counts 64 clusters, a table of one cluster 64 blocks.
    let layer = Layer::Qcow2 { size_bytes: 96 << 10, cluster_size: 512, version: 3, refcount_bits: 64 };
    Case { requests: 70, ..Case::new(Chain::of(vec![layer])) }.survives(6);
}

#[test]
fn the_refcount_table_moves_when_it_is_full() {
    // A table of one cluster of 512 bytes counts 4096 clusters; so many are not quite used.
    let layer = Layer::Qcow2 { size_bytes: 2400 << 10, cluster_size: 512, version: 3, refcount_bits: 64 };
    let chain = Chain::of(vec![layer]);
    Case { requests: 60, outcomes: 1, filled_bytes: 3960 * 512, ..Case::new(chain) }.survives(1);
}

#[test]
fn common_clusters_over_a_backing_file() {
    for refcount_bits in [1, 16] {
        let top = Layer::Qcow2 { size_bytes: 256 << 10, cluster_size: 4096, version: 3, refcount_bits };
        Case::new(Chain::of(vec![top, Layer::Raw(200 << 10)])).survives(4);
    }
}

#[test]
fn large_clusters_over_a_chain() {
    let chain = vec![Layer::qcow2(1 << 20, 65536), Layer::qcow2(512 << 10, 4096), Layer::Raw(1 << 20)];
    Case { requests: 30, stride: 2, ..Case::new(Chain::of(chain)) }.survives(3);
}

#[test]
fn clusters_in_parts() {
    let top = || Layer::Extended { size_bytes: 256 << 10, cluster_size: 16384 };
    Case::new(Chain::of(vec![top()])).survives(3);
    Case::new(Chain::of(vec![top(), Layer::Raw(200 << 10)])).survives(4);
}

#[test]
fn data_in_a_file_of_their_own() {
    let top = |raw, extended| Layer::External { size_bytes: 192 << 10, cluster_size: 16384, raw, extended };
    Case::new(Chain::of(vec![top(false, false), Layer::Raw(200 << 10)])).survives(2);
    Case::new(Chain::of(vec![top(true, false)])).survives(2);
    Case::new(Chain::of(vec![top(false, true), Layer::Raw(100 << 10)])).survives(2);
}

#[test]
fn version_2_has_no_zero_clusters() {
    let layer = || Layer::Qcow2 { size_bytes: 128 << 10, cluster_size: 1024, version: 2, refcount_bits: 16 };
    Case::new(Chain::of(vec![layer()])).survives(3);
    Case::new(Chain::of(vec![layer(), Layer::Raw(128 << 10)])).survives(3);
}

#[test]
fn files_that_promise_less() {
    for (can_discard, discard_zeroes) in [(false, false), (true, false)] {
        let file = SimFileOptions { can_discard, discard_zeroes, fast_zeroes: false, ..SimFileOptions::default() };
        let chain = Chain { file, ..Chain::of(vec![Layer::qcow2(128 << 10, 2048)]) };
        Case::new(chain).survives(2);
    }
    let file = SimFileOptions { discard_zeroes: false, ..SimFileOptions::default() };
    let external = Layer::External { size_bytes: 192 << 10, cluster_size: 16384, raw: false, extended: false };
    Case::new(Chain { file, ..Chain::of(vec![external, Layer::Raw(200 << 10)]) }).survives(3);
    let file = SimFileOptions { block_device: true, ..SimFileOptions::default() };
    let device = Chain { file, device_bytes: Some(1 << 20), ..Chain::of(vec![Layer::qcow2(128 << 10, 2048)]) };
    Case::new(device).survives(2);
}

#[test]
fn without_a_volatile_cache_what_completed_is_durable() {
    let raw = Chain::of(vec![Layer::Raw(64 << 10)]);
    let qcow2 = Chain::of(vec![Layer::qcow2(128 << 10, 1024), Layer::Raw(64 << 10)]);
    for chain in [raw, qcow2] {
        Case { volatile_cache: false, requests: 40, ..Case::new(chain) }.survives(2);
    }
}

#[test]
fn tables_that_do_not_fit_into_memory() {
    // A slice maps 32 KiB here, and two slices a layer is all there is.
    let chain = vec![Layer::qcow2(160 << 10, 512), Layer::qcow2(100 << 10, 512), Layer::qcow2(160 << 10, 1024)];
    for queues in [1, 3] {
        let chain = Chain { table_cache_bytes: Some(0), ..Chain::of(chain.clone()) };
        Case { queues, ..Case::new(chain) }.survives(2);
    }
}

#[test]
fn raw_images() {
    Case::new(Chain::of(vec![Layer::Raw(64 << 10)])).survives(2);
}

#[test]
fn a_raw_file_that_ends_within_a_sector() {
    Case::new(Chain::of(vec![Layer::Raw((8 << 10) + 100)])).survives(2);
}

#[test]
fn one_queue_and_four_queues() {
    for queues in [1, 4] {
        let chain = Chain::of(vec![Layer::qcow2(128 << 10, 1024), Layer::Raw(64 << 10)]);
        Case { queues, ..Case::new(chain) }.survives(3);
    }
}

#[test]
fn snapshots_and_compressed_clusters_of_qemu() {
    for chain in made_by_qemu() {
        Case::new(chain).survives(2);
    }
}

/// What the next process finds is in the host's cache only.
#[test]
fn a_killed_process_and_a_later_power_cut() {
    let external = Layer::External { size_bytes: 192 << 10, cluster_size: 16384, raw: false, extended: false };
    let chains = [
        vec![Layer::Raw(64 << 10)],
        vec![Layer::Qcow2 { size_bytes: 96 << 10, cluster_size: 512, version: 3, refcount_bits: 64 }],
        vec![Layer::qcow2(256 << 10, 4096), Layer::Raw(200 << 10)],
        vec![Layer::Extended { size_bytes: 256 << 10, cluster_size: 16384 }],
        vec![external],
    ];
    for chain in chains {
        for volatile_cache in [true, false] {
            let chain = Chain::of(chain.clone());
            Case { killed: true, volatile_cache, requests: 40, stride: 3, ..Case::new(chain) }.survives(1);
        }
    }
}

/// Without the barrier some seed must show damage: otherwise the test above proves nothing.
fn must_fail_without(barrier: Barrier) {
    let layers = [
        Layer::Qcow2 { size_bytes: 96 << 10, cluster_size: 512, version: 3, refcount_bits: 64 },
        Layer::qcow2(128 << 10, 1024),
    ];
    for seed in 1..20 {
        for layer in &layers {
            let chain = Chain::of(vec![layer.clone(), Layer::Raw(64 << 10)]);
            let case = Case { requests: 80, outcomes: 4, ..Case::new(chain) };
            if let Err(wrong) = case.run(seed, &[barrier]) {
                eprintln!("without {barrier:?}: {wrong}");
                return;
            }
        }
    }
    panic!("nothing was noticed without the barrier {barrier:?}");
}

#[test]
fn mutant_without_the_barrier_before_mapping_is_caught() {
    must_fail_without(Barrier::BeforeMapping);
}

#[test]
fn mutant_without_the_barrier_before_relying_is_caught() {
    must_fail_without(Barrier::BeforeRelying);
}

#[test]
fn mutant_without_the_last_barrier_is_caught() {
    must_fail_without(Barrier::End);
}

#[test]
fn mutant_that_reuses_space_too_early_is_caught() {
    must_fail_without(Barrier::Reuse);
}

#[test]
fn mutant_that_calls_overwrites_durable_whose_tables_are_not_is_caught() {
    must_fail_without(Barrier::Overwrite);
}

#[test]
fn a_durable_overwrite_stays_where_a_killed_process_left_the_tables_in_the_host_s_cache() {
    let chain = Chain::of(vec![Layer::qcow2(128 << 10, 1024)]);
    let bytes = |tag: u8| vec![tag; 1024];
    for seed in 0..20 {
        let storage = chain.storage();
        // It was killed before the last step of a flush: the tables are written, and nothing has made them durable.
        let open = |storage: &SimStorage| chain.open_without(storage, &[Barrier::End]);
        let mut killed = Session::open(&storage, &open, seed, 1).unwrap();
        killed.call(Request::write(4096, bytes(1))).unwrap();
        killed.call(Request::Flush).unwrap();
        drop(killed);

        let mut session = Session::open(&storage, &|storage| chain.open(storage), seed, 1).unwrap();
        // The first write goes the long way.
        session.call(Request::write(4096, bytes(3))).unwrap();
        session
            .call(Request::Write { offset: 4096, data: bytes(2).into(), pieces: Vec::new(), flags: OpFlags::FUA })
            .unwrap();
        let after = storage.power_cut(seed);
        let mut session = Session::open(&after, &|storage| chain.open(storage), seed, 1).unwrap();
        assert!(session.call(Request::read(4096, 1024)).unwrap() == bytes(2), "seed {seed}");
    }
}

/// The guest of such a disk takes what it reads for durable, and has no flush to make it so.
#[test]
fn what_a_killed_process_left_is_durable_before_a_disk_without_a_volatile_cache_is_read() {
    let external = Layer::External { size_bytes: 192 << 10, cluster_size: 16384, raw: false, extended: false };
    let bytes = |tag: u8| vec![tag; 1024];
    for layers in [vec![Layer::Raw(64 << 10)], vec![Layer::qcow2(128 << 10, 1024)], vec![external]] {
        let chain = Chain::of(layers);
        for seed in 0..20 {
            let storage = chain.storage();
            let mut killed = Session::open(&storage, &|storage| chain.open(storage), seed, 1).unwrap();
            killed.call(Request::write(16384, bytes(1))).unwrap();
            killed.call(Request::Flush).unwrap();
            // Nothing makes this one durable.
            killed.call(Request::write(16384, bytes(2))).unwrap();
            drop(killed);

            let open = |storage: &SimStorage| chain.open_with(storage, |options| options.volatile_cache = false);
            let mut session = Session::open(&storage, &open, seed, 1).unwrap();
            assert!(session.call(Request::read(16384, 1024)).unwrap() == bytes(2), "a guest has seen it");
            let after = storage.power_cut(seed);
            let mut session = Session::open(&after, &open, seed, 1).unwrap();
            assert!(session.call(Request::read(16384, 1024)).unwrap() == bytes(2), "{:?}, seed {seed}", chain.layers);
        }
    }
}

/// Opens a chain whose second layer nobody may write to, because another program reads it.
struct ReadByOthers(SimStorage);

impl Opener for ReadByOthers {
    fn open(&self, file: &FileName, role: Role) -> Result<Arc<dyn File>> {
        match role == Role::Writable && file.to_string() == name(1) {
            true => Err(Error::new(ErrorKind::Locked, "another program reads it")),
            false => SimOpener(self.0.clone()).open(file, role),
        }
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// The daemon was killed when its record named a new top, and the former one was not durable yet.
#[test]
fn what_a_killed_process_left_in_a_former_top_is_durable_when_the_guest_has_flushed() {
    let bytes = |tag: u8| vec![tag; 1024];
    let chain = Chain::of(vec![Layer::qcow2(64 << 10, 1024), Layer::Raw(64 << 10)]);
    for (seed, is_read_by_others) in (0..20).flat_map(|seed| [(seed, false), (seed, true)]) {
        let storage = chain.storage();
        let former = |storage: &SimStorage| common::open_as(storage, 1, Format::Raw, false, &[]);
        let mut killed = Session::open(&storage, &former, seed, 1).unwrap();
        killed.call(Request::write(4096, bytes(2))).unwrap();
        drop(killed);

        let open = |storage: &SimStorage| {
            let options = ImageOptions::new(&name(0)).with(|options| options.former_tops = 1);
            let image = match is_read_by_others {
                true => ringdisk_image::open(&options, &ReadByOthers(storage.clone()))?,
                false => ringdisk_image::open(&options, &SimOpener(storage.clone()))?,
            };
            assert_eq!(image.former_tops(), usize::from(!is_read_by_others));
            Ok(OpenedDisk::from(Arc::new(image) as Arc<dyn Disk>))
        };
        let mut session = Session::open(&storage, &open, seed, 1).unwrap();
        assert!(session.call(Request::read(4096, 1024)).unwrap() == bytes(2), "a guest has seen it");
        session.call(Request::Flush).unwrap();
        let after = storage.power_cut(seed);
        let mut session = Session::open(&after, &open, seed, 1).unwrap();
        let found = session.call(Request::read(4096, 1024)).unwrap();
        assert!(found == bytes(2), "seed {seed}, read by others: {is_read_by_others}");
    }
}

#[test]
fn what_was_written_before_a_guest_chose_write_through_is_durable_with_its_next_write() {
    let chain = Chain::of(vec![Layer::qcow2(128 << 10, 1024)]);
    let bytes = |tag: u8| vec![tag; 1024];
    for seed in 0..20 {
        let storage = chain.storage();
        let disk = std::cell::RefCell::new(None);
        let open = |storage: &SimStorage| {
            let opened = chain.open(storage)?;
            disk.replace(Some(std::sync::Arc::clone(&opened.disk)));
            Ok(opened)
        };
        let mut session = Session::open(&storage, &open, seed, 1).unwrap();
        for offset in [4096, 8192] {
            session.call(Request::write(offset, bytes(1))).unwrap();
        }
        session.call(Request::Flush).unwrap();
        session.call(Request::write(4096, bytes(2))).unwrap();
        disk.borrow().as_ref().unwrap().set_volatile_cache(false);
        session.call(Request::write(8192, bytes(2))).unwrap();
        let after = storage.power_cut(seed);
        let mut session = Session::open(&after, &|storage| chain.open(storage), seed, 1).unwrap();
        for offset in [4096, 8192] {
            assert!(session.call(Request::read(offset, 1024)).unwrap() == bytes(2), "seed {seed}, {offset}");
        }
    }
}
