//! What the layer above relies on: fillings, waiting, reuse, flush counts, caches of any size.
#![allow(clippy::unwrap_used)]

mod common;

use block::{Extent, File, FileInfo, Fill, IoErrorKind, MetaIo, ReactorCtx, block_on};
use common::{Base, DATA, Guest, NAME, blocking, copy, created, open, open_bytes, open_options};
use memory::AlignedBuf;
use ringdisk_format_qcow2::{CreateOptions, NewSnapshot, Overwrite, Prepared, Qcow2, create_snapshot};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use testkit::{Dice, OpKind, SimFile, SimFileOptions, SimReactor, SimStorage, fill_seeded, qcow2_check, stamped};

const K: u64 = 1024;

fn options(size_bytes: u64, cluster_size: u64) -> CreateOptions {
    CreateOptions::default().with(|options| {
        options.size_bytes = size_bytes;
        options.cluster_size = cluster_size;
    })
}

fn new_image(size_bytes: u64, cluster_size: u64) -> (SimStorage, Guest) {
    let (storage, file) = created(&options(size_bytes, cluster_size), SimFileOptions::default());
    let guest = open(&file, Base::default());
    (storage, guest)
}

fn prepare(guest: &Guest, offset: u64, length: u64) -> Prepared {
    block_on(guest.qcow2.prepare_write(&guest.io, offset, length)).unwrap()
}

fn fills(guest: &Guest, offset: u64, length: u64) -> (u64, u64, Fill, Fill) {
    match prepare(guest, offset, length) {
        Prepared::New(new) => (new.guest_offset, new.length_bytes, new.head, new.tail),
        Prepared::InPlace { .. } => panic!("{offset} is allocated"),
    }
}

fn with_backing() -> (SimStorage, Guest) {
    let overlay = options(1 << 20, 64 * K).with(|options| options.backing_file = Some("base".to_owned()));
    let (storage, file) = created(&overlay, SimFileOptions::default());
    let mut base = vec![0; 1 << 20];
    fill_seeded(5, &mut base);
    let guest = open(&file, Arc::new(base));
    (storage, guest)
}

#[test]
fn what_a_write_leaves_of_its_clusters_is_filled_only_where_needed() {
    let (_storage, guest) = new_image(1 << 20, 64 * K);
    // Fresh space at the end of the file is zero already.
    assert_eq!(fills(&guest, 70 * K, 100 * K), (64 * K, 128 * K, Fill::None, Fill::None));
    let (_storage, guest) = with_backing();
    assert_eq!(fills(&guest, 70 * K, 100 * K), (64 * K, 128 * K, Fill::Copy, Fill::Copy));
    assert_eq!(fills(&guest, 64 * K, 64 * K), (64 * K, 64 * K, Fill::None, Fill::None));
    assert_eq!(fills(&guest, 64 * K, 9 * K), (64 * K, 64 * K, Fill::None, Fill::Copy));
    block_on(guest.write(64 * K, &[1; 65536])).unwrap();
    block_on(guest.write_zeroes(64 * K, 64 * K, false)).unwrap();
    let Prepared::New(kept) = prepare(&guest, 65 * K, K) else { panic!("zero clusters need a new mapping") };
    assert_eq!((kept.head, kept.tail), (Fill::Zero, Fill::Zero), "the kept cluster holds old data");
    drop(kept);
    // Where the file cannot promise zeros, they are written.
    let plain = SimFileOptions { fast_zeroes: false, ..SimFileOptions::default() };
    let (_storage, file) = created(&options(1 << 20, 64 * K), plain);
    let guest = open(&file, Base::default());
    assert_eq!(fills(&guest, 70 * K, 100 * K), (64 * K, 128 * K, Fill::Zero, Fill::Zero));
}

#[test]
fn nothing_behind_the_end_of_the_disk_is_copied() {
    let overlay = options(100 * K, 64 * K).with(|options| options.backing_file = Some("base".to_owned()));
    let (_storage, file) = created(&overlay, SimFileOptions { fast_zeroes: false, ..SimFileOptions::default() });
    let guest = open(&file, Base::default());
    assert_eq!(fills(&guest, 90 * K, 10 * K), (64 * K, 64 * K, Fill::Copy, Fill::Zero));
    let outside = block_on(guest.qcow2.prepare_write(&guest.io, 90 * K, 11 * K)).map(drop);
    assert_eq!(outside.unwrap_err().kind(), IoErrorKind::OutOfRange);
}

