//! Tasks that are dropped with writes in flight, as when their reactor ends. The writes land later, and must not undo what
//! others have written since.
#![allow(clippy::unwrap_used)]

use block::{Extent, File, FileOp, IoResult, MetaIo, ReactorCtx, Task, block_on};
use memory::{AlignedBuf, IoBuf};
use ringdisk_format_scratch::{Header, Prepared, Scratch, create_kept};
use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use testkit::{Fault, FaultAction, OpKind, SimFileOptions, SimReactor, SimStorage};

const INDEX: &str = "disk.scratch";
const DATA: &str = "disk.scratch.data";
const DISK: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn made() -> (SimStorage, MetaIo, Arc<Scratch>) {
    let storage = SimStorage::new(1);
    for name in [INDEX, DATA] {
        storage.create(name, 0, SimFileOptions::default());
    }
    let io = blocking(&storage);
    let header =
        Header { size_bytes: DISK, backing_file: "below".to_owned(), backing_format: None, data_file: DATA.to_owned() };
    block_on(create_kept(&io, INDEX, &header)).unwrap();
    let scratch = opened(&storage, &io);
    (storage, io, Arc::new(scratch))
}

fn blocking(storage: &SimStorage) -> MetaIo {
    let queue = |name| storage.file(name).unwrap().open_blocking().unwrap();
    MetaIo::new(queue(INDEX)).with_data(queue(DATA))
}

fn opened(storage: &SimStorage, io: &MetaIo) -> Scratch {
    block_on(Scratch::open_kept(io, INDEX, storage.bytes(INDEX).len() as u64, false)).unwrap()
}

fn on(storage: &SimStorage, reactor: &Rc<SimReactor>) -> MetaIo {
    let queue = |name| storage.file(name).unwrap().open_queue(&reactor.ctx()).unwrap();
    MetaIo::new(queue(INDEX)).with_data(queue(DATA))
}

/// Writes a page, and returns where in the data it lies.
async fn put(scratch: &Scratch, io: &MetaIo, page: u64, byte: u8) -> IoResult<u64> {
    let place = scratch.prepare_write(io, page * PAGE, PAGE).await?;
    let offset = match &place {
        Prepared::InPlace { offset, .. } => *offset,
        Prepared::New(allocation) => allocation.file_offset,
    };
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(&[byte; PAGE as usize])).whole();
    io.data().unwrap().start(FileOp::Write { offset, data, fua: false }).await?;
    if let Prepared::New(allocation) = place {
        scratch.commit_write(allocation)?;
    }
    Ok(offset)
}

/// Polls a task until something holds, and drops it.
fn drop_when(task: impl Future, reactor: &Rc<SimReactor>, holds: impl Fn() -> bool) {
    let mut task = pin!(task);
    for _ in 0..1000 {
        assert!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        if holds() {
            return;
        }
        reactor.run_until_idle();
    }
    panic!("it never comes to that");
}

#[test]
fn an_index_page_that_a_dropped_flush_has_in_flight_does_not_land_on_a_later_flush() {
    for seed in 0..20 {
        let (storage, io, scratch) = made();
        block_on(put(&scratch, &io, 0, 1)).unwrap();
        let reactor = SimReactor::new(seed);
        reactor.complete_inline(0);
        let on_reactor = on(&storage, &reactor);
        storage.inject(INDEX, Fault::nth(OpKind::Write, 0, FaultAction::Stall));
        let before = storage.pushed(INDEX, OpKind::Write);
        drop_when(scratch.flush(&on_reactor), &reactor, || storage.pushed(INDEX, OpKind::Write) > before);

        let second = block_on(put(&scratch, &io, 1, 2)).unwrap();
        let is_done = Rc::new(Cell::new(false));
        let task = {
            let (scratch, is_done) = (Arc::clone(&scratch), Rc::clone(&is_done));
            async move {
                scratch.flush(&on_reactor).await.unwrap();
                is_done.set(true);
            }
        };
        reactor.spawn(Task::new(task));
        reactor.run_until_idle();
        storage.release_stalled();
        reactor.run_until_idle();
        assert!(is_done.get());
        for cut in 0..4 {
            let after = storage.power_cut(cut);
            let found = opened(&after, &blocking(&after)).lookup(PAGE, PAGE).unwrap();
            let Extent::Data { offset, .. } = found.extent else { panic!("seed {seed}: flushed, and gone") };
            assert_eq!(offset, second, "seed {seed}");
        }
    }
}

#[test]
fn space_that_a_dropped_task_has_asked_for_is_not_zeroed_under_those_who_use_it() {
    for seed in 0..20 {
        let (storage, _, scratch) = made();
        let reactor = SimReactor::new(seed);
        reactor.complete_inline(0);
        let on_reactor = on(&storage, &reactor);
        storage.inject(DATA, Fault::nth(OpKind::WriteZeroes, 0, FaultAction::Stall));
        drop_when(put(&scratch, &on_reactor, 0, 1), &reactor, || storage.pushed(DATA, OpKind::WriteZeroes) > 0);

        let place = Rc::new(Cell::new(None));
        let task = {
            let (scratch, place) = (Arc::clone(&scratch), Rc::clone(&place));
            async move { place.set(Some(put(&scratch, &on_reactor, 1, 2).await.unwrap())) }
        };
        reactor.spawn(Task::new(task));
        reactor.run_until_idle();
        storage.release_stalled();
        reactor.run_until_idle();
        let at = place.get().expect("it has ended") as usize;
        assert!(storage.bytes(DATA)[at..at + PAGE as usize].iter().all(|byte| *byte == 2), "seed {seed}: zeroed");
    }
}
