//! A disk as it was at one moment, copied while several queues work, and every read checked against the history of the
//! writes.

mod live;

use block::{DirtyBitmaps, Disk as _, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, ReactorCtx, Result};
use live::{Bench, HostOpener, Shape, create};
use ringdisk_image::{
    BitmapAction, ClosedEdit, Copied, CopyWatch, Format, Image, ImageOptions, MirrorEnd, MirrorScope, NewSnapshot,
    PointInTime, SnapshotName, StateSource, compact,
};
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex};
use testkit::{HistoryLoad, Moment};

const SIZE: u64 = 4 << 20;
/// Of each kind of change, in two tests.
const OPERATIONS: u64 = 100_000;

fn bytes(image: &Path) -> Vec<u8> {
    let raw = image.with_extension("seen");
    let convert = ["convert", "-U", "-f", "qcow2", "-O", "raw"];
    let status = Command::new("qemu-img").args(convert).arg(image).arg(&raw).status().expect("qemu-img is there");
    assert!(status.success(), "qemu-img reads {}", image.display());
    std::fs::read(raw).unwrap()
}

fn bitmap(name: &str, action: BitmapAction) -> ClosedEdit {
    ClosedEdit::Bitmaps(vec![(name.to_owned(), action)])
}

/// Copies the disk at one moment to a new image that rests on `base`.
fn back_up(bench: &Bench, base: Option<&Path>, bitmap: Option<&str>) -> std::path::PathBuf {
    let (fleece, target) = (bench.new_path(), bench.new_path());
    create(&target, SIZE, 16384, base, false);
    let to = open_over(&target);
    let overlay = bench.overlay(&fleece, 8192);
    let since = bench.history.now();
    let point = PointInTime::begin(&bench.image, overlay, || Ok(())).unwrap();
    let until = bench.history.now();
    let what = match (base, bitmap) {
        (Some(_), Some(bitmap)) => Copied::Ranges(point.read_bitmap(bitmap).unwrap().ranges()),
        _ => Copied::All,
    };
    let copy = point.copy_out(Arc::new(to), base.is_none()).unwrap();
    // Several pieces at once, or one after the other.
    let watch = CopyWatch::that_can_give_up();
    watch.set_rate(if bitmap.is_some() && base.is_some() { 0 } else { 32 << 20 });
    copy.run(&what, &watch).unwrap();
    assert_eq!(watch.done_bytes(), watch.total_bytes());
    drop(copy);
    if let Some(bitmap) = bitmap {
        point.clear_bitmap(bitmap).unwrap();
    }
    assert!(
        bench.image.edit_online(&ClosedEdit::CreateSnapshot(NewSnapshot::new("now"))).is_err(),
        "the chain is taken"
    );
    point.end(&CopyWatch::that_can_give_up(), || Ok(())).unwrap();
    std::fs::remove_file(fleece).unwrap();
    bench.history.check_moment(0, &bytes(&target), since, until).unwrap();
    target
}

fn open_over(path: &Path) -> Image {
    let options = ImageOptions::new(path).with(|options| {
        options.format = Some(Format::Qcow2);
        options.allow_backing = ringdisk_image::BackingPolicy::Any;
    });
    ringdisk_image::open(&options, &HostOpener).unwrap()
}

#[test]
fn a_chain_of_backups_has_the_disk_at_each_moment_while_queues_work() {
    backups_follow(&Shape::qcow2(SIZE, &[4096, 65536]));
}

/// Its bitmaps are in memory. What guests write during a backup is noted when that is taken back.
#[test]
fn a_chain_of_backups_has_a_raw_disk_at_each_moment() {
    backups_follow(&Shape::raw(SIZE));
}

#[test]
fn a_backup_of_a_raw_disk_has_no_clusters_for_its_holes() {
    let bench = Bench::new(&Shape::raw(SIZE));
    let target = back_up(&bench, None, None);
    let length = std::fs::metadata(&target).unwrap().len();
    assert!(length < SIZE / 2, "{length} bytes for an empty disk");
}

