//! A filter that bounds the rate of a disk: requests and bytes a second, of reads, of writes, and of both.
//!
//! Requests that come too fast wait in the order in which they came, reads and writes each in a line of their own. They
//! are let through one by one at even distances, not all at once at the beginning of a period. Flushes never wait.
//!
//! Limits belong to a [`ThrottleGroup`], which disks can share. Disks that wait get equal shares, however many requests
//! each has in flight: a disk that is ahead of another one that waits is held back.

use crate::filters::Filter;
use block::{Completion, DiskQueue, Op, ReactorCtx, Result, Tag, Timer};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Requests for which a line has room from the beginning.
const ROOM: usize = 256;
/// What was not used so recently may be made up for. It covers a late wake-up, so that the rate is kept.
const SLACK_NS: u64 = 1_000_000;
/// A disk may be so far ahead of another one that waits.
const LEAD_NS: u64 = 500_000;
/// A disk that is held back for another one looks again so much later.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
const NANOS: u64 = 1_000_000_000;

/// One bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rate {
    /// Units a second; `None` for no bound.
    pub per_second: Option<u64>,
    /// Units that may come at once after a time without any.
    pub burst: u64,
}

impl Rate {
    /// A bound without bursts.
    #[must_use]
    pub fn of(per_second: u64) -> Self {
        Self { per_second: Some(per_second), burst: 0 }
    }
}

/// The bounds of reads, of writes, or of both together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// Requests.
    pub requests: Rate,
    /// Bytes of data.
    pub bytes: Rate,
}

/// How much of a disk, or of a group of disks, may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ThrottleLimits {
    /// Reads and writes together. Discards and zeroing count as writes without data.
    pub total: Rates,
    /// Reads.
    pub reads: Rates,
    /// Writes.
    pub writes: Rates,
}

impl ThrottleLimits {
    /// Changes some of them: `ThrottleLimits::default().with(|limits| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// One bound, and when it lets the next unit through.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    rate: Rate,
    next_ns: u64,
}

impl Bucket {
    fn cost_ns(&self, units: u64) -> u64 {
        let Some(per_second) = self.rate.per_second else { return 0 };
        let nanos = u128::from(units).saturating_mul(u128::from(NANOS)).div_ceil(u128::from(per_second.max(1)));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    /// From when a request may pass.
    fn opens_ns(&self) -> u64 {
        if self.rate.per_second.is_some() { self.next_ns } else { 0 }
    }

    fn charge(&mut self, now_ns: u64, units: u64) {
        let slack_ns = SLACK_NS.max(self.cost_ns(self.rate.burst));
        self.next_ns = self.next_ns.max(now_ns.saturating_sub(slack_ns)).saturating_add(self.cost_ns(units));
    }

    /// A new bound. What was used before counts as if it had been used under the new one, so that neither a burst nor a
    /// long wait follows.
    fn set(&mut self, now_ns: u64, rate: Rate) {
        self.rate = rate;
        let one_ns = self.cost_ns(1);
        self.next_ns = self.next_ns.clamp(now_ns, now_ns.saturating_add(one_ns));
    }
}

/// What a request is for the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Load {
    is_write: bool,
    bytes: u64,
}

impl Load {
    /// `None` for what never waits.
    fn of(op: &Op) -> Option<Self> {
        match op {
            Op::Read { data, .. } => Some(Self { is_write: false, bytes: data.length_bytes() as u64 }),
            Op::Write { data, .. } => Some(Self { is_write: true, bytes: data.length_bytes() as u64 }),
            Op::Discard { .. } | Op::SecureErase { .. } | Op::WriteZeroes { .. } => {
                Some(Self { is_write: true, bytes: 0 })
            }
            Op::Flush => None,
        }
    }
}

/// One disk of a group.
#[derive(Debug, Clone, Copy, Default)]
struct Member {
    /// Queues of it that have requests waiting.
    waiting: u32,
    /// What it has used of the group, in nanoseconds of the tightest bound.
    used_ns: u64,
}

