//! Layers below the top of a disk are committed while several queues work, and every read is checked against the history
//! of the writes.

mod live;

use block::{Error, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, IoError, ReactorCtx, Result};
use engine::{EngineKind, OpenOptions};
use live::{Bench, HostOpener, Shape, create};
use ringdisk_image::{
    CopyWatch, FileName, LayerGoes, LayerOpeners, NewBelow, Opener, Role, commit_layer, open_below_for_writing,
};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use testkit::{HistoryLoad, SectorHistory, bytes_of, qcow2_check};

const OPERATIONS: u64 = 100_000;
const SIZE: u64 = 4 << 20;

/// Opens files without locks.
struct Unlocked;

impl Opener for Unlocked {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let options = OpenOptions::default().with(|options| {
            options.engine = EngineKind::Auto;
            options.read_only = role != Role::Writable;
            options.lock = false;
        });
        engine::open(name.path().unwrap(), &options)
    }
}

const OPENERS: LayerOpeners<'static> = LayerOpeners { for_writing: &Unlocked, for_reading: &HostOpener };

/// What was told of a layer.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    refuses: bool,
    said: Vec<&'static str>,
}

impl LayerGoes for Told {
    fn goes(&mut self) -> Result<()> {
        self.said.push("goes");
        if self.refuses { Err(Error::new(ErrorKind::Io, "no room for the record")) } else { Ok(()) }
    }

    fn is_gone(&mut self) {
        self.said.push("is gone");
    }

    fn stays(&mut self) {
        self.said.push("stays");
    }
}

fn layer(bench: &Bench, index: usize) -> FileName {
    bench.image.layer_file_names().nth(index).unwrap().0
}

/// Commits the layer of this place. Its file is empty afterwards, and is deleted: whoever still needs it fails.
fn commit(bench: &Bench, index: usize, bytes_per_second: u64) {
    let before = bench.files();
    let (gone, watch, mut told) = (layer(bench, index), CopyWatch::that_can_give_up(), Told::default());
    watch.set_rate(bytes_per_second);
    commit_layer(&bench.image, &gone, OPENERS, &watch, &mut told).unwrap();
    assert_eq!((told.said, watch.done_bytes()), (vec!["goes", "is gone"], watch.total_bytes()));
    let expected: Vec<_> = before.iter().enumerate().filter(|(at, _)| *at != index).map(|(_, file)| file).collect();
    assert_eq!(bench.files().iter().collect::<Vec<_>>(), expected);
    let gone = gone.path().unwrap();
    qcow2_check(&std::fs::read(gone).unwrap()).unwrap().sound().unwrap();
    let bytes = std::fs::metadata(gone).unwrap().blocks() * 512;
    assert!(bytes < SIZE / 4, "{bytes} bytes of a layer that has gone stay in use");
    std::fs::remove_file(gone).unwrap();
}

fn works_on(bench: Bench, indices: &[usize], bytes_per_second: u64) {
    let load = bench.start(HistoryLoad { write_percent: 20, ..HistoryLoad::default() });
    for index in indices {
        load.wait_for_more(500);
        commit(&bench, *index, bytes_per_second);
    }
    while load.operations() < OPERATIONS / 4 {
        load.wait_for_more(1000);
    }
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

#[test]
fn layers_that_were_open_for_reading_go_into_the_ones_below_them() {
    works_on(Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 512, 16384])), &[1, 1], 0);
    works_on(Bench::new(&Shape::qcow2(SIZE - 1536, &[65536, 512, 16384, 4096])), &[2, 1], 32 << 20);
    works_on(Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 16384]).with_direct_io()), &[1], 0);
}

#[test]
fn eight_layers_become_two() {
    let clusters = [4096, 65536, 16384, 4096, 8192, 65536, 512, 16384];
    works_on(Bench::new(&Shape::qcow2(SIZE, &clusters)), &[6, 3, 1, 3, 2, 1], 0);
}

#[test]
fn former_tops_go_into_a_raw_image_while_the_top_is_written() {
    let bench = Bench::new(&Shape::raw(SIZE));
    let load = bench.start(HistoryLoad::default());
    for cluster_size in [65536, 8192, 4096] {
        load.wait_for_more(1000);
        bench.put_overlay(cluster_size);
    }
    for index in [1, 1] {
        load.wait_for_more(1000);
        commit(&bench, index, 0);
    }
    // What is left is an overlay that the layer below takes back.
    load.wait_for_more(1000);
    bench.take_back();
    load.wait_for_more(1000);
    assert_eq!((load.finish(), bench.files().len()), (Vec::new(), 1));
    bench.assert_sound_and_as_written();
}

