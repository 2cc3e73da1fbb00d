//! A disk is copied to another image while several queues work on it, and every read is checked against the history of the
//! writes. Where the disk goes over to the copy, its former files are deleted, so whoever still needs them fails.

mod live;

use block::ErrorKind;
use live::{Bench, Shape};
use ringdisk_image::{Aim, CopyWatch, Format, MirrorEnd, MirrorScope};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use testkit::{HistoryLoad, qcow2_check};

/// Requests while the disk goes from one image to the next, in each test.
const OPERATIONS: u64 = 100_000;
const SIZE: u64 = 4 << 20;

#[test]
fn a_disk_goes_over_to_one_copy_after_another() {
    for shape in [Shape::qcow2(SIZE, &[65536]), Shape::qcow2(SIZE - 1536, &[4096, 65536, 512])] {
        let bench = Bench::new(&shape);
        let load = bench.start(HistoryLoad::default());
        let mut moves = 0;
        while load.operations() < OPERATIONS / 2 || moves < 4 {
            load.wait_for_more(2000);
            let former = bench.files();
            let format = [Format::Raw, Format::Qcow2][moves % 2];
            let (target, path) = bench.new_target(format, MirrorScope::Full);
            let watch = if moves % 4 < 2 { CopyWatch::that_can_give_up() } else { CopyWatch::default() };
            bench.mirror(target, MirrorEnd::Switch, &watch).unwrap();
            assert_eq!((watch.done_bytes(), bench.files()), (watch.total_bytes(), vec![path]));
            former.iter().for_each(|gone| std::fs::remove_file(gone).unwrap());
            moves += 1;
        }
        load.wait_for_more(2000);
        assert_eq!(load.finish(), [""; 0]);
        eprintln!("{moves} moves");
        bench.assert_sound_and_as_written();
    }
}

#[test]
fn a_copy_of_the_top_layer_rests_on_the_same_layers() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 8192]));
    let load = bench.start(HistoryLoad::default());
    for _ in 0..4 {
        load.wait_for_more(3000);
        let former = bench.files();
        let (target, path) = bench.new_target(Format::Qcow2, MirrorScope::Top);
        bench.mirror(target, MirrorEnd::Switch, &CopyWatch::default()).unwrap();
        assert_eq!(bench.files(), [&[path], &former[1..]].concat());
        std::fs::remove_file(&former[0]).unwrap();
    }
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

/// What a raw image or a qcow2 image holds.
fn contents(path: &Path, format: Format) -> Vec<u8> {
    match format {
        Format::Raw => std::fs::read(path).unwrap(),
        _ => {
            let raw: PathBuf = path.with_extension("raw");
            qcow2_check(&std::fs::read(path).unwrap()).unwrap().sound().unwrap();
            let convert = ["convert", "-f", "qcow2", "-O", "raw"];
            assert!(Command::new("qemu-img").args(convert).arg(path).arg(&raw).status().unwrap().success());
            std::fs::read(raw).unwrap()
        }
    }
}

#[test]
fn a_copy_that_is_kept_is_the_disk_at_one_moment() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
    let files = bench.files();
    for format in [Format::Raw, Format::Qcow2] {
        let load = bench.start(HistoryLoad::default());
        load.wait_for_more(1000);
        let (target, path) = bench.new_target(format, MirrorScope::Full);
        let since = bench.history.now();
        bench.mirror(target, MirrorEnd::Keep, &CopyWatch::that_can_give_up()).unwrap();
        if format == Format::Raw || Command::new("qemu-img").arg("--version").output().is_ok() {
            // As one read of the whole disk that began when the copy did, and has ended.
            bench.history.check_read(0, &contents(&path, format), since).unwrap();
        }
        assert_eq!(bench.files(), files);
        load.wait_for_more(1000);
        assert_eq!(load.finish(), [""; 0]);
    }
    bench.assert_sound_and_as_written();
}

#[test]
fn a_cancelled_refused_or_unrecorded_copy_leaves_the_disk_on_its_image() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
    let files = bench.files();
    let load = bench.start(HistoryLoad::default());
    let (target, _) = bench.new_target(Format::Qcow2, MirrorScope::Full);
    let watch = Arc::new(CopyWatch::default());
    watch.set_rate(1 << 20);
    let its = Arc::clone(&watch);
    let canceller = std::thread::spawn(move || {
        while its.done_bytes() == 0 {
            std::thread::yield_now();
        }
        its.cancel();
    });
    assert_eq!(bench.mirror(target, MirrorEnd::Switch, &watch).unwrap_err().kind(), ErrorKind::Cancelled);
    canceller.join().unwrap();
    let (target, _) = bench.new_target(Format::Raw, MirrorScope::Full);
    let refuse = || Err(block::Error::new(ErrorKind::Io, "no room for the record"));
    let refused = ringdisk_image::mirror(&bench.image, target, MirrorEnd::Switch, &CopyWatch::default(), refuse);
    assert!(refused.unwrap_err().to_string().contains("no room for the record"));
    let other = Bench::new(&Shape::qcow2(SIZE + 512, &[4096]));
    let (target, _) = other.new_target(Format::Raw, MirrorScope::Full);
    let error = bench.mirror(target, MirrorEnd::Switch, &CopyWatch::default()).unwrap_err();
    assert!(error.to_string().contains("make it as large"), "{error}");
    assert_eq!(bench.files(), files);
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

