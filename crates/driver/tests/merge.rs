//! The request path: what is merged, sorted and kept apart.

mod common;

use block::{IoErrorKind, Op, OpFlags, Priority};
use common::{Character, Setup, pattern, setup, small};
use memory::IoBuf;
use ringdisk_driver::{DriverOptions, DriverPath};
use virtio::Request;
use virtio::blk::{Status, features};

fn request_path() -> DriverOptions {
    small().with(|options| {
        options.path = DriverPath::Request;
        options.queue_size = 64;
        options.memory_bytes = 4 << 20;
    })
}

fn start(change: impl FnOnce(&mut Character)) -> Setup {
    let mut character = Character::default();
    change(&mut character);
    setup(character, request_path())
}

fn write(sector: u64, buf: &IoBuf) -> Op {
    Op::write(sector * 512, buf.whole(), OpFlags::NONE)
}

fn read(sector: u64, buf: &IoBuf) -> Op {
    Op::read(sector * 512, buf.whole())
}

#[test]
fn neighbours_are_one_request_in_the_disks_order() {
    for shared in [true, false] {
        let mut setup = start(|_| {});
        let bufs: Vec<_> = (0..8)
            .map(|seed| {
                let own = pattern(4096, seed);
                let buf = if shared { setup.driver.alloc(4096).unwrap() } else { IoBuf::zeroed(4096) };
                buf.whole().copy_from(0, &own.whole());
                buf
            })
            .collect();
        for (tag, order) in [5, 2, 7, 0, 1, 6, 3, 4].into_iter().enumerate() {
            setup.queue.submit(tag as u64, write(order * 8, &bufs[order as usize]));
        }
        let mut written = Vec::new();
        let seen = setup.serve(|request| {
            let Request::Write { data, .. } = request else { panic!("{request:?}") };
            written = data.to_vec();
            Status::Ok
        });
        assert_eq!(seen, ["write 0+32768"]);
        let expected: Vec<u8> = bufs.iter().flat_map(|buf| buf.whole().to_vec()).collect();
        assert!(written == expected, "shared {shared}");
        let mut tags: Vec<_> = setup.results();
        tags.sort_unstable_by_key(|(tag, _)| *tag);
        assert_eq!(tags, (0..8).map(|tag| (tag, Ok(()))).collect::<Vec<_>>());
        for (tag, buf) in bufs.iter().enumerate() {
            setup.queue.submit(tag as u64, read(tag as u64 * 8, buf));
        }
        let answer = pattern(8 * 4096, 99);
        let seen = setup.serve(|request| {
            let Request::Read { data, .. } = request else { panic!("{request:?}") };
            data.copy_from(0, &answer.whole());
            Status::Ok
        });
        assert_eq!(seen, ["read 0+32768"]);
        assert_eq!(setup.results().len(), 8);
        let found: Vec<u8> = bufs.iter().flat_map(|buf| buf.whole().to_vec()).collect();
        assert!(found == answer.whole().to_vec(), "shared {shared}");
        assert!(bufs.iter().all(IoBuf::is_unique), "no handle stays behind");
    }
}

#[test]
fn a_request_is_no_larger_than_the_device_takes() {
    let mut setup = start(|character| {
        character.config.seg_max = 3;
        character.features |= features::SIZE_MAX;
        character.config.size_max_bytes = 2048;
    });
    // Each takes two of the three segments, so that no two go together.
    let large = setup.driver.alloc(4096).unwrap();
    for tag in 0..3 {
        setup.queue.submit(tag, read(tag * 8, &large));
    }
    assert_eq!(setup.serve_all(), ["read 0+4096", "read 8+4096", "read 16+4096"]);
    let small = setup.driver.alloc(512).unwrap();
    for tag in 0..7 {
        setup.queue.submit(tag, read(tag, &small));
    }
    assert_eq!(setup.serve_all(), ["read 0+1536", "read 3+1536", "read 6+512"]);
    assert_eq!(setup.results().len(), 10);
}

#[test]
fn one_segment_where_the_device_names_none() {
    for seg_max in [None, Some(0)] {
        let mut setup = start(|character| {
            character.config.seg_max = seg_max.unwrap_or(126);
            if seg_max.is_none() {
                character.features &= !features::SEG_MAX;
            }
        });
        assert_eq!(setup.driver.facts().max_segments, 1);
        let buf = setup.driver.alloc(512).unwrap();
        for tag in 0..3 {
            setup.queue.submit(tag, read(tag, &buf));
        }
        assert_eq!(setup.serve_all(), ["read 0+512", "read 1+512", "read 2+512"]);
    }
}

