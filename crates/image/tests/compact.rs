//! The file of a disk is made shorter while several queues work, and every read is checked against the history of the
//! writes.

mod live;

use block::ErrorKind;
use live::{Bench, HostOpener, Shape, create, open};
use ringdisk_image::{
    BitmapAction, ClosedEdit, CopyWatch, CreateOptions, Format, ImageOptions, NewSnapshot, SnapshotName, compact,
};
use std::sync::Arc;
use testkit::{HistoryLoad, Qcow2Report, qcow2_check};

const SIZE: u64 = 16 << 20;

/// A disk that was full.
fn full(shape: &Shape) -> Bench {
    let bench = Bench::new(shape);
    let fill = HistoryLoad { write_percent: 95, sectors_max: 256, ..HistoryLoad::default() };
    let load = bench.start(fill);
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    bench
}

fn discard_most(bench: &Bench) {
    let sectors = bench.history.sectors();
    (0..12).for_each(|part| bench.give_back(part * sectors / 16..(part * sectors / 16) + sectors / 18));
}

/// A disk that was full, and most of which was discarded.
fn mostly_discarded(shape: &Shape) -> Bench {
    let bench = full(shape);
    discard_most(&bench);
    bench
}

/// What another program finds in the top layer's file.
fn report(bench: &Bench) -> Qcow2Report {
    let report = qcow2_check(&std::fs::read(bench.top()).unwrap()).unwrap();
    report.sound().unwrap();
    report
}

/// Hardly a hole is left.
fn assert_short(bench: &Bench, cluster_bytes: u64) {
    let (length, used) = (bench.file_bytes().0, report(bench).used_clusters * cluster_bytes);
    println!("clusters of {cluster_bytes}: {length} bytes, {used} of them in use");
    assert!(length <= used + used / 50 + 8 * cluster_bytes, "{length}, {used}");
}

fn shrinks(shape: &Shape, cluster_bytes: u64, operations: u64) {
    let bench = mostly_discarded(shape);
    let (length_before, held_before) = bench.file_bytes();
    let load = bench.start(HistoryLoad { write_percent: 30, depth: 2, ..HistoryLoad::default() });
    load.wait_for_more(500);
    let (mut moved_bytes, mut cut_bytes) = (0, 0);
    while load.operations() < operations {
        let watch = CopyWatch::default();
        let compacted = compact(&bench.image, &watch).unwrap();
        moved_bytes += compacted.moved_bytes;
        cut_bytes += compacted.before_bytes.saturating_sub(compacted.after_bytes);
        assert_eq!(watch.done_bytes(), watch.total_bytes());
        load.wait_for_more(operations / 10);
    }
    assert_eq!(load.finish(), [""; 0]);
    // Nobody is in the way.
    let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
    let (length, held) = bench.file_bytes();
    println!(
        "{length_before} bytes became {length}, {held_before} held became {held}; {moved_bytes} moved; {compacted}"
    );
    assert_eq!((compacted.after_bytes, compacted.missed_bytes, compacted.fixed_bytes), (length, 0, 0));
    cut_bytes += compacted.before_bytes.saturating_sub(compacted.after_bytes);
    assert!(cut_bytes > 0);
    assert_short(&bench, cluster_bytes);
    bench.assert_sound_and_as_written();
}

#[test]
fn a_disk_gets_shorter_under_load() {
    shrinks(&Shape::qcow2(SIZE, &[65536]), 65536, 100_000);
    shrinks(&Shape::qcow2(SIZE / 4, &[4096]), 4096, 10_000);
    shrinks(&Shape::qcow2(SIZE / 16, &[512]), 512, 5_000);
}

#[test]
fn a_disk_over_another_layer_gets_shorter() {
    shrinks(&Shape::qcow2(SIZE / 4, &[65536, 4096]), 4096, 10_000);
}

#[test]
fn a_disk_with_subclusters_gets_shorter() {
    shrinks(&Shape::qcow2(SIZE, &[4096, 65536]).with_extended_top(), 65536, 20_000);
}

#[test]
fn a_disk_past_the_page_cache_gets_shorter() {
    shrinks(&Shape::qcow2(SIZE, &[65536]).with_direct_io(), 65536, 5_000);
    shrinks(&Shape::qcow2(SIZE / 16, &[512]).with_direct_io(), 512, 2_000);
}

#[test]
fn the_file_ends_where_all_that_is_in_use_has_room() {
    for (cluster_bytes, size) in [(512, SIZE / 8), (4096, SIZE / 2), (65536, SIZE)] {
        let bench = mostly_discarded(&Shape::qcow2(size, &[cluster_bytes]));
        let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
        assert!(compacted.moved_bytes > 0 && compacted.after_bytes < compacted.before_bytes / 4, "{compacted}");
        assert_short(&bench, cluster_bytes);
        bench.assert_sound_and_as_written();
    }
}

