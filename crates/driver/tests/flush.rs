//! Flush and FUA as a table: flags, failures, cache types, and caches that are switched while a request is in line; on
//! both paths, and on the smallest ring. What the device sees is compared exactly.

mod common;

use block::{Disk, IoErrorKind, Op, OpFlags};
use common::{Character, setup, small};
use memory::Window;
use ringdisk_driver::DriverPath;
use virtio::blk::{Status, features};

/// What the device's cache is, and when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    /// No FLUSH: there is nothing to flush with.
    NoFlush,
    /// FLUSH without CONFIG_WCE.
    Volatile,
    WriteBack,
    WriteThrough,
    /// Write-back until just before the submission.
    SwitchedOff,
    /// Switched while the request waits for a place in the ring.
    OffInLine,
    OnInLine,
    /// Switched while its data are with the device.
    OnInFlight,
}

use Cache::{NoFlush, OffInLine, OnInFlight, OnInLine, SwitchedOff, Volatile, WriteBack, WriteThrough};

const CACHES: [Cache; 8] = [NoFlush, Volatile, WriteBack, WriteThrough, SwitchedOff, OffInLine, OnInLine, OnInFlight];

impl Cache {
    fn character(self) -> Character {
        let mut character = Character::default();
        match self {
            NoFlush => character.features &= !features::FLUSH,
            Volatile => {}
            _ => character.features |= features::CONFIG_WCE,
        }
        character.config.writeback = u8::from(matches!(self, WriteBack | SwitchedOff | OffInLine));
        character
    }

    /// Whether a flush before the data has anything to do. What had ended when the request was submitted counts.
    fn needs_flush(self) -> bool {
        // What was written before a switch may be volatile still.
        matches!(self, Volatile | WriteBack | SwitchedOff | OffInLine)
    }

    /// Whether data that the request sends can be lost.
    fn loses(self) -> bool {
        matches!(self, Volatile | WriteBack | OnInLine | OnInFlight)
    }
}

fn all_flags() -> [OpFlags; 4] {
    [OpFlags::NONE, OpFlags::PREFLUSH, OpFlags::FUA, OpFlags::PREFLUSH | OpFlags::FUA]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Data,
    Empty,
    Flush,
    Zeroes,
}

/// What the device is to see, and how the request ends, if the device fails request number `fails`.
fn expected(cache: Cache, what: What, flags: OpFlags, fails: Option<usize>) -> (Vec<&'static str>, bool) {
    let mut steps = Vec::new();
    match what {
        What::Flush | What::Empty => {
            let wanted = what == What::Flush || flags.is_preflush();
            steps.extend((wanted && cache.needs_flush()).then_some("flush"));
        }
        What::Data | What::Zeroes => {
            steps.extend((flags.is_preflush() && cache.needs_flush()).then_some("flush"));
            steps.push(if what == What::Data { "write" } else { "writezeroes" });
            steps.extend((flags.is_fua() && cache.loses()).then_some("flush"));
        }
    }
    match fails.filter(|fails| *fails < steps.len()) {
        Some(fails) => {
            steps.truncate(fails + 1);
            (steps, false)
        }
        None => (steps, true),
    }
}

fn op(what: What, flags: OpFlags, data: Window) -> Op {
    match what {
        What::Data => Op::write(512, data, flags),
        What::Empty => Op::write(512, Window::empty(), flags),
        What::Flush => Op::Flush,
        What::Zeroes => Op::WriteZeroes { offset: 512, length: 512, may_unmap: false, flags },
    }
}