#[test]
fn nothing_is_merged_or_sorted_across_what_keeps_its_place() {
    let buf = IoBuf::zeroed(512);
    let fua = Op::write(9 * 512, buf.whole(), OpFlags::FUA);
    let preflush = Op::write(9 * 512, buf.whole(), OpFlags::PREFLUSH);
    let zeroes = Op::WriteZeroes { offset: 9 * 512, length: 512, may_unmap: false, flags: OpFlags::NONE };
    for (between, shown) in [
        (Op::Flush, "flush"),
        (Op::Discard { offset: 9 * 512, length: 512 }, "discard"),
        (zeroes, "writezeroes"),
        (fua, "write 9+512"),
        (preflush, "flush"),
    ] {
        let mut setup = start(|_| {});
        for (tag, op) in
            [write(3, &buf), write(2, &buf), between, write(1, &buf), write(0, &buf)].into_iter().enumerate()
        {
            setup.queue.submit(tag as u64, op);
        }
        let seen = setup.serve_all();
        assert!(seen[1].starts_with(shown), "{seen:?}");
        assert_eq!([&seen[0], &seen[2]], ["write 2+1024", "write 0+1024"], "{seen:?}");
        assert_eq!(setup.results().len(), 5);
    }
}

#[test]
fn reads_and_writes_and_unlike_priorities_stay_apart() {
    let mut setup = start(|_| {});
    let buf = setup.driver.alloc(512).unwrap();
    setup.queue.submit(0, read(0, &buf));
    setup.queue.submit(1, write(1, &buf));
    setup.queue.submit(2, read(1, &buf));
    setup.queue.submit(3, write(2, &buf));
    let urgent = Op::Read { offset: 1024, data: buf.whole(), priority: Priority::best_effort(0) };
    setup.queue.submit(4, urgent);
    // Gaps and overlaps are no neighbours.
    setup.queue.submit(5, read(10, &buf));
    setup.queue.submit(6, read(10, &buf));
    setup.queue.submit(7, read(12, &buf));
    let expected = ["read 0+1024", "read 2+512", "read 10+512", "read 10+512", "read 12+512", "write 1+1024"];
    assert_eq!(setup.serve_all(), expected);
    assert_eq!(setup.results().len(), 8);
}

#[test]
fn a_lone_request_goes_out_with_its_turn() {
    let mut setup = start(|_| {});
    let buf = setup.driver.alloc(512).unwrap();
    setup.queue.submit(1, read(7, &buf));
    assert!(setup.reactor.turn(), "it is sent");
    assert_eq!(
        setup.device.pop().unwrap().map(|(head, request)| setup.describe(head, &request)).unwrap(),
        "read 7+512"
    );
    setup.queue.submit(2, read(8, &buf));
    assert!(!setup.reactor.arm(), "a reactor that sleeps has sent everything");
    assert!(setup.device.pop().unwrap().is_some(), "also beside others that are in flight");
}

#[test]
fn what_fails_together_fails_once_each() {
    for (status, kind) in [(Status::IoErr, IoErrorKind::Io), (Status::Unsupported, IoErrorKind::Unsupported)] {
        let mut setup = start(|_| {});
        let buf = setup.driver.alloc(512).unwrap();
        for tag in 0..4 {
            setup.queue.submit(tag, write(tag, &buf));
        }
        assert_eq!(setup.serve(|_| status), ["write 0+2048"]);
        assert_eq!(setup.results(), (0..4).map(|tag| (tag, Err(kind))).collect::<Vec<_>>());
        assert!(buf.is_unique());
    }
}

#[test]
fn newcomers_join_those_that_wait_but_not_for_ever() {
    let options = request_path().with(|options| (options.queue_size, options.indirect) = (4, false));
    let mut setup = setup(Character::default(), options);
    let buf = setup.driver.alloc(512).unwrap();
    setup.queue.submit(1000, read(4000, &buf));
    setup.reactor.turn();
    // The last sector waits; others keep coming before it.
    setup.queue.submit(1, read(8000, &buf));
    let mut turns = 0;
    loop {
        setup.queue.submit(2000 + turns, read(turns * 2, &buf));
        let seen = setup.serve(|_| Status::Ok);
        if seen.contains(&"read 8000+512".to_owned()) {
            break;
        }
        turns += 1;
        assert!(turns < 100, "it starves");
    }
    assert!(turns > 2, "those before it went first");
}
