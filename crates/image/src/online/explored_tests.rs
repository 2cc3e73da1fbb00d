//! Exchanges under shuttle: queues on reactors of their own write, read and flush, in whole clusters and in parts,
//! while layers are put on top and taken back, and the disk grows. What each file operation does happens at some moment
//! between its push and its end, so requests are in flight at every barrier.

use super::overlay::{OpenedOverlay, put_overlay_async};
use super::take_back::take_back_async;
use super::watch::CopyWatch;
use crate::chain::exchange::lease::Over;
use crate::chain::image::Image;
use crate::{CreateOptions, FileName, Format, ImageOptions, Opener, Role};
use block::sync::{AtomicBool, Ordering};
use block::{
    Completion, Disk, Executor, File, FileInfo, FileIo, FileQueue, Op, OpFlags, Poller, PollerId, Priority, ReactorCtx,
    Result, Tag, Task, Timers, Work,
};
use memory::{IoBuf, Window};
use shuttle::future::block_on;
use shuttle::thread;
use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use testkit::histories::{History, Yielding};
use testkit::schedules::{LONG, Verdict, explore, schedules, seed};
use testkit::{Dice, SimFile, SimFileOptions, SimStorage, mix};

/// Faults that are planted.
#[derive(Default)]
pub(crate) struct Mutant {
    is_late: AtomicBool,
    is_impatient: AtomicBool,
}

impl Mutant {
    /// Queues say that they hold requests, and do not: they adopt the next chain late.
    pub(crate) fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }

    /// Copies from the former top do not wait for what is in flight there.
    pub(crate) fn hurry(&self, over: Arc<Over>) -> Arc<Over> {
        if self.is_impatient.load(Ordering::Relaxed) { Arc::new(Over::past()) } else { over }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Late,
    Impatient,
}

const UNIT: usize = 512;
/// Units that are used: three neighbours, which share a cluster or not, and one of another table.
const UNITS: [u64; 4] = [0, 1, 2, 9];
const SIZE: u64 = 16 << 10;
const QUEUES: u64 = 3;
const STEPS: u64 = 8;

/// A reactor of a thread: tasks, and operations that were pushed and not carried out.
struct Here {
    executor: Executor,
    timers: Rc<Timers>,
    later: Rc<RefCell<Vec<(Rc<dyn FileQueue>, FileIo)>>>,
}

impl ReactorCtx for Here {
    fn spawn(&self, task: Task) {
        self.executor.spawn(task);
    }

    fn add_poller(&self, _poller: Rc<RefCell<dyn Poller>>) -> Result<PollerId> {
        Ok(PollerId(0))
    }

    fn remove_poller(&self, _id: PollerId) {}

    fn timers(&self) -> &Rc<Timers> {
        &self.timers
    }

    fn run_aside(&self, _turn: u64, work: Work) {
        work();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Keeps operations for later.
struct LaterQueue {
    now: Rc<dyn FileQueue>,
    later: Rc<RefCell<Vec<(Rc<dyn FileQueue>, FileIo)>>>,
}

impl FileQueue for LaterQueue {
    fn push(&self, io: FileIo) {
        self.later.borrow_mut().push((Rc::clone(&self.now), io));
    }
}

#[derive(Debug)]
struct LaterFile(Arc<SimFile>);

impl File for LaterFile {
    fn info(&self) -> &FileInfo {
        self.0.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.0.length_bytes()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        let here = ctx.as_any().downcast_ref::<Here>().unwrap();
        Ok(Rc::new(LaterQueue { now: self.0.open_blocking()?, later: Rc::clone(&here.later) }))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(Yielding(self.0.open_blocking()?)))
    }
}

struct LaterOpener(SimStorage);

impl Opener for LaterOpener {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        Ok(Arc::new(LaterFile(self.0.file(&name.to_string()).unwrap())))
    }

    fn canonical(&self, path: &std::path::Path) -> Result<std::path::PathBuf> {
        Ok(path.to_owned())
    }
}

