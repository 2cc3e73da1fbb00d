use super::*;
use crate::dice::Dice;
use block::{File, FileOp, FileQueue, IoError, IoErrorKind, PastEnd, Task};
use memory::{AlignedBuf, IoBuf};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

fn write(offset: u64, bytes: &[u8], fua: bool) -> FileOp {
    FileOp::Write { offset, data: IoBuf::from_aligned(AlignedBuf::copy_of(bytes)).whole(), fua }
}

fn queue_of(storage: &SimStorage, reactor: &Rc<SimReactor>) -> Rc<dyn FileQueue> {
    storage.file("disk").unwrap().open_queue(&reactor.ctx()).unwrap()
}

fn setup(length: u64, options: SimFileOptions) -> (SimStorage, Rc<SimReactor>, Rc<dyn FileQueue>) {
    let storage = SimStorage::new(1);
    storage.create("disk", length, options);
    let reactor = SimReactor::new(1);
    let queue = queue_of(&storage, &reactor);
    (storage, reactor, queue)
}

/// Returns all values that the first bytes of the first `N` sectors take over many cuts.
fn outcomes<const N: usize>(cut: impl Fn(u64) -> SimStorage) -> Vec<[u8; N]> {
    let mut seen = Vec::new();
    for seed in 0..300 {
        let bytes = cut(seed).bytes("disk");
        let state = std::array::from_fn(|sector| bytes[sector * 512]);
        if !seen.contains(&state) {
            seen.push(state);
        }
    }
    seen.sort_unstable();
    seen
}

#[test]
fn a_cut_keeps_or_loses_each_unflushed_sector_by_itself_and_flushed_ones_always_stay() {
    let (storage, reactor, queue) = setup(2048, SimFileOptions::default());
    reactor.run(queue.start(write(0, &[1; 1024], false))).unwrap();
    assert_eq!(outcomes(|seed| storage.power_cut(seed)), [[0, 0], [0, 1], [1, 0], [1, 1]]);
    reactor.run(queue.start(FileOp::Flush)).unwrap();
    reactor.run(queue.start(write(0, &[2; 512], false))).unwrap();
    reactor.run(queue.start(write(0, &[3; 512], false))).unwrap();
    assert_eq!(outcomes(|seed| storage.power_cut(seed)), [[1, 1], [2, 1], [3, 1]]);
    assert_eq!(outcomes(|seed| storage.process_killed(seed)), [[3, 1]], "a kill loses nothing that was written");
}

#[test]
fn what_a_lost_flush_was_to_write_is_read_and_durable_only_once_it_is_written_again() {
    let (storage, reactor, queue) = setup(1024, SimFileOptions::default());
    storage.inject("disk", Fault::nth(OpKind::Flush, 0, FaultAction::Lose(IoError::EIO)));
    reactor.run(queue.start(write(0, &[1; 1024], false))).unwrap();
    reactor.run(queue.start(FileOp::Flush)).unwrap_err();
    reactor.run(queue.start(write(512, &[1; 512], false))).unwrap();
    reactor.run(queue.start(FileOp::Flush)).unwrap();
    assert_eq!(storage.bytes("disk"), [1; 1024]);
    assert_eq!(outcomes(|seed| storage.power_cut(seed)), [[0, 1], [1, 1]]);
    reactor.run(queue.start(write(0, &[1; 512], false))).unwrap();
    reactor.run(queue.start(FileOp::Flush)).unwrap();
    assert_eq!(outcomes(|seed| storage.power_cut(seed)), [[1, 1]]);
}

#[test]
fn a_flush_covers_only_what_completed_before_it_was_pushed() {
    let (storage, reactor, queue) = setup(1024, SimFileOptions::default());
    storage.inject("disk", Fault::nth(OpKind::Flush, 0, FaultAction::Stall));
    let flush = queue.start(FileOp::Flush);
    reactor.run(queue.start(write(0, &[1; 512], false))).unwrap();
    storage.release_stalled();
    reactor.run(flush).unwrap();
    assert_eq!(outcomes(|seed| storage.power_cut(seed)), [[0, 0], [1, 0]]);
    reactor.run(queue.start(write(512, &[1; 512], true))).unwrap();
    assert_eq!(
        outcomes(|seed| storage.power_cut(seed)),
        [[0, 1], [1, 1]],
        "a FUA write makes itself durable, no other"
    );
}