#[test]
fn a_large_write_gets_one_long_allocation() {
    let (_storage, guest) = new_image(64 << 20, 64 * K);
    for (offset, length, wanted) in [(0, 1 << 20, 1 << 20), (8 << 20, 8 << 20, 2 << 20)] {
        let (_, length, ..) = fills(&guest, offset, length);
        // The first may end where the prepared space at the end of the file does.
        assert!(length >= wanted / 8 && length <= wanted, "{length}");
    }
    let (_, length, ..) = fills(&guest, 20 << 20, 2 << 20);
    assert_eq!(length % (64 * K), 0);
}

#[test]
fn a_second_write_to_a_new_cluster_waits_and_then_overwrites() {
    let (storage, first) = new_image(1 << 20, 64 * K);
    let file = storage.file(NAME).unwrap();
    let reactor = SimReactor::new(1);
    let second = first.through(MetaIo::new(file.open_queue(&reactor.ctx()).unwrap()));
    let Prepared::New(allocation) = prepare(&first, 0, 512) else { panic!("new") };
    let file_offset = allocation.file_offset;
    let outcome = Rc::new(RefCell::new(None));
    let seen = Rc::clone(&outcome);
    reactor.spawn(block::Task::new(async move {
        *seen.borrow_mut() = Some(second.qcow2.prepare_write(&second.io, 1024, 512).await.unwrap());
    }));
    reactor.run_until_idle();
    assert!(outcome.borrow().is_none(), "the same cluster must not be allocated twice");
    assert_eq!(block_on(first.read(0, 512)).unwrap(), [0; 512], "invisible before commit");
    block_on(first.qcow2.commit_write(&first.io, allocation)).unwrap();
    reactor.run_until_idle();
    let got = outcome.take();
    assert!(
        matches!(got, Some(Prepared::InPlace { offset, length_bytes: 512 }) if offset == file_offset + 1024),
        "{got:?}"
    );
}

#[test]
fn a_dropped_allocation_gives_its_space_back() {
    let (storage, guest) = new_image(1 << 20, 64 * K);
    let Prepared::New(allocation) = prepare(&guest, 0, 512) else { panic!("new") };
    let file_offset = allocation.file_offset;
    drop(allocation);
    assert!(matches!(guest.qcow2.lookup_overwrite(0, 512), Overwrite::Slow));
    block_on(guest.flush()).unwrap();
    let Prepared::New(again) = prepare(&guest, 0, 512) else { panic!("new") };
    assert_eq!(again.file_offset, file_offset);
    drop(again);
    block_on(guest.close()).unwrap();
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    assert_eq!(report.leaked_clusters, 0);
}

#[test]
fn a_freed_cluster_is_not_reused_while_anybody_may_still_write_there() {
    let (_storage, guest) = new_image(1 << 20, 64 * K);
    let mut queue = guest.qcow2.epochs().join();
    block_on(guest.write(0, &[1; 65536])).unwrap();
    let ticket = queue.begin(guest.qcow2.epochs());
    let Overwrite::InPlace { offset: old, .. } = guest.qcow2.lookup_overwrite(0, 512) else { panic!("allocated") };
    block_on(guest.discard(0, 64 * K)).unwrap();
    let reused = |at: u64| match prepare(&guest, at, 512) {
        Prepared::New(new) => new.file_offset == old,
        Prepared::InPlace { .. } => panic!("new"),
    };
    assert!(!reused(0), "not before the flush");
    block_on(guest.flush()).unwrap();
    block_on(guest.flush()).unwrap();
    assert!(!reused(0), "an operation resolved before is still in flight");
    queue.end(ticket);
    block_on(guest.flush()).unwrap();
    assert!(reused(0));
}