/// Opens it as a user who keeps others from writing, or from using it at all.
fn is_free(path: &Path, read_only: bool) -> bool {
    match HostOpener.open_path(path, read_only) {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::Locked => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_base_that_somebody_else_uses_takes_no_layer_and_is_locked_as_before_afterwards() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 16384]));
    let (before, gone) = (bench.files(), layer(&bench, 1));
    let (base, mut told) = (before[2].clone(), Told::default());
    for used in [2, 0] {
        // Somebody who reads the base; then the top is this disk's own, and it works.
        let other = (used == 2).then(|| HostOpener.open_path(&base, true).unwrap());
        let result = commit_layer(&bench.image, &gone, OPENERS, &CopyWatch::default(), &mut told);
        if other.is_none() {
            result.unwrap();
            break;
        }
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Locked);
        assert_eq!((&bench.files(), told.said.len()), (&before, 0));
        assert!(is_free(&base, true) && !is_free(&base, false));
    }
    assert!(is_free(&base, true) && !is_free(&base, false));
    bench.assert_sound_and_as_written();
}

#[test]
fn a_layer_that_goes_and_cannot_be_emptied_is_named_by_the_outcome() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 16384]));
    let (gone, watch) = (layer(&bench, 1), CopyWatch::default());
    let reader = HostOpener.open_path(gone.path().unwrap(), true).unwrap();
    commit_layer(&bench.image, &gone, OPENERS, &watch, &mut Told::default()).unwrap();
    drop(reader);
    let outcome = watch.outcome().unwrap();
    assert!(outcome.contains(&gone.to_string()) && outcome.contains("check -r leaks"), "{outcome}");
    bench.assert_sound_and_as_written();
}

#[test]
fn a_commit_that_is_cancelled_or_not_recorded_leaves_the_chain_as_it_is() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 16384]));
    let (before, gone) = (bench.files(), layer(&bench, 1));
    let load = bench.start(HistoryLoad::default());
    let watch = Arc::new(CopyWatch::default());
    watch.set_rate(1 << 20);
    let its = Arc::clone(&watch);
    let canceller = std::thread::spawn(move || {
        while its.done_bytes() == 0 {
            std::thread::yield_now();
        }
        its.cancel();
    });
    let mut told = Told::default();
    let error = commit_layer(&bench.image, &gone, OPENERS, &watch, &mut told).unwrap_err();
    canceller.join().unwrap();
    assert_eq!((error.kind(), told.said.len()), (ErrorKind::Cancelled, 0));
    load.wait_for_more(1000);
    told.refuses = true;
    let error = commit_layer(&bench.image, &gone, OPENERS, &CopyWatch::default(), &mut told).unwrap_err();
    assert!(error.to_string().contains("no room for the record"), "{error}");
    assert_eq!((told.said, bench.files()), (vec!["goes", "stays"], before.clone()));
    for index in [0, 2] {
        let it = layer(&bench, index);
        let error = commit_layer(&bench.image, &it, OPENERS, &CopyWatch::default(), &mut Told::default()).unwrap_err();
        assert!(error.to_string().contains("between two others"), "{error}");
    }
    assert!(is_free(&before[2], true) && !is_free(&before[2], false));
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}

#[test]
fn the_top_goes_into_an_image_that_was_open_for_reading() {
    let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536]));
    let load = bench.start(HistoryLoad::default());
    load.wait_for_more(500);
    let base = bench.files()[1].clone();
    let watch = CopyWatch::default();
    open_below_for_writing(&bench.image, &Unlocked, &watch).unwrap();
    assert!(!is_free(&base, true), "it is this disk's alone");
    load.wait_for_more(500);
    bench.take_back();
    load.wait_for_more(2000);
    assert_eq!((load.finish(), bench.files()), (Vec::new(), vec![base.clone()]));
    assert!(!is_free(&base, true));
    // A change of its base would need one.
    assert!(bench.move_onto(NewBelow::Nothing, &watch).is_err());
    bench.assert_sound_and_as_written();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It cannot be opened for reading.
    Open,
    /// It cannot be opened for reading, and meanwhile somebody else has opened it.
    OpenByOther,
    /// The queues cannot open what is open for reading.
    Queue,
    /// What is open for writing cannot be flushed.
    Flush,
}

/// Opens files as [`OPENERS`] do. The base has a fault until it is over.
struct Faulty {
    fault: Fault,
    base: PathBuf,
    is_over: Arc<AtomicBool>,
    other: Mutex<Option<Arc<dyn File>>>,
}

impl Opener for Faulty {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let (path, is_writer) = (name.path().unwrap(), role == Role::Writable);
        let inner: &dyn Opener = if is_writer { &Unlocked } else { &HostOpener };
        let fault = (path == self.base && !self.is_over.load(Ordering::Relaxed)).then_some(self.fault);
        match (fault, is_writer) {
            (Some(Fault::OpenByOther), false) => {
                *self.other.lock().unwrap() = Some(HostOpener.open_path(path, true)?);
                Err(Error::new(ErrorKind::Io, "no descriptor is left"))
            }
            (Some(Fault::Open), false) => Err(Error::new(ErrorKind::Io, "no descriptor is left")),
            (Some(Fault::Queue), false) | (Some(Fault::Flush), true) => {
                let (file, is_over) = (inner.open(name, role)?, Arc::clone(&self.is_over));
                Ok(Arc::new(FaultyFile { file, fault: self.fault, is_over }))
            }
            _ => inner.open(name, role),
        }
    }
}

