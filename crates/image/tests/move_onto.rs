//! The top layer of a disk gets what lower layers hold while several queues work, and every read is checked against the
//! history of the writes.

mod live;

use block::ErrorKind;
use live::{Bench, HostOpener, Shape, create, open};
use ringdisk_image::{CopyWatch, Format, ImageOptions, NewBelow, OpenedBase};
use std::sync::Arc;
use testkit::HistoryLoad;

const OPERATIONS: u64 = 100_000;
const SIZE: u64 = 4 << 20;

/// Under load; the layers that go are deleted afterwards, so whoever still needs them fails.
fn streams(shape: &Shape, keep: Option<usize>) {
    let bench = Bench::new(shape);
    let before = bench.files();
    let load = bench.start(HistoryLoad { write_percent: 20, ..HistoryLoad::default() });
    load.wait_for_more(500);
    let watch = CopyWatch::default();
    watch.set_rate(16 << 20);
    bench.move_onto(keep.map_or(NewBelow::Nothing, NewBelow::Layer), &watch).unwrap();
    assert_eq!(watch.done_bytes(), watch.total_bytes());
    let kept = keep.map_or(before.len(), |keep| keep);
    before[1..kept].iter().for_each(|gone| std::fs::remove_file(gone).unwrap());
    let stays = before.iter().enumerate().filter(|(at, _)| *at == 0 || *at >= kept);
    let after: Vec<_> = stays.map(|(_, file)| file.clone()).collect();
    assert_eq!(bench.files(), after);
    while load.operations() < OPERATIONS / 4 {
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
fn a_disk_comes_to_rest_on_another_image() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
    let other = Bench::new(&Shape::qcow2(SIZE / 2 + 512, &[16384, 4096]));
    let base = other.top();
    other.image.close().unwrap();
    drop(other.image);
    let load = bench.start(HistoryLoad::default());
    let options = ImageOptions::new(&base).with(|options| options.format = Some(Format::Qcow2));
    let base = OpenedBase::open(&options, &HostOpener).unwrap();
    bench.move_onto(NewBelow::Base(base), &CopyWatch::default()).unwrap();
    load.wait_for_more(5000);
    assert_eq!((load.finish(), bench.files().len()), (Vec::new(), 3));
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
    let error = ringdisk_image::move_onto(&bench.image, NewBelow::Nothing, &CopyWatch::default(), refuse).unwrap_err();
    assert!(error.to_string().contains("no room for the record"));
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
