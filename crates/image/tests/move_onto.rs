//! The top layer of a disk gets what lower layers hold while several queues work, and every read is checked against the
//! history of the writes.

mod live;

use block::{Disk, ErrorKind, File, FileInfo, FileIo, FileQueue, ReactorCtx, Result, StatusQuery};
use live::{Bench, HostOpener, Shape, create, open};
use ringdisk_image::{
    CopyWatch, FileName, Format, ImageOptions, NewBelow, OpenedBase, Opener, Role, move_onto, move_onto_or_stay,
};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::HistoryLoad;

const OPERATIONS: u64 = 100_000;
const SIZE: u64 = 4 << 20;

/// Under load, with several pieces at once, and with a limit one after the other.
fn streams(shape: &Shape, keep: Option<usize>) {
    [None, Some(16 << 20)].into_iter().for_each(|limit| streams_at(shape, keep, limit));
}

/// The layers that go are deleted afterwards, so whoever still needs them fails.
fn streams_at(shape: &Shape, keep: Option<usize>, bytes_per_second: Option<u64>) {
    let bench = Bench::new(shape);
    let before = bench.files();
    let load = bench.start(HistoryLoad { write_percent: 20, ..HistoryLoad::default() });
    load.wait_for_more(500);
    let watch = CopyWatch::that_can_give_up();
    watch.set_rate(bytes_per_second.unwrap_or(0));
    bench.move_onto(keep.map_or(NewBelow::Nothing, NewBelow::Layer), &watch).unwrap();
    assert_eq!(watch.done_bytes(), watch.total_bytes());
    let kept = keep.map_or(before.len(), |keep| keep);
    before[1..kept].iter().for_each(|gone| std::fs::remove_file(gone).unwrap());
    let stays = before.iter().enumerate().filter(|(at, _)| *at == 0 || *at >= kept);
    let after: Vec<_> = stays.map(|(_, file)| file.clone()).collect();
    assert_eq!(bench.files(), after);
    while load.operations() < OPERATIONS / 8 {
        load.wait_for_more(1000);
    }
    assert_eq!(load.finish(), [""; 0]);
    let named = bench.image.qcow2_header().unwrap().backing_file;
    assert_eq!(named.as_deref(), after.get(1).map(|below| below.to_str().unwrap()));
    bench.assert_sound_and_as_written();
}

#[test]
fn a_chain_becomes_one_image() {
    streams(&Shape::qcow2(SIZE, &[4096, 65536]), None);
    streams(&Shape::qcow2(SIZE - 1536, &[65536, 512, 16384, 4096]), None);
}

/// What one allocation of a piece leaves is copied as well: clusters in flight and ends of tables cut allocations short.
#[test]
fn all_of_a_piece_is_copied_though_an_allocation_ends_within_it() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536]));
    let load = HistoryLoad { write_percent: 100, sectors_max: 512, ..HistoryLoad::default() };
    let load = bench.start(load);
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    // One of its tables maps 32 KiB.
    bench.put_overlay(512);
    let watch = CopyWatch::that_can_give_up();
    bench.move_onto(NewBelow::Nothing, &watch).unwrap();
    assert_eq!((watch.done_bytes(), bench.files().len()), (SIZE, 1));
    bench.assert_sound_and_as_written();
}

#[test]
fn a_top_with_subclusters_gets_all_that_lies_below() {
    streams(&Shape::qcow2(SIZE, &[4096, 65536]).with_extended_top(), None);
}

#[test]
fn eight_layers_become_two_and_one() {
    streams(&Shape::qcow2(SIZE, &[4096, 65536, 16384, 4096, 8192, 65536, 512, 16384]), Some(7));
    streams(&Shape::qcow2(SIZE, &[16384, 4096, 65536]), Some(2));
}

#[test]
fn a_disk_comes_to_rest_on_another_image_and_back() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
    let other = Bench::new(&Shape::qcow2(SIZE / 2 + 512, &[16384, 4096]));
    let bases = [other.top(), bench.files()[1].clone()];
    other.image.close().unwrap();
    drop(other.image);
    let load = bench.start(HistoryLoad::default());
    for (base, layers) in bases.iter().cycle().zip([3, 2].into_iter().cycle()).take(10) {
        let options = ImageOptions::new(base).with(|options| options.format = Some(Format::Qcow2));
        let base = OpenedBase::open(&options, &HostOpener).unwrap();
        bench.move_onto(NewBelow::Base(base), &CopyWatch::default()).unwrap();
        assert_eq!(bench.files().len(), layers);
        load.wait_for_more(OPERATIONS / 10);
    }
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

#[test]
fn a_cancelled_or_refused_move_leaves_the_chain_as_it_is() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
    let before = bench.files();
    let load = bench.start(HistoryLoad::default());
    let watch = Arc::new(CopyWatch::default());
    watch.set_rate(1 << 20);
    let its = Arc::clone(&watch);
    let canceller = std::thread::spawn(move || {
        while its.done_bytes() == 0 {
            std::thread::yield_now();
        }
        its.pause();
        std::thread::sleep(std::time::Duration::from_millis(50));
        its.cancel();
    });
    let error = bench.move_onto(NewBelow::Nothing, &watch).unwrap_err();
    canceller.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let refuse = || Err(block::Error::new(ErrorKind::Io, "no room for the record"));
    let (watch, mut has_stayed) = (CopyWatch::default(), false);
    let moved = move_onto_or_stay(&bench.image, NewBelow::Nothing, &watch, refuse, || has_stayed = true);
    assert!(moved.unwrap_err().to_string().contains("no room for the record") && has_stayed);
    assert!(bench.move_onto(NewBelow::Layer(2), &CopyWatch::default()).is_err());
    assert_eq!(bench.files(), before);
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
    let alone = tempfile::tempdir().unwrap();
    let path = alone.path().join("alone");
    create(&path, SIZE, 65536, None, false);
    let error =
        ringdisk_image::move_onto(&open(&path), NewBelow::Nothing, &CopyWatch::default(), || Ok(())).unwrap_err();
    assert!(error.to_string().contains("rests on no other layer"), "{error}");
}

