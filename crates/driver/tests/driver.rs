//! The driver against a device that the test plays by hand: what it sends, in which order, and how it takes answers,
//! wrong ones included.

mod common;

use block::{Disk, IoErrorKind, Op, OpFlags, Priority};
use common::{Character, HandReactor, Server, pattern, read, setup, setup_dummy, small, write};
use memory::IoBuf;
use ringdisk_driver::{Driver, DriverOptions};
use virtio::Request;
use virtio::blk::{Geometry, Status, features};

#[test]
fn the_disk_is_what_the_configuration_space_says() {
    let mut character = Character::default();
    character.config.blk_size_bytes = 4096;
    character.config.discard_sector_alignment = 16;
    character.features |= features::RO;
    let setup = setup(character, small());
    let info = setup.driver.info();
    assert_eq!((info.size_bytes, info.logical_block_bytes, info.read_only), (8192 * 512, 4096, true));
    assert_eq!((info.serial.as_str(), info.volatile_cache, info.write_zeroes), ("fake-0001", true, false));
    assert_eq!((info.discard, info.discard_granularity_bytes), (false, 8192));
}

#[test]
fn shared_memory_is_named_as_it_is_and_other_memory_is_copied() {
    for (indirect, event_idx) in [(true, true), (false, false)] {
        let mut setup = setup(
            Character::default(),
            small().with(|options| {
                options.indirect = indirect;
                options.event_idx = event_idx;
            }),
        );
        let (own, expected) = (pattern(200 << 10, 1), pattern(200 << 10, 1).whole().to_vec());
        let shared = setup.driver.alloc(200 << 10).unwrap();
        shared.whole().copy_from(0, &own.whole());
        for buf in [&own, &shared] {
            setup.queue.submit(1, write(1024, buf, false));
            let mut written = Vec::new();
            setup.serve(|request| {
                let Request::Write { sector: 2, data, .. } = request else { panic!("{request:?}") };
                written = data.to_vec();
                Status::Ok
            });
            assert!(written == expected, "indirect {indirect}");
            let answer = pattern(buf.length_bytes(), 77);
            setup.queue.submit(2, read(0, buf));
            setup.serve(|request| {
                let Request::Read { sector: 0, data, .. } = request else { panic!("{request:?}") };
                data.copy_from(0, &answer.whole());
                Status::Ok
            });
            assert_eq!(setup.results(), [(1, Ok(())), (2, Ok(()))]);
            assert!(buf.whole().to_vec() == answer.whole().to_vec(), "indirect {indirect}");
        }
        assert!(own.is_unique() && shared.is_unique(), "no handle stays behind");
    }
}

#[test]
fn requests_are_cut_to_the_limits_of_the_device() {
    let mut character = Character::default();
    character.features |= features::SIZE_MAX;
    character.config.size_max_bytes = 3000;
    character.config.seg_max = 2;
    let mut setup = setup(character, small());
    let shared = setup.driver.alloc(8192).unwrap();
    shared.whole().copy_from(0, &pattern(8192, 3).whole());
    // Pieces that end inside of blocks: 100 + 3996 + 4096 bytes.
    let whole = shared.whole();
    let odd = IoBuf::gather(vec![whole.slice(0, 100), whole.slice(100, 3996), whole.slice(4096, 4096)]);
    for buf in [odd, pattern(8192, 3)] {
        setup.queue.submit(5, write(0, &buf, false));
        let (mut written, mut next) = (vec![0; 8192], 0);
        while next < 16 {
            setup.serve(|request| {
                let Request::Write { sector, data, .. } = request else { panic!("{request:?}") };
                assert_eq!(*sector, next);
                assert!(data.segment_count() <= 2);
                data.for_each_segment(|segment| assert!(segment.length_bytes() <= 3000));
                data.copy_to_slice(0, &mut written[*sector as usize * 512..]);
                next += data.length_bytes() as u64 / 512;
                Status::Ok
            });
        }
        assert!(written == pattern(8192, 3).whole().to_vec());
        assert_eq!(setup.results(), [(5, Ok(()))]);
    }
    for (offset, length, op) in [(0, 100 * 512, "discard"), (512, 65 * 512, "writezeroes")] {
        setup.queue.submit(
            6,
            match op {
                "discard" => Op::Discard { offset, length },
                _ => Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE },
            },
        );
        let seen = setup.serve_all();
        let first = offset / 512;
        assert_eq!(seen.len(), 2, "{seen:?}");
        assert!(seen[0].contains(&format!("sector: {first}, sector_count: 64,")), "{seen:?}");
        let rest = length / 512 - 64;
        assert!(seen[1].contains(&format!("sector: {}, sector_count: {rest},", first + 64)), "{seen:?}");
        assert_eq!(setup.results(), [(6, Ok(()))]);
    }
}