#[test]
fn writes_in_flight_may_be_there_in_part() {
    let (storage, reactor, queue) = setup(1024, SimFileOptions::default());
    storage.inject("disk", Fault::nth(OpKind::Write, 0, FaultAction::Stall));
    let _in_flight = queue.start(write(0, &[1; 1024], false));
    reactor.run_until_idle();
    assert_eq!(reactor.operations_in_flight(), 1);
    assert_eq!(outcomes::<2>(|seed| storage.power_cut(seed)).len(), 4);
    assert_eq!(outcomes::<2>(|seed| storage.process_killed(seed)).len(), 4);
}

#[test]
fn what_a_killed_process_wrote_is_there_and_stays_volatile_until_the_next_one_flushes() {
    let (storage, reactor, queue) = setup(1024, SimFileOptions::default());
    reactor.run(queue.start(write(0, &[1; 512], false))).unwrap();
    storage.inject("disk", Fault::nth(OpKind::Write, 0, FaultAction::Stall));
    let _in_flight = queue.start(write(512, &[1; 512], false));
    reactor.run_until_idle();
    assert_eq!(outcomes(|seed| storage.left_by_killed(seed)), [[1, 0], [1, 1]]);
    for seed in 0..20 {
        let left = storage.left_by_killed(seed);
        let there = [left.bytes("disk")[0], left.bytes("disk")[512]];
        let lost = outcomes::<2>(|seed| left.power_cut(seed));
        assert!(lost.contains(&[0, 0]) && lost.contains(&there), "{lost:?}");
        let reactor = SimReactor::new(seed);
        reactor.run(queue_of(&left, &reactor).start(FileOp::Flush)).unwrap();
        assert_eq!(outcomes(|seed| left.power_cut(seed)), [there], "seed {seed}");
    }
}

#[test]
fn space_that_nobody_wrote_is_garbage_until_it_is_punched() {
    let (storage, reactor, queue) = setup(512, SimFileOptions::default());
    assert_eq!(storage.bytes("disk"), [0; 512], "a created file is zeros");
    reactor.run(queue.start(FileOp::SetLength { length: 2048 })).unwrap();
    let grown = storage.bytes("disk");
    assert!(grown[512..1024].iter().any(|byte| *byte != 0));
    reactor.run(queue.start(FileOp::Discard { offset: 512, length: 512 })).unwrap();
    reactor.run(queue.start(FileOp::WriteZeroes { offset: 1024, length: 100, may_unmap: true })).unwrap();
    let punched = storage.bytes("disk");
    assert_eq!(punched[..1124], [0; 1124]);
    assert_eq!(punched[1124..], grown[1124..]);
    reactor.run(queue.start(FileOp::Flush)).unwrap();
    assert_eq!(storage.power_cut(1).bytes("disk"), punched);
}

#[test]
fn the_length_is_volatile_too() {
    let (storage, reactor, queue) = setup(512, SimFileOptions::default());
    reactor.run(queue.start(write(512, &[1; 1024], false))).unwrap();
    let lengths: std::collections::BTreeSet<_> =
        (0..100).map(|seed| storage.power_cut(seed).bytes("disk").len()).collect();
    assert!(lengths.contains(&512) && lengths.contains(&1536), "{lengths:?}");
    reactor.run(queue.start(FileOp::Flush)).unwrap();
    assert!((0..100).all(|seed| storage.power_cut(seed).bytes("disk").len() == 1536));
}