#[test]
fn a_flush_without_new_metadata_is_one_flush_and_no_write() {
    let (storage, guest) = new_image(1 << 20, 64 * K);
    block_on(guest.write(0, &[1; 4096])).unwrap();
    block_on(guest.flush()).unwrap();
    block_on(guest.write(0, &[2; 4096])).unwrap();
    let count = || (storage.pushed(NAME, OpKind::Flush), storage.pushed(NAME, OpKind::Write));
    let before = count();
    block_on(guest.flush()).unwrap();
    assert_eq!(count(), (before.0 + 1, before.1));
    // An allocation costs one barrier more: data and refcounts before the mapping.
    block_on(guest.write(128 * K, &[3; 4096])).unwrap();
    let before = count();
    block_on(guest.flush()).unwrap();
    assert_eq!(count(), (before.0 + 2, before.1 + 2));
}

#[test]
fn flushes_at_the_same_time_share_their_work() {
    let (storage, guest) = new_image(1 << 20, 64 * K);
    let file = storage.file(NAME).unwrap();
    let reactor = SimReactor::new(2);
    reactor.complete_inline(0);
    let done = Rc::new(RefCell::new(0));
    let before = storage.pushed(NAME, OpKind::Flush);
    for _ in 0..20 {
        let queue = guest.through(MetaIo::new(file.open_queue(&reactor.ctx()).unwrap()));
        let done = Rc::clone(&done);
        reactor.spawn(block::Task::new(async move {
            queue.flush().await.unwrap();
            *done.borrow_mut() += 1;
        }));
    }
    reactor.run_until_idle();
    assert_eq!(*done.borrow(), 20);
    assert!(storage.pushed(NAME, OpKind::Flush) - before <= 2, "the first, and one for all that came meanwhile");
}

#[test]
fn a_flush_whose_task_is_dropped_is_taken_over() {
    let (storage, guest) = new_image(1 << 20, 64 * K);
    block_on(guest.write(0, &[1; 4096])).unwrap();
    let file = storage.file(NAME).unwrap();
    let reactor = SimReactor::new(2);
    reactor.complete_inline(0);
    let queue = guest.through(MetaIo::new(file.open_queue(&reactor.ctx()).unwrap()));
    {
        let mut abandoned = Box::pin(queue.flush());
        let waker = std::task::Waker::noop();
        assert!(abandoned.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
    }
    reactor.run(async move { queue.flush().await }).unwrap();
    let after = storage.power_cut(1);
    let reopened = open(&after.file(NAME).unwrap(), Base::default());
    assert_eq!(block_on(reopened.read(0, 4096)).unwrap(), [1; 4096]);
}

#[test]
fn unknown_autoclear_bits_are_cleared_before_the_first_write_and_not_at_open() {
    let (storage, _) = new_image(1 << 20, 64 * K);
    let mut bytes = storage.bytes(NAME);
    bytes[88..96].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 1]);
    let (storage, guest) = open_bytes(&bytes, Base::default());
    block_on(guest.flush()).unwrap();
    block_on(guest.read(0, 4096)).unwrap();
    assert!(storage.bytes(NAME) == bytes);
    let allocation = prepare(&guest, 0, 512);
    assert_eq!(storage.power_cut(1).bytes(NAME)[88..96], [0; 8], "durable before anything else changes");
    drop(allocation);
    let (storage, guest) = open_bytes(&bytes, Base::default());
    block_on(guest.discard(0, 1 << 20)).unwrap();
    assert!(storage.bytes(NAME) == bytes, "a discard of nothing is no write");
}