#[test]
fn an_erase_is_cut_where_the_device_works_in_whole_units() {
    let mut setup = setup(Character::default(), small());
    assert!(setup.driver.facts().secure_erase);
    // Sectors 3 to 132, at most 64 at once, in units of eight: cut at 64 and 128.
    setup.queue.submit(7, Op::SecureErase { offset: 3 * 512, length: 129 * 512 });
    let expected = [(3, 61), (64, 64), (128, 4)].map(|(sector, count)| {
        format!("secureerase rangesegment {{ sector: {sector}, sector_count: {count}, flags: 0 }}")
    });
    assert_eq!(setup.serve_all(), expected);
    assert_eq!(setup.results(), [(7, Ok(()))]);
    setup.queue.submit(8, Op::SecureErase { offset: 0, length: 512 });
    setup.serve(|_| Status::IoErr);
    assert_eq!(setup.results(), [(8, Err(IoErrorKind::Io))]);
}

#[test]
fn what_does_not_fit_waits_in_line_and_nothing_overtakes_a_flush() {
    // Without indirect descriptors sixteen entries hold five requests.
    let mut setup = setup(Character::default(), small().with(|options| options.indirect = false));
    let bufs: Vec<_> = (0..20).map(|_| setup.driver.alloc(512).unwrap()).collect();
    for (tag, buf) in bufs.iter().enumerate() {
        setup.queue.submit(tag as u64, write(tag as u64 * 512, buf, false));
        if tag == 12 {
            setup.queue.submit(100, Op::Flush);
        }
    }
    assert_eq!(setup.queue.in_flight(), 21);
    let mut expected: Vec<_> = (0..20).map(|tag| format!("write {tag}+512")).collect();
    expected.insert(13, "flush".into());
    assert_eq!(setup.serve_all(), expected);
    let tags: Vec<_> = setup.results().into_iter().map(|(tag, _)| tag).collect();
    assert_eq!(tags, (0..13).chain([100]).chain(13..20).collect::<Vec<_>>());
    assert_eq!(setup.queue.in_flight(), 0);
}

#[test]
fn bounce_buffers_run_out_and_come_back() {
    let mut setup = setup(Character::default(), small().with(|options| options.bounce_bytes = 128 << 10));
    let bufs: Vec<_> = (0..3).map(|seed| pattern(256 << 10, seed)).collect();
    for (tag, buf) in bufs.iter().enumerate() {
        setup.queue.submit(tag as u64, write((tag as u64) << 18, buf, false));
    }
    let mut written = vec![0; 768 << 10];
    while setup.queue.in_flight() > 0 {
        let seen = setup.serve(|request| {
            let Request::Write { sector, data, .. } = request else { panic!("{request:?}") };
            data.copy_to_slice(0, &mut written[*sector as usize * 512..]);
            Status::Ok
        });
        assert!(!seen.is_empty());
        setup.queue.harvest(&mut setup.done);
    }
    let expected: Vec<u8> = bufs.iter().flat_map(|buf| buf.whole().to_vec()).collect();
    assert!(written == expected);
}

