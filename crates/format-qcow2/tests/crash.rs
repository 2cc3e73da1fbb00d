//! Power cuts and faults at every moment of concurrent workloads, below `image`: only this crate and simulated storage.
#![allow(clippy::unwrap_used)]

mod common;

use block::{Completion, File, IoResult, MetaIo, OpFlags, Participant, PastEnd, ReactorCtx, block_on};
use common::{Base, Guest, NAME, created};
use ringdisk_format_qcow2::{Barrier, Compression, CreateOptions, Qcow2};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use testkit::{
    Dice, Fault, FaultAction, ModelDisk, OpKind, Reply, Request, SimFileOptions, SimReactor, SimStorage, mix,
    qcow2_check, stamped,
};

/// What the guest saw, for telling a model again.
enum Event {
    Submitted(u64, Request),
    Completed(Reply),
}

/// A model that is told everything, and the story with the storage's clock.
#[derive(Clone)]
struct Witness {
    storage: SimStorage,
    model: Rc<RefCell<ModelDisk>>,
    story: Rc<RefCell<Vec<(u64, Event)>>>,
}

impl Witness {
    fn new(storage: &SimStorage, contents: &[u8]) -> Self {
        let model = Rc::new(RefCell::new(ModelDisk::new(contents, true)));
        Self { storage: storage.clone(), model, story: Rc::default() }
    }

    fn submitted(&self, tag: u64, request: &Request) {
        self.model.borrow_mut().submit(tag, request);
        self.story.borrow_mut().push((self.storage.now(), Event::Submitted(tag, request.clone())));
    }

    fn completed(&self, completion: Completion, data: Vec<u8>) {
        let reply = Reply { tag: completion.tag, result: completion.result, data };
        self.model.borrow_mut().complete(&reply).unwrap();
        self.story.borrow_mut().push((self.storage.now(), Event::Completed(reply)));
    }
}

#[derive(Clone, Copy)]
struct Plan {
    seed: u64,
    queues: u64,
    depth: u64,
    requests: u64,
    /// Longest request.
    most_bytes: u64,
    /// Never a write-zeroes or discard.
    only_writes: bool,
    /// Clusters of this size are written whole and compressed; zero: none are.
    compress: u64,
    /// What lies at the end of the file moves down meanwhile.
    compacts: bool,
    skip: Option<Barrier>,
    /// The so-manieth operation of a kind fails.
    fault: Option<(OpKind, u64)>,
}

const PLAN: Plan = Plan {
    seed: 1,
    queues: 2,
    depth: 3,
    requests: 10,
    most_bytes: 12 << 10,
    only_writes: false,
    compress: 0,
    compacts: false,
    skip: None,
    fault: None,
};

fn random_request(dice: &mut Dice, size: u64, plan: &Plan) -> Request {
    let offset = dice.below(size / 512) * 512;
    let length = ((1 + dice.below(plan.most_bytes / 512)) * 512).min(size - offset);
    let mut write = Request::write(offset, stamped(dice.seed(), offset, length as usize));
    if plan.compress > 0 {
        let start = offset - offset % plan.compress;
        let end = (offset + length).next_multiple_of(plan.compress).min(size);
        let mut data = stamped(dice.seed(), start, (end - start) as usize);
        // Each sector is different, and most of it is nothing.
        data.chunks_mut(512).for_each(|sector| sector[100..].fill(0));
        write = Request::write(start, data);
    }
    match dice.below(20) {
        0..3 => Request::Flush,
        3..6 => Request::read(offset, length as usize),
        _ if plan.only_writes => write,
        6..9 => Request::WriteZeroes { offset, length, may_unmap: dice.chance(50), flags: OpFlags::NONE },
        9..12 => Request::Discard { offset, length },
        _ => write,
    }
}

async fn carry_out(guest: &Guest, request: &Request, compress: bool) -> (IoResult, Vec<u8>) {
    let result = match request {
        Request::Read { offset, pieces } => match guest.read(*offset, pieces.iter().sum()).await {
            Ok(data) => return (Ok(()), data),
            Err(error) => Err(error),
        },
        Request::Write { offset, data, .. } if compress => guest.write_compressed(*offset, data).await,
        Request::Write { offset, data, .. } => guest.write(*offset, data).await,
        Request::WriteByMap { offset, data } => guest.write(*offset, data).await,
        Request::Flush => guest.flush().await,
        Request::Discard { offset, length } => guest.discard(*offset, *length).await,
        Request::WriteZeroes { offset, length, may_unmap, .. } => {
            guest.write_zeroes(*offset, *length, *may_unmap).await
        }
    };
    (result, Vec::new())
}

