//! The limits themselves, in virtual time.

use super::group::{Load, Member, State};
use super::rates::NANOS;
use super::{Rate, ThrottleGroup, ThrottleLimits};

const READ: Load = Load { is_write: false, bytes: 4096 };
const WRITE: Load = Load { is_write: true, bytes: 4096 };
const SECOND: u64 = NANOS;

/// A disk in virtual time. It has at most `depth` requests in flight, and each takes `service_ns` below.
struct Disk {
    id: u64,
    depth: usize,
    service_ns: u64,
    /// Times at which requests below end.
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

/// Runs disks against a group. Each looks again when it is told to, up to 60 us late, as a reactor would.
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

/// Checks the rate in each second after the first, and the longest gap.
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
fn after_a_pause_the_rate_holds_from_the_first_second_on() {
    for per_second in [100, 10_000, 200_000] {
        let mut state = group(iops(per_second), 1);
        let mut disks = [disk(0, 256, 0)];
        for begin in [0, 3 * SECOND, 5 * SECOND + SECOND / 20] {
            disks[0].admitted.clear();
            play(&mut state, &mut disks, READ, begin, begin + SECOND, per_second);
            let count = disks[0].admitted.len() as f64;
            let error = (count - per_second as f64).abs();
            assert!(error <= (per_second as f64 * 0.01).max(1.0), "{count} after a pause, not {per_second}");
            state.ends_to_wait(0);
            disks[0].waits = false;
        }
    }
}

#[test]
fn what_a_late_wake_up_has_missed_is_made_up_for() {
    let (per_second, late_ns) = (200_000, 15_000_000);
    let mut state = group(iops(per_second), 1);
    let mut disks = [disk(0, 256, 0)];
    for begin in (0..SECOND).step_by(100_000_000) {
        play(&mut state, &mut disks, READ, begin + late_ns, begin + 100_000_000, begin);
    }
    let count = disks[0].admitted.len() as f64;
    assert!((count / per_second as f64 - 1.0).abs() < 0.002, "{count}");
}

#[test]
fn bytes_are_bounded_as_requests_are() {
    let limits = ThrottleLimits::default().with(|limits| limits.reads.bytes = Rate::of(4096 * 1000));
    let mut state = group(limits, 1);
    let mut disks = [disk(0, 32, 0)];
    play(&mut state, &mut disks, READ, 0, 4 * SECOND, 1);
    judge(&disks[0].admitted, 1000);
    // Writes are not limited.
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
