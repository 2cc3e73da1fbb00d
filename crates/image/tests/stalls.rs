//! One slow operation on the storage holds up nobody who does not need it.

mod common;

use block::OpFlags;
use common::{Chain, Layer, name};
use testkit::{Fault, FaultAction, Harness, OpKind, Request, Session, SimStorage, stamped};

const CLUSTER: u64 = 4096;
/// What one L2 table maps.
const TABLE: u64 = CLUSTER / 8 * CLUSTER;

fn chain() -> Chain {
    Chain::of(vec![Layer::qcow2(10 << 20, CLUSTER), Layer::Raw(8 << 20)])
}

/// A session on a disk whose first cluster under each of four L2 tables is allocated; these tables are not loaded yet. A
/// write elsewhere has made the header durable, on which the first write of a session waits.
fn session(chain: &Chain, storage: &SimStorage) -> Session {
    let open = |storage: &_| chain.open(storage);
    let mut before = Session::open(storage, &open, 1, 1).unwrap();
    for table in 0..4 {
        before.call(Request::write(table * TABLE, stamped(1, table * TABLE, CLUSTER as usize))).unwrap();
    }
    before.close().unwrap();
    let mut session = Session::open(storage, &open, 1, 2).unwrap();
    session.call(Request::write(4 * TABLE, stamped(1, 4 * TABLE, CLUSTER as usize))).unwrap();
    session
}

/// Submits the first request, lets it run into the fault, then submits the others. Returns the tags that complete while
/// something is stalled, and those that complete after it has been released.
fn race(session: &mut Session, storage: &SimStorage, requests: Vec<Request>) -> (Vec<u64>, Vec<u64>) {
    for (tag, request) in (0..).zip(requests) {
        let queue = session.queues[tag as usize % session.queues.len()];
        session.harness.submit(queue, vec![(tag, request)]);
        if tag == 0 {
            assert!(gather(session).is_empty(), "the first request did not stall");
            assert_eq!(session.harness.reactor().operations_in_flight(), 1);
        }
    }
    let meanwhile = gather(session);
    storage.release_stalled();
    (meanwhile, gather(session))
}

/// The tags of what completes until everything is idle.
fn gather(session: &mut Session) -> Vec<u64> {
    let mut tags = Vec::new();
    loop {
        let turn = session.harness.turn();
        for (_, reply) in &turn.replies {
            assert!(reply.result.is_ok(), "request {} failed", reply.tag);
            tags.push(reply.tag);
        }
        if turn.idle && turn.replies.is_empty() {
            tags.sort_unstable();
            return tags;
        }
    }
}

fn stall(storage: &SimStorage, file: usize, kind: OpKind) {
    storage.inject(&name(file), Fault::nth(kind, 0, FaultAction::Stall));
}

/// Requests that touch nothing of the first L2 table: a read of a mapped cluster, an overwrite, an allocation, a read
/// from the layer below, write zeroes, a discard.
fn others() -> Vec<Request> {
    let at = |table: u64, cluster: u64| table * TABLE + cluster * CLUSTER;
    vec![
        Request::read(at(1, 0), CLUSTER as usize),
        Request::write(at(2, 0), stamped(2, at(2, 0), CLUSTER as usize)),
        Request::write(at(2, 5), stamped(3, at(2, 5), 512)),
        Request::read(at(3, 7), CLUSTER as usize),
        Request::WriteZeroes { offset: at(3, 8), length: 2 * CLUSTER, may_unmap: true, flags: OpFlags::NONE },
        Request::Discard { offset: at(1, 9), length: CLUSTER },
    ]
}

fn holds_nobody_up(first: Request, file: usize, kind: OpKind, and: Vec<Request>) {
    let storage = chain().storage();
    let mut session = session(&chain(), &storage);
    stall(&storage, file, kind);
    let requests: Vec<_> = std::iter::once(first).chain(others()).chain(and).collect();
    let all = requests.len() as u64;
    let (meanwhile, after) = race(&mut session, &storage, requests);
    assert_eq!((meanwhile, after), ((1..all).collect(), vec![0]));
}