#[test]
fn a_raw_disk_does_not_grow_beyond_what_its_bitmaps_can_note() {
    let bench = Bench::new(&Shape::raw(SIZE));
    bench.image.edit_online(&bitmap("b", BitmapAction::Add { granularity_bytes: Some(512) })).unwrap();
    let refused = bench.image.grow(1 << 40).unwrap_err().to_string();
    assert!(refused.contains(bench.top().to_str().unwrap()) && refused.contains("larger granules"), "{refused}");
    assert_eq!(bench.image.info().size_bytes, SIZE);
    bench.image.grow(2 * SIZE).unwrap();
    assert_eq!(bench.image.online_bitmaps().unwrap()[0].dirty_bytes, Some(0));
}

fn backups_follow(shape: &Shape) {
    let bench = Bench::new(shape);
    bench.image.edit_online(&bitmap("b", BitmapAction::Add { granularity_bytes: Some(4096) })).unwrap();
    let load = bench.start(HistoryLoad { write_percent: 20, ..HistoryLoad::default() });
    let mut last = back_up(&bench, None, Some("b"));
    for _ in 0..5 {
        load.wait_for_more(OPERATIONS / 10);
        last = back_up(&bench, Some(&last), Some("b"));
    }
    assert_eq!(load.finish(), [""; 0]);
    let last = back_up(&bench, Some(&last), Some("b"));
    let dirty = bench.image.online_bitmaps().unwrap()[0].dirty_bytes;
    assert_eq!(dirty, Some(0), "nobody has written since");
    let (top, format) = (bench.top(), bench.image.format());
    let restored = bytes(&last);
    bench.image.close().unwrap();
    let own = if format == Some(Format::Raw) { std::fs::read(&top).unwrap() } else { bytes(&top) };
    assert!(own == restored);
    bench.assert_sound_and_as_written();
}

#[test]
fn guests_go_on_while_a_new_layer_is_recorded() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536]));
    let load = bench.start(HistoryLoad::default());
    let overlay = bench.overlay(&bench.new_path(), 65536);
    let recorded = || {
        load.wait_for_more(500);
        Ok(())
    };
    let point = PointInTime::begin(&bench.image, overlay, recorded).unwrap();
    load.wait_for_more(100);
    point.end(&CopyWatch::default(), recorded).unwrap();
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

/// Also what guests write through a layer that is put on the disk and taken back.
#[test]
fn a_bitmap_of_a_raw_disk_has_all_that_was_written() {
    let bench = Bench::new(&Shape::raw(SIZE));
    for round in 0..3 {
        let name = format!("b{round}");
        bench.image.edit_online(&bitmap(&name, BitmapAction::Add { granularity_bytes: Some(512) })).unwrap();
        let before = std::fs::read(bench.top()).unwrap();
        let load = bench.start(HistoryLoad { seed: round, write_percent: 60, ..HistoryLoad::default() });
        load.wait_for_more(200);
        bench.put_overlay(4096);
        load.wait_for_more(50);
        assert!(bench.image.edit_online(&bitmap(&name, BitmapAction::Clear)).is_err(), "it is in a lower layer");
        bench.take_back();
        load.wait_for_more(50);
        assert_eq!(load.finish(), [""; 0]);
        let mut at = 0;
        let after = std::fs::read(bench.top()).unwrap();
        for (length_bytes, is_dirty) in bench.image.dirty_bitmap(&name).unwrap().runs(0..SIZE, usize::MAX) {
            let range = at as usize..(at + length_bytes) as usize;
            assert!(is_dirty || before[range.clone()] == after[range], "something from byte {at} on is not noted");
            at += length_bytes;
        }
        assert_eq!(at, SIZE);
        bench.image.edit_online(&bitmap(&name, BitmapAction::Remove)).unwrap();
    }
    bench.assert_sound_and_as_written();
}

