//! A disk of 16 TiB that is nearly full: what opening it, the first read and the first allocation read.
#![allow(clippy::unwrap_used)]

mod common;

use block::{Extent, File, FileIo, FileOp, FileQueue, MetaIo, block_on};
use common::{NAME, open_options};
use ringdisk_format_qcow2::{CreateOptions, Prepared, Qcow2, create};
use std::cell::Cell;
use std::rc::Rc;
use testkit::{SimFileOptions, SimStorage};

const CLUSTER: u64 = 64 << 10;
/// Host clusters that one refcount block counts.
const PER_BLOCK: u64 = CLUSTER / 2;
/// Guest bytes that one L2 table maps.
const PER_TABLE: u64 = CLUSTER / 8 * CLUSTER;
const SIZE: u64 = 16 << 40;
const USED_TABLES: u64 = SIZE / PER_TABLE * 9 / 10;

#[derive(Default)]
struct Spent {
    operations: Cell<u64>,
    bytes_read: Cell<u64>,
}

impl Spent {
    fn take(&self) -> (u64, u64) {
        (self.operations.take(), self.bytes_read.take())
    }
}

struct Counting(Rc<dyn FileQueue>, Rc<Spent>);

impl FileQueue for Counting {
    fn push(&self, io: FileIo) {
        self.1.operations.set(self.1.operations.get() + 1);
        if let FileOp::Read { data, .. } = &io.op {
            self.1.bytes_read.set(self.1.bytes_read.get() + data.length_bytes() as u64);
        }
        self.0.push(io);
    }
}

/// Tables at the start of each stretch that a refcount block counts: the block itself, then the L2 tables of the stretch.
fn nearly_full() -> SimStorage {
    let storage = SimStorage::new(1);
    let small = storage.create("small", 0, SimFileOptions::default());
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = CLUSTER;
    });
    block_on(create(&MetaIo::new(small.open_blocking().unwrap()), &options)).unwrap();
    let head = storage.bytes("small");
    let field = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap());
    let (l1, refcount_table) = (field(40), field(48));

    // Data behind each table: as many clusters as it maps, and the metadata.
    let clusters = USED_TABLES * (PER_TABLE / CLUSTER + 1) + 2 * USED_TABLES;
    let blocks = clusters.div_ceil(PER_BLOCK);
    let sparse = SimFileOptions { max_length_bytes: 1 << 45, ..SimFileOptions::default() };
    let file = storage.create(NAME, clusters * CLUSTER, sparse);
    let io = file.open_blocking().unwrap();
    let put = |offset: u64, bytes: Vec<u8>| {
        let data = memory::IoBuf::from_aligned(memory::AlignedBuf::copy_of(&bytes)).whole();
        block_on(io.start(FileOp::Write { offset, data, fua: true })).unwrap();
    };
    put(0, head.clone());
    let first_stretch = |block: u64| if block == 0 { field(48) / CLUSTER + 64 } else { block * PER_BLOCK };
    let table = |number: u64| {
        let stretch = number / 4 + 1;
        (stretch * PER_BLOCK + 1 + number % 4) * CLUSTER
    };
    let entries = |offsets: &mut dyn Iterator<Item = u64>| offsets.flat_map(u64::to_be_bytes).collect::<Vec<u8>>();
    put(l1, entries(&mut (0..USED_TABLES).map(|number| table(number) | (1 << 63))));
    put(refcount_table, entries(&mut (0..blocks).map(|block| first_stretch(block) * CLUSTER)));
    let full = [0, 1].repeat(PER_BLOCK as usize);
    for block in [0, 1, 2, blocks - 1] {
        put(first_stretch(block) * CLUSTER, full.clone());
    }
    put(table(0), ((1u64 << 63) | ((PER_BLOCK + 100) * CLUSTER)).to_be_bytes().to_vec());
    storage
}

#[test]
fn opening_reading_and_allocating_in_a_huge_image_read_little() {
    let storage = nearly_full();
    let file = storage.file(NAME).unwrap();
    let spent = Rc::new(Spent::default());
    let io = MetaIo::new(Rc::new(Counting(file.open_blocking().unwrap(), Rc::clone(&spent))));
    let qcow2 = block_on(Qcow2::open(&io, file.info(), open_options(false))).unwrap();
    // The header's sector and cluster, L1, the refcount table.
    let (operations, bytes) = spent.take();
    assert!(operations <= 4 && bytes <= 512 << 10, "open: {operations} operations, {bytes} bytes");

    let mapped = block_on(qcow2.resolve(&io, 4096, 4096)).unwrap();
    assert_eq!(mapped.extent, Extent::Data { file: 0, offset: (PER_BLOCK + 100) * CLUSTER + 4096 });
    assert_eq!(spent.take(), (1, 4096), "the first read");

    let allocate = |offset| match block_on(qcow2.prepare_write(&io, offset, 4096)).unwrap() {
        Prepared::New(allocation) => block_on(qcow2.commit_write(&io, allocation)).unwrap(),
        Prepared::InPlace { .. } => panic!("{offset} is allocated"),
    };
    allocate(CLUSTER);
    // The header and its sync, two refcount blocks (one that is looked through for free clusters, one for the space at the
    // end), that space.
    let (operations, bytes) = spent.take();
    assert!(operations <= 6 && bytes <= 4 * CLUSTER, "the first allocation: {operations} operations, {bytes} bytes");

    for number in 2..400 {
        allocate(number * CLUSTER);
    }
    // Looking for free clusters goes on, a block now and then.
    let (operations, bytes) = spent.take();
    assert!(operations <= 10 && bytes <= 4 * CLUSTER, "398 more: {operations} operations, {bytes} bytes");
}
