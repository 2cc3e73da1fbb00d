use super::*;
use crate::edit::snapshots::{NewSnapshot, create_snapshot};
use crate::fixture::{self, CLUSTER};
use crate::live::image::OpenOptions;
use block::{Extent, File, FileIo, FileQueue, block_on};
use std::cell::RefCell;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use testkit::SimStorage;

/// What one L2 table maps.
const TABLE_BYTES: u64 = CLUSTER / 8 * CLUSTER;
/// Four tables.
const SIZE: u64 = 4 * TABLE_BYTES;

/// From here on the disk lies behind where the file is to end.
const LAST: u64 = SIZE - 16 * CLUSTER;

/// Data everywhere but where the first table maps: there is room below. Two slices fit into memory.
async fn with_room(storage: &SimStorage, io: &MetaIo) -> Qcow2 {
    let options = OpenOptions { name: fixture::NAME.to_owned(), read_only: false };
    let qcow2 = Qcow2::open_with_cache(io, fixture::file(storage).info(), options, 0).await.unwrap();
    fixture::fill(&qcow2, io, 0..SIZE).await;
    qcow2.discard(io, 0, TABLE_BYTES).await.unwrap();
    for _ in 0..2 {
        qcow2.flush(io).await.unwrap();
    }
    qcow2
}

async fn host_of(qcow2: &Qcow2, io: &MetaIo, at: u64) -> u64 {
    match qcow2.resolve(io, at, CLUSTER).await.unwrap().extent {
        Extent::Data { offset, .. } => offset,
        other => panic!("{other:?}"),
    }
}

