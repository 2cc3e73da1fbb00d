//! How many operations on files small writes to new clusters take. ARCHITECTURE.md states the figures.

mod common;

use block::IoError;
use common::{Chain, Layer, name};
use testkit::{Fault, FaultAction, Harness, OpKind, Request, Session, SimStorage, mix, stamped};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 1 << 30;
/// What one slice of an L2 table maps.
const SLICE: u64 = 32 << 20;

/// Operations on a file, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    reads: u64,
    writes: u64,
    flushes: u64,
    extensions: u64,
}

impl Counts {
    fn of(storage: &SimStorage, layer: usize) -> Self {
        let pushed = |kind| storage.pushed(&name(layer), kind);
        Self {
            reads: pushed(OpKind::Read),
            writes: pushed(OpKind::Write),
            flushes: pushed(OpKind::Flush),
            extensions: pushed(OpKind::WriteZeroes),
        }
    }
}

struct Disk {
    storage: SimStorage,
    session: Session,
    before: Vec<Counts>,
}

impl Disk {
    fn open(layers: Vec<Layer>) -> Self {
        let chain = Chain::of(layers);
        let storage = chain.storage();
        let session = Session::open(&storage, &|storage| chain.open(storage), 1, 1).unwrap();
        let mut disk = Self { storage, session, before: Vec::new() };
        disk.spent();
        disk
    }

    /// Operations since the last look, by layer.
    fn spent(&mut self) -> Vec<Counts> {
        let layers = (0..).take_while(|layer| self.storage.file(&name(*layer)).is_some());
        let now: Vec<Counts> = layers.map(|layer| Counts::of(&self.storage, layer)).collect();
        let grown = now.iter().zip(&self.before).map(|(now, before)| Counts {
            reads: now.reads - before.reads,
            writes: now.writes - before.writes,
            flushes: now.flushes - before.flushes,
            extensions: now.extensions - before.extensions,
        });
        let grown = grown.collect();
        self.before = now;
        grown
    }

    fn write(&mut self, offset: u64) {
        self.session.call(Request::write(offset, stamped(5, offset, 4096))).unwrap();
    }

    fn flush(&mut self) {
        self.session.call(Request::Flush).unwrap();
    }

    /// Writes at once, as a batch has them.
    fn write_all(&mut self, offsets: impl Iterator<Item = u64>) {
        let write = |(tag, offset)| (tag as u64, Request::write(offset, stamped(5, offset, 4096)));
        let requests: Vec<_> = offsets.enumerate().map(write).collect();
        let queue = self.session.queues[0];
        let mut left = requests.len();
        self.session.harness.submit(queue, requests);
        while left > 0 {
            let turn = self.session.harness.turn();
            assert!(!turn.idle, "{left} writes were never completed");
            turn.replies.iter().for_each(|(_, reply)| reply.result.unwrap());
            left -= turn.replies.len();
        }
    }
}

#[test]
fn a_small_write_to_an_empty_image_is_one_write() {
    let mut disk = Disk::open(vec![Layer::qcow2(SIZE, CLUSTER)]);
    disk.write(10 * CLUSTER + 4096);
    // The first makes the header durable, reads the refcount block that it changes, and makes room for those to come.
    assert_eq!(disk.spent(), [Counts { reads: 1, writes: 2, flushes: 1, extensions: 1 }]);
    disk.write(700 << 20);
    assert_eq!(disk.spent(), [Counts { reads: 0, writes: 1, flushes: 0, extensions: 0 }]);
    // Refcounts and two new L2 tables; the barrier; L1; the barrier.
    disk.flush();
    assert_eq!(disk.spent(), [Counts { reads: 0, writes: 4, flushes: 2, extensions: 0 }]);
    // With tables there: refcounts; the barrier; the slice; the barrier.
    disk.write(20 * CLUSTER);
    disk.flush();
    // Room was made again: the file grows by its own length at a time, up to 16 MiB.
    assert_eq!(disk.spent(), [Counts { reads: 0, writes: 3, flushes: 2, extensions: 1 }]);
    disk.session.close().unwrap();
}