fn value_of(data: &Window) -> u64 {
    let bytes = data.to_vec();
    let words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    if words.iter().all(|word| *word == words[0]) { words[0] } else { u64::MAX }
}

fn data_of(value: u64) -> Window {
    let data = IoBuf::zeroed(UNIT).whole();
    data.copy_from_slice(0, &value.to_le_bytes().repeat(UNIT / 8));
    data
}

#[derive(Clone)]
struct World {
    storage: SimStorage,
    image: Arc<Image>,
    history: Arc<Mutex<History>>,
    is_over: Arc<AtomicBool>,
    verdict: Verdict,
    seed: u64,
}

enum Flying {
    Write { unit: u64, index: usize },
    Read { unit: u64, since: u64, data: Window },
    Flush,
}

fn create(storage: &SimStorage, name: &str, cluster_size: u64, backing_file: Option<String>) {
    let file: Arc<dyn File> = storage.create(name, 0, SimFileOptions::default());
    let options = format_qcow2::CreateOptions::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = cluster_size;
        options.backing_file = backing_file;
    });
    crate::create(&file, &CreateOptions::Qcow2(options)).unwrap();
}

impl World {
    fn new(seed: u64, fault: Fault, verdict: &Verdict) -> Self {
        let mut dice = Dice::new(seed);
        let mut cluster_size = || [512, 1024][dice.index(2)];
        let storage = SimStorage::new(seed);
        create(&storage, "base", cluster_size(), None);
        for index in 0..2 {
            create(&storage, &format!("overlay{index}"), cluster_size(), Some("base".to_owned()));
        }
        let options = ImageOptions { format: Some(Format::Qcow2), ..ImageOptions::new("base") };
        let image = crate::open(&options, &LaterOpener(storage.clone())).unwrap();
        image.board.mutant.is_late.store(fault == Fault::Late, Ordering::Relaxed);
        image.board.mutant.is_impatient.store(fault == Fault::Impatient, Ordering::Relaxed);
        Self {
            storage,
            image: Arc::new(image),
            history: Arc::default(),
            is_over: Arc::new(AtomicBool::new(false)),
            verdict: verdict.clone(),
            seed,
        }
    }

    fn exchange(&self) {
        let mut dice = Dice::new(mix(self.seed, 77));
        for index in 0..2 {
            let name = FileName::from(&format!("overlay{index}"));
            let top = self.image.file_names().next().unwrap().to_string();
            rest_on(&self.storage, &name, top);
            let file = LaterOpener(self.storage.clone()).open(&name, Role::Writable).unwrap();
            let overlay = OpenedOverlay::open(&name, file).unwrap();
            let put = put_overlay_async(vec![(Arc::clone(&self.image), overlay)], || Ok(()));
            block_on(put).unwrap().into_iter().for_each(Result::unwrap);
            if dice.chance(50) {
                block_on(take_back_async(&self.image, &CopyWatch::default(), || Ok(()))).unwrap();
            }
        }
        block_on(self.image.grow_async(SIZE * 2)).unwrap();
        self.is_over.store(true, Ordering::Release);
    }

    fn work(&self, thread: u64) {
        let mut dice = Dice::new(mix(self.seed, thread));
        let timers = Timers::with_virtual_time(std::time::Instant::now());
        let here = Rc::new(Here { executor: Executor::new(Box::new(|| {})), timers, later: Rc::default() });
        let ctx: Rc<dyn ReactorCtx> = Rc::clone(&here) as _;
        let mut queue = self.image.open_queue(&ctx).unwrap();
        let mut flying: BTreeMap<Tag, Flying> = BTreeMap::new();
        let (mut step, mut done) = (0, Vec::new());
        while step < STEPS || !flying.is_empty() || !self.is_over.load(Ordering::Acquire) {
            if step < STEPS && flying.len() < 3 && dice.chance(40) {
                step += 1;
                let (op, request) = self.request(&mut dice, thread * 100 + step);
                flying.insert(step, request);
                queue.submit(step, op);
            }
            here.executor.run_ready(20);
            let count = here.later.borrow().len();
            if count > 0 && dice.chance(60) {
                let (now, io) = here.later.borrow_mut().swap_remove(dice.index(count));
                now.push(io);
            }
            queue.harvest(&mut done);
            for Completion { tag, result } in done.drain(..) {
                result.unwrap();
                self.judge(flying.remove(&tag).unwrap());
            }
            thread::yield_now();
        }
        drop(queue);
        here.executor.run_ready(100);
    }