#[test]
fn a_table_that_takes_long_to_load() {
    holds_nobody_up(Request::read(0, 512), 0, OpKind::Read, Vec::new());
    holds_nobody_up(Request::write(8 * CLUSTER, stamped(9, 8 * CLUSTER, 512)), 0, OpKind::Read, Vec::new());
}

#[test]
fn data_that_take_long_to_read_from_the_layer_below() {
    let same_table = Request::read(0, 512);
    holds_nobody_up(Request::read(9 * CLUSTER, 512), 1, OpKind::Read, vec![same_table.clone()]);
    let copy_on_write = Request::write(9 * CLUSTER, stamped(9, 9 * CLUSTER, 512));
    holds_nobody_up(copy_on_write, 1, OpKind::Read, vec![same_table, Request::Flush]);
}

#[test]
fn a_write_that_takes_long_and_flushes_meanwhile() {
    let in_place = Request::write(0, stamped(9, 0, CLUSTER as usize));
    holds_nobody_up(in_place, 0, OpKind::Write, vec![Request::read(512, 512), Request::Flush]);
    let new = Request::write(20 * CLUSTER, stamped(9, 20 * CLUSTER, CLUSTER as usize));
    holds_nobody_up(new, 0, OpKind::Write, vec![Request::read(512, 512), Request::Flush]);
}

#[test]
fn a_flush_that_takes_long() {
    holds_nobody_up(Request::Flush, 0, OpKind::Flush, Vec::new());
}

#[test]
fn a_second_write_into_a_cluster_that_is_being_allocated_waits_and_both_are_there() {
    let storage = chain().storage();
    let mut session = session(&chain(), &storage);
    let at = 30 * CLUSTER;
    let below = session.call(Request::read(at, 2048)).unwrap();
    stall(&storage, 0, OpKind::Write);
    let (first, second) = (stamped(7, at, 512), stamped(8, at + 512, 1024));
    let requests = vec![Request::write(at, &first[..]), Request::write(at + 512, &second[..])];
    let (_, after) = race(&mut session, &storage, requests);
    assert!(after.contains(&0));
    let found = session.call(Request::read(at, 2048)).unwrap();
    assert!(found[..512] == first && found[512..1536] == second);
    assert!(found[1536..] == below[1536..], "the rest comes from the layer below");
}

#[test]
fn a_long_read_of_data_and_zeros_by_turns_zeroes_only_a_part_at_once() {
    const LARGE: u64 = 16 << 10;
    const CLUSTERS: u64 = 512;
    let chain = Chain::of(vec![Layer::qcow2(CLUSTERS * LARGE, LARGE)]);
    let storage = chain.storage();
    let mut session = Session::open(&storage, &|storage: &_| chain.open(storage), 1, 1).unwrap();
    for cluster in (0..CLUSTERS).step_by(2) {
        session.call(Request::write(cluster * LARGE, stamped(1, cluster * LARGE, LARGE as usize))).unwrap();
        // Space that reads as zeros.
        let (offset, length) = ((cluster + 1) * LARGE, LARGE);
        session.call(Request::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE }).unwrap();
    }
    let before = session.call(Request::read(0, (CLUSTERS * LARGE) as usize)).unwrap();
    let queue = session.queues[0];
    session.harness.submit(queue, vec![(0, Request::read(0, (CLUSTERS * LARGE) as usize))]);
    // All pieces of data that come before the zeros which are left to a task.
    let at_once = session.harness.reactor().operations_in_flight();
    assert!((8..=128).contains(&at_once), "{at_once} of 256 pieces of data");
    assert_eq!(gather(&mut session), [0]);
    assert_eq!(session.call(Request::read(0, (CLUSTERS * LARGE) as usize)).unwrap(), before);
    session.close().unwrap();
}