/// In a lone image a cluster without an entry reads as zeros, so zeroing one writes none. A base would show there.
#[test]
fn a_lone_image_is_not_moved_onto_a_base_whose_data_would_show_where_the_guest_zeroed() {
    let directory = tempfile::tempdir().unwrap();
    let (base, top) = (directory.path().join("base"), directory.path().join("top"));
    create(&base, SIZE, 65536, None, false);
    create(&top, SIZE, 65536, None, false);
    let options = ImageOptions::new(&base).with(|options| options.format = Some(Format::Qcow2));
    let base = OpenedBase::open(&options, &HostOpener).unwrap();
    let (image, watch) = (open(&top), CopyWatch::default());
    let error = move_onto(&image, NewBelow::Base(base), &watch, || panic!("nothing is to be recorded")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("stop the guest and use 'ringdisk rebase'"), "{error}");
    assert_eq!((watch.done_bytes(), image.qcow2_header().unwrap().backing_file), (0, None));
}

/// Cancels a copy at one of the operations on a file.
#[derive(Debug, Default)]
struct Cancelling {
    watch: CopyWatch,
    left: AtomicU64,
}

#[derive(Debug)]
struct CancellingFile(Arc<dyn File>, Arc<Cancelling>);

struct CancellingQueue(Rc<dyn FileQueue>, Arc<Cancelling>);

impl FileQueue for CancellingQueue {
    fn push(&self, io: FileIo) {
        if self.1.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.1.watch.cancel();
        }
        self.0.push(io);
    }
}

impl File for CancellingFile {
    fn info(&self) -> &FileInfo {
        self.0.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.0.length_bytes()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(CancellingQueue(self.0.open_queue(ctx)?, Arc::clone(&self.1))))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(CancellingQueue(self.0.open_blocking()?, Arc::clone(&self.1))))
    }
}

struct CancellingOpener(Arc<Cancelling>);

impl Opener for CancellingOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        Ok(Arc::new(CancellingFile(HostOpener.open(name, role)?, Arc::clone(&self.0))))
    }
}

/// Whoever cancelled in time finds the record as it was, however late the storage answers.
#[test]
fn a_move_that_was_cancelled_before_its_record_changed_changes_none() {
    let directory = tempfile::tempdir().unwrap();
    let (below, top) = (directory.path().join("below"), directory.path().join("top"));
    create(&below, SIZE, 65536, None, false);
    create(&top, SIZE, 65536, Some(&below), false);
    for operation in 1.. {
        let options = ImageOptions::new(&top).with(|options| options.format = Some(Format::Qcow2));
        let cancelling = Arc::new(Cancelling::default());
        let image = ringdisk_image::open(&options, &CancellingOpener(Arc::clone(&cancelling))).unwrap();
        cancelling.left.store(operation, Ordering::Relaxed);
        let (watch, mut has_changed) = (&cancelling.watch, false);
        let refuse = || {
            has_changed = true;
            assert!(!watch.is_cancelled(), "at operation {operation}");
            Err(block::Error::new(ErrorKind::Io, "no room for the record"))
        };
        move_onto(&image, NewBelow::Nothing, watch, refuse).unwrap_err();
        image.close().unwrap();
        if has_changed {
            assert!(operation > 1);
            return;
        }
    }
}

/// The former mapping is not kept up to date any more, and its tables may be somebody else's data by now.
#[test]
fn a_walk_that_has_begun_goes_on_with_the_mapping_in_use() {
    for grows in [true, false] {
        let clusters: &[u64] = if grows { &[4096] } else { &[4096, 4096] };
        let bench = Bench::new(&Shape::qcow2(SIZE, clusters));
        let load = bench.start(HistoryLoad { write_percent: 95, sectors_max: 256, ..HistoryLoad::default() });
        load.wait_for_more(2000);
        assert_eq!(load.finish(), [""; 0]);
        // Several runs for the walk, however much a fast load wrote.
        for start in (0..bench.history.sectors()).step_by(512) {
            bench.give_back(start..start + 256);
        }
        let mut walk = bench.image.block_status(&StatusQuery::all()).unwrap();
        walk.next().unwrap().unwrap();
        match grows {
            true => bench.image.grow(2 * SIZE).unwrap(),
            false => bench.move_onto(NewBelow::Nothing, &CopyWatch::default()).unwrap(),
        }
        bench.give_back(0..bench.history.sectors());
        // One more run was looked at before.
        let rest: Vec<_> = walk.skip(1).map(Result::unwrap).collect();
        assert!(!rest.is_empty() && rest.iter().all(|run| run.zero && !run.data), "grows: {grows}, {rest:?}");
    }
}
