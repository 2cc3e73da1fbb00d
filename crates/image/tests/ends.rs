//! A queue, and a reactor with all its tasks, that go away with requests in flight: what was pushed to the storage still
//! happens, and lands in nobody else's data.

mod common;

use block::OpFlags;
use common::{Chain, Layer, name};
use testkit::{Dice, Harness, ModelDisk, Request, Session, Workload, qcow2_check, stamped};

const SIZE: u64 = 192 << 10;

/// Some requests like those of a workload, without reads.
fn requests(dice: &mut Dice, first_tag: u64) -> Vec<(u64, Request)> {
    let one = |index| {
        let tag = first_tag + index;
        let (offset, length) = (dice.below(SIZE / 512 - 16) * 512, (1 + dice.below(16)) * 512);
        let request = match dice.below(6) {
            0 => Request::Flush,
            1 => Request::Discard { offset, length },
            2 => Request::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE },
            _ => Request::write(offset, stamped(tag, offset, length as usize)),
        };
        (tag, request)
    };
    (0..8).map(one).collect()
}

fn play(seed: u64, end_reactor: bool) -> Result<(), String> {
    let chain = Chain { seed, ..Chain::of(vec![Layer::qcow2(SIZE, 1024), Layer::Raw(100 << 10)]) };
    let storage = chain.storage();
    let open = |storage: &_| chain.open(storage);
    let contents = Session::open(&storage, &open, seed, 1)?.read_all()?;
    let mut model = ModelDisk::new(&contents, true);
    let mut dice = Dice::new(seed);
    let mut session = Session::open(&storage, &open, seed, 6)?;
    let mut tag = 1 << 40;
    while session.queues.len() > 1 {
        let queue = session.queues.pop().ok_or("no queue")?;
        let batch = requests(&mut dice, tag);
        tag += 8;
        batch.iter().for_each(|(tag, request)| model.submit(*tag, request));
        session.harness.submit(queue, batch);
        for _ in 0..dice.below(12) {
            for (_, reply) in session.harness.turn().replies {
                model.complete(&reply)?;
            }
        }
        session.harness.close(queue);
        if end_reactor {
            session.harness.end_last_reactor();
        }
        // The others go on at once: they allocate, free and allocate again.
        let left = session.queues.clone();
        let workload = Workload { first_tag: tag, flush_percent: 20, ..Workload::new(dice.seed(), 60, SIZE, 1024) };
        tag += 60;
        workload.run(&mut session.harness, &left, &mut model, &|| 0)?;
    }
    session.harness.settle();
    model.check_live(&session.read_all()?)?;
    session.close()?;
    qcow2_check(&storage.bytes(&name(0)))?.sound()?;
    model.check_live(&Session::open(&storage, &open, seed, 1)?.read_all()?)
}

#[test]
fn queues_that_go_away_in_flight_harm_nobody() {
    for seed in common::seeds(60) {
        play(seed, false).unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}"));
    }
}

#[test]
fn reactors_that_end_with_tasks_in_flight_harm_nobody() {
    for seed in common::seeds(60) {
        play(seed, true).unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}"));
    }
}