/// However fast guests write, few passes are enough: each write of the last pass goes to both sides.
#[test]
fn a_copy_ends_after_few_passes_while_guests_write_at_full_speed() {
    const LARGE: u64 = 24 << 20;
    let bench = Bench::new(&Shape::qcow2(LARGE, &[65536]));
    let load = bench.start(HistoryLoad { write_percent: 100, sectors_max: 256, ..HistoryLoad::default() });
    for format in [Format::Raw, Format::Qcow2] {
        load.wait_for_more(1000);
        let watch = CopyWatch::default();
        // No time at all: the rounds are left out, and writes are slowed down.
        watch.set_aim(Aim { within: Some(Duration::from_millis(1)), stall: Some(Duration::from_millis(20)) });
        bench.mirror(bench.new_target(format, MirrorScope::Full).0, MirrorEnd::Switch, &watch).unwrap();
        let hurried = watch.rounds();
        assert!(hurried.rounds <= 3, "{hurried:?}");
        assert!(hurried.throttled > Duration::ZERO && hurried.is_late, "{hurried:?}");
        // All of it once, and what was written while the first pieces were copied.
        assert!(watch.total_bytes() <= 2 * LARGE, "{} bytes", watch.total_bytes());

        bench.put_overlay(65536);
        load.wait_for_more(1000);
        let watch = CopyWatch::default();
        ringdisk_image::take_back(&bench.image, &watch, || Ok(())).unwrap();
        let rounds = watch.rounds();
        assert!((2..=7).contains(&rounds.rounds), "{rounds:?}");
        assert_eq!((rounds.left_bytes, rounds.throttled, rounds.is_late), (0, Duration::ZERO, false), "{rounds:?}");
    }
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

#[test]
fn guests_write_to_both_images_until_it_is_known_which_one_is_on_record() {
    let unsure = || block::Error::new(ErrorKind::Unsure, "nobody knows");
    let refused = || block::Error::new(ErrorKind::Io, "the old record is there");
    for goes_over in [true, false] {
        let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
        let load = bench.start(HistoryLoad::default());
        let (target, path) = bench.new_target(Format::Raw, MirrorScope::Full);
        let (watch, mut tries) = (CopyWatch::default(), 0);
        let record = || {
            load.wait_for_more(500);
            tries += 1;
            match tries {
                1 => Err(unsure()),
                2 => {
                    assert!(watch.is_decided() && watch.outcome().unwrap().contains("nobody knows"));
                    if goes_over { Ok(()) } else { Err(refused()) }
                }
                _ => unreachable!(),
            }
        };
        let mirrored = ringdisk_image::mirror(&bench.image, target, MirrorEnd::Switch, &watch, record);
        assert_eq!(mirrored.map_err(|error| error.kind()), if goes_over { Ok(()) } else { Err(ErrorKind::Io) });
        assert_eq!((watch.outcome(), bench.top() == path), (None, goes_over));
        load.wait_for_more(500);
        assert_eq!(load.finish(), [""; 0]);
        bench.assert_sound_and_as_written();
    }
}

#[test]
fn a_disk_that_ends_before_that_is_known_leaves_both_images_whole() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536]));
    let mut load = Some(bench.start(HistoryLoad::default()));
    let (target, path) = bench.new_target(Format::Qcow2, MirrorScope::Full);
    let mut tries = 0;
    let record = || {
        tries += 1;
        if let Some(load) = load.take() {
            load.wait_for_more(500);
            assert_eq!(load.finish(), [""; 0]);
            bench.image.ends();
        }
        Err(block::Error::new(ErrorKind::Unsure, "nobody knows"))
    };
    let ended = ringdisk_image::mirror(&bench.image, target, MirrorEnd::Switch, &CopyWatch::default(), record);
    assert_eq!((ended.unwrap_err().kind(), tries), (ErrorKind::Unsure, 2));
    if Command::new("qemu-img").arg("--version").output().is_ok() {
        let copied = contents(&path, Format::Qcow2);
        bench.history.check_read(0, &copied, bench.history.now()).unwrap();
    }
    bench.assert_sound_and_as_written();
}