#[test]
fn fua_is_data_then_flush_where_the_cache_is_volatile() {
    let mut character = Character::default();
    character.features |= features::CONFIG_WCE;
    character.config.writeback = 1;
    let mut setup = setup(character, small());
    let buf = setup.driver.alloc(512).unwrap();
    setup.queue.submit(1, write(0, &buf, true));
    assert_eq!(setup.serve(|_| Status::Ok), ["write 0+512"]);
    assert_eq!(setup.results(), [], "not before the flush");
    assert_eq!(setup.serve(|_| Status::IoErr), ["flush"]);
    assert_eq!(setup.results(), [(1, Err(IoErrorKind::Io))]);

    setup.queue.submit(2, Op::WriteZeroes { offset: 0, length: 512, may_unmap: false, flags: OpFlags::FUA });
    assert_eq!(setup.serve(|_| Status::IoErr).len(), 1);
    assert_eq!(setup.results(), [(2, Err(IoErrorKind::Io))], "no flush after data that failed");
}

#[test]
fn preflush_is_flush_then_data_and_where_the_flush_fails_no_data_are_sent() {
    let mut character = Character::default();
    character.features |= features::CONFIG_WCE;
    character.config.writeback = 1;
    let mut setup = setup(character, small());
    let buf = setup.driver.alloc(512).unwrap();
    let both = OpFlags::PREFLUSH | OpFlags::FUA;
    setup.queue.submit(1, Op::write(0, buf.whole(), both));
    for step in ["flush", "write 0+512", "flush"] {
        assert_eq!(setup.results(), [], "not before the {step}");
        assert_eq!(setup.serve(|_| Status::Ok), [step]);
    }
    assert_eq!(setup.results(), [(1, Ok(()))]);

    setup.queue.submit(2, Op::write(0, buf.whole(), both));
    assert_eq!(setup.serve(|_| Status::IoErr), ["flush"]);
    assert_eq!(setup.results(), [(2, Err(IoErrorKind::Io))]);
    assert!(setup.serve_all().is_empty(), "its data are not sent");

    setup.queue.submit(3, Op::write(0, memory::Window::empty(), OpFlags::PREFLUSH));
    assert_eq!(setup.serve(|_| Status::Ok), ["flush"], "without data it is a flush alone");
    assert_eq!(setup.results(), [(3, Ok(()))]);
}

#[test]
fn a_transfers_priority_is_in_its_header() {
    let mut setup = setup(Character::default(), small());
    let buf = setup.driver.alloc(512).unwrap();
    let priority = Priority::best_effort(3);
    setup.queue.submit(1, Op::Read { offset: 0, data: buf.whole(), priority });
    setup.queue.submit(2, Op::Write { offset: 0, data: buf.whole(), flags: OpFlags::NONE, priority });
    let mut found = Vec::new();
    setup.serve(|request| {
        if let Request::Read { priority, .. } | Request::Write { priority, .. } = request {
            found.push(*priority);
        }
        Status::Ok
    });
    assert_eq!(found, [u32::from(priority.ioprio()); 2]);
}

#[test]
fn impossible_requests_are_refused_without_the_device() {
    let mut setup = setup(Character { features: 0, ..Character::default() }, small());
    let (buf, odd) = (IoBuf::zeroed(512), IoBuf::zeroed(100));
    let end = setup.driver.info().size_bytes;
    for (tag, op) in
        [read(end, &buf), read(u64::MAX - 511, &buf), read(1, &buf), write(0, &odd, false)].into_iter().enumerate()
    {
        setup.queue.submit(tag as u64, op);
        assert_eq!(setup.results(), [(tag as u64, Err(IoErrorKind::OutOfRange))]);
    }
    setup.queue.submit(8, Op::SecureErase { offset: 0, length: 512 });
    setup.queue.submit(9, Op::Discard { offset: 0, length: 512 });
    setup.queue.submit(10, Op::read(0, memory::Window::empty()));
    let unsupported = Err(IoErrorKind::Unsupported);
    assert_eq!(setup.results(), [(8, unsupported), (9, unsupported), (10, Ok(()))]);
    // A device without write-zeroes gets zeros, with one segment a request because it does not say SEG_MAX.
    setup.queue.submit(11, Op::WriteZeroes { offset: 0, length: 70 << 10, may_unmap: true, flags: OpFlags::FUA });
    setup.reactor.turn();
    let mut zeros = 0;
    setup.serve(|request| {
        let Request::Write { data, .. } = request else { panic!("{request:?}") };
        assert!(data.is_zero() && data.segment_count() == 1);
        zeros += data.length_bytes();
        Status::Ok
    });
    assert_eq!((zeros, setup.results()), (70 << 10, vec![(11, Ok(()))]));
}