#[test]
fn backups_by_a_bitmap_have_the_disk_while_its_file_gets_shorter() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096]));
    bench.image.edit_online(&bitmap("b", BitmapAction::Add { granularity_bytes: Some(4096) })).unwrap();
    let fill = HistoryLoad { write_percent: 95, sectors_max: 256, ..HistoryLoad::default() };
    let filling = bench.start(fill);
    filling.wait_for_more(500);
    assert_eq!(filling.finish(), [""; 0]);
    let sectors = bench.history.sectors();
    let load = bench.start(HistoryLoad { write_percent: 20, depth: 2, ..HistoryLoad::default() });
    let (mut last, mut moved_bytes) = (back_up(&bench, None, Some("b")), 0);
    for round in 0..3 {
        bench.give_back(round * sectors / 4..round * sectors / 4 + sectors / 5);
        load.wait_for_more(100);
        moved_bytes += compact(&bench.image, &CopyWatch::default()).unwrap().moved_bytes;
        last = back_up(&bench, Some(&last), Some("b"));
    }
    assert!(moved_bytes > 0);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

/// A file whose header names another layer than the one it lies on would give other data when it is opened again.
#[test]
fn a_new_image_that_names_a_layer_which_is_not_there_any_more_is_refused() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536, 65536]));
    let (stale, target) = (bench.overlay(&bench.new_path(), 65536), bench.overlay(&bench.new_path(), 65536));
    let beside = bench.overlay(&bench.new_path(), 65536);
    let (mirrored, _) = bench.new_target(Format::Qcow2, MirrorScope::Top);
    bench.put_overlay(65536);
    let before = bench.files();
    let refused = |error: block::Error| {
        assert!(error.kind() == ErrorKind::Locked && error.to_string().contains("try again"), "{error}");
        assert_eq!(bench.files(), before);
    };
    refused(PointInTime::begin(&bench.image, stale, || panic!("it is not recorded")).err().unwrap());
    let put = ringdisk_image::put_overlay(vec![(Arc::clone(&bench.image), target)], || panic!("it is not recorded"));
    refused(put.err().unwrap());
    refused(bench.mirror(mirrored, MirrorEnd::Switch, &CopyWatch::default()).unwrap_err());
    // What names the top is for an image beside it as wrong as for one on it.
    bench.put_overlay(65536);
    let point = PointInTime::begin(&bench.image, bench.overlay(&bench.new_path(), 65536), || Ok(())).unwrap();
    assert_eq!(point.image_beside_top(beside).err().unwrap().kind(), ErrorKind::Locked);
    point.end(&CopyWatch::default(), || Ok(())).unwrap();
    bench.assert_sound_and_as_written();
}

/// Whoever gave a copy up has the bitmap as if there had been no copy.
#[test]
fn a_bitmap_notes_what_was_written_during_a_copy_that_was_given_up() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536]));
    bench.image.edit_online(&bitmap("b", BitmapAction::Add { granularity_bytes: Some(4096) })).unwrap();
    let first = back_up(&bench, None, Some("b"));
    let load = bench.start(HistoryLoad { write_percent: 20, ..HistoryLoad::default() });
    for _ in 0..3 {
        load.wait_for_more(200);
        let fleece = bench.new_path();
        let point = PointInTime::begin(&bench.image, bench.overlay(&fleece, 4096), || Ok(())).unwrap();
        load.wait_for_more(200);
        let target = bench.new_path();
        create(&target, SIZE, 65536, None, false);
        let watch = CopyWatch::default();
        watch.cancel();
        let error = point.copy_out(Arc::new(open_over(&target)), true).unwrap().run(&Copied::All, &watch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        point.end(&CopyWatch::default(), || Ok(())).unwrap();
    }
    assert_eq!(load.finish(), [""; 0]);
    let second = back_up(&bench, Some(&first), Some("b"));
    let top = bench.top();
    bench.image.close().unwrap();
    assert!(bytes(&top) == bytes(&second));
}

/// Lets nothing through until it is opened.
#[derive(Debug)]
struct Gate {
    file: Arc<dyn File>,
    is_open: Arc<(Mutex<bool>, Condvar)>,
}

struct GateQueue(Rc<dyn FileQueue>, Arc<(Mutex<bool>, Condvar)>);

