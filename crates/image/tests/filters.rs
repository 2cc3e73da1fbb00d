//! Filters over disks: what they promise, and that they do nothing else.

mod common;

use block::{
    Completion, Disk, DiskInfo, DiskListener, DiskQueue, IoError, IoErrorKind, Op, OpFlags, Poller, ReactorCtx, Result,
};
use common::{Chain, Layer};
use engine::{Reactor, ReactorConfig};
use memory::IoBuf;
use ringdisk_image::{
    Delay, DelayOptions, ErrorOptions, ErrorPolicy, Errors, Filter, FilterDisk, Hold, HoldControl, NullDisk, Rate,
    RequestKind, Throttle, ThrottleGroup, ThrottleLimits,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use testkit::conformance::{Subject, run};
use testkit::{Fault, FaultAction, OpKind, SimHarness, SimReactor};

const SIZE: u64 = 1 << 20;

fn null() -> Arc<dyn Disk> {
    Arc::new(NullDisk::new(SIZE, String::new()))
}

fn filtered(disk: Arc<dyn Disk>, filter: impl Filter) -> Arc<dyn Disk> {
    Arc::new(FilterDisk::new(disk, filter))
}

fn slow() -> DelayOptions {
    DelayOptions::of(Duration::from_micros(300)).with(|options| options.bytes_per_second = Some(100 << 20))
}

fn errors(change: impl FnOnce(&mut ErrorOptions)) -> Errors {
    Errors::new(ErrorOptions::default().with(change))
}

/// What no request gets to.
fn never() -> Errors {
    errors(|options| options.after = u64::MAX)
}

/// What holds everything that it may.
fn holding() -> (Arc<HoldControl>, Hold) {
    let control = Arc::new(HoldControl::default());
    control.set_policies(Some(ErrorPolicy::Hold), Some(ErrorPolicy::Hold));
    (Arc::clone(&control), Hold::new(control))
}

#[test]
fn a_stack_of_filters_conforms_where_its_disk_does() {
    let chain = Chain::of(vec![Layer::qcow2(SIZE, 4096), Layer::Raw(SIZE / 2)]);
    for seed in common::seeds(2) {
        let mut make = |read_only| {
            let opened = match read_only {
                true => common::open_as(&chain.storage(), 0, ringdisk_image::Format::Qcow2, true, &[]),
                false => chain.open(&chain.storage()),
            };
            Some(filtered(filtered(filtered(opened.unwrap().disk, never()), Delay::new(slow())), holding().1))
        };
        let mut subject = Subject { make: &mut make, keeps_data: true, seed };
        let report = run(&mut SimHarness::new(seed, 3), &mut subject);
        assert!(report.failures.is_empty(), "{:#?}", report.failures);
        assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    }
}

/// Runs the reactor until all requests of the queues have ended; returns their tags, results and when, in order.
fn run_all(
    reactor: &SimReactor,
    ctx: &Rc<dyn ReactorCtx>,
    queues: &mut [Box<dyn DiskQueue>],
) -> Vec<(u64, Completion)> {
    let (start, mut ended) = (ctx.now(), Vec::new());
    while queues.iter().any(|queue| queue.in_flight() > 0) {
        let mut done = Vec::new();
        for queue in &mut *queues {
            queue.harvest(&mut done);
        }
        let micros = u64::try_from((ctx.now() - start).as_micros()).unwrap();
        ended.extend(done.into_iter().map(|completion| (micros, completion)));
        reactor.step();
    }
    ended
}

fn read(length: usize) -> Op {
    Op::read(0, IoBuf::zeroed(length).whole())
}

#[test]
fn requests_wait_side_by_side_and_their_data_pass_one_after_the_other_on_all_queues() {
    let reactor = SimReactor::new(1);
    let ctx = reactor.ctx();
    let mut options = DelayOptions::of(Duration::from_millis(1));
    let at = |queue: &mut Box<dyn DiskQueue>, tag| queue.submit(tag, read(64 << 10));
    // Whether there is a link, and when the requests have to be over.
    for (bytes_per_second, expected) in [(None, [1000; 4]), (Some(64 << 20), [1977, 2954, 3930, 4907])] {
        options.bytes_per_second = bytes_per_second;
        let disk = filtered(null(), Delay::new(options));
        let mut queues = [disk.open_queue(&ctx).unwrap(), disk.open_queue(&ctx).unwrap()];
        (0..4).for_each(|tag| at(&mut queues[tag as usize % 2], tag));
        let ended = run_all(&reactor, &ctx, &mut queues);
        let mut times: Vec<_> = ended.iter().map(|(micros, completion)| (completion.tag, *micros)).collect();
        times.sort_unstable();
        for ((_, micros), expected) in times.iter().zip(expected) {
            // A few turns of the simulation go by until it is seen.
            assert!((expected..expected + 20).contains(micros), "{bytes_per_second:?}: {times:?}");
        }
        assert_eq!(times.len(), 4);
    }
    // A flush has no data, and waits its delay behind them.
    let disk = filtered(null(), Delay::new(options));
    let mut queues = [disk.open_queue(&ctx).unwrap()];
    at(&mut queues[0], 0);
    queues[0].submit(1, Op::Flush);
    let ended = run_all(&reactor, &ctx, &mut queues);
    assert_eq!(ended.iter().map(|(_, completion)| completion.tag).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn each_request_takes_its_time_on_the_link_whatever_its_length() {
    let reactor = SimReactor::new(1);
    let ctx = reactor.ctx();
    let options =
        DelayOptions::of(Duration::from_millis(1)).with(|options| options.request = Duration::from_micros(100));
    let disk = filtered(null(), Delay::new(options));
    let mut queues = [disk.open_queue(&ctx).unwrap(), disk.open_queue(&ctx).unwrap()];
    for (tag, length) in (0..).zip([4096, 512, 1 << 20, 4096]) {
        queues[tag as usize % 2].submit(tag, read(length));
    }
    let ended = run_all(&reactor, &ctx, &mut queues);
    let mut times: Vec<_> = ended.iter().map(|(micros, completion)| (completion.tag, *micros)).collect();
    times.sort_unstable();
    for ((_, micros), expected) in times.iter().zip([1100, 1200, 1300, 1400]) {
        assert!((expected..expected + 20).contains(micros), "{times:?}");
    }
}

#[test]
fn with_jitter_requests_overtake_each_other_and_none_is_earlier_or_later_than_it_says() {
    let reactor = SimReactor::new(1);
    let ctx = reactor.ctx();
    let options = DelayOptions::of(Duration::from_millis(1)).with(|options| options.jitter = Duration::from_millis(2));
    let disk = filtered(null(), Delay::new(options));
    let mut queues = [disk.open_queue(&ctx).unwrap()];
    (0..100).for_each(|tag| queues[0].submit(tag, read(512)));
    let ended = run_all(&reactor, &ctx, &mut queues);
    let mut tags: Vec<_> = ended.iter().map(|(_, completion)| completion.tag).collect();
    assert!(!tags.is_sorted(), "{tags:?}");
    tags.sort_unstable();
    assert_eq!(tags, (0..100).collect::<Vec<_>>());
    assert!(ended.iter().all(|(micros, _)| (1000..3020).contains(micros)));
}

/// Sends `ops` one after the other; returns the numbers of those that failed, and checks with what.
fn failing(filter: Errors, ops: impl IntoIterator<Item = Op>, error: IoError) -> Vec<usize> {
    let reactor = SimReactor::new(1);
    let ctx = reactor.ctx();
    let disk = filtered(null(), filter);
    // Two queues in turns: what counts is the disk.
    let mut queues = [disk.open_queue(&ctx).unwrap(), disk.open_queue(&ctx).unwrap()];
    let mut failed = Vec::new();
    for (index, op) in ops.into_iter().enumerate() {
        queues[index % 2].submit(index as u64, op);
        let [(_, Completion { tag, result })] = run_all(&reactor, &ctx, &mut queues)[..] else { panic!("one each") };
        assert_eq!(tag, index as u64);
        if let Err(found) = result {
            assert_eq!(found, error);
            failed.push(index);
        }
    }
    failed
}

fn write_at(offset: u64, length: usize) -> Op {
    Op::write(offset, IoBuf::zeroed(length).whole(), OpFlags::NONE)
}

fn one_of_each() -> [Op; 5] {
    let zeroes = Op::WriteZeroes { offset: 0, length: 512, may_unmap: false, flags: OpFlags::NONE };
    [read(512), write_at(0, 512), Op::Flush, Op::Discard { offset: 0, length: 512 }, zeroes]
}

#[test]
fn only_the_chosen_kinds_and_places_fail() {
    let all = failing(errors(|_| ()), one_of_each(), IoError::EIO);
    assert_eq!(all, [0, 1, 2, 3, 4]);
    for (index, (name, kind)) in RequestKind::NAMES.into_iter().enumerate() {
        let filter = errors(|options| options.kinds = vec![kind]);
        assert_eq!(failing(filter, one_of_each(), IoError::EIO), [index], "{name}");
    }
    let filter = errors(|options| options.range = 4096..8192);
    let places = [(0, 4096), (0, 4608), (4096, 512), (7680, 1024), (8192, 512)];
    let ops = places.into_iter().map(|(offset, length)| write_at(offset, length)).chain([Op::Flush]);
    assert_eq!(failing(filter, ops, IoError::EIO), [1, 2, 3], "a flush has no place");
}

#[test]
fn every_nth_request_fails_from_some_request_on_and_for_some_times() {
    let reads = || (0..12).map(|_| read(512));
    let numbers = |after, every, count| {
        let filter = errors(|options| (options.after, options.every, options.count) = (after, every, count));
        failing(filter, reads(), IoError::EIO)
    };
    assert_eq!(numbers(0, 5, u64::MAX), [4, 9]);
    assert_eq!(numbers(2, 3, u64::MAX), [4, 7, 10]);
    assert_eq!(numbers(2, 3, 2), [4, 7]);
    assert_eq!(numbers(7, 1, 1), [7], "once");
    let no_space = IoError::new(IoErrorKind::NoSpace);
    let filter = errors(|options| (options.every, options.error) = (6, no_space));
    assert_eq!(failing(filter, reads(), no_space), [5, 11]);
}

#[test]
fn what_fails_does_not_reach_the_disk_and_what_passes_does() {
    let chain = Chain::of(vec![Layer::qcow2(SIZE, 4096)]);
    let storage = chain.storage();
    let every_other_write = || errors(|options| (options.kinds, options.every) = (vec![RequestKind::Write], 2));
    let open = |storage: &testkit::SimStorage| {
        let opened = chain.open(storage)?;
        Ok(testkit::OpenedDisk { disk: filtered(Arc::clone(&opened.disk), every_other_write()), ..opened })
    };
    let mut session = testkit::Session::open(&storage, &open, 1, 1).unwrap();
    let write = |tag: u8| testkit::Request::write(4096 * u64::from(tag), vec![tag; 4096]);
    for tag in 1..=8 {
        assert_eq!(session.call(write(tag)).is_err(), tag % 2 == 0, "{tag}");
    }
    for tag in 1..=8 {
        let found = session.call(testkit::Request::read(4096 * u64::from(tag), 4096)).unwrap();
        assert!(found == vec![if tag % 2 == 0 { 0 } else { tag }; 4096], "{tag}");
    }
    session.close().unwrap();
}

/// Makes a disk read-only.
#[derive(Debug)]
struct ReadOnly;

impl Filter for ReadOnly {
    fn open_queue(&self, below: Box<dyn DiskQueue>, _: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(below)
    }

    fn info(&self, below: DiskInfo) -> DiskInfo {
        DiskInfo { read_only: true, ..below }
    }
}

/// Turns the reactor for a while of its time, and returns what has ended.
fn turn(reactor: &SimReactor, queue: &mut Box<dyn DiskQueue>) -> Vec<Completion> {
    let mut done = Vec::new();
    for _ in 0..200 {
        queue.harvest(&mut done);
        reactor.step();
    }
    done
}

#[test]
fn what_storage_fails_waits_until_it_is_tried_again_or_given_up() {
    let reactor = SimReactor::new(1);
    let ctx = reactor.ctx();
    let (control, hold) = holding();
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&told);
    control.listen(Box::new(move |error| heard.lock().unwrap().push(error)));
    let no_space = errors(|options| {
        options.kinds = vec![RequestKind::Write, RequestKind::Flush];
        options.count = 6;
        options.error = IoError::new(IoErrorKind::NoSpace);
    });
    let disk = filtered(filtered(null(), no_space), hold);
    let mut queue = disk.open_queue(&ctx).unwrap();
    for tag in [10, 11] {
        queue.submit(tag, write_at(0, 512));
    }
    queue.submit(12, read(512));
    queue.submit(13, Op::Flush);
    let mut ended = turn(&reactor, &mut queue);
    ended.sort_by_key(|completion| completion.tag);
    let error = Err(IoError::new(IoErrorKind::NoSpace));
    assert_eq!(ended, [Completion { tag: 12, result: Ok(()) }, Completion { tag: 13, result: error }]);
    assert_eq!((control.held().unwrap().requests, queue.in_flight()), (2, 2));
    control.try_again();
    assert!(turn(&reactor, &mut queue).is_empty(), "they fail again, and wait again");
    control.set_policies(None, Some(ErrorPolicy::Report));
    assert!(turn(&reactor, &mut queue).is_empty(), "what waits goes on waiting");
    control.set_policies(None, Some(ErrorPolicy::Hold));
    queue.submit(14, write_at(0, 512));
    assert!(turn(&reactor, &mut queue).is_empty());
    control.try_again();
    let ended = turn(&reactor, &mut queue);
    assert_eq!(
        ended.iter().map(|end| (end.tag, end.result)).collect::<Vec<_>>(),
        [10, 11, 14].map(|tag| (tag, Ok(())))
    );
    assert_eq!((control.held(), queue.in_flight()), (None, 0));
    assert_eq!(told.lock().unwrap().len(), 2, "told when the first fails, and when it fails again");
}

fn durable_write_at(offset: u64, length: usize) -> Op {
    Op::write(offset, IoBuf::zeroed(length).whole(), OpFlags::FUA)
}

#[test]
fn a_durable_write_that_may_tell_of_lost_data_is_not_held() {
    let chain = Chain::of(vec![Layer::qcow2(SIZE, 4096)]);
    let storage = chain.storage();
    let (control, hold) = holding();
    let disk = filtered(chain.open(&storage).unwrap().disk, hold);
    let reactor = SimReactor::new(1);
    let mut queue = disk.open_queue(&reactor.ctx()).unwrap();
    // The sync of the second loses the data of the first. Another try would succeed without them.
    for (op, result) in [(write_at(0, 512), Ok(())), (durable_write_at(8192, 512), Err(IoError::EIO))] {
        queue.submit(1, op);
        let mut ended = Vec::new();
        while ended.is_empty() && control.held().is_none() {
            ended = turn(&reactor, &mut queue);
        }
        assert_eq!((ended, control.held()), (vec![Completion { tag: 1, result }], None));
        storage.inject(&common::name(0), Fault::nth(OpKind::Flush, 0, FaultAction::Lose(IoError::EIO)));
    }
}

#[test]
fn a_durable_write_waits_for_space() {
    let no_space = errors(|options| (options.count, options.error) = (1, IoError::new(IoErrorKind::NoSpace)));
    let (control, hold) = holding();
    let disk = filtered(filtered(null(), no_space), hold);
    let reactor = SimReactor::new(1);
    let mut queue = disk.open_queue(&reactor.ctx()).unwrap();
    queue.submit(1, durable_write_at(0, 512));
    assert!(turn(&reactor, &mut queue).is_empty());
    control.try_again();
    assert_eq!(turn(&reactor, &mut queue), [Completion { tag: 1, result: Ok(()) }]);
}

#[test]
fn a_disk_that_goes_does_not_wait_for_what_is_held() {
    let reactor = SimReactor::new(1);
    let ctx = reactor.ctx();
    let (control, hold) = holding();
    let disk = filtered(filtered(null(), errors(|_| {})), hold);
    let mut queue = disk.open_queue(&ctx).unwrap();
    queue.submit(1, read(512));
    assert!(turn(&reactor, &mut queue).is_empty());
    let ending = control.give_up();
    queue.submit(2, read(512));
    let mut tags: Vec<_> = turn(&reactor, &mut queue).iter().map(|end| (end.tag, end.result.is_err())).collect();
    tags.sort_unstable();
    assert_eq!((tags, queue.in_flight(), control.held()), (vec![(1, true), (2, true)], 0, None));
    drop(ending);
    queue.submit(3, read(512));
    assert!(turn(&reactor, &mut queue).is_empty(), "from then on requests are held again");
}

#[test]
fn listeners_of_a_filter_hear_what_the_disk_looks_like_through_it() {
    #[derive(Default)]
    struct Hears(Mutex<Vec<DiskInfo>>);
    impl DiskListener for Hears {
        fn info_changed(&self, info: &DiskInfo) {
            self.0.lock().unwrap().push(info.clone());
        }
    }
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let below = chain.open(&chain.storage()).unwrap().disk;
    let disk = filtered(filtered(Arc::clone(&below), ReadOnly), never());
    let hears = Arc::new(Hears::default());
    let listener: Arc<dyn DiskListener> = Arc::clone(&hears) as _;
    disk.subscribe(Arc::downgrade(&listener));
    below.set_volatile_cache(false);
    assert!(disk.info().read_only && !disk.info().volatile_cache);
    assert_eq!(*hears.0.lock().unwrap(), [disk.info()]);
}

/// Sends a request when its predecessor has ended.
struct OneByOne {
    queue: Box<dyn DiskQueue>,
    left: u32,
    done: Vec<Completion>,
    ended: std::sync::mpsc::Sender<Duration>,
    since: Instant,
}

impl Poller for OneByOne {
    fn poll(&mut self) -> bool {
        let ended = self.queue.harvest(&mut self.done) > 0;
        if ended {
            assert!(self.done.drain(..).all(|completion| completion.result.is_ok()));
            self.ended.send(self.since.elapsed()).unwrap();
        }
        if self.queue.in_flight() > 0 || self.left == 0 {
            return ended;
        }
        self.left -= 1;
        self.since = Instant::now();
        self.queue.submit(7, read(512));
        true
    }
}

#[test]
fn a_delayed_request_waits_its_time_and_a_sleeping_reactor_wakes_up_for_it() {
    const COUNT: u32 = 2;
    let delay = Duration::from_millis(200);
    let disk = filtered(null(), Delay::new(DelayOptions::of(delay)));
    let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
    let (ended, times) = std::sync::mpsc::channel();
    let begin = move |ctx: &Rc<dyn ReactorCtx>| {
        let queue = disk.open_queue(ctx).unwrap();
        let load = OneByOne { queue, left: COUNT, done: Vec::new(), ended, since: Instant::now() };
        ctx.add_poller(Rc::new(RefCell::new(load))).unwrap();
    };
    block::run_and_wait(&*reactor.handle(), begin).unwrap();
    for time in times.iter().take(COUNT as usize) {
        assert!(time >= delay, "{time:?}");
    }
    assert!(reactor.stats().sleeps > 0, "it slept meanwhile");
    reactor.stop().unwrap();
}

#[test]
fn what_waits_for_nobody_ends_with_an_error_and_nothing_waits_from_then_on() {
    const DONE: block::IoResult = Ok(());
    let failed = Err(IoError::EIO);
    let limits = ThrottleLimits::default().with(|limits| limits.writes.requests = Rate::of(1));
    let cases = [
        // The first write passes at once.
        (filtered(null(), Throttle::new(ThrottleGroup::new(limits))), [DONE, failed, failed]),
        (filtered(null(), Delay::new(DelayOptions::of(Duration::from_secs(3600)))), [failed; 3]),
        // It fails once: what comes later is not in its way.
        (filtered(filtered(null(), errors(|options| options.count = 1)), holding().1), [failed, DONE, DONE]),
    ];
    for (index, (disk, expected)) in cases.into_iter().enumerate() {
        let reactor = SimReactor::new(1);
        let ctx = reactor.ctx();
        // A filter above passes the call on.
        let disk = filtered(disk, never());
        let mut queue = disk.open_queue(&ctx).unwrap();
        queue.submit(0, write_at(0, 512));
        queue.submit(1, write_at(0, 512));
        let mut ended = Vec::new();
        for _ in 0..200 {
            queue.harvest(&mut ended);
        }
        queue.abandon();
        queue.submit(2, write_at(0, 512));
        ended.extend(turn(&reactor, &mut queue));
        ended.sort_by_key(|completion| completion.tag);
        let results: Vec<_> = ended.iter().map(|completion| completion.result).collect();
        assert_eq!((results, queue.in_flight()), (expected.to_vec(), 0), "case {index}");
    }
}
