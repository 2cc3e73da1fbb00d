//! The space of a kept overlay whose guest frees pages and never flushes.
#![allow(clippy::unwrap_used)]

use block::{File, IoError, IoErrorKind, IoResult, MetaIo, block_on};
use ringdisk_format_scratch::{Header, HostSpace, Prepared, Scratch, Space, create_kept};
use std::sync::Arc;
use testkit::{Fault, FaultAction, OpKind, SimFileOptions, SimStorage};

const INDEX: &str = "disk.scratch";
const DATA: &str = "disk.scratch.data";
const DISK: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// How far the data of so small a disk may grow beyond it: what waits for a flush, and one step of space.
const BEYOND: u64 = (64 << 20) + (4 << 20);

struct Kept {
    storage: SimStorage,
    io: MetaIo,
    scratch: Scratch,
}

impl Kept {
    fn new(data: SimFileOptions) -> Self {
        Self::of(DISK, data)
    }

    fn of(size_bytes: u64, data: SimFileOptions) -> Self {
        let storage = SimStorage::new(1);
        storage.create(INDEX, 0, SimFileOptions::default());
        storage.create(DATA, 0, data);
        let queue = |name| storage.file(name).unwrap().open_blocking().unwrap();
        let io = MetaIo::new(queue(INDEX)).with_data(queue(DATA));
        let header =
            Header { size_bytes, backing_file: "below".to_owned(), backing_format: None, data_file: DATA.to_owned() };
        block_on(create_kept(&io, INDEX, &header)).unwrap();
        let length = storage.bytes(INDEX).len() as u64;
        let scratch = block_on(Scratch::open_kept(&io, INDEX, length, false)).unwrap();
        Self { storage, io, scratch }
    }

    fn write(&self, offset: u64, length: u64) -> IoResult {
        let mut done = 0;
        while done < length {
            done += match block_on(self.scratch.prepare_write(&self.io, offset + done, length - done))? {
                Prepared::InPlace { length_bytes, .. } => length_bytes,
                Prepared::New(allocation) => {
                    let length_bytes = allocation.length_bytes;
                    self.scratch.commit_write(allocation)?;
                    length_bytes
                }
            };
        }
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) {
        block_on(self.scratch.discard(&self.io, offset, length)).unwrap();
    }

    fn flushes(&self) -> u64 {
        self.storage.pushed(DATA, OpKind::Flush)
    }
}

#[test]
fn a_guest_that_frees_and_never_flushes_waits_for_a_flush_before_its_data_grow_without_bound() {
    let kept = Kept::new(SimFileOptions::default());
    for round in 0..1000 {
        // Whole disks, and now and then one page: the runs differ.
        let length = if round % 10 == 9 { PAGE } else { DISK };
        kept.write(0, length).unwrap();
        kept.discard(0, length);
        assert!(kept.scratch.used_bytes() <= DISK + BEYOND, "round {round}: {}", kept.scratch.used_bytes());
    }
    let length = kept.storage.file(DATA).unwrap().storage().bytes(DATA).len() as u64;
    assert!(length <= DISK + BEYOND, "{length}");
    assert!((10..=20).contains(&kept.flushes()), "{}", kept.flushes());
}

#[test]
fn where_the_host_is_full_what_was_freed_and_not_flushed_is_flushed_and_used_again() {
    const ROOM: u64 = 16;
    let kept = Kept::new(SimFileOptions { max_length_bytes: ROOM * PAGE, ..SimFileOptions::default() });
    for round in 0..10_000 {
        kept.write(0, PAGE).unwrap_or_else(|error| panic!("round {round}: {error}"));
        kept.discard(0, PAGE);
    }
    assert!(kept.flushes() <= 10_000 / ROOM + 1, "{}", kept.flushes());
    // What is in use is no room, however often it is flushed.
    kept.write(0, ROOM * PAGE).unwrap();
    let flushes = kept.flushes();
    assert_eq!(kept.write(ROOM * PAGE, PAGE).unwrap_err().kind(), IoErrorKind::NoSpace);
    assert_eq!(kept.flushes(), flushes);
    kept.discard(0, PAGE);
    kept.write(ROOM * PAGE, PAGE).unwrap();
}

/// The disk of a guest that goes on all the same: it has space at hand.
#[test]
fn on_a_full_host_space_is_asked_for_once_ahead() {
    let kept = Kept::of(8 * DISK, SimFileOptions::default());
    // More than half of what is reserved at first.
    kept.write(0, 3 * DISK).unwrap();
    assert!(kept.scratch.is_short());
    let before = kept.storage.pushed(DATA, OpKind::WriteZeroes);
    let full = FaultAction::Fail(IoError::new(IoErrorKind::NoSpace));
    kept.storage.inject(DATA, Fault::from_nth(OpKind::WriteZeroes, 0, full));
    block_on(kept.scratch.reserve_ahead(&kept.io));
    assert_eq!(kept.storage.pushed(DATA, OpKind::WriteZeroes) - before, 1);
    assert!(!kept.scratch.is_short());
}

/// Whatever becomes of the pages of its file: on a disk they may be written out and dropped.
#[test]
fn the_index_of_an_overlay_that_is_not_in_memory_does_not_lie_in_its_file() {
    for resident in [false, true] {
        let file = || tempfile::tempfile().unwrap();
        let index = file();
        let spaces = [index.try_clone().unwrap(), file()].map(|file| Arc::new(HostSpace::of(file)) as Arc<dyn Space>);
        let scratch = Scratch::new("disk", DISK, &index, spaces, resident).unwrap();
        let queue = |name: &str| SimStorage::new(1).create(name, 0, SimFileOptions::default()).open_blocking().unwrap();
        let io = MetaIo::new(queue(INDEX)).with_data(queue(DATA));
        let mut staged = scratch.try_stage(0, PAGE).unwrap();
        block_on(scratch.link(&io, 0, &mut staged)).unwrap();
        assert!(scratch.in_one_piece(0, PAGE).is_some());
        index.set_len(0).unwrap();
        assert_eq!(scratch.in_one_piece(0, PAGE).is_some(), !resident);
    }
}

/// Where the file of the data cannot be mapped after all.
#[test]
fn space_that_is_given_back_unused_is_the_next_that_is_given() {
    let file = || tempfile::tempfile().unwrap();
    let index = file();
    let spaces = [index.try_clone().unwrap(), file()].map(|file| Arc::new(HostSpace::of(file)) as Arc<dyn Space>);
    let scratch = Scratch::new("disk", DISK, &index, spaces, true).unwrap();
    // One page is at hand from the start.
    for round in 0..1000 {
        scratch.try_stage(0, PAGE).unwrap_or_else(|| panic!("round {round}")).give_back();
    }
    assert_eq!(scratch.used_bytes(), PAGE);
}