    fn request(&self, dice: &mut Dice, value: u64) -> (Op, Flying) {
        let unit = UNITS[dice.index(UNITS.len())];
        let (offset, priority) = (unit * UNIT as u64, Priority::NONE);
        match dice.below(10) {
            0..5 => {
                let flags = if dice.chance(20) { OpFlags::FUA } else { OpFlags::NONE };
                let index = self.history.lock().unwrap().begin(unit, value);
                (Op::Write { offset, data: data_of(value), flags, priority }, Flying::Write { unit, index })
            }
            5..9 => {
                let data = IoBuf::zeroed(UNIT).whole();
                let since = self.history.lock().unwrap().now();
                (Op::Read { offset, data: data.clone(), priority }, Flying::Read { unit, since, data })
            }
            _ => (Op::Flush, Flying::Flush),
        }
    }

    fn judge(&self, request: Flying) {
        match request {
            Flying::Write { unit, index } => self.history.lock().unwrap().end(unit, index),
            Flying::Read { unit, since, data } => {
                let value = value_of(&data);
                if !self.history.lock().unwrap().explains(unit, value, since) {
                    self.verdict.fail(format!("unit {unit} shows write {value}, which was replaced before, or none"));
                }
            }
            Flying::Flush => {}
        }
    }
}

fn execution(seed: u64, fault: Fault, verdict: &Verdict) {
    let world = World::new(seed, fault, verdict);
    let work = |thread| {
        let world = world.clone();
        thread::spawn(move || world.work(thread))
    };
    let threads: Vec<_> = (1..=QUEUES).map(work).collect();
    world.exchange();
    for thread in threads {
        thread.join().unwrap();
    }
    // All is as the history says, also where it was closed and is opened again.
    let names: Vec<_> = world.image.file_names().collect();
    world.image.close().unwrap();
    for image in [Arc::clone(&world.image), reopened(&world.storage, &names)] {
        let shared = crate::chain::queue::Shared::blocking(&image.chain()).unwrap();
        for unit in UNITS {
            let data = IoBuf::zeroed(UNIT).whole();
            let since = world.history.lock().unwrap().now();
            block_on(shared.read(unit * UNIT as u64, data.clone(), Priority::NONE)).unwrap();
            world.judge(Flying::Read { unit, since, data });
        }
    }
}

/// Writes into an image which file it rests on.
fn rest_on(storage: &SimStorage, name: &FileName, below: String) {
    let file: Arc<dyn File> = storage.file(&name.to_string()).unwrap();
    let below = crate::Backing { file: below, format: Some("qcow2".to_owned()) };
    crate::set_backing(&file, Format::Qcow2, Some(&below)).unwrap();
}

/// The chain with these files, top first, as somebody opens it who reads which file rests on which.
fn reopened(storage: &SimStorage, names: &[FileName]) -> Arc<Image> {
    if let [top, below, ..] = names {
        rest_on(storage, top, below.to_string());
    }
    let options = ImageOptions {
        format: Some(Format::Qcow2),
        read_only: true,
        allow_backing: crate::BackingPolicy::Any,
        ..ImageOptions::new(names[0].clone())
    };
    Arc::new(crate::open(&options, &LaterOpener(storage.clone())).unwrap())
}