#[test]
fn a_guest_that_only_discards_ends_the_promises_of_others_before_anything_changes() {
    const UNKNOWN: u8 = 0x20;
    for data_file_raw in [None, Some(false), Some(true)] {
        let data_file = data_file_raw.map(|_| DATA.to_owned());
        let data_file_raw = data_file_raw == Some(true);
        let wanted = options(1 << 20, 64 * K).with(|options| {
            options.data_file = data_file;
            options.data_file_raw = data_file_raw;
        });
        let (original, file) = created(&wanted, SimFileOptions::default());
        let guest = open(&file, Base::default());
        block_on(guest.write(0, &stamped(1, 0, 256 << 10))).unwrap();
        block_on(guest.close()).unwrap();
        drop(guest);
        let (storage, mut header) = (copy(&original), original.bytes(NAME)[..512].to_vec());
        header[95] |= UNKNOWN;
        let file = storage.file(NAME).unwrap();
        block_on(blocking(&file).write(0, AlignedBuf::copy_of(&header))).unwrap();
        block_on(blocking(&file).flush()).unwrap();
        let data = |storage: &SimStorage| storage.file(DATA).map(|_| storage.bytes(DATA));
        let before = data(&storage);
        let guest = open(&file, Base::default());
        assert_eq!(storage.bytes(NAME)[95] & UNKNOWN, UNKNOWN, "opening is no change");
        storage.record();
        block_on(guest.discard(0, 128 * K)).unwrap();
        block_on(guest.close()).unwrap();
        let kept = if data_file_raw { 2 } else { 0 };
        assert_eq!(storage.bytes(NAME)[95], kept, "{wanted:?}");
        let (mut replay, mut changed) = (storage.take_recording().replay(), 0);
        while let Some(now) = replay.advance() {
            let cut = replay.power_cut(now);
            if data(&cut) != before {
                changed += 1;
                assert_eq!(cut.bytes(NAME)[95], kept, "{wanted:?}, cut at {now}");
            }
        }
        assert_eq!(changed > 0, before.is_some());
    }
}

#[test]
fn a_read_only_image_is_never_written() {
    let (storage, guest) = new_image(1 << 20, 64 * K);
    block_on(guest.write(0, &[1; 4096])).unwrap();
    block_on(guest.close()).unwrap();
    let file = storage.file(NAME).unwrap();
    let writes = storage.now();
    let io = blocking(&file);
    let qcow2 = block_on(Qcow2::open(&io, file.info(), open_options(true))).unwrap();
    let reader = Guest { qcow2: Arc::new(qcow2), io, base: Base::default() };
    assert_eq!(block_on(reader.read(0, 4096)).unwrap(), [1; 4096]);
    assert!(matches!(reader.qcow2.lookup_overwrite(0, 512), Overwrite::Slow));
    let refused = |result: block::IoResult| assert_eq!(result.unwrap_err().kind(), IoErrorKind::ReadOnly);
    refused(block_on(reader.write(0, &[2; 512])));
    refused(block_on(reader.discard(0, 64 * K)));
    refused(block_on(reader.write_zeroes(0, 64 * K, true)));
    block_on(reader.flush()).unwrap();
    block_on(reader.close()).unwrap();
    assert_eq!(storage.now(), writes);
}

fn open_small_cache(file: &SimFile) -> Guest {
    let (io, info): (_, FileInfo) = (blocking(file), file.info().clone());
    let qcow2 = block_on(Qcow2::open_with_cache(&io, &info, open_options(false), 0)).unwrap();
    Guest { qcow2: Arc::new(qcow2), io, base: Base::default() }
}

#[test]
fn a_cache_much_smaller_than_the_tables_only_costs_time() {
    // 256 tables of 64 entries; the smallest cache holds 64 of them, and 16 refcount blocks of 64 refcounts.
    let wanted = options(8 << 20, 512).with(|options| options.refcount_bits = 64);
    let (storage, file) = created(&wanted, SimFileOptions::default());
    let mut model = vec![0u8; 8 << 20];
    let mut dice = Dice::new(3);
    for _ in 0..2 {
        let guest = open_small_cache(&storage.file(NAME).unwrap());
        for _ in 0..1500 {
            let offset = dice.below((8 << 20) / 512) * 512;
            let length = (512 * (1 + dice.below(8))).min((8 << 20) - offset);
            let range = offset as usize..(offset + length) as usize;
            block_on(async {
                if dice.chance(15) {
                    model[range].fill(0);
                    guest.write_zeroes(offset, length, true).await.unwrap();
                } else {
                    fill_seeded(dice.seed(), &mut model[range.clone()]);
                    guest.write(offset, &model[range]).await.unwrap();
                }
            });
        }
        assert!(block_on(guest.read_all()).unwrap() == model);
        block_on(guest.close()).unwrap();
        qcow2_check(&storage.bytes(NAME)).unwrap().sound().unwrap();
    }
    drop(file);
    let guest = open(&storage.file(NAME).unwrap(), Base::default());
    assert!(block_on(guest.read_all()).unwrap() == model);
}