async fn work(guest: Guest, part: Rc<RefCell<Participant>>, witness: Witness, plan: Plan, worker: u64) {
    let mut dice = Dice::new(mix(plan.seed, worker));
    let size = guest.qcow2.size_bytes();
    for number in 0..plan.requests {
        let tag = worker << 32 | number;
        let request = random_request(&mut dice, size, &plan);
        let ticket = part.borrow_mut().begin(guest.qcow2.epochs());
        witness.submitted(tag, &request);
        let (result, data) = carry_out(&guest, &request, plan.compress > 0).await;
        part.borrow_mut().end(ticket);
        witness.completed(Completion { tag, result }, data);
    }
}

thread_local! {
    /// Bytes that compactions have moved.
    static MOVED: Cell<u64> = const { Cell::new(0) };
}

/// Passes of a compaction, until one fails.
async fn compact(guest: Guest) -> IoResult {
    for _ in 0..4 {
        guest.flush().await?;
        guest.flush().await?;
        let mut compaction = guest.qcow2.begin_compaction(&guest.io).await?;
        let mut at = 0;
        while at < guest.qcow2.size_bytes() {
            let mut patience = 10;
            let waits = async || {
                patience -= 1;
                patience > 0 && guest.io.read(0, 512, PastEnd::Fails).await.is_ok()
            };
            let step = guest.qcow2.compact_step(&guest.io, &mut compaction, at, waits).await?;
            MOVED.set(MOVED.get() + step.moved_bytes);
            at = step.next;
        }
    }
    Ok(())
}

/// Runs the plan; all that the guest sees is checked as it goes. Ends without closing.
fn play(storage: &SimStorage, base: &Base, plan: Plan) -> (Guest, Witness) {
    let file = storage.file(NAME).unwrap();
    let blocking = common::open(&file, Arc::clone(base));
    let contents = block_on(blocking.read_all()).unwrap();
    if let Some(barrier) = plan.skip {
        blocking.qcow2.skip_barrier_for_test(barrier);
    }
    if let Some((kind, nth)) = plan.fault {
        storage.inject(NAME, Fault::nth(kind, nth, FaultAction::Fail(block::IoError::EIO)));
    }
    let witness = Witness::new(storage, &contents);
    let first = SimReactor::new(plan.seed);
    let mut reactors = Vec::new();
    for queue in 0..plan.queues {
        let reactor = if queue == 0 { Rc::clone(&first) } else { first.sibling() };
        let guest = blocking.through(MetaIo::new(file.open_queue(&reactor.ctx()).unwrap()));
        let part = Rc::new(RefCell::new(guest.qcow2.epochs().join()));
        for task in 0..plan.depth {
            let worker = 1 + queue * plan.depth + task;
            reactor.spawn(block::Task::new(work(guest.clone(), Rc::clone(&part), witness.clone(), plan, worker)));
        }
        if queue == 0 && plan.compacts {
            let guest = guest.clone();
            reactor.spawn(block::Task::new(async move {
                let result = compact(guest).await;
                assert!(result.is_ok() || plan.fault.is_some() || plan.skip.is_some(), "{result:?}");
            }));
        }
        reactors.push(reactor);
    }
    first.run_until_idle();
    (blocking, witness)
}

fn sound(storage: &SimStorage) -> Result<(), String> {
    qcow2_check(&storage.bytes(NAME))?.sound()
}

/// Reads everything from an image that is only read: as it is, dirty or not.
fn read_as_it_is(storage: &SimStorage, base: &Base) -> Result<Vec<u8>, String> {
    let file = storage.file(NAME).unwrap();
    let io = common::blocking(&file);
    let qcow2 = block_on(Qcow2::open(&io, file.info(), common::open_options(true))).map_err(|e| e.to_string())?;
    let guest = Guest { qcow2: Arc::new(qcow2), io, base: Arc::clone(base) };
    block_on(guest.read_all()).map_err(|error| error.to_string())
}