impl FileQueue for GateQueue {
    fn push(&self, io: FileIo) {
        if matches!(io.op, FileOp::Write { .. }) {
            let mut is_open = self.1.0.lock().unwrap();
            while !*is_open {
                is_open = self.1.1.wait(is_open).unwrap();
            }
        }
        self.0.push(io);
    }
}

impl File for Gate {
    fn info(&self) -> &FileInfo {
        self.file.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.length_bytes()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(GateQueue(self.file.open_queue(ctx)?, Arc::clone(&self.is_open))))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(GateQueue(self.file.open_blocking()?, Arc::clone(&self.is_open))))
    }
}

struct GateOpener(Arc<(Mutex<bool>, Condvar)>);

impl ringdisk_image::Opener for GateOpener {
    fn open(&self, name: &ringdisk_image::FileName, _role: ringdisk_image::Role) -> Result<Arc<dyn File>> {
        let file = HostOpener.open_path(name.path().unwrap(), false)?;
        Ok(Arc::new(Gate { file, is_open: Arc::clone(&self.0) }))
    }
}

#[test]
fn a_target_that_hangs_keeps_no_guest_waiting_and_the_fleece_is_taken_back_without_it() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536]));
    let load = bench.start(HistoryLoad::default());
    load.wait_for_more(1000);
    let (fleece, target) = (bench.new_path(), bench.new_path());
    std::fs::write(&target, []).unwrap();
    std::fs::File::options().write(true).open(&target).unwrap().set_len(SIZE).unwrap();
    let gate: Arc<(Mutex<bool>, Condvar)> = Arc::default();
    let options = ImageOptions::new(&target).with(|options| options.format = Some(Format::Raw));
    let to = ringdisk_image::open(&options, &GateOpener(Arc::clone(&gate))).unwrap();
    let point = PointInTime::begin(&bench.image, bench.overlay(&fleece, 65536), || Ok(())).unwrap();
    let (copy, watch) = (point.copy_out(Arc::new(to), true).unwrap(), Arc::new(CopyWatch::default()));
    let its = Arc::clone(&watch);
    let copying = std::thread::spawn(move || copy.run(&Copied::All, &its));
    load.wait_for_more(20_000);
    assert!(!copying.is_finished());
    watch.cancel();
    point.end(&CopyWatch::default(), || Ok(())).unwrap();
    std::fs::remove_file(fleece).unwrap();
    load.wait_for_more(5_000);
    assert!(!copying.is_finished(), "the target still hangs");
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    assert_eq!(copying.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
    load.wait_for_more(1_000);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

/// Once a layer is off, only its space is left to give back.
#[test]
fn a_layer_that_was_taken_off_and_hangs_while_it_is_emptied_can_be_left() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[65536]));
    let path = bench.new_path();
    let gate: Arc<(Mutex<bool>, Condvar)> = Arc::new((Mutex::new(true), Condvar::new()));
    drop(bench.overlay(&path, 4096));
    let name = ringdisk_image::FileName::from(path.as_path());
    let file = ringdisk_image::Opener::open(&GateOpener(Arc::clone(&gate)), &name, ringdisk_image::Role::Writable);
    let overlay = ringdisk_image::OpenedOverlay::open(&name, file.unwrap()).unwrap();
    let put = ringdisk_image::put_overlay(vec![(Arc::clone(&bench.image), overlay)], || Ok(())).unwrap();
    put.into_iter().for_each(Result::unwrap);
    let load = bench.start(HistoryLoad::default());
    load.wait_for_more(1000);
    assert_eq!(load.finish(), [""; 0]);
    let watch = Arc::new(CopyWatch::that_can_give_up());
    let (its, gates) = (Arc::clone(&watch), Arc::clone(&gate));
    let (is_off, off) = std::sync::mpsc::channel();
    let image = Arc::clone(&bench.image);
    let taking = std::thread::spawn(move || {
        ringdisk_image::take_back_then(
            &image,
            &its,
            || Ok(()),
            || {
                *gates.0.lock().unwrap() = false;
                is_off.send(()).unwrap();
            },
        )
    });
    off.recv().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!taking.is_finished() && !watch.is_decided(), "it hangs, and can be left");
    assert_eq!(bench.image.formats().count(), 1);
    watch.give_up();
    taking.join().unwrap().unwrap();
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    bench.assert_sound_and_as_written();
}