#[test]
fn a_huge_image_opens_by_reading_its_header_and_top_tables_only() {
    let (storage, file) = created(&options(16 << 40, 64 * K), SimFileOptions::default());
    let before = storage.pushed(NAME, OpKind::Read);
    let guest = open(&file, Base::default());
    assert!(storage.pushed(NAME, OpKind::Read) - before <= 4);
    block_on(guest.write((16 << 40) - 4096, &[7; 4096])).unwrap();
    assert_eq!(block_on(guest.read((16 << 40) - 8192, 8192)).unwrap(), [[0; 4096], [7; 4096]].concat());
    // What was never written is one extent up to the next table.
    let hole = guest.qcow2.lookup(0, 1 << 40).unwrap();
    assert_eq!((hole.extent, hole.length_bytes), (Extent::Backing, 1 << 40));
    assert!(storage.pushed(NAME, OpKind::Read) - before <= 6);
}

#[test]
fn a_device_that_cannot_grow_is_used_to_its_end_and_then_full() {
    let (source, _) = created(&options(4 << 20, 64 * K), SimFileOptions::default());
    let mut bytes = source.bytes(NAME);
    bytes.resize(1 << 20, 0xa5);
    let storage = SimStorage::new(1);
    let device = SimFileOptions { block_device: true, ..SimFileOptions::default() };
    let file = storage.create_with(NAME, &bytes, device);
    let guest = open(&file, Base::default());
    let mut written = 0;
    let error = loop {
        match block_on(guest.write(written * 64 * K, &[written as u8; 512])) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), IoErrorKind::NoSpace);
    assert!(written >= 9, "only {written} of 16 clusters could be used");
    block_on(async {
        // No guest has to flush for it: space that it gave up is there for it.
        guest.discard(0, 64 * K).await.unwrap();
        guest.write(written * 64 * K, &[0xee; 512]).await.unwrap();
        guest.close().await.unwrap();
    });
    let reopened = open(&file, Base::default());
    for cluster in 1..written {
        let mut expected = vec![0; 65536];
        expected[..512].fill(cluster as u8);
        assert!(block_on(reopened.read(cluster * 64 * K, 65536)).unwrap() == expected);
    }
    qcow2_check(&storage.bytes(NAME)).unwrap().sound().unwrap();
}

#[test]
fn discarded_space_is_punched_out_of_the_file_and_used_again() {
    let (storage, guest) = new_image(8 << 20, 64 * K);
    block_on(async {
        guest.write(0, &vec![3; 4 << 20]).await.unwrap();
        guest.flush().await.unwrap();
        let length = storage.bytes(NAME).len();
        guest.discard(0, 4 << 20).await.unwrap();
        guest.flush().await.unwrap();
        let bytes = storage.bytes(NAME);
        assert!(!bytes.chunks(512).any(|sector| sector == [3; 512]), "old data lies in the file");
        guest.write(4 << 20, &vec![4; 4 << 20]).await.unwrap();
        guest.close().await.unwrap();
        assert_eq!(storage.bytes(NAME).len(), length, "the file grew");
    });
    assert_eq!(qcow2_check(&storage.bytes(NAME)).unwrap().leaked_clusters, 0);
}

#[test]
fn a_guest_that_never_flushes_makes_the_file_no_longer_than_some_of_its_disk_more() {
    let (storage, guest) = new_image(8 << 20, 64 * K);
    block_on(async {
        for round in 0..2000u64 {
            let offset = round % 128 * 64 * K;
            guest.write(offset, &[round as u8; 512]).await.unwrap();
            guest.discard(offset, 64 * K).await.unwrap();
        }
        let length_mib = storage.bytes(NAME).len() >> 20;
        assert!(length_mib <= 64 + 8 + 16, "{length_mib} MiB");
        guest.close().await.unwrap();
    });
    assert_eq!(qcow2_check(&storage.bytes(NAME)).unwrap().leaked_clusters, 0);
}

