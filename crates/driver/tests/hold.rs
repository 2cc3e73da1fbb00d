//! Freezing and restoring a device, resetting it, and removing it, with requests in flight and others in line.

mod common;

use block::{Disk, IoErrorKind, Op, OpFlags};
use common::{Character, Device, HandReactor, Setup, setup, setup_dummy, small};
use memory::IoBuf;
use ringdisk_driver::{Driver, DriverPath};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use virtio::blk::Status;

/// Five requests fit into the ring, each of its own sector.
const IN_RING: u64 = 5;

fn flooded(path: DriverPath, requests: u64) -> (Setup, IoBuf) {
    let options = small().with(|options| (options.path, options.indirect) = (path, false));
    let mut setup = setup(Character::default(), options);
    let buf = setup.driver.alloc(512).unwrap();
    for tag in 0..requests {
        setup.queue.submit(tag, Op::write(tag * 1024, buf.whole(), OpFlags::NONE));
    }
    setup.reactor.turn();
    (setup, buf)
}

/// Runs `control` on a thread of its own, as a monitor does, and turns the reactor and the device meanwhile.
fn during(setup: &mut Setup, control: impl Fn(&Driver) -> block::Result<()> + Sync, mut turn: impl FnMut(&mut Device)) {
    let Setup { driver, device, reactor, queue, done, .. } = setup;
    let ended = AtomicBool::new(false);
    let patience = Instant::now() + Duration::from_secs(20);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let result = control(driver);
            ended.store(true, Ordering::SeqCst);
            result
        });
        while !ended.load(Ordering::SeqCst) {
            assert!(Instant::now() < patience, "it never ends");
            reactor.turn();
            // Not before the driver wants its queues.
            if is_held(driver) {
                turn(device);
            }
            queue.harvest(done);
        }
        thread.join().unwrap().unwrap();
    });
    reactor.turn();
    queue.harvest(done);
}

fn is_held(driver: &Driver) -> bool {
    let (_, ctx) = HandReactor::new();
    driver.open_queue(&ctx).err().is_some_and(|error| error.to_string().contains("frozen"))
}

fn end_all(device: &mut Device) {
    while let Some((head, request)) = device.pop().unwrap() {
        drop(request);
        device.complete(head, Status::Ok);
    }
    device.publish();
}

fn tags(setup: &mut Setup, expected: Result<(), IoErrorKind>) -> Vec<u64> {
    let results = setup.results();
    assert!(results.iter().all(|(_, result)| *result == expected), "{results:?}");
    let mut tags: Vec<_> = results.into_iter().map(|(tag, _)| tag).collect();
    tags.sort_unstable();
    tags
}

#[test]
fn a_frozen_device_keeps_requests_and_sends_them_when_it_is_restored() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        let (mut setup, buf) = flooded(path, 12);
        during(&mut setup, Driver::freeze, end_all);
        // What the device had has ended; a queue that was noticed late may have sent a few more.
        let ended = tags(&mut setup, Ok(()));
        assert!(ended.len() as u64 >= IN_RING && ended.len() < 12, "{ended:?}");
        setup.queue.submit(50, Op::write(50 * 1024, buf.whole(), OpFlags::FUA));
        let (_, ctx) = HandReactor::new();
        assert!(setup.driver.open_queue(&ctx).err().unwrap().to_string().contains("frozen"));
        for _ in 0..3 {
            setup.reactor.turn();
            assert!(setup.device.pop().unwrap().is_none(), "the ring is not used");
        }
        assert_eq!(setup.results(), []);
        setup.driver.freeze().unwrap();

        setup.driver.restore().unwrap();
        setup.started = setup.server.ring();
        setup.device = setup.started.queue();
        let seen = setup.serve_all();
        assert_eq!(seen.len() + ended.len(), 12 + 2, "the rest, and data and flush of the last: {seen:?}");
        let mut all = ended;
        all.extend(tags(&mut setup, Ok(())));
        assert_eq!(all, (0..12).chain([50]).collect::<Vec<_>>(), "each once, in order");
        assert_eq!(setup.queue.in_flight(), 0);
        assert!(buf.is_unique());
        setup.driver.restore().unwrap();
    }
}

