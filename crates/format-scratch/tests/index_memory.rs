//! The memory that the indexes of kept overlays may take: one test, because the limit is the process'.
#![allow(clippy::unwrap_used)]

use block::{File, IoErrorKind, IoResult, MetaIo, block_on};
use ringdisk_format_scratch::{Header, Prepared, Scratch, create_kept, limit_index_memory};
use testkit::{SimFileOptions, SimStorage};

const INDEX: &str = "disk.scratch";
const DATA: &str = "disk.scratch.data";
/// What one table of the index is for, and takes.
const PART: u64 = 4 << 20;
const TABLE: u64 = 4096;

fn made() -> SimStorage {
    let storage = SimStorage::new(1);
    for name in [INDEX, DATA] {
        storage.create(name, 0, SimFileOptions::default());
    }
    let header = Header {
        size_bytes: 1 << 40,
        backing_file: "below".to_owned(),
        backing_format: None,
        data_file: DATA.to_owned(),
    };
    block_on(create_kept(&io(&storage), INDEX, &header)).unwrap();
    storage
}

fn io(storage: &SimStorage) -> MetaIo {
    let queue = |name| storage.file(name).unwrap().open_blocking().unwrap();
    MetaIo::new(queue(INDEX)).with_data(queue(DATA))
}

fn open(storage: &SimStorage) -> Scratch {
    let length = storage.bytes(INDEX).len() as u64;
    block_on(Scratch::open_kept(&io(storage), INDEX, length, false)).unwrap()
}

fn write(scratch: &Scratch, io: &MetaIo, offset: u64) -> IoResult {
    match block_on(scratch.prepare_write(io, offset, 4096))? {
        Prepared::New(allocation) => scratch.commit_write(allocation),
        Prepared::InPlace { .. } => Ok(()),
    }
}

/// Writes to one new part after the other until one fails; how many did not, and why that one did.
fn fill(scratch: &Scratch, io: &MetaIo) -> (u64, IoErrorKind) {
    for part in 0.. {
        if let Err(error) = write(scratch, io, part * PART) {
            return (part, error.kind());
        }
    }
    unreachable!("the disk ends before")
}

#[test]
fn an_index_grows_while_it_leaves_as_much_as_it_takes_and_then_its_disk_is_full() {
    limit_index_memory(100 * TABLE);
    let (first, second) = (made(), made());
    let (one, two) = (open(&first), open(&second));
    let (parts, why) = fill(&one, &io(&first));
    assert_eq!(why, IoErrorKind::NoSpace);
    assert!((30..50).contains(&parts), "{parts}");
    // What it has goes on being written, and another overlay grows, too.
    write(&one, &io(&first), (parts - 1) * PART + 4096).unwrap();
    let (parts_of_other, _) = fill(&two, &io(&second));
    assert!((10..parts).contains(&parts_of_other), "{parts_of_other}");
    block_on(one.flush(&io(&first))).unwrap();
    drop(two);
    drop(one);
    // One that is there is opened, whatever the limit is by now, and takes no more than it has.
    limit_index_memory(8 * TABLE);
    let again = open(&first);
    write(&again, &io(&first), 0).unwrap();
    assert_eq!(write(&again, &io(&first), parts * PART).unwrap_err().kind(), IoErrorKind::NoSpace);
    drop(again);
    limit_index_memory(1000 * TABLE);
    let again = open(&first);
    write(&again, &io(&first), parts * PART).unwrap();
    block_on(again.flush(&io(&first))).unwrap();
    opened_anew_it_counts_once(&first, &again);
}

fn opened_anew_it_counts_once(storage: &SimStorage, former: &Scratch) {
    let pages = storage.bytes(INDEX).len() as u64 / TABLE;
    limit_index_memory((2 * pages + 50) * TABLE);
    let anew = open(storage);
    let more = |from: u64| (from..from + 20).try_for_each(|part| write(&anew, &io(storage), part * PART));
    assert_eq!(more(1000).unwrap_err().kind(), IoErrorKind::NoSpace, "both count");
    former.count_index_memory(false);
    more(1000).unwrap();
    former.count_index_memory(true);
    assert_eq!(more(2000).unwrap_err().kind(), IoErrorKind::NoSpace);
}