#[test]
fn threads_that_write_side_by_side_lose_nothing() {
    const THREADS: u64 = 4;
    // Small clusters and the smallest cache: allocation, eviction and flushes all the time. Each thread has every
    // fourth sector, so that they share clusters.
    let (storage, file) = created(&options(4 << 20, 2048), SimFileOptions::default());
    let shared = open_small_cache(&file).qcow2;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, storage) = (Arc::clone(&shared), storage.clone());
            scope.spawn(move || {
                let file = storage.file(NAME).unwrap();
                let guest = Guest { qcow2: shared, io: blocking(&file), base: Base::default() };
                let mut queue = guest.qcow2.epochs().join();
                let mut dice = Dice::new(thread);
                let mut model = std::collections::BTreeMap::new();
                for _ in 0..1200 {
                    let sector = dice.below((4 << 20) / 512 / THREADS) * THREADS + thread;
                    let value = dice.below(255) as u8 + 1;
                    let ticket = queue.begin(guest.qcow2.epochs());
                    block_on(async {
                        guest.write(sector * 512, &[value; 512]).await.unwrap();
                        model.insert(sector, value);
                        if dice.chance(3) {
                            guest.flush().await.unwrap();
                        }
                        let other = *model.keys().nth(dice.index(model.len())).unwrap();
                        assert_eq!(guest.read(other * 512, 512).await.unwrap(), [model[&other]; 512]);
                    });
                    queue.end(ticket);
                }
                for (sector, value) in model {
                    assert_eq!(block_on(guest.read(sector * 512, 512)).unwrap(), [value; 512]);
                }
            });
        }
    });
    let io = blocking(&storage.file(NAME).unwrap());
    block_on(shared.close(&io)).unwrap();
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    report.sound().unwrap();
    assert_eq!(report.leaked_clusters, 0);
}

#[test]
fn a_write_to_one_part_of_a_cluster_that_gets_a_new_place_takes_the_other_parts_along() {
    let extended = options(1 << 20, 16 * K).with(|options| options.extended_l2 = true);
    for compressed in [false, true] {
        let (_storage, file) = created(&extended, SimFileOptions::default());
        let guest = open(&file, Base::default());
        let mut expected = vec![0; 16 << 10];
        for part in [0, 3] {
            expected[part * 512..][..512].fill(1 + part as u8);
        }
        block_on(async {
            match compressed {
                true => guest.write_compressed(0, &expected).await.unwrap(),
                false => {
                    guest.write(0, &expected[..512]).await.unwrap();
                    guest.write(3 * 512, &expected[3 * 512..4 * 512]).await.unwrap();
                }
            }
            guest.close().await.unwrap();
            if !compressed {
                let new = NewSnapshot::new("one");
                create_snapshot(&blocking(&file), file.as_ref(), NAME, &new, &mut |_, _| true).await.unwrap();
            }
        });
        let guest = open(&file, Base::default());
        expected[5 * 512..6 * 512].fill(9);
        block_on(guest.write(5 * 512, &[9; 512])).unwrap();
        assert!(block_on(guest.read(0, 16 << 10)).unwrap() == expected, "compressed: {compressed}");
    }
}

#[test]
fn compressed_clusters_follow_each_other_whatever_is_allocated_between_them() {
    let (storage, guest) = new_image(32 << 20, 4 * K);
    let (mut noise, mut half) = (vec![0; 4096], vec![0; 4096]);
    const PAIRS: u64 = 1500;
    for index in 0..PAIRS {
        fill_seeded(index, &mut noise);
        half[..2048].copy_from_slice(&noise[..2048]);
        block_on(guest.write_compressed(index * 8 * K, &half)).unwrap();
        block_on(guest.write(index * 8 * K + 4 * K, &noise)).unwrap();
    }
    block_on(guest.close()).unwrap();
    block_on(guest.qcow2.trim(&guest.io)).unwrap();
    let image = storage.bytes(NAME);
    let report = qcow2_check(&image).unwrap();
    assert_eq!(report.leaked_clusters, 0);
    report.sound().unwrap();
    // The noise, a little more than half a cluster for each of the others, and tables.
    let least = PAIRS * (4096 + 2048);
    assert!((image.len() as u64) < least * 104 / 100, "{} bytes for {least}", image.len());
    let (_storage, again) = open_bytes(&image, Base::default());
    for index in [0, 1, 700, PAIRS - 1] {
        fill_seeded(index, &mut noise);
        assert!(block_on(again.read(index * 8 * K + 4 * K, 4096)).unwrap() == noise);
        assert!(block_on(again.read(index * 8 * K, 2048)).unwrap() == noise[..2048]);
    }
}