#[test]
fn a_disk_with_bitmaps_gets_shorter() {
    for (cluster_bytes, size) in [(512, SIZE / 16), (65536, SIZE)] {
        let bench = mostly_discarded(&Shape::qcow2(size, &[cluster_bytes]));
        let edits = [
            ("on", BitmapAction::Add { granularity_bytes: Some(512) }),
            ("off", BitmapAction::Add { granularity_bytes: None }),
        ];
        let edits = edits.map(|(name, action)| (name.to_owned(), action));
        bench.image.edit_online(&ClosedEdit::Bitmaps(edits.to_vec())).unwrap();
        let load = bench.start(HistoryLoad { write_percent: 5, depth: 2, ..HistoryLoad::default() });
        load.wait_for_more(200);
        bench.image.edit_online(&ClosedEdit::Bitmaps(vec![("off".to_owned(), BitmapAction::Disable)])).unwrap();
        let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
        assert!(compacted.moved_bytes > 0, "{compacted}");
        load.wait_for_more(200);
        assert_eq!(load.finish(), [""; 0]);
        let before: Vec<_> = bench.image.online_bitmaps().unwrap().iter().map(|bitmap| bitmap.dirty_bytes).collect();
        let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
        println!("{compacted}");
        let after: Vec<_> = bench.image.online_bitmaps().unwrap().iter().map(|bitmap| bitmap.dirty_bytes).collect();
        assert_eq!(before, after);
        assert!(after.iter().all(|bytes| bytes.is_some_and(|bytes| bytes > 0)));
        // The tables of the bitmap that is off stay where they are.
        let (length, used) = (bench.file_bytes().0, report(&bench).used_clusters * cluster_bytes);
        assert!(length <= used + used / 4 + 16 * cluster_bytes, "{length}, {used}");
        bench.assert_sound_and_as_written();
    }
}

#[test]
fn what_internal_snapshots_hold_stays_and_the_rest_gets_shorter() {
    for (cluster_bytes, size) in [(512, SIZE / 16), (4096, SIZE / 4)] {
        let bench = full(&Shape::qcow2(size, &[cluster_bytes]));
        bench.image.edit_online(&ClosedEdit::CreateSnapshot(NewSnapshot::new("full"))).unwrap();
        discard_most(&bench);
        let digest = report(&bench).snapshots_digest;
        let load = bench.start(HistoryLoad { write_percent: 20, depth: 2, ..HistoryLoad::default() });
        load.wait_for_more(1000);
        let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
        println!("{compacted}");
        load.wait_for_more(200);
        assert_eq!(load.finish(), [""; 0]);
        compact(&bench.image, &CopyWatch::default()).unwrap();
        assert_eq!(report(&bench).snapshots_digest, digest);
        bench.image.edit_online(&ClosedEdit::DeleteSnapshot(SnapshotName::named("full"))).unwrap();
        let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
        assert_eq!((compacted.fixed_bytes, compacted.missed_bytes), (0, 0));
        assert_short(&bench, cluster_bytes);
        bench.assert_sound_and_as_written();
    }
}

#[test]
fn a_cancelled_compaction_leaves_a_whole_disk_and_others_wait_their_turn() {
    let bench = mostly_discarded(&Shape::qcow2(SIZE / 4, &[4096]));
    let load = bench.start(HistoryLoad { depth: 2, ..HistoryLoad::default() });
    let watch = Arc::new(CopyWatch::default());
    watch.set_rate(64 << 10);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| compact(&bench.image, &watch));
        while watch.done_bytes() == 0 && !running.is_finished() {
            std::thread::yield_now();
        }
        watch.pause();
        let refused = compact(&bench.image, &CopyWatch::default()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Locked, "{refused}");
        watch.cancel();
        assert_eq!(running.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
    });
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    compact(&bench.image, &CopyWatch::default()).unwrap();
    bench.assert_sound_and_as_written();
}

#[test]
fn what_has_no_clusters_that_could_move_is_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("raw");
    engine::create(&raw, 1 << 20).unwrap();
    ringdisk_image::create(&HostOpener.open_path(&raw, false).unwrap(), &CreateOptions::raw(1 << 20)).unwrap();
    let options = ImageOptions::new(&raw).with(|options| options.format = Some(Format::Raw));
    let image = ringdisk_image::open(&options, &HostOpener).unwrap();
    let error = compact(&image, &CopyWatch::default()).unwrap_err();
    assert!(error.to_string().contains("only qcow2 images"), "{error}");
    drop(image);
    let path = directory.path().join("qcow2");
    create(&path, 1 << 20, 65536, None, false);
    let options = ImageOptions::new(&path).with(|options| options.read_only = true);
    let image = ringdisk_image::open(&options, &HostOpener).unwrap();
    let error = compact(&image, &CopyWatch::default()).unwrap_err();
    assert!(error.to_string().contains("for reading only"), "{error}");
    drop(image);
    // An empty one is as short as it can be.
    let image = open(&path);
    let compacted = compact(&image, &CopyWatch::default()).unwrap();
    assert_eq!((compacted.moved_bytes, compacted.fixed_bytes), (0, 0));
    image.close().unwrap();
}
