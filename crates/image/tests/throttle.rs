//! The filter that bounds a disk's rate, with its timers, in virtual time.

use block::{Completion, Disk, DiskQueue, Op, OpFlags, ReactorCtx, Tag};
use memory::IoBuf;
use ringdisk_image::{FilterDisk, NullDisk, Rate, Throttle, ThrottleGroup, ThrottleLimits, ThrottleMember};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::SimReactor;

const SECOND: Duration = Duration::from_secs(1);
/// Nothing may happen for so many turns of the reactor before the test gives up.
const TURNS_MAX: u64 = 100_000;

fn iops(per_second: u64) -> ThrottleLimits {
    ThrottleLimits::default().with(|limits| limits.total.requests = Rate::of(per_second))
}

const READ: Tag = 1;
const WRITE: Tag = 2;

/// A guest that always has so many reads in flight, and perhaps a write.
struct Guest {
    queue: Box<dyn DiskQueue>,
    member: Arc<ThrottleMember>,
    depth: usize,
    writes: bool,
    is_writing: bool,
    /// When reads ended, and when writes did.
    ends: Vec<Instant>,
    written: Vec<Instant>,
    done: Vec<Completion>,
}

impl Guest {
    fn begin(group: &Arc<ThrottleGroup>, reactor: &Rc<SimReactor>, depth: usize) -> Self {
        let throttle = Throttle::new(Arc::clone(group));
        let member = throttle.member();
        let disk = FilterDisk::new(Arc::new(NullDisk::new(1 << 20, String::new())), throttle);
        let queue = disk.open_queue(&reactor.ctx()).unwrap();
        let (ends, written, done) = (Vec::new(), Vec::new(), Vec::new());
        Self { queue, member, depth, writes: false, is_writing: false, ends, written, done }
    }

    /// Takes what has ended, and asks for as much again.
    fn turn(&mut self, now: Instant) -> usize {
        let count = self.queue.harvest(&mut self.done);
        for completion in self.done.drain(..) {
            match completion.tag {
                WRITE => {
                    self.written.push(now);
                    self.is_writing = false;
                }
                _ => self.ends.push(now),
            }
        }
        if self.writes && !self.is_writing {
            self.is_writing = true;
            self.queue.submit(WRITE, Op::write(0, IoBuf::zeroed(512).whole(), OpFlags::NONE));
        }
        while self.queue.in_flight() < self.depth + usize::from(self.is_writing) {
            self.queue.submit(READ, Op::read(0, IoBuf::zeroed(512).whole()));
        }
        count
    }
}

/// Lets guests work for so long. Their reactor is up to 60 us late each time.
fn play(reactor: &SimReactor, guests: &mut [Guest], time: Duration, seed: u64) {
    let (mut dice, mut still) = (seed, 0);
    let end = reactor.timers().now() + time;
    while reactor.timers().now() < end {
        reactor.step();
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if (dice >> 33) % 8 == 0 {
            for _ in 0..(dice >> 40) % 60 {
                reactor.step();
            }
        }
        let now = reactor.timers().now();
        let ended: usize = guests.iter_mut().map(|guest| guest.turn(now)).sum();
        still = if ended > 0 { 0 } else { still + 1 };
        assert!(still < TURNS_MAX, "it hangs");
    }
}

/// Each whole second but the first, and the longest time without an end.
fn judge(ends: &[Instant], begin: Instant, per_second: u64) {
    let at = |end: &Instant| end.duration_since(begin);
    let seconds = ends.last().map_or(0, |last| at(last).as_secs());
    assert!(seconds >= 2);
    for second in 1..seconds {
        let count = ends.iter().filter(|end| at(end).as_secs() == second).count() as f64;
        let error = (count - per_second as f64).abs();
        assert!(error <= (per_second as f64 * 0.01).max(1.0), "{count} in second {second}, not {per_second}");
    }
    let longest = ends.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    let most = Duration::from_millis(2).max(SECOND * 2 / per_second as u32);
    assert!(longest <= most, "{longest:?} without a request at {per_second}");
}

#[test]
fn a_reactors_timers_keep_any_rate_also_where_requests_are_less_than_a_millisecond_apart() {
    for per_second in [100, 997, 3_000, 20_000, 200_000] {
        let reactor = SimReactor::new(per_second);
        let group = ThrottleGroup::new(iops(per_second));
        let mut guests = [Guest::begin(&group, &reactor, 128)];
        let begin = reactor.timers().now();
        play(&reactor, &mut guests, SECOND * 3 + SECOND / 10, per_second);
        judge(&guests[0].ends, begin, per_second);
    }
}