/// One cell of the table.
fn play(path: DriverPath, queue_size: u16, cache: Cache, what: What, flags: OpFlags, fails: Option<usize>) {
    let cell = format!("{path:?}, ring of {queue_size}, {cache:?}, {what:?}, {flags:?}, fails {fails:?}");
    let options = small().with(|options| {
        options.queue_size = queue_size;
        options.indirect = false;
        options.path = path;
    });
    let mut setup = setup(cache.character(), options);
    let buf = setup.driver.alloc(512).unwrap();
    if cache == SwitchedOff {
        setup.driver.set_volatile_cache(false);
    }
    // Three descriptors each, so that whatever comes behind them waits.
    let before: Vec<_> = (0..queue_size / 3).map(|tag| u64::from(tag) + 100).collect();
    for tag in &before {
        setup.queue.submit(*tag, Op::read(0, buf.whole()));
    }
    setup.reactor.turn();
    setup.queue.submit(1, op(what, flags, buf.whole()));
    match cache {
        OffInLine => setup.driver.set_volatile_cache(false),
        OnInLine => setup.driver.set_volatile_cache(true),
        _ => {}
    }
    let (mut seen, mut results) = (Vec::new(), setup.results());
    loop {
        setup.reactor.turn();
        let Some((head, request)) = setup.device.pop().unwrap() else { break };
        let step = setup.describe(head, &request).split(' ').next().unwrap().to_owned();
        drop(request);
        let is_ours = step != "read";
        if cache == OnInFlight && is_ours && step != "flush" {
            setup.driver.set_volatile_cache(true);
        }
        let status = if is_ours && fails == Some(seen.len()) { Status::IoErr } else { Status::Ok };
        setup.device.complete(head, status);
        setup.device.publish();
        results.extend(setup.results());
        if is_ours {
            seen.push(step);
        }
    }
    let (steps, success) = expected(cache, what, flags, fails);
    assert_eq!(seen, steps, "{cell}");
    results.retain(|(tag, _)| *tag < 100);
    assert_eq!(results, [(1, if success { Ok(()) } else { Err(IoErrorKind::Io) })], "{cell}");
    assert_eq!(setup.queue.in_flight(), 0, "{cell}");
}

fn table(path: DriverPath) {
    for queue_size in [4, 16] {
        for cache in CACHES {
            for what in [What::Data, What::Empty, What::Flush, What::Zeroes] {
                for flags in all_flags() {
                    // At most three steps can fail.
                    for fails in [None, Some(0), Some(1), Some(2)] {
                        let (steps, success) = expected(cache, what, flags, fails);
                        let is_alike = success && fails.is_some();
                        if !is_alike && (what != What::Flush || flags == OpFlags::NONE) {
                            assert!(steps.len() < 4);
                            play(path, queue_size, cache, what, flags, fails);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn flush_and_fua_on_the_bio_path() {
    table(DriverPath::Bio);
}

#[test]
fn flush_and_fua_on_the_request_path() {
    table(DriverPath::Request);
}

/// What the next operation sends, when it succeeds.
fn sent(setup: &mut common::Setup, op: Op) -> Vec<String> {
    setup.queue.submit(1, op);
    let seen = setup.serve_all();
    assert_eq!(setup.results(), [(1, Ok(()))]);
    seen
}

#[test]
fn one_flush_is_owed_after_a_switch_to_write_through() {
    let mut setup = setup(WriteBack.character(), small());
    let buf = setup.driver.alloc(512).unwrap();
    assert_eq!(sent(&mut setup, Op::write(0, buf.whole(), OpFlags::NONE)), ["write 0+512"]);
    setup.driver.set_volatile_cache(false);
    assert!(!setup.driver.info().volatile_cache);
    assert_eq!(sent(&mut setup, Op::Flush), ["flush"], "the write came before the switch");
    assert!(sent(&mut setup, Op::Flush).is_empty(), "nothing is owed any more");
    setup.driver.set_volatile_cache(true);
    assert_eq!(sent(&mut setup, Op::Flush), ["flush"]);
}

#[test]
fn a_flush_that_fails_or_overlaps_a_write_settles_nothing() {
    let mut setup = setup(WriteBack.character(), small());
    let buf = setup.driver.alloc(512).unwrap();
    setup.driver.set_volatile_cache(false);
    setup.queue.submit(1, Op::Flush);
    setup.serve(|_| Status::IoErr);
    assert_eq!(setup.results(), [(1, Err(IoErrorKind::Io))]);
    // Nobody knows whether the device took the write before the switch.
    setup.queue.submit(2, Op::write(0, buf.whole(), OpFlags::NONE));
    setup.queue.submit(3, Op::Flush);
    assert_eq!(setup.serve_all(), ["write 0+512", "flush"]);
    setup.results();
    assert_eq!(sent(&mut setup, Op::Flush), ["flush"]);
    assert!(sent(&mut setup, Op::Flush).is_empty());
}