#[derive(Debug, Default)]
struct State {
    limits: ThrottleLimits,
    /// Requests and bytes of both, of reads, of writes.
    buckets: [[Bucket; 2]; 3],
    members: BTreeMap<u64, Member>,
    next_member: u64,
}

impl State {
    fn concerns(load: Load) -> [usize; 2] {
        [0, if load.is_write { 2 } else { 1 }]
    }

    /// Lets a request of `member` through, or says when to ask again.
    fn take(&mut self, member: u64, now_ns: u64, load: Load) -> Result<(), u64> {
        let kinds = Self::concerns(load);
        let opens_ns = |[requests, bytes]: &[Bucket; 2]| requests.opens_ns().max(bytes.opens_ns());
        let opens_ns = kinds.iter().filter_map(|kind| self.buckets.get(*kind)).map(opens_ns).max().unwrap_or(0);
        if opens_ns > now_ns {
            return Err(opens_ns);
        }
        let others = self.members.iter().filter(|(id, other)| **id != member && other.waiting > 0);
        let behind_ns = others.map(|(_, other)| other.used_ns).min();
        let used_ns = self.members.get(&member).map_or(0, |member| member.used_ns);
        if behind_ns.is_some_and(|behind_ns| used_ns > behind_ns.saturating_add(LEAD_NS)) {
            let again_ns = u64::try_from(LOOK_AGAIN.as_nanos()).unwrap_or(u64::MAX);
            return Err(now_ns.saturating_add(again_ns));
        }
        let mut cost_ns = 0;
        for kind in kinds {
            let Some([requests, bytes]) = self.buckets.get_mut(kind) else { continue };
            cost_ns = cost_ns.max(requests.cost_ns(1)).max(bytes.cost_ns(load.bytes));
            requests.charge(now_ns, 1);
            bytes.charge(now_ns, load.bytes);
        }
        if let Some(member) = self.members.get_mut(&member) {
            member.used_ns = member.used_ns.saturating_add(cost_ns);
        }
        Ok(())
    }

    /// A queue of this member has requests waiting. What it did not use while it had none is lost.
    fn begins_to_wait(&mut self, member: u64) {
        let others = self.members.iter().filter(|(id, other)| **id != member && other.waiting > 0);
        let least_ns = others.map(|(_, other)| other.used_ns).min();
        if let Some(member) = self.members.get_mut(&member) {
            if let (0, Some(least_ns)) = (member.waiting, least_ns) {
                member.used_ns = member.used_ns.max(least_ns);
            }
            member.waiting = member.waiting.saturating_add(1);
        }
    }

    fn ends_to_wait(&mut self, member: u64) {
        if let Some(member) = self.members.get_mut(&member) {
            member.waiting = member.waiting.saturating_sub(1);
        }
    }
}

/// Limits that disks share. They can be changed while disks are in use.
#[derive(Default)]
pub struct ThrottleGroup {
    state: Mutex<State>,
    /// From when nanoseconds count.
    start: OnceLock<Instant>,
}

impl fmt::Debug for ThrottleGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleGroup").field("limits", &self.limits()).finish_non_exhaustive()
    }
}

impl ThrottleGroup {
    /// A group with these limits.
    #[must_use]
    pub fn new(limits: ThrottleLimits) -> Arc<Self> {
        let group = Self::default();
        group.set(0, limits);
        Arc::new(group)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> ThrottleLimits {
        self.lock().limits
    }

    /// Changes its limits. Requests that wait go on under the new ones, without a burst.
    pub fn set_limits(&self, limits: ThrottleLimits) {
        let now_ns = self.start.get().map_or(0, |start| nanos(start.elapsed()));
        self.set(now_ns, limits);
    }

    fn set(&self, now_ns: u64, limits: ThrottleLimits) {
        let mut state = self.lock();
        state.limits = limits;
        let rates = [limits.total, limits.reads, limits.writes];
        for ([requests, bytes], rates) in state.buckets.iter_mut().zip(rates) {
            requests.set(now_ns, rates.requests);
            bytes.set(now_ns, rates.bytes);
        }
    }

    fn now_ns(&self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(*self.start.get_or_init(|| now)))
    }