#[test]
fn statuses_of_the_device_become_errors_of_the_request() {
    let mut setup = setup(Character::default(), small());
    let buf = IoBuf::zeroed(512);
    for (tag, status, expected) in
        [(1, Status::IoErr, Err(IoErrorKind::Io)), (2, Status::Unsupported, Err(IoErrorKind::Unsupported))]
    {
        setup.queue.submit(tag, read(0, &buf));
        setup.serve(|_| status);
        assert_eq!(setup.results(), [(tag, expected)]);
    }
    assert!(buf.is_unique());
}

#[test]
fn the_device_is_kicked_once_a_batch_and_calls_only_a_sleeper() {
    let mut setup = setup(Character::default(), small());
    let buf = setup.driver.alloc(512).unwrap();
    // A device that has just started calls once in any case: it cannot know what the driver has seen.
    setup.queue.submit(9, read(0, &buf));
    setup.serve(|_| Status::Ok);
    setup.results();
    setup.started.kicks();
    assert!(!setup.device.ring_mut().enable_notifications());
    for tag in 0..5 {
        setup.queue.submit(tag, read(0, &buf));
    }
    assert_eq!(setup.started.kicks(), 0, "submitting only pushes");
    setup.reactor.turn();
    assert_eq!(setup.started.kicks(), 1);

    let (head, _) = setup.device.pop().unwrap().unwrap();
    setup.device.complete(head, Status::Ok);
    assert!(!setup.device.publish(), "the driver looks by itself");
    assert!(setup.reactor.arm(), "something came before the callbacks were on");
    setup.reactor.disarm();
    assert_eq!(setup.results().len(), 1);
    assert!(!setup.reactor.arm());
    let (head, _) = setup.device.pop().unwrap().unwrap();
    setup.device.complete(head, Status::Ok);
    assert!(setup.device.publish(), "the driver sleeps");
    setup.reactor.disarm();
    let (head, _) = setup.device.pop().unwrap().unwrap();
    setup.device.complete(head, Status::Ok);
    assert!(!setup.device.publish(), "the driver is awake");
    let counters = setup.driver.counters();
    assert_eq!(counters.wakeups, 2);
}

#[test]
fn a_device_that_uses_what_it_was_not_given_fails_the_queue() {
    // A name that cannot be, one that is not in flight, more than was given.
    for (id, count) in [(99, 1), (7, 1), (7, 9)] {
        let mut setup = setup(Character::default(), small());
        let buf = IoBuf::zeroed(512);
        setup.queue.submit(1, read(0, &buf));
        setup.queue.submit(2, read(0, &buf));
        setup.reactor.turn();
        setup.started.put_used(0, id, 0);
        setup.started.show_used(count);
        assert_eq!(setup.results(), [(1, Err(IoErrorKind::Io)), (2, Err(IoErrorKind::Io))]);
        assert!(buf.is_unique());
        setup.queue.submit(3, Op::Flush);
        assert_eq!(setup.results(), [(3, Err(IoErrorKind::Io))], "it stays failed");
        assert_eq!(setup.queue.in_flight(), 0);
    }
}

#[test]
fn a_read_that_the_device_gives_another_length_has_failed() {
    for written in [0, 1, 512, 514, u32::MAX] {
        let mut setup = setup(Character::default(), small());
        let buf = setup.driver.alloc(512).unwrap();
        setup.queue.submit(1, read(0, &buf));
        setup.reactor.turn();
        let (head, request) = setup.device.pop().unwrap().unwrap();
        // The status is good.
        setup.device.complete(head, Status::Ok);
        drop(request);
        setup.started.put_used(0, head, written);
        setup.device.publish();
        assert_eq!(setup.results(), [(1, Err(IoErrorKind::Io))], "{written} bytes");
        setup.queue.submit(2, write(0, &buf, false));
        setup.serve(|_| Status::Ok);
        assert_eq!(setup.results(), [(2, Ok(()))]);
    }
}