/// Changes snapshots of the disk below a layer that takes what guests write meanwhile. The moment is the first one.
fn change_beside_guests(bench: &Bench, edit: &ClosedEdit) -> (Moment, Moment) {
    let fleece = bench.new_path();
    let overlay = bench.overlay(&fleece, 4096);
    let since = bench.history.now();
    let point = PointInTime::begin(&bench.image, overlay, || Ok(())).unwrap();
    let until = bench.history.now();
    let bitmaps = point.change_snapshots(&bitmap("none", BitmapAction::Clear), &mut || true);
    assert_eq!(bitmaps.unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(point.change_snapshots(edit, &mut || false).is_err(), "it is told not to go on");
    point.change_snapshots(edit, &mut || true).unwrap();
    point.end(&CopyWatch::default(), || Ok(())).unwrap();
    std::fs::remove_file(fleece).unwrap();
    (since, until)
}

fn change_while_guests_wait(bench: &Bench, edit: &ClosedEdit) -> (Moment, Moment) {
    let since = bench.history.now();
    bench.image.edit_online(edit).unwrap();
    (since, bench.history.now())
}

#[test]
fn an_internal_snapshot_is_one_moment_of_the_disk_while_queues_work() {
    internal_snapshots_are_moments(change_while_guests_wait);
}

#[test]
fn an_internal_snapshot_that_keeps_no_guest_waiting_is_one_moment_of_the_disk() {
    internal_snapshots_are_moments(change_beside_guests);
}

fn internal_snapshots_are_moments(change: impl Fn(&Bench, &ClosedEdit) -> (Moment, Moment)) {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 16384]));
    let load = bench.start(HistoryLoad::default());
    let mut moments = Vec::new();
    for index in 0..4 {
        load.wait_for_more(OPERATIONS / 8);
        let (since, until) = change(&bench, &ClosedEdit::CreateSnapshot(NewSnapshot::new(format!("s{index}"))));
        moments.push((index, since, until));
        if index == 2 {
            load.wait_for_more(500);
            change(&bench, &ClosedEdit::DeleteSnapshot(SnapshotName::named("s1")));
            moments.remove(1);
        }
    }
    load.wait_for_more(1000);
    let names: Vec<String> = bench.image.online_snapshots().unwrap().into_iter().map(|found| found.name).collect();
    assert_eq!(names, ["s0", "s2", "s3"]);
    assert_eq!(load.finish(), [""; 0]);
    let top = bench.top();
    bench.image.close().unwrap();
    for (index, since, until) in moments {
        let raw = top.with_extension(format!("s{index}"));
        let convert = ["convert", "-U", "-f", "qcow2", "-l", &format!("snapshot.name=s{index}"), "-O", "raw"];
        let status = Command::new("qemu-img").args(convert).arg(&top).arg(&raw).status().expect("qemu-img is there");
        assert!(status.success());
        bench.history.check_moment(0, &std::fs::read(raw).unwrap(), since, until).unwrap();
    }
    // Nobody uses it, so it can be what it was.
    bench.image.edit_online(&ClosedEdit::ApplySnapshot(SnapshotName::named("s2"))).unwrap();
    bench.image.close().unwrap();
    let raw = top.with_extension("s2");
    assert!(bytes(&top) == std::fs::read(raw).unwrap());
}