#[test]
fn space_that_was_given_up_is_written_as_if_it_were_new_only_where_its_punch_succeeded() {
    for is_punched in [true, false] {
        let mut disk = Disk::open(vec![Layer::qcow2(SIZE, CLUSTER)]);
        let old = stamped(7, 0, CLUSTER as usize);
        disk.session.call(Request::write(0, old.clone())).unwrap();
        disk.flush();
        let host = |disk: &Disk, bytes: &[u8]| {
            let file = disk.storage.bytes(&name(0));
            file.chunks(4096).position(|chunk| chunk == bytes).map(|chunk| chunk as u64 * 4096)
        };
        let before = host(&disk, &old[..4096]).unwrap();
        if !is_punched {
            let fails = FaultAction::Fail(IoError::EIO);
            disk.storage.inject(&name(0), Fault::from_nth(OpKind::Discard, 0, fails));
        }
        disk.session.call(Request::Discard { offset: 0, length: CLUSTER }).unwrap();
        // Nothing on the disk leads to it, then nobody may use it any more.
        (0..3).for_each(|_| disk.flush());
        assert!(disk.storage.pushed(&name(0), OpKind::Discard) > 0);
        disk.spent();
        let offset = 100 * CLUSTER + 8192;
        let bytes_before = disk.storage.written_bytes(&name(0));
        disk.write(offset);
        let spent = disk.spent()[0];
        // What lies around is zero already, or is written as zeros in the same write.
        let expected_bytes = if is_punched { 4096 } else { CLUSTER };
        let written_bytes = disk.storage.written_bytes(&name(0)) - bytes_before;
        assert_eq!(written_bytes, expected_bytes, "punched: {is_punched}");
        assert_eq!((spent.reads, spent.writes, spent.extensions), (0, 1, 0), "punched: {is_punched}");
        assert_eq!(host(&disk, &stamped(5, offset, 4096)), Some(before + 8192), "it is the same space");
        let around = disk.session.call(Request::read(100 * CLUSTER, CLUSTER as usize)).unwrap();
        assert!(around[..8192].iter().chain(&around[12288..]).all(|byte| *byte == 0), "punched: {is_punched}");
        disk.session.close().unwrap();
    }
}

#[test]
fn writes_of_a_batch_into_one_slice_share_its_metadata() {
    let mut disk = Disk::open(vec![Layer::qcow2(SIZE, CLUSTER)]);
    disk.write(0);
    disk.flush();
    disk.spent();
    disk.write_all((1..65).map(|cluster| cluster * 7 % 512 * CLUSTER));
    let spent = disk.spent()[0];
    assert_eq!((spent.reads, spent.writes, spent.flushes), (0, 64, 0));
    assert!(spent.extensions <= 5, "the file grows by its own length: {spent:?}");
    disk.flush();
    assert_eq!(disk.spent(), [Counts { reads: 0, writes: 2, flushes: 2, extensions: 0 }]);
    disk.session.close().unwrap();
}

#[test]
fn random_writes_with_a_flush_every_32_write_each_slice_they_touch_once() {
    let mut disk = Disk::open(vec![Layer::qcow2(SIZE, CLUSTER)]);
    // Tables for the whole disk first.
    disk.write_all((0..SIZE / SLICE).map(|slice| slice * SLICE));
    disk.flush();
    disk.spent();
    for round in 0..8 {
        let place = |index| mix(round, index) % (SIZE / CLUSTER - 1) * CLUSTER + CLUSTER;
        let places: std::collections::BTreeSet<u64> = (0..32).map(place).collect();
        let slices: std::collections::BTreeSet<u64> = places.iter().map(|offset| offset / SLICE).collect();
        disk.write_all(places.iter().copied());
        let data = disk.spent()[0];
        assert_eq!((data.reads, data.flushes), (0, 0));
        assert_eq!(data.writes, places.len() as u64);
        assert!(data.extensions <= 1, "{data:?}");
        disk.flush();
        let metadata = disk.spent()[0];
        assert!(metadata.writes <= slices.len() as u64 + 1, "{metadata:?}, {} slices", slices.len());
        assert_eq!((metadata.reads, metadata.flushes), (0, 2));
    }
    disk.session.close().unwrap();
}

#[test]
fn a_small_write_to_an_overlay_is_one_read_below_and_one_write() {
    let mut disk = Disk::open(vec![Layer::qcow2(16 << 20, CLUSTER), Layer::Raw(16 << 20)]);
    disk.write(CLUSTER);
    disk.spent();
    disk.write(10 * CLUSTER + 8192);
    let none = Counts { reads: 0, writes: 0, flushes: 0, extensions: 0 };
    assert_eq!(disk.spent(), [Counts { writes: 1, ..none }, Counts { reads: 1, ..none }]);
    let at = 10 * CLUSTER;
    let cluster = disk.session.call(Request::read(at, CLUSTER as usize)).unwrap();
    let mut expected = disk.storage.bytes(&name(1))[at as usize..][..CLUSTER as usize].to_vec();
    expected[8192..12288].copy_from_slice(&stamped(5, at + 8192, 4096));
    assert!(cluster == expected);
    disk.session.close().unwrap();
}