#[test]
fn a_recording_replays_to_the_same_cuts_as_the_live_storage() {
    let (storage, reactor, queue) = setup(1 << 14, SimFileOptions::default());
    storage.record();
    let mut dice = Dice::new(3);
    let mut live = Vec::new();
    for round in 0..60u8 {
        let op = match dice.below(8) {
            0 => FileOp::Flush,
            1 => FileOp::Discard { offset: dice.below(1 << 14), length: dice.below(3000) },
            2 => FileOp::WriteZeroes { offset: dice.below(1 << 14), length: dice.below(3000), may_unmap: false },
            3 => FileOp::SetLength { length: (1 << 13) + dice.below(1 << 13) },
            _ => write(dice.below(1 << 14), &vec![round + 1; dice.below(3000) as usize], dice.chance(20)),
        };
        drop(queue.start(op));
        for _ in 0..dice.below(3) {
            reactor.step();
        }
        live.push((storage.now(), storage.power_cut(5).bytes("disk")));
    }
    let mut replay = storage.take_recording().replay();
    let mut compared = 0;
    while let Some(now) = replay.advance() {
        if let Some((_, bytes)) = live.iter().find(|(at, _)| *at == now) {
            assert!(replay.power_cut(5).bytes("disk") == *bytes, "event {now}");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}

#[test]
fn one_seed_gives_one_order_and_seeds_differ() {
    let order = |seed| {
        let storage = SimStorage::new(1);
        let file = storage.create("disk", 1 << 16, SimFileOptions::default());
        let reactor = SimReactor::new(seed);
        let queue = file.open_queue(&reactor.ctx()).unwrap();
        let sink = block::Sink::new();
        for token in 0..20 {
            let done = block::Done::Sink { sink: Rc::clone(&sink), token };
            queue.push(block::FileIo::new(write(token * 512, &[1; 512], false), done));
        }
        reactor.run_until_idle();
        let mut done = Vec::new();
        sink.take(&mut done);
        assert_eq!(done.len(), 20);
        done.iter().map(|(token, _)| *token).collect::<Vec<_>>()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_ne!(order(1), (0..20).collect::<Vec<_>>());
}

#[test]
fn faults_hit_the_operation_they_were_ordered_for() {
    let (storage, reactor, queue) = setup(8192, SimFileOptions::default());
    let no_space = IoError::new(IoErrorKind::NoSpace);
    storage.inject("disk", Fault::nth(OpKind::Write, 1, FaultAction::Fail(no_space)));
    storage.inject("disk", Fault::nth(OpKind::Write, 2, FaultAction::Short(IoError::EIO)));
    storage.inject("disk", Fault::from_nth(OpKind::Flush, 1, FaultAction::Fail(IoError::EIO)));
    let mut results = Vec::new();
    for byte in 1..=4 {
        results.push(reactor.run(queue.start(write(u64::from(byte) * 1024, &[byte; 1024], false))));
        results.push(reactor.run(queue.start(FileOp::Flush)));
    }
    let (ok, io) = (Ok(()), Err(IoError::EIO));
    assert_eq!(results, [ok, ok, Err(no_space), io, io, io, ok, io]);
    let bytes = storage.bytes("disk");
    assert_eq!(bytes[2048..3072], [0; 1024], "a failed write wrote nothing");
    assert!(bytes[3072..4096] != [3; 1024], "a short write is never whole");
}

#[test]
fn a_stalled_operation_holds_nobody_up() {
    let (storage, reactor, queue) = setup(8192, SimFileOptions::default());
    storage.inject("disk", Fault::nth(OpKind::Read, 0, FaultAction::Stall));
    let read = |offset| FileOp::Read { offset, data: IoBuf::zeroed(512).whole(), past_end: PastEnd::Fails };
    let done = Rc::new(Cell::new(0));
    for offset in [0, 512] {
        let (future, done) = (queue.start(read(offset)), Rc::clone(&done));
        block::ReactorCtx::spawn(
            &*reactor,
            block::Task::new(async move {
                future.await.unwrap();
                done.set(done.get() + 1);
            }),
        );
    }
    reactor.run_until_idle();
    assert_eq!((done.get(), reactor.operations_in_flight()), (1, 1));
    storage.release_stalled();
    reactor.run_until_idle();
    assert_eq!(done.get(), 2);
    assert_eq!(reactor.run(queue.start(read(8000))), Err(IoError::EIO), "behind the end");
}

#[test]
fn sleepers_of_all_reactors_wake_in_the_order_of_simulated_time() {
    let first = SimReactor::new(1);
    let second = first.sibling();
    let woken = Rc::new(RefCell::new(Vec::new()));
    for (reactor, seconds) in [(&first, 30), (&second, 20), (&first, 10)] {
        let (woken, ctx) = (Rc::clone(&woken), reactor.ctx());
        reactor.ctx().spawn(Task::new(async move {
            ctx.sleep(Duration::from_secs(seconds)).await;
            woken.borrow_mut().push(seconds);
        }));
    }
    let before = first.ctx().now();
    first.run_until_idle();
    assert_eq!(*woken.borrow(), [10, 20, 30]);
    assert!(first.ctx().now() - before >= Duration::from_secs(30), "though nobody waited so long");
}
