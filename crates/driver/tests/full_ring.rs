//! Rings that are too small for what is submitted: requests wait in line or in the scheduler, while the device ends those
//! that it has in any order. Nothing is lost, done twice, or carried past a flush.

mod common;

use block::{Op, OpFlags};
use common::{Character, Setup, setup, small};
use memory::IoBuf;
use ringdisk_driver::DriverPath;
use std::collections::{BTreeMap, BTreeSet};
use testkit::Dice;
use virtio::Request;
use virtio::blk::Status;

const REQUESTS: u64 = 512;
/// Every so often comes a flush, or a write that is to be durable.
const FLUSH_EVERY: u64 = 37;

/// What the device saw, in its order: the first sector of each request and its sectors; `None` for a flush.
type Seen = Vec<Option<(u64, u64)>>;

/// Ends what the device has in random order, a few at a time, until all is done. Returns what it saw, and every tag.
fn serve_in_any_order(setup: &mut Setup, dice: &mut Dice) -> (Seen, Vec<u64>) {
    let (mut seen, mut tags, mut held) = (Seen::new(), Vec::new(), Vec::new());
    while setup.queue.in_flight() > 0 {
        setup.reactor.turn();
        while let Some((head, request)) = setup.device.pop().unwrap() {
            seen.push(match &request {
                Request::Read { sector, data, .. } | Request::Write { sector, data, .. } => {
                    Some((*sector, data.length_bytes() as u64 / 512))
                }
                Request::Flush => None,
                other => panic!("{other:?}"),
            });
            if let Request::Read { sector, data, .. } = &request {
                for index in 0..data.length_bytes() / 512 {
                    data.copy_from_slice(index * 512, &(*sector + index as u64).to_le_bytes());
                }
            }
            held.push(head);
        }
        assert!(!held.is_empty(), "{} requests wait for nothing", setup.queue.in_flight());
        dice.shuffle(&mut held);
        let ends = 1 + dice.index(held.len());
        for head in held.drain(..ends) {
            setup.device.complete(head, Status::Ok);
        }
        setup.device.publish();
        for (tag, result) in setup.results() {
            assert_eq!(result, Ok(()), "request {tag}");
            tags.push(tag);
        }
    }
    (seen, tags)
}

/// The operation with this tag: its own sector, so that the device's view tells them apart.
fn op(tag: u64, buf: &IoBuf, dice: &mut Dice) -> Op {
    match tag % FLUSH_EVERY {
        0 => Op::Flush,
        _ if dice.chance(50) => Op::read(tag * 512, buf.whole()),
        _ => Op::write(tag * 512, buf.whole(), OpFlags::NONE),
    }
}

fn floods(path: DriverPath, queue_size: u16, indirect: bool, shared: bool, seed: u64) {
    let options = small().with(|options| {
        (options.path, options.queue_size, options.indirect) = (path, queue_size, indirect);
        options.memory_bytes = 4 << 20;
        options.bounce_bytes = 128 << 10;
    });
    let mut setup = setup(Character::default(), options);
    let mut dice = Dice::new(seed);
    let bufs: Vec<_> =
        (0..REQUESTS).map(|_| if shared { setup.driver.alloc(512).unwrap() } else { IoBuf::zeroed(512) }).collect();
    let mut reads = BTreeSet::new();
    for (tag, buf) in bufs.iter().enumerate() {
        let op = op(tag as u64, buf, &mut dice);
        if matches!(op, Op::Read { .. }) {
            reads.insert(tag);
        }
        setup.queue.submit(tag as u64, op);
    }
    let (seen, mut tags) = serve_in_any_order(&mut setup, &mut dice);
    tags.sort_unstable();
    assert!(tags.iter().copied().eq(0..REQUESTS), "each ends once");
    // The flushes cut what the device saw into parts. Each part holds what was submitted between them, each sector once.
    let parts: Vec<BTreeMap<u64, u64>> =
        seen.split(Option::is_none).map(|part| part.iter().flatten().copied().collect::<BTreeMap<_, _>>()).collect();
    for (index, part) in parts.iter().enumerate().skip(1) {
        let sectors: Vec<_> = part.iter().flat_map(|(first, count)| *first..first + count).collect();
        let first = (index as u64 - 1) * FLUSH_EVERY + 1;
        let expected: Vec<_> = (first..(first + FLUSH_EVERY - 1).min(REQUESTS)).collect();
        assert_eq!(sectors, expected, "between flush {} and the next", index - 1);
    }
    if path == DriverPath::Bio {
        let order: Vec<_> = seen.iter().flatten().map(|(sector, _)| *sector).collect();
        assert!(order.is_sorted(), "first come, first served");
    }
    for (tag, buf) in bufs.iter().enumerate().filter(|(tag, _)| reads.contains(tag)) {
        let mut bytes = [0; 8];
        buf.whole().copy_to_slice(0, &mut bytes);
        assert_eq!(u64::from_le_bytes(bytes), tag as u64, "its own data");
    }
    assert!(bufs.iter().all(IoBuf::is_unique), "no handle stays behind");
    let counters = setup.driver.counters();
    // The serial was asked for, too.
    assert!(counters.wakeups <= REQUESTS && counters.kicks <= REQUESTS + 1, "{counters:?}");
}

#[test]
fn more_requests_than_a_ring_holds_wait_their_turn() {
    let mut seed = 0;
    for path in [DriverPath::Bio, DriverPath::Request] {
        for queue_size in [4, 8, 16] {
            for (indirect, shared) in [(true, true), (false, true), (true, false), (false, false)] {
                seed += 1;
                floods(path, queue_size, indirect, shared, seed);
            }
        }
    }
}

#[test]
fn a_completion_wakes_the_driver_at_most_once() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        let mut setup = setup(
            Character::default(),
            small().with(|options| {
                (options.path, options.queue_size, options.indirect) = (path, 4, false);
            }),
        );
        let buf = setup.driver.alloc(512).unwrap();
        for tag in 0..64 {
            // Not neighbours.
            setup.queue.submit(tag, Op::read(tag * 1024, buf.whole()));
        }
        let mut completions = 0;
        setup.reactor.turn();
        while setup.queue.in_flight() > 0 {
            assert!(!setup.reactor.arm(), "there is nothing to do before the device calls");
            let (head, request) = setup.device.pop().unwrap().expect("the ring is never left empty");
            drop(request);
            assert!(setup.device.pop().unwrap().is_none(), "the ring holds one");
            setup.device.complete(head, Status::Ok);
            assert!(setup.device.publish(), "the driver sleeps");
            setup.reactor.disarm();
            completions += setup.results().len() as u64;
            setup.reactor.turn();
        }
        assert_eq!((completions, setup.driver.counters().wakeups), (64, 64), "{path:?}");
    }
}