#[test]
fn a_state_that_is_said_to_be_longer_than_its_image_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, state_path) = (directory.path().join("image"), directory.path().join("state"));
    std::fs::write(&state_path, [7; 100_000]).unwrap();
    let read_only = engine::OpenOptions::default().with(|options| options.read_only = true);
    let source = StateSource { file: engine::open(&state_path, &read_only).unwrap(), length_bytes: 100_000 };
    create(&path, 1 << 20, 65536, None, false);
    let image = open_over(&path);
    image.edit_online(&ClosedEdit::SaveState(NewSnapshot::new("one"), source)).unwrap();
    image.close().unwrap();
    drop(image);
    let mut bytes = std::fs::read(&path).unwrap();
    let table = u64::from_be_bytes(bytes[64..72].try_into().unwrap()) as usize;
    // The long size of the state, in the first row's extra data. The row's L1 table leads to as much.
    assert_eq!(bytes[table + 40..table + 48], 100_000_u64.to_be_bytes());
    bytes[table + 40..table + 48].copy_from_slice(&(500_u64 << 20).to_be_bytes());
    std::fs::write(&path, bytes).unwrap();
    let file = engine::open(&path, &read_only).unwrap();
    let mut given = 0;
    let mut each = |piece: &[u8], _| {
        given += piece.len();
        Ok(())
    };
    let error = ringdisk_image::read_vm_state(path.as_path(), &file, "one", &mut each).unwrap_err().to_string();
    assert!(error.contains("more than the file holds"), "{error}");
    assert_eq!(given, 0);
}

/// With clusters so small that the state takes many tables, and with entries of two words.
#[test]
fn a_snapshot_keeps_a_machines_state_and_qemu_img_finds_nothing_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let state: Vec<u8> = (0..1_500_001_u32).map(|index| (index / 3) as u8).collect();
    let state_path = directory.path().join("state");
    std::fs::write(&state_path, &state).unwrap();
    let file = engine::open(&state_path, &engine::OpenOptions::default().with(|options| options.read_only = true));
    let source = StateSource { file: file.unwrap(), length_bytes: state.len() as u64 - 1 };
    for (index, options) in ["cluster_size=512", "cluster_size=65536", "extended_l2=on"].into_iter().enumerate() {
        let path = directory.path().join(format!("image{index}"));
        let qemu_img = |arguments: &[&str]| {
            let status = Command::new("qemu-img").args(arguments).arg(&path).status().expect("qemu-img is there");
            assert!(status.success(), "{options}: {arguments:?}");
        };
        let created =
            Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", "-o", options]).arg(&path).arg("1M").status();
        assert!(created.unwrap().success());
        let image = open_over(&path);
        let too_much = StateSource { length_bytes: state.len() as u64 + 1, ..source.clone() };
        let length = std::fs::metadata(&path).unwrap().len();
        image.edit_online(&ClosedEdit::SaveState(NewSnapshot::new("none"), too_much)).unwrap_err();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length, "{options}: nothing is left of what failed");
        for name in ["one", "two"] {
            image.edit_online(&ClosedEdit::SaveState(NewSnapshot::new(name), source.clone())).unwrap();
            let found = image.online_snapshots().unwrap();
            assert_eq!(found.last().unwrap().vm_state_bytes, source.length_bytes);
        }
        image.edit_online(&ClosedEdit::DeleteSnapshot(SnapshotName::named("one"))).unwrap();
        image.close().unwrap();
        drop(image);
        qemu_img(&["check", "-q"]);
        for _ in 0..2 {
            let file = engine::open(&path, &engine::OpenOptions::default().with(|options| options.read_only = true));
            let mut read = Vec::new();
            let mut each = |piece: &[u8], _| {
                read.extend_from_slice(piece);
                Ok(())
            };
            ringdisk_image::read_vm_state(path.as_path(), &file.unwrap(), "two", &mut each).unwrap();
            assert!(read == state[..state.len() - 1], "{options}");
            // The same once it is a part of the disk's own tables.
            qemu_img(&["snapshot", "-a", "two"]);
            qemu_img(&["check", "-q"]);
        }
        // A new state takes the place of what lies behind the disk.
        let image = open_over(&path);
        image.edit_online(&ClosedEdit::SaveState(NewSnapshot::new("three"), source.clone())).unwrap();
        image.close().unwrap();
        drop(image);
        qemu_img(&["check", "-q"]);
    }
}