#[derive(Debug)]
struct FaultyFile {
    file: Arc<dyn File>,
    fault: Fault,
    is_over: Arc<AtomicBool>,
}

impl FaultyFile {
    fn queue(&self, inner: Rc<dyn FileQueue>) -> Rc<dyn FileQueue> {
        if self.fault == Fault::Flush { Rc::new(Unflushed(inner, Arc::clone(&self.is_over))) } else { inner }
    }
}

impl File for FaultyFile {
    fn info(&self) -> &FileInfo {
        self.file.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.length_bytes()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.file.identity()
    }

    fn lock_again(&self, for_writing: bool) -> Result<()> {
        self.file.lock_again(for_writing)
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        match self.fault {
            Fault::Queue => Err(Error::new(ErrorKind::Io, "no memory is left")),
            _ => Ok(self.queue(self.file.open_queue(ctx)?)),
        }
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(self.queue(self.file.open_blocking()?))
    }
}

struct Unflushed(Rc<dyn FileQueue>, Arc<AtomicBool>);

impl FileQueue for Unflushed {
    fn push(&self, io: FileIo) {
        match io.op {
            FileOp::Flush if !self.1.load(Ordering::Relaxed) => io.done.complete(Err(IoError::EIO)),
            _ => self.0.push(io),
        }
    }
}

#[test]
fn a_base_that_stays_open_for_writing_after_an_error_is_written_to_by_this_disk_alone() {
    for fault in [Fault::Open, Fault::OpenByOther, Fault::Queue, Fault::Flush] {
        let bench = Bench::new(&Shape::qcow2(SIZE, &[4096, 65536, 16384]));
        let (before, gone) = (bench.files(), layer(&bench, 1));
        let base = before[2].clone();
        let load = bench.start(HistoryLoad { write_percent: 20, ..HistoryLoad::default() });
        load.wait_for_more(500);
        let opener = Faulty { fault, base: base.clone(), is_over: Arc::default(), other: Mutex::default() };
        let commit = || {
            let openers = LayerOpeners { for_writing: &opener, for_reading: &opener };
            commit_layer(&bench.image, &gone, openers, &CopyWatch::default(), &mut Told::default())
        };
        commit().unwrap_err();
        assert_eq!(bench.files(), before);
        opener.is_over.store(true, Ordering::Relaxed);
        if fault == Fault::OpenByOther {
            assert_eq!(commit().unwrap_err().kind(), ErrorKind::Locked);
            opener.other.lock().unwrap().take();
        } else {
            assert!(!is_free(&base, true), "{fault:?}: others can use what is open for writing");
        }
        load.wait_for_more(500);
        commit().unwrap();
        assert!(!is_free(&base, true), "{fault:?}");
        load.wait_for_more(500);
        assert_eq!(load.finish(), [""; 0]);
        bench.assert_sound_and_as_written();
    }
}

fn tool(name: &str, arguments: &[&str]) {
    let status = Command::new(name).args(arguments).stdout(Stdio::null()).status().expect("the tool is there");
    assert!(status.success(), "{name} {arguments:?}");
}

/// The base gives up its compressed clusters one after the other while queues read the rest of them.
#[test]
fn compressed_clusters_of_a_base_are_read_while_they_are_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let [raw, base, middle, top] = ["raw", "base", "middle", "top"].map(|name| directory.path().join(name));
    // A sector of each eight holds something, so clusters become smaller.
    let (written, mut contents) = (SectorHistory::new((SIZE / 512) as usize), vec![0; SIZE as usize]);
    for sector in (0..SIZE / 512).step_by(8) {
        let (at, write) = (sector as usize * 512, written.begin_write(sector, 1));
        contents[at..at + 512].copy_from_slice(&bytes_of(write));
    }
    std::fs::write(&raw, &contents).unwrap();
    let [from, to] = [&raw, &base].map(|path| path.to_str().unwrap());
    tool("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", from, to]);
    create(&middle, SIZE, 4096, Some(&base), false);
    // A small cluster of the middle in each of the base's.
    let mut writes = vec!["-f".to_owned(), "qcow2".to_owned()];
    for at in (4096..SIZE as usize).step_by(64 << 10) {
        let piece = directory.path().join(format!("piece{at}"));
        std::fs::write(&piece, &contents[at..at + 4096]).unwrap();
        writes.extend(["-c".to_owned(), format!("write -s {} {at} 4096", piece.display())]);
    }
    writes.push(middle.to_str().unwrap().to_owned());
    tool("qemu-io", &writes.iter().map(String::as_str).collect::<Vec<_>>());
    create(&top, SIZE, 4096, Some(&middle), false);
    let bench = Bench::of_images(directory, vec![base, middle, top], &contents);
    let load = bench.start(HistoryLoad { write_percent: 1, ..HistoryLoad::default() });
    load.wait_for_more(2000);
    commit(&bench, 1, 0);
    load.wait_for_more(2000);
    assert_eq!(load.finish(), [""; 0]);
    bench.assert_sound_and_as_written();
}
