//! Limits that disks share fairly.

use super::rates::{Bucket, SLACK_NS, ThrottleLimits};
use block::Op;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How far a disk may be ahead of another disk that waits.
const LEAD_NS: u64 = 500_000;
/// After this time, a disk that is held back for another disk looks again.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// What a request costs of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) is_write: bool,
    pub(super) bytes: u64,
}

impl Load {
    /// Returns the request's load; `None` for a request that never waits.
    pub(super) fn of(op: &Op) -> Option<Self> {
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
pub(super) struct Member {
    /// How many of its queues have waiting requests.
    waiting: u32,
    /// Its use of the group's limits, in nanoseconds of the tightest one.
    used_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct State {
    limits: ThrottleLimits,
    /// For all requests, for reads, and for writes: the limit of requests and the limit of bytes.
    pub(super) buckets: [[Bucket; 2]; 3],
    pub(super) members: BTreeMap<u64, Member>,
    next_member: u64,
    /// When a request last passed, or was found to wait.
    last_ns: u64,
}

impl State {
    fn concerns(load: Load) -> [usize; 2] {
        [0, if load.is_write { 2 } else { 1 }]
    }

    /// Lets a request of `member` through, or returns when to ask again.
    pub(super) fn take(&mut self, member: u64, now_ns: u64, load: Load) -> Result<(), u64> {
        self.look_for_pause(now_ns);
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

    /// Notices that nobody has asked for anything for longer than any thread is kept from its work.
    fn look_for_pause(&mut self, now_ns: u64) {
        let is_long = now_ns.saturating_sub(self.last_ns) > SLACK_NS;
        if is_long && self.members.values().all(|member| member.waiting == 0) {
            self.buckets.iter_mut().flatten().for_each(|bucket| bucket.forget_pause(now_ns));
        }
        self.last_ns = now_ns;
    }

    /// Notes that another queue of this member has waiting requests. The share that the member did not use while it had
    /// none is lost.
    pub(super) fn begins_to_wait(&mut self, member: u64) {
        let others = self.members.iter().filter(|(id, other)| **id != member && other.waiting > 0);
        let least_ns = others.map(|(_, other)| other.used_ns).min();
        if let Some(member) = self.members.get_mut(&member) {
            if let (0, Some(least_ns)) = (member.waiting, least_ns) {
                member.used_ns = member.used_ns.max(least_ns);
            }
            member.waiting = member.waiting.saturating_add(1);
        }
    }

    pub(super) fn ends_to_wait(&mut self, member: u64) {
        if let Some(member) = self.members.get_mut(&member) {
            member.waiting = member.waiting.saturating_sub(1);
        }
    }
}

/// Limits that disks share. They can be changed while disks are in use.
#[derive(Default)]
pub struct ThrottleGroup {
    pub(super) state: Mutex<State>,
    /// The time from which nanoseconds count.
    start: OnceLock<Instant>,
}

impl fmt::Debug for ThrottleGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleGroup").field("limits", &self.limits()).finish_non_exhaustive()
    }
}

impl ThrottleGroup {
    /// Makes a group with these limits.
    #[must_use]
    pub fn new(limits: ThrottleLimits) -> Arc<Self> {
        let group = Self::default();
        group.set(0, limits);
        Arc::new(group)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the limits.
    #[must_use]
    pub fn limits(&self) -> ThrottleLimits {
        self.lock().limits
    }

    /// Changes the limits. Waiting requests go on under the new ones, without a burst.
    pub fn set_limits(&self, limits: ThrottleLimits) {
        let now_ns = self.start.get().map_or(0, |start| nanos(start.elapsed()));
        self.set(now_ns, limits);
    }

    pub(super) fn set(&self, now_ns: u64, limits: ThrottleLimits) {
        let mut state = self.lock();
        state.limits = limits;
        let rates = [limits.total, limits.reads, limits.writes];
        for ([requests, bytes], rates) in state.buckets.iter_mut().zip(rates) {
            requests.set(now_ns, rates.requests);
            bytes.set(now_ns, rates.bytes);
        }
    }

    /// Adds a disk and returns its number.
    pub(super) fn join(&self) -> u64 {
        let mut state = self.lock();
        let id = state.next_member;
        state.next_member = id.saturating_add(1);
        state.members.insert(id, Member::default());
        id
    }

    pub(super) fn leave(&self, member: u64) {
        self.lock().members.remove(&member);
    }

    pub(super) fn now_ns(&self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(*self.start.get_or_init(|| now)))
    }

    pub(super) fn at(&self, nanos: u64) -> Option<Instant> {
        self.start.get()?.checked_add(Duration::from_nanos(nanos))
    }
}

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