/// Of an image that a power cut left dirty: the next who writes finds it repaired, with the same contents.
fn repaired(storage: &SimStorage, base: &Base) -> Result<(), String> {
    let before = storage.bytes(NAME);
    let seen = read_as_it_is(storage, base)?;
    if storage.bytes(NAME) != before {
        return Err("reading has changed it".to_owned());
    }
    let file = storage.file(NAME).unwrap();
    let opened = block_on(Qcow2::open(&common::blocking(&file), file.info(), common::open_options(false)));
    drop(opened.map_err(|error| error.to_string())?);
    let is = qcow2_check(&storage.bytes(NAME))?;
    is.sound()?;
    if is.dirty || is.leaked_clusters > 0 {
        return Err(format!("dirty: {}, {} leaks after the repair", is.dirty, is.leaked_clusters));
    }
    match read_as_it_is(storage, base)? == seen {
        true => Ok(()),
        false => Err("the repair has changed the contents".to_owned()),
    }
}

/// Reads everything, as after a restart.
fn reread(storage: &SimStorage, base: &Base) -> Result<Vec<u8>, String> {
    let guest = common::open(&storage.file(NAME).unwrap(), Arc::clone(base));
    block_on(guest.read_all()).map_err(|error| error.to_string())
}

/// Cuts the power at each write and flush boundary; says what is wrong first.
fn cut_everywhere(storage: &SimStorage, base: &Base, plan: Plan, stride: u64) -> Result<u64, String> {
    let contents = reread(storage, base)?;
    storage.record();
    let (guest, witness) = play(storage, base, plan);
    witness.model.borrow().check_live(&block_on(guest.read_all()).unwrap())?;
    block_on(guest.close()).map_err(|error| error.to_string())?;
    sound(storage)?;
    if qcow2_check(&storage.bytes(NAME))?.dirty {
        return Err("it is dirty after it was closed".to_owned());
    }
    let mut model = ModelDisk::new(&contents, true);
    let story = witness.story.take();
    let mut story = story.iter().peekable();
    let mut replay = storage.take_recording().replay();
    let mut cuts = 0;
    while let Some(now) = replay.advance() {
        while let Some((_, event)) = story.next_if(|(at, _)| *at <= now) {
            match event {
                Event::Submitted(tag, request) => model.submit(*tag, request),
                Event::Completed(reply) => model.complete(reply)?,
            }
        }
        if !mix(plan.seed, now).is_multiple_of(stride) {
            continue;
        }
        cuts += 1;
        for outcome in 0..2 {
            let after = replay.power_cut(outcome);
            let at = |wrong| format!("seed {}, cut at {now}, outcome {outcome}: {wrong}", plan.seed);
            let report = qcow2_check(&after.bytes(NAME)).and_then(|report| report.sound().map(|()| report));
            if report.map_err(at)?.dirty {
                repaired(&after, base).map_err(at)?;
            }
            model.check_after_crash(&reread(&after, base).map_err(at)?).map_err(at)?;
        }
    }
    Ok(cuts)
}

fn options(cluster_size: u64, version: u32, refcount_bits: u32) -> CreateOptions {
    CreateOptions::default().with(|options| {
        options.size_bytes = 160 << 10;
        options.cluster_size = cluster_size;
        options.version = version;
        options.refcount_bits = refcount_bits;
    })
}

fn image(options: &CreateOptions, seed: u64) -> SimStorage {
    let kind = SimFileOptions {
        can_discard: !seed.is_multiple_of(4),
        discard_zeroes: !seed.is_multiple_of(5),
        ..SimFileOptions::default()
    };
    created(options, kind).0
}

#[test]
fn after_a_power_cut_flushed_data_is_whole_untouched_sectors_are_as_they_were_and_only_space_is_lost() {
    let mut cuts = 0;
    for seed in 0..16 {
        let clusters = [512, 1024, 4096, 16384][seed as usize % 4];
        let version = if seed % 5 == 4 { 2 } else { 3 };
        let mut options = options(clusters, version, if version == 2 { 16 } else { [16, 1, 64][seed as usize % 3] });
        let mut base = Base::default();
        if seed % 3 == 1 {
            options.backing_file = Some("base.raw".to_owned());
            base = Arc::new(stamped(99, 0, 100 << 10));
        }
        cuts += cut_everywhere(&image(&options, seed), &base, Plan { seed, ..PLAN }, 3).unwrap();
    }
    println!("{cuts} cuts");
}