    fn at(&self, nanos: u64) -> Option<Instant> {
        self.start.get()?.checked_add(Duration::from_nanos(nanos))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// See the module.
#[derive(Debug)]
pub struct Throttle {
    member: Arc<ThrottleMember>,
}

/// A disk's place in its group.
#[derive(Debug)]
pub struct ThrottleMember {
    group: Arc<ThrottleGroup>,
    id: u64,
    waited_ns: AtomicU64,
}

impl ThrottleMember {
    /// The group.
    #[must_use]
    pub fn group(&self) -> &ThrottleGroup {
        &self.group
    }

    /// How long requests of this disk have waited, all together.
    #[must_use]
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }
}

impl Drop for ThrottleMember {
    fn drop(&mut self) {
        self.group.lock().members.remove(&self.id);
    }
}

impl Throttle {
    /// A filter that makes its disk a member of `group`.
    #[must_use]
    pub fn new(group: Arc<ThrottleGroup>) -> Self {
        let id = {
            let mut state = group.lock();
            let id = state.next_member;
            state.next_member = id.saturating_add(1);
            state.members.insert(id, Member::default());
            id
        };
        Self { member: Arc::new(ThrottleMember { group, id, waited_ns: AtomicU64::new(0) }) }
    }

    /// The disk's place in its group.
    #[must_use]
    pub fn member(&self) -> Arc<ThrottleMember> {
        Arc::clone(&self.member)
    }
}

impl Filter for Throttle {
    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let lines = [VecDeque::with_capacity(ROOM), VecDeque::with_capacity(ROOM)];
        Ok(Box::new(ThrottleQueue { below, member: Arc::clone(&self.member), lines, waits: false, timer: ctx.timer() }))
    }
}

struct Waiting {
    since: Instant,
    load: Load,
    tag: Tag,
    op: Op,
}

struct ThrottleQueue {
    below: Box<dyn DiskQueue>,
    member: Arc<ThrottleMember>,
    /// Reads, and writes.
    lines: [VecDeque<Waiting>; 2],
    /// The group knows that this queue waits.
    waits: bool,
    timer: Timer,
}

impl ThrottleQueue {
    /// Submits all that may pass, and sets the timer for the next.
    fn let_pass(&mut self) {
        let group = &self.member.group;
        let now = self.timer.now();
        let now_ns = group.now_ns(now);
        let mut next: Option<Instant> = None;
        let mut pass = [0; 2];
        {
            let mut state = group.lock();
            for (line, pass) in self.lines.iter().zip(&mut pass) {
                for waiting in line {
                    if let Err(again_ns) = state.take(self.member.id, now_ns, waiting.load) {
                        // What is later than any time that there is comes never.
                        next = [next, group.at(again_ns)].into_iter().flatten().min();
                        break;
                    }
                    *pass = usize::saturating_add(*pass, 1);
                }
            }
            let waits = self.lines.iter().zip(pass).any(|(line, pass)| line.len() > pass);
            match (self.waits, waits) {
                (false, true) => state.begins_to_wait(self.member.id),
                (true, false) => state.ends_to_wait(self.member.id),
                _ => {}
            }
            self.waits = waits;
        }
        // Without the lock: a disk in memory carries a request out as it is submitted.
        for (line, pass) in self.lines.iter_mut().zip(pass) {
            for Waiting { since, tag, op, .. } in line.drain(..pass) {
                let waited_ns = nanos(now.saturating_duration_since(since));
                self.member.waited_ns.fetch_add(waited_ns, Ordering::Relaxed);
                self.below.submit(tag, op);
            }
        }
        match next {
            Some(next) => self.timer.set(next),
            None => self.timer.clear(),
        }
    }
}

