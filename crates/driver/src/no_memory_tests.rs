//! Tests of a lack of memory for a request: it waits, in its place, and goes on when memory is there.

use crate::Driver;
use crate::DriverPath;
use crate::common::{Character, HandReactor, Server, small};
use block::{Completion, Disk, Op, OpFlags};
use memory::IoBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::Dice;
use virtio::Request;
use virtio::blk::Status;

/// Runs `requests` through a driver that is refused memory as `refuses` says for each attempt. Returns the device's view:
/// sectors, and `None` for each flush.
fn run(path: DriverPath, requests: u64, refuses: impl Fn(u64) -> bool + Send + 'static) -> Vec<Option<u64>> {
    let server = Server::new(Character::default());
    let options = small().with(|options| options.path = path);
    let driver = Driver::connect(&server.path, options).unwrap();
    let mut device = server.ring().queue();
    let attempts = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&attempts);
    for ring in &mut driver.inner.control.rings().parked {
        let (counted, refuses) = (Arc::clone(&counted), &refuses);
        // Decided in advance, so that each ring owns its answers.
        let answers: Vec<bool> = (0..100_000).map(refuses).collect();
        ring.refuse = Some(Box::new(move || {
            let attempt = counted.fetch_add(1, Ordering::Relaxed) as usize;
            answers.get(attempt).copied().unwrap_or(false)
        }));
    }
    let (reactor, ctx) = HandReactor::new();
    let mut queue = driver.open_queue(&ctx).unwrap();
    let buf = IoBuf::zeroed(512);
    for tag in 0..requests {
        // Not neighbours, so that each is one request on both paths.
        let write = Op::write(tag * 1024, buf.whole(), OpFlags::NONE);
        queue.submit(tag, if tag % 10 == 9 { Op::Flush } else { write });
    }
    let (mut seen, mut done, mut idle) = (Vec::new(), Vec::<Completion>::new(), 0);
    while queue.in_flight() > 0 {
        let is_busy = reactor.turn();
        while let Some((head, request)) = device.pop().unwrap() {
            seen.push(match &request {
                Request::Write { sector, .. } => Some(*sector / 2),
                Request::Flush => None,
                other => panic!("{other:?}"),
            });
            drop(request);
            device.complete(head, Status::Ok);
            idle = 0;
        }
        device.publish();
        queue.harvest(&mut done);
        idle += 1;
        assert!(idle < 1000, "{} requests never end", queue.in_flight());
        // A reactor that is not told to go on would sleep, and nothing would wake it.
        assert!(is_busy || queue.in_flight() == 0 || reactor.arm(), "requests wait, and the reactor sleeps");
    }
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    let mut tags: Vec<_> = done.iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..requests), "each ends once");
    assert!(buf.is_unique());
    seen
}

#[test]
fn requests_that_are_refused_memory_wait_in_their_place() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        for seed in 0..20 {
            let refuses = move |attempt: u64| Dice::new(seed * 1_000_003 + attempt).chance(10 + seed * 4);
            let seen = run(path, 100, refuses);
            let expected: Vec<_> = (0..100).map(|tag| (tag % 10 != 9).then_some(tag)).collect();
            assert_eq!(seen, expected, "{path:?}, seed {seed}");
        }
    }
}

#[test]
fn a_lack_of_memory_while_nothing_is_in_flight_ends_when_memory_is_back() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        assert_eq!(run(path, 3, |attempt| attempt < 50), [Some(0), Some(1), Some(2)]);
    }
}