#[test]
fn compressed_writes_survive_power_cuts_packed_into_shared_clusters() {
    let mut compressed = 0;
    for (seed, (clusters, bits, compression)) in [
        (512, 16, Compression::Zlib),
        (1024, 1, Compression::Zstd),
        (4096, 2, Compression::Zlib),
        (1024, 64, Compression::Zstd),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = seed as u64 + 1;
        let options = options(clusters, 3, bits).with(|options| options.compression = compression);
        let storage = image(&options, seed);
        let plan = Plan { seed, compress: clusters, most_bytes: 6 * clusters, ..PLAN };
        cut_everywhere(&storage, &Base::default(), plan, 3).unwrap();
        let report = qcow2_check(&storage.bytes(NAME)).unwrap();
        compressed += report.compressed_clusters;
        assert_eq!(report.leaked_clusters, 0);
    }
    assert!(compressed > 20, "only {compressed} clusters are compressed in the end");
}

#[test]
fn a_refcount_table_that_moves_survives_a_power_cut() {
    for seed in 0..2 {
        // 64 refcounts a block and 64 blocks a table: it moves when the file passes 2 MiB.
        let lazy_refcounts = seed == 1;
        let options = options(512, 3, 64).with(|options| {
            options.size_bytes = 4 << 20;
            options.lazy_refcounts = lazy_refcounts;
        });
        let plan = Plan { seed, requests: 16, most_bytes: 128 << 10, only_writes: true, ..PLAN };
        let storage = image(&options, 1);
        let place = storage.bytes(NAME)[48..56].to_vec();
        cut_everywhere(&storage, &Base::default(), plan, 60).unwrap();
        assert_ne!(storage.bytes(NAME)[48..56], place, "the table did not move");
    }
}

#[test]
fn leaving_any_barrier_out_is_found_by_a_power_cut() {
    for barrier in [Barrier::BeforeMapping, Barrier::BeforeRelying, Barrier::End, Barrier::Reuse] {
        let found = (0..60).find(|seed| {
            let seed = *seed;
            let plan = Plan { seed, skip: Some(barrier), ..PLAN };
            // Small refcount blocks, so that new ones are often needed.
            let storage = image(&options(512, 3, 64), 1);
            cut_everywhere(&storage, &Base::default(), plan, 2).is_err()
        });
        assert!(found.is_some(), "nothing noticed that {barrier:?} is missing");
    }
}

#[test]
fn lazy_refcounts_survive_a_power_cut_and_are_repaired_when_the_image_is_opened_for_writing() {
    for seed in 0..12 {
        let clusters = [512, 4096, 1024, 16384][seed as usize % 4];
        let mut options =
            options(clusters, 3, [16, 1, 64][seed as usize % 3]).with(|options| options.lazy_refcounts = true);
        options.extended_l2 = clusters == 16384;
        let mut base = Base::default();
        if seed % 3 == 1 {
            options.backing_file = Some("base.raw".to_owned());
            base = Arc::new(stamped(99, 0, 100 << 10));
        }
        let compress = if seed == 6 { clusters } else { 0 };
        let plan = Plan { seed, compress, only_writes: compress > 0, ..PLAN };
        cut_everywhere(&image(&options, seed), &base, plan, 5).unwrap();
    }
}

#[test]
fn leaving_a_barrier_of_a_lazy_image_out_is_found_by_a_power_cut() {
    for barrier in [Barrier::BeforeMapping, Barrier::End, Barrier::Reuse, Barrier::Extension] {
        let found = (0..60).find(|seed| {
            let seed = *seed;
            let plan = Plan { seed, skip: Some(barrier), ..PLAN };
            let mut options = options(512, 3, 64).with(|options| options.lazy_refcounts = true);
            options.backing_file = seed.is_multiple_of(2).then(|| "base.raw".to_owned());
            let base = if seed.is_multiple_of(2) { Arc::new(stamped(99, 0, 100 << 10)) } else { Base::default() };
            cut_everywhere(&image(&options, 1), &base, plan, 2).is_err()
        });
        assert!(found.is_some(), "nothing noticed that {barrier:?} is missing");
    }
}