#[test]
fn a_freeze_that_the_device_does_not_allow_is_given_up() {
    let options = small().with(|options| options.answer_timeout_ms = 300);
    let mut setup = setup(Character::default(), options);
    let buf = setup.driver.alloc(512).unwrap();
    setup.queue.submit(1, Op::read(0, buf.whole()));
    setup.reactor.turn();
    let said = std::sync::Mutex::new(String::new());
    during(
        &mut setup,
        |driver| {
            *said.lock().unwrap() = driver.freeze().unwrap_err().to_string();
            Ok(())
        },
        |_| {},
    );
    assert!(said.lock().unwrap().contains("did not end within 300 ms"), "{said:?}");
    setup.queue.submit(2, Op::Flush);
    assert_eq!(setup.serve_all(), ["read 0+512", "flush"]);
    assert_eq!(setup.results(), [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn a_reset_that_is_given_up_leaves_a_queue_as_it_was_that_did_not_turn_meanwhile() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        let options = small().with(|options| (options.path, options.answer_timeout_ms) = (path, 100));
        let mut setup = setup(Character::default(), options);
        let buf = setup.driver.alloc(512).unwrap();
        setup.queue.submit(1, Op::read(0, buf.whole()));
        setup.reactor.turn();
        let said = setup.driver.reset().unwrap_err().to_string();
        assert!(said.contains("did not end within 100 ms"), "{said}");
        setup.queue.submit(2, Op::Flush);
        assert_eq!(setup.serve_all(), ["read 0+512", "flush"]);
        assert_eq!(setup.results(), [(1, Ok(())), (2, Ok(()))]);
    }
}

#[test]
fn a_queue_dropped_while_frozen_leaves_its_ring_to_the_next() {
    let mut setup = setup(Character::default(), small());
    during(&mut setup, Driver::freeze, end_all);
    setup.queue = setup_dummy();
    setup.driver.restore().unwrap();
    setup.device = setup.server.ring().queue();
    let (reactor, ctx) = HandReactor::new();
    setup.queue = setup.driver.open_queue(&ctx).unwrap();
    setup.reactor = reactor;
    setup.queue.submit(1, Op::Flush);
    assert_eq!(setup.serve_all(), ["flush"]);
    assert_eq!(setup.results(), [(1, Ok(()))]);
}

#[test]
fn a_reset_ends_everything_once_and_the_queue_works_again() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        let (mut setup, buf) = flooded(path, 40);
        // One of those in flight ends well.
        let (head, request) = setup.device.pop().unwrap().unwrap();
        drop(request);
        setup.device.complete(head, Status::Ok);
        setup.device.publish();
        assert_eq!(setup.results().len(), 1);
        during(&mut setup, Driver::reset, |_| {});
        assert_eq!(tags(&mut setup, Err(IoErrorKind::Io)), (1..40).collect::<Vec<_>>());
        assert_eq!(setup.queue.in_flight(), 0);
        assert!(buf.is_unique());
        drop(buf);
        assert!(setup.driver.alloc(1 << 20).is_ok(), "the device is done with all memory");
        setup.device = setup.server.ring().queue();
        setup.queue.submit(1, Op::Flush);
        assert_eq!(setup.serve_all(), ["flush"]);
        assert_eq!(setup.results(), [(1, Ok(()))]);
    }
}

/// A queue of a frozen device waits, so its reactor need not turn during the reset.
#[test]
fn a_reset_of_a_frozen_device_ends_what_waits_and_nothing_later() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        for resets in 1..=2 {
            let (mut setup, buf) = flooded(path, 12);
            during(&mut setup, Driver::freeze, end_all);
            let ended = tags(&mut setup, Ok(())).len();
            for _ in 0..resets {
                setup.driver.reset().unwrap();
                setup.device = setup.server.ring().queue();
            }
            setup.queue.submit(60, Op::Flush);
            assert_eq!(setup.serve_all(), ["flush"], "nothing that waited is sent");
            let (after, before): (Vec<_>, Vec<_>) = setup.results().into_iter().partition(|(tag, _)| *tag == 60);
            assert_eq!(after, [(60, Ok(()))]);
            assert_eq!(before.len() + ended, 12);
            assert!(before.iter().all(|(_, result)| *result == Err(IoErrorKind::Io)), "{before:?}");
            assert_eq!(setup.queue.in_flight(), 0);
            assert!(buf.is_unique());
        }
    }
}

#[test]
fn a_reset_repairs_a_queue_that_the_device_broke() {
    let mut setup = setup(Character::default(), small());
    setup.queue.submit(1, Op::Flush);
    setup.reactor.turn();
    setup.started.put_used(0, 9, 1);
    setup.started.show_used(1);
    assert_eq!(setup.results(), [(1, Err(IoErrorKind::Io))]);
    during(&mut setup, Driver::reset, |_| {});
    setup.device = setup.server.ring().queue();
    setup.queue.submit(2, Op::Flush);
    assert_eq!(setup.serve_all(), ["flush"]);
    assert_eq!(setup.results(), [(2, Ok(()))]);
}

/// The driver's watch looks at the device's signals whenever the device is asked something, and some time later.
#[test]
fn a_reset_repairs_a_queue_that_the_device_gave_up() {
    let mut setup = setup(Character::default(), small());
    for round in 0..2 {
        setup.queue.submit(1, Op::Flush);
        setup.reactor.turn();
        setup.started.give_up();
        assert_eq!(setup.wait_for_end(), [(1, Err(IoErrorKind::Io))], "round {round}");
        during(&mut setup, Driver::reset, |_| {});
        setup.started = setup.server.ring();
        setup.device = setup.started.queue();
        for _ in 0..100 {
            setup.queue.submit(2, Op::Flush);
            assert_eq!(setup.serve_all(), ["flush"], "round {round}");
            assert_eq!(setup.results(), [(2, Ok(()))], "round {round}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_removed_device_ends_everything_once() {
    for path in [DriverPath::Bio, DriverPath::Request] {
        let (mut setup, buf) = flooded(path, 40);
        setup.driver.disconnect().unwrap();
        let ended = setup.wait_for_end();
        assert!(ended.iter().all(|(_, result)| *result == Err(IoErrorKind::Io)), "{ended:?}");
        let mut tags: Vec<_> = ended.into_iter().map(|(tag, _)| tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..40).collect::<Vec<_>>());
        assert!(buf.is_unique());
        assert!(setup.driver.freeze().is_err() && setup.driver.reset().is_err());
    }
}

#[test]
fn a_device_that_goes_while_it_is_frozen_ends_what_waits() {
    let (mut setup, _buf) = flooded(DriverPath::Bio, 12);
    during(&mut setup, Driver::freeze, end_all);
    let ended = tags(&mut setup, Ok(())).len();
    setup.server.hang_up();
    let results = setup.wait_for_end();
    assert_eq!(results.len() + ended, 12);
    assert!(results.iter().all(|(_, result)| *result == Err(IoErrorKind::Io)));
    assert!(setup.driver.restore().is_err());
}