impl DiskQueue for ThrottleQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let Some(load) = Load::of(&op) else { return self.below.submit(tag, op) };
        let [reads, writes] = &mut self.lines;
        let line = if load.is_write { writes } else { reads };
        let is_first = line.is_empty();
        line.push_back(Waiting { since: self.timer.now(), load, tag, op });
        if is_first {
            self.let_pass();
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.timer.is_due() {
            self.let_pass();
        }
        self.below.harvest(done)
    }

    fn in_flight(&self) -> usize {
        let waiting = self.lines.iter().map(VecDeque::len).fold(0, usize::saturating_add);
        self.below.in_flight().saturating_add(waiting)
    }
}

impl Drop for ThrottleQueue {
    fn drop(&mut self) {
        if self.waits {
            self.member.group.lock().ends_to_wait(self.member.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Load = Load { is_write: false, bytes: 4096 };
    const WRITE: Load = Load { is_write: true, bytes: 4096 };
    const SECOND: u64 = NANOS;

    /// A disk in virtual time: so many requests in flight at most, each of which takes so long below.
    struct Disk {
        id: u64,
        depth: usize,
        service_ns: u64,
        /// Ends of what is below.
        below: Vec<u64>,
        admitted: Vec<u64>,
        waits: bool,
    }

    fn group(limits: ThrottleLimits, disks: usize) -> State {
        let group = ThrottleGroup::default();
        group.set(0, limits);
        let mut state = group.state.into_inner().unwrap();
        state.members.extend((0..disks as u64).map(|id| (id, Member::default())));
        state
    }

    fn iops(per_second: u64) -> ThrottleLimits {
        ThrottleLimits::default().with(|limits| limits.total.requests = Rate::of(per_second))
    }

    fn disk(id: u64, depth: usize, service_ns: u64) -> Disk {
        Disk { id, depth, service_ns, below: Vec::new(), admitted: Vec::new(), waits: false }
    }

    /// Plays disks against a group. Each looks again when it is told to, up to 60 us late, as a reactor would.
    fn play(state: &mut State, disks: &mut [Disk], load: Load, from_ns: u64, until_ns: u64, seed: u64) {
        let mut dice = seed;
        let mut wakes: Vec<u64> = disks.iter().map(|_| from_ns).collect();
        loop {
            let (index, now_ns) = wakes.iter().copied().enumerate().min_by_key(|(_, wake)| *wake).unwrap();
            if now_ns >= until_ns {
                return;
            }
            let disk = &mut disks[index];
            disk.below.retain(|end| *end > now_ns);
            let mut again = u64::MAX;
            while disk.below.len() < disk.depth {
                match state.take(disk.id, now_ns, load) {
                    Ok(()) => {
                        disk.below.push(now_ns + disk.service_ns);
                        disk.admitted.push(now_ns);
                    }
                    Err(at) => {
                        again = at;
                        break;
                    }
                }
            }
            let waits = disk.below.len() < disk.depth;
            match (disk.waits, waits) {
                (false, true) => state.begins_to_wait(disk.id),
                (true, false) => state.ends_to_wait(disk.id),
                _ => {}
            }
            disk.waits = waits;
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let late_ns = (dice >> 33) % 60_000;
            let ends = disk.below.iter().copied().min().unwrap_or(u64::MAX);
            wakes[index] = again.min(ends).max(now_ns + 1).saturating_add(late_ns);
        }
    }

    /// The rate in each second after the first, and the longest gap.
    fn judge(admitted: &[u64], per_second: u64) {
        let seconds = admitted.last().unwrap() / SECOND;
        for second in 1..seconds {
            let range = second * SECOND..(second + 1) * SECOND;
            let count = admitted.iter().filter(|at| range.contains(at)).count() as f64;
            let error = (count - per_second as f64).abs();
            assert!(error <= (per_second as f64 * 0.01).max(1.0), "{count} in second {second}, not {per_second}");
        }
        let longest = admitted.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
        assert!(longest <= 2_000_000.max(2 * SECOND / per_second), "{longest} ns without a request at {per_second}");
    }

    #[test]
    fn any_rate_is_kept_in_every_second_and_evenly() {
        for per_second in [100, 997, 5_000, 33_333, 200_000] {
            let mut state = group(iops(per_second), 1);
            let mut disks = [disk(0, 256, 100_000)];
            play(&mut state, &mut disks, READ, 0, 6 * SECOND, per_second);
            judge(&disks[0].admitted, per_second);
        }
    }

    #[test]
    fn bytes_are_bounded_as_requests_are() {
        let limits = ThrottleLimits::default().with(|limits| limits.reads.bytes = Rate::of(4096 * 1000));
        let mut state = group(limits, 1);
        let mut disks = [disk(0, 32, 0)];
        play(&mut state, &mut disks, READ, 0, 4 * SECOND, 1);
        judge(&disks[0].admitted, 1000);
        // Writes are not.
        assert_eq!((0..100).map(|_| state.take(0, 4 * SECOND, WRITE)).filter(Result::is_ok).count(), 100);
    }

    #[test]
    fn disks_of_a_group_get_equal_shares_however_greedy_one_is() {
        for (others, seed) in [(1, 1), (1, 2), (3, 3)] {
            let per_second = 8_000;
            let mut state = group(iops(per_second), others + 1);
            let mut disks = vec![disk(0, 256, 50_000)];
            disks.extend((1..=others as u64).map(|id| disk(id, 4, 50_000)));
            play(&mut state, &mut disks, READ, 0, 5 * SECOND, seed);
            let all: usize = disks.iter().map(|disk| disk.admitted.len()).sum();
            assert!((all as f64 / (5.0 * per_second as f64) - 1.0).abs() < 0.01, "{all}");
            for disk in &disks {
                let share = disk.admitted.len() as f64 * disks.len() as f64 / all as f64;
                assert!((0.95..=1.05).contains(&share), "disk {} has {share} of its share", disk.id);
            }
        }
    }

    #[test]
    fn what_one_disk_does_not_use_the_others_may() {
        let mut state = group(iops(1000), 2);
        let mut disks = [disk(0, 64, 0), disk(1, 1, 20_000_000)];
        play(&mut state, &mut disks, READ, 0, 5 * SECOND, 4);
        let slow = disks[1].admitted.len();
        assert!((200..=260).contains(&slow), "a disk of 50 requests a second has {slow} in five");
        assert!(disks[0].admitted.len() + slow >= 4_950);
    }

    #[test]
    fn a_new_limit_holds_at_once_and_without_a_burst() {
        let mut state = group(iops(100), 1);
        let mut disks = [disk(0, 64, 0)];
        play(&mut state, &mut disks, READ, 0, 2 * SECOND, 5);
        for (from, per_second) in [(2, 10_000), (4, 50), (6, 1_000)] {
            for [requests, _] in &mut state.buckets[..1] {
                requests.set(from * SECOND, Rate::of(per_second));
            }
            disks[0].admitted.clear();
            play(&mut state, &mut disks, READ, from * SECOND, (from + 2) * SECOND, 6);
            let first_tenth = disks[0].admitted.iter().filter(|at| **at < from * SECOND + SECOND / 10).count() as u64;
            assert!(first_tenth <= per_second / 10 + per_second / 500 + 2, "{first_tenth} at {per_second}");
            let count = disks[0].admitted.len() as u64;
            assert!(count.abs_diff(2 * per_second) <= per_second / 50 + 2, "{count} at {per_second}");
        }
    }

    #[test]
    fn a_burst_passes_once_and_comes_back_with_time() {
        let limits =
            ThrottleLimits::default().with(|limits| limits.total.requests = Rate { per_second: Some(100), burst: 50 });
        let mut state = group(limits, 1);
        let count = |state: &mut State, now| (0..200).take_while(|_| state.take(0, now, READ).is_ok()).count();
        assert!((50..=52).contains(&count(&mut state, 10 * SECOND)));
        assert!(count(&mut state, 10 * SECOND + SECOND / 10) <= 11);
        assert!((50..=52).contains(&count(&mut state, 20 * SECOND)));
    }

    #[test]
    fn without_limits_nothing_waits() {
        let mut state = group(ThrottleLimits::default(), 1);
        assert!((0..1000).all(|_| state.take(0, 0, WRITE).is_ok()));
    }
}