/// Runs a plan in which an operation fails. The image stays valid, and the guest goes on. Returns how many requests failed.
fn fails_once(storage: &SimStorage, plan: Plan) -> usize {
    let base = Base::default();
    let (guest, witness) = play(storage, &base, plan);
    storage.clear_faults();
    let failed = |event: &&(u64, Event)| matches!(&event.1, Event::Completed(reply) if reply.result.is_err());
    let errors = witness.story.borrow().iter().filter(failed).count();
    let model = witness.model.borrow();
    model.check_live(&block_on(guest.read_all()).unwrap()).unwrap();
    let killed = qcow2_check(&storage.process_killed(plan.seed).bytes(NAME)).unwrap();
    assert!(killed.dirty || killed.sound().is_ok(), "{:?}", killed.sound());
    model.check_after_crash(&reread(&storage.power_cut(plan.seed), &base).unwrap()).unwrap();
    // It can be flushed again, and then nothing is missing.
    block_on(guest.close()).unwrap();
    sound(storage).unwrap();
    assert!(!qcow2_check(&storage.bytes(NAME)).unwrap().dirty, "it was closed");
    model.check_live(&reread(storage, &base).unwrap()).unwrap();
    errors
}

#[test]
fn a_failed_operation_fails_its_request_and_leaves_a_valid_image() {
    let mut errors = 0;
    for kind in [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard, OpKind::SetLength] {
        for nth in 0..60 {
            errors +=
                fails_once(&image(&options(1024, 3, 16), 1), Plan { seed: nth, fault: Some((kind, nth)), ..PLAN });
        }
    }
    assert!(errors > 60, "only {errors} requests failed: the faults hit nothing");
}

#[test]
fn a_failed_operation_leaves_a_valid_image_also_while_the_refcount_table_moves() {
    let (mut moved, mut errors) = (0, 0);
    for nth in 0..20 {
        for fault in [(OpKind::Write, nth * 50), (OpKind::Flush, nth * 3)] {
            let options = options(512, 3, 64).with(|options| {
                options.size_bytes = 4 << 20;
                options.lazy_refcounts = nth % 4 == 3;
            });
            let storage = image(&options, 1);
            let place = storage.bytes(NAME)[48..56].to_vec();
            let most_bytes = 128 << 10;
            let plan = Plan { seed: nth, requests: 16, most_bytes, only_writes: true, fault: Some(fault), ..PLAN };
            errors += fails_once(&storage, plan);
            moved += usize::from(storage.bytes(NAME)[48..56] != place);
        }
    }
    println!("{moved} tables moved, {errors} requests failed");
    assert!(moved > 30 && errors > 10, "{moved} tables moved, {errors} requests failed");
}

#[test]
fn internal_snapshots_survive_power_cuts_and_keep_their_contents() {
    if !common::has_tool("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot.qcow2");
    let path = path.to_str().unwrap();
    for (seed, cluster_size) in [(1, 512), (2, 4096)] {
        let storage = image(&options(cluster_size, 3, 16), seed);
        let guest = common::open(&storage.file(NAME).unwrap(), Base::default());
        block_on(async {
            guest.write(0, &stamped(1, 0, 100 << 10)).await.unwrap();
            guest.write_zeroes(8 << 10, 8 << 10, false).await.unwrap();
            guest.close().await.unwrap();
        });
        std::fs::write(path, storage.bytes(NAME)).unwrap();
        common::run("qemu-img", &["snapshot", "-c", "one", path]);
        let storage = SimStorage::new(seed);
        storage.create_with(NAME, &std::fs::read(path).unwrap(), SimFileOptions::default());
        let snapshot = |storage: &SimStorage| {
            std::fs::write(path, storage.bytes(NAME)).unwrap();
            let raw = format!("{path}.raw");
            common::run("qemu-img", &["convert", "-l", "one", "-O", "raw", path, &raw]);
            std::fs::read(raw).unwrap()
        };
        let before = snapshot(&storage);
        cut_everywhere(&storage, &Base::default(), Plan { seed, ..PLAN }, 3).unwrap();
        assert!(snapshot(&storage) == before);
    }
}