/// A move of the last clusters, that has begun.
async fn begun(qcow2: &Qcow2, io: &MetaIo, end: u64) -> Box<Move> {
    let first = qcow2.inner.geometry.cluster_of(LAST);
    loop {
        match qcow2.inner.run(io, |state| qcow2.find_move(state, first, end)).await.unwrap() {
            Found::Clusters(moving) => return moving,
            Found::Table => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_write_that_found_the_old_entry_late_finds_the_bar_up_however_late_it_asks() {
    let (storage, io) = fixture::created(SIZE);
    block_on(async {
        let qcow2 = with_room(&storage, &io).await;
        let inner = &*qcow2.inner;
        let at = LAST;
        let old = host_of(&qcow2, &io, at).await;
        let mut compaction = qcow2.begin_compaction(&io).await.unwrap();
        let (mut early, mut late) = (inner.epochs.join(), inner.epochs.join());
        let mut waited_for = Some(early.begin(&inner.epochs));
        let mut ticket = None;
        // The move waits for the one that is early, and never for the one that is late.
        let mut waits = async || {
            ticket = ticket.or_else(|| Some(late.begin(&inner.epochs)));
            assert!(inner.lookup_overwrite(at, CLUSTER).is_none() && qcow2.begin_overwrite(at, CLUSTER).is_none());
            if let Some(ticket) = waited_for.take() {
                early.end(ticket);
            }
            true
        };
        // Perhaps the table first.
        for _ in 0..2 {
            if host_of(&qcow2, &io, at).await == old {
                qcow2.compact_step(&io, &mut compaction, at, &mut waits).await.unwrap();
            }
        }
        assert_ne!(host_of(&qcow2, &io, at).await, old, "nothing has moved");
        assert!(inner.may_hold_table(old), "the late one overwrites what has moved away");
        assert!(qcow2.begin_overwrite(at, CLUSTER).is_some(), "the new place is overwritten without the lock");
        for _ in 0..3 {
            qcow2.flush(&io).await.unwrap();
        }
        assert!(inner.may_hold_table(old), "the late one overwrites what has moved away");
        late.end(ticket.unwrap());
        for _ in 0..2 {
            qcow2.flush(&io).await.unwrap();
        }
        assert!(!inner.may_hold_table(old), "nothing of it is left");
        drop(compaction);
        qcow2.close(&io).await.unwrap();
    });
}

#[test]
fn a_move_that_is_dropped_after_it_was_given_up_leaves_what_another_write_is_allocating() {
    let (storage, io) = fixture::created(SIZE);
    block_on(async {
        let qcow2 = with_room(&storage, &io).await;
        let inner = &*qcow2.inner;
        let compaction = qcow2.begin_compaction(&io).await.unwrap();
        for is_given_up in [true, false] {
            let moving = begun(&qcow2, &io, compaction.end).await;
            let (guest, old) = (moving.allocation.guest.clone(), moving.from);
            assert!(inner.may_hold_table(old));
            if is_given_up {
                let mut state = inner.lock();
                assert!(state.give_way(&guest));
                state.in_flight.insert(guest.start, guest.end);
            }
            drop(moving);
            let mut state = inner.lock();
            assert_eq!(state.in_flight.remove(&guest.start).is_some(), is_given_up);
            drop(state);
            assert!(!inner.may_hold_table(old), "nobody moves it");
        }
        drop(compaction);
        qcow2.close(&io).await.unwrap();
    });
}

/// Keeps what is pushed for later.
#[derive(Default)]
struct Held(RefCell<Vec<FileIo>>);

impl FileQueue for Held {
    fn push(&self, io: FileIo) {
        self.0.borrow_mut().push(io);
    }
}

#[test]
fn a_slice_is_not_taken_from_where_its_table_no_longer_lies() {
    let (storage, io) = fixture::created(SIZE);
    block_on(async {
        let qcow2 = with_room(&storage, &io).await;
        let inner = &*qcow2.inner;
        let at = LAST;
        let host = host_of(&qcow2, &io, at).await;
        // The slices of others push the last one out.
        for other in [TABLE_BYTES, 2 * TABLE_BYTES] {
            host_of(&qcow2, &io, other).await;
        }
        let old = inner.table(3).unwrap().unwrap().offset;
        let end = inner.geometry.cluster_of(old);
        assert!(inner.run(&io, |state| inner.try_move_table(state, 3, old, end)).await.unwrap());
        let slice = inner.geometry.slice_of(inner.geometry.cluster_of(at));
        let held = Rc::new(Held::default());
        let slow = MetaIo::new(Rc::clone(&held) as Rc<dyn FileQueue>);
        let mut load = pin!(inner.satisfy(&slow, Need::Slice(slice)));
        let mut context = Context::from_waker(Waker::noop());
        assert!(load.as_mut().poll(&mut context).is_pending() && held.0.borrow().len() == 1);
        // The table is written to its new place. The old one is somebody else's.
        for _ in 0..2 {
            qcow2.flush(&io).await.unwrap();
        }
        assert!(inner.lock().fresh_tables.is_empty());
        io.write(old, AlignedBuf::zeroed(CLUSTER as usize)).await.unwrap();
        for op in held.0.take() {
            fixture::file(&storage).open_blocking().unwrap().push(op);
        }
        assert_eq!(load.as_mut().poll(&mut context), Poll::Ready(Ok(())));
        assert!(inner.slices.view(slice).is_none(), "it is what lies in the old place now");
        assert_eq!(host_of(&qcow2, &io, at).await, host);
        qcow2.close(&io).await.unwrap();
    });
}

/// Data everywhere, shared with an internal snapshot.
async fn shared(storage: &SimStorage, io: &MetaIo) -> Qcow2 {
    with_room(storage, io).await.close(io).await.unwrap();
    let file = fixture::file(storage);
    create_snapshot(io, &*file, fixture::NAME, &NewSnapshot::new("kept"), &mut |_, _| true).await.unwrap();
    fixture::opened(storage, io).await
}

/// One pass; the last clusters never move, because a snapshot shares them.
async fn pass(qcow2: &Qcow2, io: &MetaIo) -> IoResult<Compaction> {
    let mut compaction = qcow2.begin_compaction(io).await?;
    let mut at = 0;
    while at < SIZE {
        at = qcow2.compact_step(io, &mut compaction, at, async || true).await?.next;
    }
    Ok(compaction)
}

#[test]
fn a_cluster_that_is_used_and_counts_as_free_ends_the_pass_that_meets_it() {
    let (storage, io) = fixture::created(SIZE);
    block_on(async {
        let qcow2 = shared(&storage, &io).await;
        let inner = &*qcow2.inner;
        let compaction = pass(&qcow2, &io).await.unwrap();
        assert!(compaction.fixed_bytes() > 0);
        drop(compaction);
        let host = inner.geometry.cluster_of(host_of(&qcow2, &io, LAST).await);
        inner.run(&io, |state| inner.refcount_in_use(state, host)).await.unwrap();
        inner.lock().refcounts.set(host, 0).unwrap();
        assert_eq!(pass(&qcow2, &io).await.unwrap_err().kind(), block::IoErrorKind::Corrupt);
    });
}

#[test]
fn what_only_a_snapshot_leads_to_must_count_too() {
    let (storage, io) = fixture::created(SIZE);
    block_on(async {
        let qcow2 = shared(&storage, &io).await;
        let inner = &*qcow2.inner;
        let host = inner.geometry.cluster_of(host_of(&qcow2, &io, LAST).await);
        qcow2.discard(&io, 0, SIZE).await.unwrap();
        qcow2.flush(&io).await.unwrap();
        qcow2.flush(&io).await.unwrap();
        let mut compaction = pass(&qcow2, &io).await.unwrap();
        assert_eq!(compaction.fixed_bytes(), 0);
        // As if all in front were free.
        compaction.end = host;
        assert_eq!(qcow2.look_at_still(&io, &mut compaction, || false).await, Ok(false));
        assert_eq!(qcow2.look_at_still(&io, &mut compaction, || true).await, Ok(true));
        assert!(compaction.fixed_bytes() > 0);
        inner.run(&io, |state| inner.refcount_in_use(state, host)).await.unwrap();
        inner.lock().refcounts.set(host, 0).unwrap();
        let looked = qcow2.look_at_still(&io, &mut compaction, || true).await;
        assert_eq!(looked.unwrap_err().kind(), block::IoErrorKind::Corrupt);
    });
}