#[test]
fn a_write_to_an_overlay_leaves_what_is_around_it_whatever_its_size_and_place() {
    // The last cluster is cut short by the end of the disk, the fifth of the base by that of the base. The layer between
    // has some clusters: so small that what a write needs lies in several places, or large.
    let size = 9 * CLUSTER + 5120;
    for between in [4096, 4 * CLUSTER] {
        let layers = vec![Layer::qcow2(size, CLUSTER), Layer::qcow2(size, between), Layer::Raw(5 * CLUSTER - 7168)];
        let mut disk = Disk::open(layers);
        let mut expected = disk.session.call(Request::read(0, size as usize)).unwrap();
        let places = [
            (512, 512),
            (CLUSTER + 4096, 4096),
            (3 * CLUSTER - 512, 1024),
            (3 * CLUSTER + 512, 16 << 10),
            (4 * CLUSTER + 1024, 20 << 10),
            (5 * CLUSTER + 512, 2 * CLUSTER as usize),
            (8 * CLUSTER, 4096),
            (size - 1024, 512),
        ];
        for (offset, length) in places {
            let bytes = stamped(9, offset, length);
            expected[offset as usize..][..length].copy_from_slice(&bytes);
            disk.session.call(Request::write(offset, bytes)).unwrap();
            let now = disk.session.call(Request::read(0, size as usize)).unwrap();
            assert!(now == expected, "{length} at {offset}, over clusters of {between}");
        }
        disk.session.close().unwrap();
    }
}

#[test]
fn a_small_write_to_an_overlay_over_nothing_is_one_small_write() {
    // The base ends before, so that nothing is below.
    let mut disk = Disk::open(vec![Layer::qcow2(16 << 20, CLUSTER), Layer::Raw(CLUSTER)]);
    disk.write(CLUSTER);
    disk.spent();
    let length = disk.storage.bytes(&name(0)).len();
    disk.write(10 * CLUSTER + 8192);
    let none = Counts { reads: 0, writes: 0, flushes: 0, extensions: 0 };
    assert_eq!(disk.spent(), [Counts { writes: 1, ..none }, none]);
    assert_eq!(disk.storage.bytes(&name(0)).len(), length);
    let cluster = disk.session.call(Request::read(10 * CLUSTER, CLUSTER as usize)).unwrap();
    assert!(cluster[..8192].iter().chain(&cluster[12288..]).all(|byte| *byte == 0));
    disk.session.close().unwrap();
}

#[test]
fn a_small_write_to_new_space_is_one_write_of_its_own_length_whatever_the_clusters() {
    let size_bytes = 64 << 20;
    let shapes = [
        (Layer::qcow2(size_bytes, 4096), 4096),
        (Layer::qcow2(size_bytes, 2 << 20), 2 << 20),
        (Layer::Extended { size_bytes, cluster_size: CLUSTER }, CLUSTER),
        (Layer::Qcow2 { size_bytes, cluster_size: CLUSTER, version: 2, refcount_bits: 16 }, CLUSTER),
    ];
    for (layer, cluster) in shapes {
        let mut disk = Disk::open(vec![layer.clone()]);
        disk.write(0);
        disk.flush();
        disk.spent();
        for index in 1..8 {
            let bytes_before = disk.storage.written_bytes(&name(0));
            // In the middle, where there is one.
            disk.write(index * cluster + cluster / 8192 * 4096);
            let spent = disk.spent()[0];
            assert_eq!((spent.reads, spent.writes, spent.flushes), (0, 1, 0), "{layer:?}");
            assert_eq!(disk.storage.written_bytes(&name(0)) - bytes_before, 4096, "{layer:?}");
        }
        // Of all of them: refcounts, and the slice.
        disk.flush();
        let spent = disk.spent()[0];
        assert_eq!((spent.reads, spent.writes, spent.flushes), (0, 2, 2), "{layer:?}");
        disk.session.close().unwrap();
    }
}
