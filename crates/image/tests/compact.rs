//! The file of a disk is made shorter while several queues work, and every read is checked against the history of the
//! writes.

mod live;

use block::ErrorKind;
use live::{Bench, HostOpener, Shape, create, open};
use ringdisk_image::{CopyWatch, CreateOptions, Format, ImageOptions, compact};
use std::sync::Arc;
use testkit::HistoryLoad;

const SIZE: u64 = 16 << 20;

/// A disk that was full, and most of which was discarded.
fn mostly_discarded(shape: &Shape) -> Bench {
    let bench = Bench::new(shape);
    let fill = HistoryLoad { write_percent: 95, sectors_max: 256, ..HistoryLoad::default() };
    let load = bench.start(fill);
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    let sectors = bench.history.sectors();
    (0..12).for_each(|part| bench.give_back(part * sectors / 16..(part * sectors / 16) + sectors / 18));
    bench
}

/// How much of what is free is given back.
#[derive(PartialEq)]
enum Gives {
    Nearly,
    /// What was a table and lies free with its old contents ends the cut. With small clusters there are many of these.
    Part,
}

fn shrinks(shape: &Shape, operations: u64, gives: &Gives) {
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
    assert!(moved_bytes > 0);
    // Nobody is in the way.
    let compacted = compact(&bench.image, &CopyWatch::default()).unwrap();
    let (length, held) = bench.file_bytes();
    println!(
        "{length_before} bytes became {length}, {held_before} held became {held}; {moved_bytes} moved; {compacted}"
    );
    assert_eq!((compacted.after_bytes, compacted.missed_bytes, compacted.fixed_bytes), (length, 0, 0));
    cut_bytes += compacted.before_bytes.saturating_sub(compacted.after_bytes);
    assert!(cut_bytes > 0);
    if *gives == Gives::Nearly {
        assert!(length < length_before / 10 * 9, "{length} of {length_before}");
        // Hardly a hole is left, but for clusters that are written in part.
        let most = (held + held / 4).max(bench.history.sectors() * 512);
        assert!(length <= most + (1 << 20), "{length}, {held}");
    }
    bench.assert_sound_and_as_written();
}

#[test]
fn a_disk_gets_shorter_under_load() {
    shrinks(&Shape::qcow2(SIZE, &[65536]), 100_000, &Gives::Nearly);
    shrinks(&Shape::qcow2(SIZE / 4, &[4096]), 10_000, &Gives::Nearly);
}

#[test]
fn a_disk_of_small_clusters_gets_shorter() {
    shrinks(&Shape::qcow2(SIZE / 16, &[512]), 5_000, &Gives::Part);
}

#[test]
fn a_disk_over_another_layer_gets_shorter() {
    shrinks(&Shape::qcow2(SIZE / 4, &[65536, 4096]), 10_000, &Gives::Nearly);
}

#[test]
fn a_disk_with_subclusters_gets_shorter() {
    shrinks(&Shape::qcow2(SIZE, &[4096, 65536]).with_extended_top(), 20_000, &Gives::Nearly);
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