/// An image whose file has holes in front, and data at its end.
fn with_holes(options: &CreateOptions, base: &Base, seed: u64) -> SimStorage {
    let storage = image(options, seed * 4 + 1);
    let guest = common::open(&storage.file(NAME).unwrap(), Arc::clone(base));
    block_on(async {
        let size = guest.qcow2.size_bytes();
        guest.write(0, &stamped(7, 0, size as usize)).await.unwrap();
        let mut dice = Dice::new(seed);
        for start in (0..size / 4 * 3).step_by(4 * options.cluster_size as usize) {
            if dice.chance(80) {
                guest.discard(start, 3 * options.cluster_size).await.unwrap();
            }
        }
        guest.close().await.unwrap();
    });
    storage.process_killed(0)
}

fn compactable(seed: u64) -> (CreateOptions, Base) {
    let clusters = [512, 1024, 4096, 16384][seed as usize % 4];
    let version = if seed % 5 == 4 { 2 } else { 3 };
    let mut options = options(clusters, version, if version == 2 { 16 } else { [16, 1, 64][seed as usize % 3] });
    options.extended_l2 = clusters == 16384 && version == 3;
    options.lazy_refcounts = seed % 7 == 3 && version == 3;
    options.size_bytes = (160 * clusters).clamp(160 << 10, 800 << 10);
    let mut base = Base::default();
    // Version 2 discards nothing over a backing file.
    if seed % 3 == 1 && version == 3 {
        options.backing_file = Some("base.raw".to_owned());
        base = Arc::new(stamped(99, 0, 100 << 10));
    }
    (options, base)
}

#[test]
fn clusters_move_to_the_start_of_the_file_and_the_power_may_be_cut_at_any_moment() {
    let mut cuts = 0;
    for seed in 0..14 {
        let (options, base) = compactable(seed);
        let plan = Plan { seed, compacts: true, requests: 8, ..PLAN };
        let moved = MOVED.get();
        cuts += cut_everywhere(&with_holes(&options, &base, seed), &base, plan, 5).unwrap();
        println!("seed {seed}: {} bytes moved", MOVED.get() - moved);
        assert!(MOVED.get() > moved, "seed {seed}: nothing moved");
    }
    println!("{cuts} cuts");
}

#[test]
fn leaving_out_what_keeps_moved_clusters_safe_is_found() {
    for barrier in [Barrier::BeforeMapping, Barrier::Reuse, Barrier::Epoch, Barrier::Move] {
        let found = (0..100).find(|seed| {
            let seed = *seed;
            let only_writes = barrier == Barrier::Move;
            let plan = Plan { seed, compacts: true, skip: Some(barrier), depth: 6, only_writes, ..PLAN };
            let options = options(1024, 3, 16);
            let storage = with_holes(&options, &Base::default(), seed);
            let run = || cut_everywhere(&storage, &Base::default(), plan, 4).is_err();
            // What the guest reads at once is checked by a panic.
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or(true)
        });
        println!("without {barrier:?}: found with seed {found:?}");
        assert!(found.is_some(), "nothing noticed that {barrier:?} is missing");
    }
}

#[test]
fn an_operation_of_a_move_that_fails_breaks_the_compaction_and_not_the_image() {
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard];
    for kind in kinds {
        for nth in (0..150).step_by(3) {
            let (options, base) = compactable(nth % 14);
            let storage = with_holes(&options, &base, nth);
            let plan = Plan { seed: nth, compacts: true, fault: Some((kind, nth)), ..PLAN };
            let (guest, witness) = play(&storage, &base, plan);
            storage.clear_faults();
            let model = witness.model.borrow();
            model.check_live(&block_on(guest.read_all()).unwrap()).unwrap();
            let dirty = || qcow2_check(&storage.process_killed(nth).bytes(NAME)).unwrap().dirty;
            assert!(options.lazy_refcounts || !dirty());
            if !options.lazy_refcounts {
                sound(&storage.process_killed(nth)).unwrap();
            }
            model.check_after_crash(&reread(&storage.power_cut(nth), &base).unwrap()).unwrap();
            block_on(guest.close()).unwrap();
            sound(&storage).unwrap();
            model.check_live(&reread(&storage, &base).unwrap()).unwrap();
        }
    }
}