#[test]
fn a_status_that_was_not_written_is_an_error() {
    let mut setup = setup(Character::default(), small());
    setup.queue.submit(1, Op::Flush);
    setup.reactor.turn();
    let (head, _) = setup.device.pop().unwrap().unwrap();
    setup.started.put_used(0, head, 1);
    setup.started.show_used(1);
    assert_eq!(setup.results(), [(1, Err(IoErrorKind::Io))]);
}

#[test]
fn a_device_that_is_silent_for_too_long_is_given_up() {
    let mut setup = setup(Character::default(), small().with(|options| options.request_timeout_ms = 100));
    let buf = setup.driver.alloc(512).unwrap();
    for tag in 0..20 {
        setup.queue.submit(tag, read(0, &buf));
    }
    let results = setup.wait_for_end();
    assert_eq!(results.len(), 20);
    assert!(results.iter().all(|(_, result)| *result == Err(IoErrorKind::Io)));
    assert!(!setup.driver.is_disconnected(), "only the queue is given up");
}

#[test]
fn a_device_without_requests_may_be_silent_for_ever() {
    let mut setup = setup(Character::default(), small().with(|options| options.request_timeout_ms = 40));
    let pause = || std::thread::sleep(std::time::Duration::from_millis(120));
    pause();
    setup.queue.submit(1, Op::Flush);
    assert_eq!(setup.serve_all(), ["flush"]);
    assert_eq!(setup.results(), [(1, Ok(()))]);
    pause();
    // One that nobody waits for.
    setup.queue.submit(2, Op::Flush);
    setup.reactor.turn();
    setup.queue = setup_dummy();
    pause();
    let (reactor, ctx) = HandReactor::new();
    (setup.queue, setup.reactor) = (setup.driver.open_queue(&ctx).unwrap(), reactor);
    setup.queue.submit(3, Op::Flush);
    assert_eq!(setup.serve_all(), ["flush", "flush"]);
    assert_eq!(setup.results(), [(3, Ok(()))]);
}

#[test]
fn what_the_device_changes_later_but_may_not_is_not_believed() {
    let mut character = Character::default();
    character.features |= features::CONFIG_WCE;
    character.config.writeback = 1;
    let setup = setup(character, small());
    let before = setup.driver.info();
    setup.server.change(|character| {
        character.config.blk_size_bytes = 0;
        character.config.seg_max = 0;
    });
    // Reads the configuration anew.
    setup.driver.set_volatile_cache(false);
    let after = setup.driver.info();
    assert_eq!(after, block::DiskInfo { volatile_cache: false, ..before });
}

#[test]
fn facts_have_the_defaults_of_the_specification() {
    let setup = setup(Character { features: 0, ..Character::default() }, small());
    let facts = setup.driver.facts();
    assert_eq!((facts.max_segments, facts.max_segment_bytes, facts.alignment_offset_bytes), (1, None, 0));
    let Geometry { cylinders, heads, sectors } = facts.geometry;
    assert_eq!((cylinders, heads, sectors), (8192 / (64 * 32), 64, 32));
    drop(setup);

    let mut character = Character::default();
    character.features |= features::GEOMETRY | features::SIZE_MAX | features::TOPOLOGY;
    character.config.geometry = Geometry { cylinders: 3, heads: 4, sectors: 5 };
    character.config.size_max_bytes = 65536;
    character.config.alignment_offset = 3;
    let facts = common::setup(character, small()).driver.facts();
    assert_eq!((facts.geometry.cylinders, facts.geometry.heads, facts.geometry.sectors), (3, 4, 5));
    assert_eq!((facts.max_segments, facts.max_segment_bytes), (126, Some(65536)));
    assert_eq!(facts.alignment_offset_bytes, 3 * 512);
}

#[test]
fn callbacks_that_are_kept_come_while_the_driver_looks_by_itself() {
    for event_idx in [true, false] {
        for keep in [true, false] {
            let options = small().with(|options| (options.keep_callbacks, options.event_idx) = (keep, event_idx));
            let mut setup = setup(Character::default(), options);
            let mut calls = 0;
            for tag in 0..8 {
                setup.queue.submit(tag, Op::Flush);
                setup.reactor.turn();
                let (head, _) = setup.device.pop().unwrap().unwrap();
                setup.device.complete(head, Status::Ok);
                calls += u32::from(setup.device.publish());
                setup.results();
            }
            // A device that has just started calls once in any case.
            assert!(if keep { calls >= 7 } else { calls <= 1 }, "keep {keep}, event_idx {event_idx}: {calls}");
        }
    }
}