#[test]
fn reads_without_end_do_not_hold_up_a_write() {
    const RATE: u64 = 1000;
    let reactor = SimReactor::new(3);
    let group = ThrottleGroup::new(iops(RATE));
    let mut guests = [Guest::begin(&group, &reactor, 8)];
    guests[0].writes = true;
    play(&reactor, &mut guests, SECOND * 3, 3);
    let [guest] = guests;
    // One request of nine is a write.
    let (reads, writes) = (guest.ends.len() as f64, guest.written.len() as f64);
    assert!(((reads + writes) / (3.0 * RATE as f64) - 1.0).abs() < 0.01, "{reads} reads, {writes} writes");
    assert!((writes * 9.0 / (reads + writes) - 1.0).abs() < 0.05, "{reads} reads, {writes} writes");
}

#[test]
fn what_waits_soon_obeys_a_new_limit() {
    let reactor = SimReactor::new(6);
    let group = ThrottleGroup::new(iops(1));
    let mut guests = [Guest::begin(&group, &reactor, 4)];
    play(&reactor, &mut guests, SECOND / 100, 6);
    assert_eq!(guests[0].ends.len(), 1);
    let begin = reactor.timers().now();
    group.set_limits(iops(1000));
    play(&reactor, &mut guests, SECOND / 2, 6);
    let next = guests[0].ends[1].duration_since(begin);
    assert!(next <= SECOND * 3 / 20, "the old limit held for {next:?}");
}

#[test]
fn what_waits_passes_when_the_disk_ends() {
    let reactor = SimReactor::new(5);
    let group = ThrottleGroup::new(iops(1));
    let mut guest = Guest::begin(&group, &reactor, 128);
    guest.writes = true;
    guest.turn(reactor.timers().now());
    reactor.step();
    assert!(guest.queue.in_flight() > 120);
    guest.depth = 0;
    guest.writes = false;
    let _lifted = guest.member.lift();
    let begin = reactor.timers().now();
    while guest.queue.in_flight() > 0 {
        reactor.step();
        let now = reactor.timers().now();
        guest.turn(now);
        assert!(now < begin + SECOND, "{} wait", guest.queue.in_flight());
    }
}

#[test]
fn a_greedy_disk_gets_its_share_of_a_group_and_no_more() {
    const RATE: u64 = 8_000;
    for seed in [1, 2] {
        let reactor = SimReactor::new(seed);
        let group = ThrottleGroup::new(iops(RATE));
        let mut guests = [256, 4, 4].map(|depth| Guest::begin(&group, &reactor, depth));
        play(&reactor, &mut guests, SECOND * 3, seed);
        let counts = guests.each_ref().map(|guest| guest.ends.len() as f64);
        let all: f64 = counts.iter().sum();
        assert!((all / (3.0 * RATE as f64) - 1.0).abs() < 0.01, "{counts:?}");
        for count in counts {
            let share = count * 3.0 / all;
            assert!((0.95..=1.05).contains(&share), "{counts:?}");
        }
    }
}

/// At the end of a disk nobody waits for limits, and nobody gets an error for them.
#[test]
fn waiting_requests_pass_while_the_limits_are_lifted() {
    let reactor = SimReactor::new(1);
    let throttle = Throttle::new(ThrottleGroup::new(iops(1)));
    let member = throttle.member();
    let disk = FilterDisk::new(Arc::new(NullDisk::new(1 << 20, String::new())), throttle);
    let mut queue = disk.open_queue(&reactor.ctx()).unwrap();
    let read = || Op::read(0, IoBuf::zeroed(512).whole());
    let begin = reactor.timers().now();
    let play = |queue: &mut Box<dyn DiskQueue>, until: Duration| {
        let mut done = Vec::new();
        while reactor.timers().now() < begin + until && queue.in_flight() > 0 {
            reactor.step();
            queue.harvest(&mut done);
        }
        done.iter().map(|completion| completion.tag).collect::<Vec<_>>()
    };
    (0..20).for_each(|tag| queue.submit(tag, read()));
    assert_eq!(play(&mut queue, SECOND / 10), [0], "the first passes at once");
    let lifted = member.lift();
    assert_eq!(play(&mut queue, SECOND / 2), (1..20).collect::<Vec<_>>());
    queue.submit(20, read());
    assert_eq!(play(&mut queue, SECOND / 2), [20]);
    drop(lifted);
    queue.submit(21, read());
    assert_eq!(play(&mut queue, SECOND * 9 / 10), [], "the limits hold again");
    assert_eq!(play(&mut queue, SECOND * 2), [21]);
}