/// Writes numbers to two disks in turn, each when the one before was acknowledged, until a layer was put on both.
fn count_up(disks: &[World], unit: u64, is_over: &AtomicBool) {
    let mut dice = Dice::new(mix(disks[0].seed, unit));
    let timers = Timers::with_virtual_time(std::time::Instant::now());
    let here = Rc::new(Here { executor: Executor::new(Box::new(|| {})), timers, later: Rc::default() });
    let ctx: Rc<dyn ReactorCtx> = Rc::clone(&here) as _;
    let mut queues: Vec<_> = disks.iter().map(|disk| disk.image.open_queue(&ctx).unwrap()).collect();
    let (mut number, mut done) = (1u64, vec![Completion { tag: 0, result: Ok(()) }]);
    while !is_over.load(Ordering::Acquire) || done.is_empty() {
        if done.pop().is_some() {
            let write = Op::Write {
                offset: unit * UNIT as u64,
                data: data_of(number),
                flags: OpFlags::NONE,
                priority: Priority::NONE,
            };
            queues[number as usize % 2].submit(number, write);
            number += 1;
        }
        here.executor.run_ready(20);
        let count = here.later.borrow().len();
        if count > 0 {
            let (now, io) = here.later.borrow_mut().swap_remove(dice.index(count));
            now.push(io);
        }
        for queue in &mut queues {
            queue.harvest(&mut done);
        }
        thread::yield_now();
    }
    drop(queues);
    here.executor.run_ready(100);
}

/// The former tops are one moment of both disks: one that has a number has all before it.
fn two_disks(seed: u64, fault: Fault, verdict: &Verdict) {
    let disks: Vec<_> = (0..2).map(|disk| World::new(mix(seed, disk), fault, verdict)).collect();
    let formers: Vec<_> = disks.iter().map(|disk| disk.image.chain()).collect();
    let is_over = Arc::new(AtomicBool::new(false));
    let units = [0, 9];
    let count = |unit| {
        let (disks, is_over) = (disks.clone(), Arc::clone(&is_over));
        thread::spawn(move || count_up(&disks, unit, &is_over))
    };
    let threads = units.map(count);
    let name = FileName::from("overlay0");
    let overlays = disks.iter().map(|disk| {
        let file = LaterOpener(disk.storage.clone()).open(&name, Role::Writable).unwrap();
        (Arc::clone(&disk.image), OpenedOverlay::open(&name, file).unwrap())
    });
    let put = put_overlay_async(overlays.collect(), || Ok(()));
    block_on(put).unwrap().into_iter().for_each(Result::unwrap);
    is_over.store(true, Ordering::Release);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for unit in units {
        let read = |former: &Arc<crate::chain::layers::Chain>| {
            let data = IoBuf::zeroed(UNIT).whole();
            let shared = crate::chain::queue::Shared::blocking(former).unwrap();
            block_on(shared.read(unit * UNIT as u64, data.clone(), Priority::NONE)).unwrap();
            value_of(&data)
        };
        let (even, odd) = (read(&formers[0]), read(&formers[1]));
        if even.abs_diff(odd) > 1 {
            verdict.fail(format!("unit {unit}: one former top has number {even}, the other {odd}"));
        }
    }
}

fn run(limit: u64, fault: Fault) -> std::result::Result<(), String> {
    explore(seed(), limit, LONG, move |seed, verdict| execution(seed, fault, verdict))
}

#[test]
fn queues_see_each_others_writes_whatever_chain_they_began_on() {
    run(schedules(300), Fault::None).unwrap();
}

#[test]
fn a_queue_that_adopts_the_next_chain_late_is_found() {
    println!("{}", run(20_000, Fault::Late).unwrap_err());
}

#[test]
fn a_copy_that_does_not_wait_for_what_is_in_flight_below_is_found() {
    println!("{}", run(20_000, Fault::Impatient).unwrap_err());
}

#[test]
fn two_disks_pass_one_barrier() {
    explore(seed(), schedules(300), LONG, |seed, verdict| two_disks(seed, Fault::None, verdict)).unwrap();
}

#[test]
fn a_queue_of_one_of_two_disks_that_adopts_late_is_found() {
    let found = explore(seed(), 20_000, LONG, |seed, verdict| two_disks(seed, Fault::Late, verdict));
    println!("{}", found.unwrap_err());
}