#[test]
fn requests_end_when_the_server_goes_or_gives_the_ring_up() {
    for goes in [true, false] {
        let mut setup = setup(Character::default(), small());
        let buf = IoBuf::zeroed(512);
        for tag in 0..40 {
            setup.queue.submit(tag, write(0, &buf, false));
        }
        setup.reactor.turn();
        let (head, _) = setup.device.pop().unwrap().unwrap();
        setup.device.complete(head, Status::Ok);
        setup.device.publish();
        if goes {
            setup.server.hang_up()
        } else {
            setup.started.give_up()
        }
        let results = setup.wait_for_end();
        assert_eq!(results.len(), 40);
        assert_eq!(results.iter().filter(|(_, result)| result.is_ok()).count(), 1, "what was completed counts");
        assert_eq!(setup.driver.is_disconnected(), goes);
    }
}

#[test]
fn a_queue_dropped_in_flight_keeps_its_memory_and_its_ring() {
    let mut setup = setup(Character::default(), small());
    let buf = setup.driver.alloc(1 << 20).unwrap();
    setup.queue.submit(1, read(0, &buf));
    let (_, ctx) = HandReactor::new();
    assert!(setup.driver.open_queue(&ctx).is_err(), "the only queue is open");
    setup.queue = setup_dummy();
    assert_eq!(setup.reactor.pollers(), 0);
    drop(buf);
    assert!(setup.driver.alloc(1).is_err(), "the device may still write there");

    let (reactor, ctx) = HandReactor::new();
    setup.queue = setup.driver.open_queue(&ctx).unwrap();
    setup.reactor = reactor;
    setup.queue.submit(2, Op::Flush);
    assert_eq!(setup.serve(|_| Status::Ok), ["read 0+1048576", "flush"]);
    assert_eq!(setup.results(), [(2, Ok(()))], "nobody hears of the other");
    assert!(setup.driver.alloc(1 << 20).is_ok());
}

#[test]
fn a_disconnected_driver_fails_everything_after() {
    let mut setup = setup(Character::default(), small());
    setup.driver.disconnect().unwrap();
    setup.queue.submit(1, Op::Flush);
    assert_eq!(setup.wait_for_end(), [(1, Err(IoErrorKind::Io))]);
    let (_, ctx) = HandReactor::new();
    assert!(setup.driver.open_queue(&ctx).is_err());
    drop(setup.driver);
    setup.queue.submit(2, Op::Flush);
    assert_eq!(setup.queue.in_flight(), 1, "a queue outlives its driver");
}

#[test]
fn a_server_that_does_not_fit_is_refused_with_the_reason() {
    let refused = |character: Character, options: DriverOptions| {
        let server = Server::new(character);
        Driver::connect(&server.path, options).unwrap_err().to_string()
    };
    let with = |change: fn(&mut Character)| {
        let mut character = Character::default();
        change(&mut character);
        character
    };
    let two = small().with(|options| options.queues = 2);
    assert!(refused(Character::default(), two).contains("2 queues asked for, the server has 1"));
    let odd = with(|character| character.config.blk_size_bytes = 1000);
    assert!(refused(odd, small()).contains("blocks of 1000 bytes"));
    let tiny = with(|character| {
        character.features |= features::SIZE_MAX;
        character.config.size_max_bytes = 100;
    });
    assert!(refused(tiny, small()).contains("segments of 100 bytes"));
    let huge = with(|character| character.config.capacity_sectors = u64::MAX);
    assert!(refused(huge, small()).contains("claims"));
    let nowhere = Driver::connect("/nonexistent/socket", small()).unwrap_err().to_string();
    assert!(nowhere.contains("/nonexistent/socket"), "{nowhere}");
}

#[test]
fn a_server_that_does_not_answer_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("silent.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let options = small().with(|options| options.answer_timeout_ms = 50);
    let error = Driver::connect(&path, options).unwrap_err().to_string();
    assert!(error.contains("no answer within 50 ms"), "{error}");
}
