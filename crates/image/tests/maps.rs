//! Access without operations, on real files: conformance where maps are given, agreement with the model, cancelled maps, and
//! files that become shorter beneath.

use block::{Disk, Error, File, IoResult, ReactorHandle, Result, StatusQuery};
use engine::{CacheMode, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{
    ClosedEdit, CopyWatch, CreateOptions, FileName, Format, HostSpace, Image, ImageOptions, NewSnapshot, OpenedOverlay,
    Opener, PointInTime, Role, ScratchFiles, Space, TemporaryFiles,
};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use testkit::conformance::{Subject, run};
use testkit::{Harness, ModelDisk, Request, ThreadHarness, Workload, stamped};

const SIZE: u64 = 1 << 20;

/// Opens files of the host; temporary ones lie in the directory.
struct HostOpener(PathBuf, Option<Arc<Gate>>);

/// Space of the data that nobody finds while the gate is shut.
#[derive(Default)]
struct Gate {
    is_shut: Mutex<bool>,
    opens: Condvar,
    waiting: AtomicU64,
}

struct Gated(HostSpace, Arc<Gate>);

impl Space for Gated {
    fn reserve(&self, offset: u64, length_bytes: u64) -> IoResult {
        self.1.waiting.fetch_add(1, Ordering::SeqCst);
        drop(self.1.opens.wait_while(self.1.is_shut.lock().unwrap(), |is_shut| *is_shut).unwrap());
        self.1.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.reserve(offset, length_bytes)
    }
}

impl Gate {
    fn shut(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap() = is_shut;
        self.opens.notify_all();
    }
}

fn options(read_only: bool) -> OpenOptions {
    OpenOptions::default().with(|options| {
        options.cache = CacheMode::Unsafe;
        options.read_only = read_only;
    })
}

impl Opener for HostOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        engine::open(name.path().unwrap(), &options(role != Role::Writable))
    }

    fn temporary(&self) -> Result<Box<dyn TemporaryFiles>> {
        Ok(Box::new(Temporary(self.0.clone(), self.1.clone())))
    }
}

struct Temporary(PathBuf, Option<Arc<Gate>>);

impl Temporary {
    fn file(&self) -> Result<std::fs::File> {
        tempfile::tempfile_in(&self.0).map_err(|error| Error::io("cannot make a temporary file", error))
    }
}

impl TemporaryFiles for Temporary {
    fn directory(&self) -> PathBuf {
        self.0.clone()
    }

    fn scratch(&self) -> Result<ScratchFiles> {
        let (index, data) = (self.file()?, self.file()?);
        let space = HostSpace::of(data.try_clone().unwrap());
        let space: Arc<dyn Space> = match &self.1 {
            Some(gate) => Arc::new(Gated(space, Arc::clone(gate))),
            None => Arc::new(space),
        };
        let data = engine::open_fd(OwnedFd::from(data), "data", &options(false).with(|options| options.lock = false))?;
        let own: Arc<dyn Space> = Arc::new(HostSpace::of(index.try_clone().unwrap()));
        Ok(ScratchFiles { index, data, spaces: [own, space] })
    }

    fn image(&self) -> Result<Arc<dyn File>> {
        engine::open_fd(OwnedFd::from(self.file()?), "image", &options(false))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Raw,
    Qcow2,
    Scratch,
}

const KINDS: [Kind; 3] = [Kind::Raw, Kind::Qcow2, Kind::Scratch];

/// In memory, and on a disk.
fn directories() -> Vec<tempfile::TempDir> {
    ["/dev/shm", env!("CARGO_TARGET_TMPDIR")].map(|place| tempfile::tempdir_in(place).unwrap()).into()
}

/// A new disk: a raw image, a qcow2 image with small clusters over one, or a scratch overlay over such a qcow2 image.
fn make(directory: &Path, kind: Kind, read_only: bool) -> Arc<Image> {
    make_with(directory, kind, read_only, None)
}

fn make_with(directory: &Path, kind: Kind, read_only: bool, gate: Option<Arc<Gate>>) -> Arc<Image> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let directory = &directory.join(number.to_string());
    std::fs::create_dir(directory).unwrap();
    let opener = HostOpener(directory.to_owned(), gate);
    let (base, top) = (directory.join("base"), directory.join("image"));
    let bytes: Vec<u8> = (0..SIZE / 2).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(&base, bytes).unwrap();
    let (path, format) = match kind {
        Kind::Raw => {
            std::fs::File::options().write(true).open(&base).unwrap().set_len(SIZE).unwrap();
            (base, Format::Raw)
        }
        Kind::Qcow2 | Kind::Scratch => {
            let options = CreateOptions::Qcow2(Qcow2Options::default().with(|options| {
                options.size_bytes = SIZE;
                options.cluster_size = 1024;
                options.backing_file = Some("base".to_owned());
                options.backing_format = Some("raw".to_owned());
            }));
            engine::create(&top, 0).unwrap();
            ringdisk_image::create(&opener.open(&(&*top).into(), Role::Writable).unwrap(), &options).unwrap();
            (top, Format::Qcow2)
        }
    };
    let options = ImageOptions::new(&path).with(|options| {
        options.format = Some(format);
        options.read_only = read_only && kind != Kind::Scratch;
        options.scratch = kind == Kind::Scratch;
    });
    Arc::new(ringdisk_image::open(&options, &opener).unwrap())
}

fn reactors(count: usize) -> Vec<ReactorThread> {
    let config = |index| ReactorConfig::default().with(|config| config.name = format!("test-{index}"));
    (0..count).map(|index| Reactor::spawn(config(index)).unwrap()).collect()
}

fn harness(reactors: &[ReactorThread]) -> ThreadHarness {
    ThreadHarness::new(reactors.iter().map(|reactor| reactor.handle() as Arc<dyn ReactorHandle>).collect())
}

fn call(harness: &mut ThreadHarness, queue: u64, request: Request) -> Vec<u8> {
    harness.submit(queue, vec![(u64::MAX, request)]);
    loop {
        let turn = harness.turn();
        if let Some((_, reply)) = turn.replies.into_iter().find(|(_, reply)| reply.tag == u64::MAX) {
            reply.result.unwrap();
            return reply.data;
        }
    }
}

/// What the disk shows of a range, if it shows it.
fn shown(disk: &dyn Disk, offset: u64, length: usize) -> Option<Vec<u8>> {
    let map = disk.map_read(offset, length)?;
    let mut bytes = vec![0xa5; length];
    map.read_at(0, &mut bytes).unwrap();
    map.commit().unwrap();
    Some(bytes)
}

#[test]
fn disks_that_give_maps_conform() {
    for directory in directories() {
        for kind in KINDS {
            let mut new = |read_only| {
                let asked = !(read_only && kind == Kind::Scratch);
                asked.then(|| make(directory.path(), kind, read_only) as Arc<dyn Disk>)
            };
            let threads = reactors(2);
            let mut subject = Subject { make: &mut new, keeps_data: true, seed: 1 };
            let report = run(&mut harness(&threads), &mut subject);
            assert!(report.failures.is_empty(), "{kind:?} in {directory:?}: {:#?}", report.failures);
            threads.into_iter().for_each(|thread| thread.stop().unwrap());
        }
    }
}

#[test]
fn what_lies_in_memory_is_shown_and_whole_pages_of_a_scratch_overlay_are_taken_over() {
    for directory in directories() {
        for kind in KINDS {
            let disk = make(directory.path(), kind, false);
            let threads = reactors(1);
            let mut harness = harness(&threads);
            let shared = Arc::clone(&disk) as Arc<dyn Disk>;
            let queue = harness.open(&shared, 0).unwrap();
            let bytes = stamped(1, 8192, 16384);
            call(&mut harness, queue, Request::write(8192, &bytes[..]));
            call(&mut harness, queue, Request::read(0, SIZE as usize));
            let found = shown(&*disk, 8192, 16384);
            assert_eq!(found.as_ref(), Some(&bytes), "{kind:?} in {directory:?}");
            assert!(shown(&*disk, 8192 + 512, 1024).is_some() && shown(&*disk, 0, SIZE as usize).is_some());
            // Its space is at hand since the write above. Parts of pages are not taken over.
            let given = |offset, length| disk.map_write(offset, length).map(|map| map.is_in_place());
            let wanted = (kind == Kind::Scratch).then_some(true);
            assert_eq!([given(4096, 8192), given(512, 4096), given(4096, 512)], [wanted, None, None], "{kind:?}");
            drop(harness);
            threads.into_iter().for_each(|thread| thread.stop().unwrap());
        }
    }
}

/// What was written is read and written over again and again by copies of the reactor itself.
#[test]
fn a_scratch_overlay_in_memory_is_read_and_overwritten_without_a_system_call() {
    if std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1) {
        // Workers serve files in memory there.
        eprintln!("skipped: this host has swap");
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = make(directory.path(), Kind::Scratch, false);
    let threads = reactors(1);
    let mut harness = harness(&threads);
    let shared = Arc::clone(&disk) as Arc<dyn Disk>;
    let queue = harness.open(&shared, 0).unwrap();
    call(&mut harness, queue, Request::write(0, vec![1; 1 << 18]));
    let mut calls_of = |round: u64| {
        let before = threads[0].stats();
        for page in 0..64 {
            call(&mut harness, queue, Request::write(page * 4096, vec![round as u8; 4096]));
            assert!(
                call(&mut harness, queue, Request::read(page * 4096, 4096)).iter().all(|byte| *byte == round as u8)
            );
        }
        let after = threads[0].stats();
        assert_eq!(after.completions - before.completions, 128);
        after.system_calls - before.system_calls + after.worker_calls - before.worker_calls
    };
    assert!((2..40).any(|round| calls_of(round) == 0), "each round made system calls");
    drop(harness);
    threads.into_iter().for_each(|thread| thread.stop().unwrap());
    disk.close().unwrap();
}

/// Threads put new bytes together and cancel them, and look at what is there, while requests and commits go on.
#[test]
fn maps_of_many_threads_agree_with_the_model_and_cancelled_ones_never_show() {
    let directories = directories();
    for (seed, (directory, kind)) in directories.iter().flat_map(|one| KINDS.map(|kind| (one, kind))).enumerate() {
        let disk = make(directory.path(), kind, false);
        let threads = reactors(2);
        let mut harness = harness(&threads);
        let shared = Arc::clone(&disk) as Arc<dyn Disk>;
        let queues: Vec<_> = (0..4).map(|index| harness.open(&shared, index).unwrap()).collect();
        let contents = call(&mut harness, queues[0], Request::read(0, SIZE as usize));
        let mut model = ModelDisk::new(&contents, false).with_mixed_reads(true);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| cancels_and_looks(&*disk, &stop));
            for round in 0..3_u64 {
                let requests = 800;
                let workload = Workload {
                    depth: 8,
                    maps: true,
                    first_tag: 1 + round * requests,
                    ..Workload::new(seed as u64 * 10 + round, requests, SIZE / 2, 4096)
                };
                let ended = workload.run(&mut harness, &queues, &mut model, &|| 0);
                ended.unwrap_or_else(|wrong| panic!("{kind:?}, seed {seed}: {wrong}"));
                let found = call(&mut harness, queues[1], Request::read(0, SIZE as usize));
                model.check_live(&found).unwrap();
                if let Some(map) = shown(&*disk, 0, SIZE as usize) {
                    assert!(map == found, "{kind:?}, seed {seed}: a map shows something else");
                }
            }
            stop.store(true, Ordering::Relaxed);
            let (cancelled, looked) = looks.join().unwrap();
            assert!(cancelled > 0 || kind != Kind::Scratch, "{kind:?}: no space was given");
            assert!(looked > 0, "{kind:?}: nothing was shown");
        });
        drop(harness);
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
        disk.close().unwrap();
    }
}

/// Maps for writing that are held at the same time, and what a map for reading keeps from being used again.
#[test]
fn maps_for_writing_are_given_again_after_they_were_short_and_what_is_kept_does_not_make_the_file_longer_and_longer() {
    for directory in directories() {
        let disk = make(directory.path(), Kind::Scratch, false);
        let threads = reactors(1);
        let mut harness = harness(&threads);
        let shared = Arc::clone(&disk) as Arc<dyn Disk>;
        let queue = harness.open(&shared, 0).unwrap();
        let mut write = |at: u64, byte: u8| {
            let data = vec![byte; 4096][..].into();
            call(&mut harness, queue, Request::WriteByMap { offset: at % (SIZE / 4096) * 4096, data });
        };
        (0..SIZE / 4096).for_each(|at| write(at, 1));
        let held: Vec<_> = (0..5000).map_while(|_| disk.map_write(0, 4096)).collect();
        assert!((1..5000).contains(&held.len()), "{} maps at the same time", held.len());
        write(1, 2);
        for length in [4096, 65536, 1 << 20] {
            // Nobody waits for the space.
            until(&format!("space for {length} bytes in {directory:?}"), || {
                write(1, 2);
                disk.map_write(0, length).is_some()
            });
        }
        drop(held);
        let map = disk.map_read(0, SIZE as usize).unwrap();
        (0..8000).for_each(|at| write(at, 3));
        assert!(disk.map_write(0, 4096).is_none(), "what the map keeps takes more and more space");
        map.read_at(0, &mut [0; 4096]).unwrap();
        drop(map);
        until("space", || {
            write(0, 3);
            disk.map_write(0, 4096).is_some()
        });
        assert!(shown(&*disk, 0, SIZE as usize).unwrap().iter().all(|byte| *byte == 3));
        drop(harness);
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
        disk.close().unwrap();
    }
}

/// Waits until something holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "there is no {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn while_the_host_finds_no_space_commits_end_and_what_they_free_is_given_again() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let gate = Arc::new(Gate::default());
    let disk = make_with(directory.path(), Kind::Scratch, false, Some(Arc::clone(&gate)));
    let threads = reactors(1);
    let mut harness = harness(&threads);
    let shared = Arc::clone(&disk) as Arc<dyn Disk>;
    let queue = harness.open(&shared, 0).unwrap();
    let mut write = |at: u64, byte: u8, by_map: bool| {
        let (offset, data) = (at % (SIZE / 4096) * 4096, vec![byte; 4096]);
        let request = match by_map {
            true => Request::WriteByMap { offset, data: data[..].into() },
            false => Request::write(offset, data),
        };
        call(&mut harness, queue, request);
    };
    (0..SIZE / 4096).for_each(|at| write(at, 1, true));
    gate.shut(true);
    // So many maps leave little, and the host is asked for more.
    let mut held: Vec<_> = (0..600).map_while(|_| disk.map_write(0, 4096)).collect();
    assert_eq!(held.len(), 600);
    write(0, 2, true);
    until("hanging request for space", || {
        write(0, 2, false);
        gate.waiting.load(Ordering::SeqCst) == 1
    });
    for at in 0..5000 {
        assert!(disk.map_write(at % 64 * 4096, 4096).is_some_and(|map| map.is_in_place()), "write {at}");
        write(at, 3, true);
    }
    assert_eq!(gate.waiting.load(Ordering::SeqCst), 1, "it is asked once");
    held.clear();
    gate.shut(false);
    until("space", || gate.waiting.load(Ordering::SeqCst) == 0);
    assert!(shown(&*disk, 0, SIZE as usize).unwrap().iter().all(|byte| *byte == 3));
    // A queue may go while space is looked for.
    gate.shut(true);
    until("hanging request for space", || {
        // All that is at hand, also what was reserved last.
        held.extend((0..4096).map_while(|_| disk.map_write(0, 4096)));
        write(0, 4, false);
        gate.waiting.load(Ordering::SeqCst) == 1
    });
    drop((held, harness));
    gate.shut(false);
    threads.into_iter().for_each(|thread| thread.stop().unwrap());
    disk.close().unwrap();
}

/// No byte of a base.
const CANCELLED: u8 = 0xfd;

/// Returns how many maps were cancelled, and how many were looked at.
fn cancels_and_looks(disk: &dyn Disk, stop: &AtomicBool) -> (u64, u64) {
    let (mut cancelled, mut looked) = (0, 0);
    let mut at = 0;
    while !stop.load(Ordering::Relaxed) {
        at = (at + 7 * 4096) % (SIZE / 2 - 16384);
        let offset = at / 4096 * 4096;
        if let Some(mut map) = disk.map_write(offset, 8192) {
            map.fill(0, 8192, CANCELLED).unwrap();
            cancelled += 1;
        }
        if let Some(map) = disk.map_read(offset, 16384) {
            let mut bytes = vec![0; 16384];
            map.read_at(0, &mut bytes).unwrap();
            // No stamp has it so often in a row.
            assert!(!bytes.windows(64).any(|run| run == [CANCELLED; 64]), "a cancelled map shows at {offset}");
            looked += 1;
        }
    }
    (cancelled, looked)
}

#[test]
fn a_map_keeps_what_it_shows_from_being_used_again() {
    for directory in directories() {
        for kind in [Kind::Qcow2, Kind::Scratch] {
            let disk = make(directory.path(), kind, false);
            let threads = reactors(1);
            let mut harness = harness(&threads);
            let shared = Arc::clone(&disk) as Arc<dyn Disk>;
            let queue = harness.open(&shared, 0).unwrap();
            call(&mut harness, queue, Request::write(0, vec![1; 65536]));
            let map = disk.map_read(0, 65536).unwrap();
            call(&mut harness, queue, Request::Discard { offset: 0, length: 65536 });
            call(&mut harness, queue, Request::Flush);
            for at in 1..8_u64 {
                let data = vec![0xee; 65536][..].into();
                call(&mut harness, queue, Request::WriteByMap { offset: at * 65536, data });
                call(&mut harness, queue, Request::Flush);
            }
            let mut bytes = vec![0; 65536];
            map.read_at(0, &mut bytes).unwrap();
            assert!(!bytes.contains(&0xee), "{kind:?}: a map shows a stranger's data");
            drop((map, harness));
            threads.into_iter().for_each(|thread| thread.stop().unwrap());
        }
    }
}

#[test]
fn a_map_that_outlives_the_layer_it_was_made_in_fails_and_is_made_again() {
    for directory in directories() {
        let disk = make(directory.path(), Kind::Qcow2, false);
        let threads = reactors(1);
        let mut harness = harness(&threads);
        let shared = Arc::clone(&disk) as Arc<dyn Disk>;
        let queue = harness.open(&shared, 0).unwrap();
        call(&mut harness, queue, Request::write(0, vec![1; 65536]));
        let map = disk.map_read(0, 65536).unwrap();
        call(&mut harness, queue, Request::Discard { offset: 0, length: 65536 });
        // The layer is closed, so what was discarded is free at once, and the file has a hole there.
        disk.edit_online(&ClosedEdit::CreateSnapshot(NewSnapshot::new("one"))).unwrap();
        map.read_at(0, &mut [0; 512]).unwrap_err();
        map.commit().unwrap_err();
        let status = disk.block_status(&StatusQuery::all()).unwrap();
        status.for_each(|run| assert!(run.unwrap().length_bytes > 0));
        call(&mut harness, queue, Request::write(0, vec![2; 65536]));
        let mut bytes = vec![0; 65536];
        disk.map_read(0, 65536).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [2; 65536]);
        drop(harness);
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
    }
}

/// The space of a layer that was taken off goes back to the host, so it reads as zeros.
#[test]
fn a_map_of_a_layer_that_was_taken_off_fails_and_a_walk_goes_on_with_the_layers_that_stay() {
    for directory in directories() {
        let disk = make(directory.path(), Kind::Qcow2, false);
        let threads = reactors(1);
        let mut harness = harness(&threads);
        let shared = Arc::clone(&disk) as Arc<dyn Disk>;
        let queue = harness.open(&shared, 0).unwrap();
        let (below, path) = (disk.layer_in_header(0).unwrap(), directory.path().join("fleece"));
        let options = Qcow2Options::default().with(|options| {
            options.size_bytes = SIZE;
            options.rest_on(below);
        });
        engine::create(&path, 0).unwrap();
        let opener = HostOpener(directory.path().to_owned(), None);
        let file = opener.open(&(&*path).into(), Role::Writable).unwrap();
        ringdisk_image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
        let overlay = OpenedOverlay::open(&(&*path).into(), file).unwrap();
        let point = PointInTime::begin(&disk, overlay, || Ok(())).unwrap();
        call(&mut harness, queue, Request::write(0, vec![7; 65536]));
        let map = disk.map_read(0, 65536).expect("it lies in memory");
        map.read_at(0, &mut [0; 512]).unwrap();
        let mut walk = disk.block_status(&StatusQuery::all()).unwrap();
        walk.next().unwrap().unwrap();
        point.end(&CopyWatch::default(), || Ok(())).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().write_all_at(&[0; 1 << 16], 0).unwrap();
        map.read_at(0, &mut [0; 512]).unwrap_err();
        map.commit().unwrap_err();
        walk.for_each(|run| assert!(run.unwrap().length_bytes > 0));
        let mut bytes = vec![0; 65536];
        disk.map_read(0, 65536).expect("maps are made anew").read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 65536]);
        drop(harness);
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
        disk.close().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}

/// Files of the host, without locks: the same process opens them twice.
struct Anew;

impl Opener for Anew {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let options = options(role != Role::Writable).with(|options| options.lock = false);
        engine::open(name.path().unwrap(), &options)
    }

    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        if path.exists() {
            return Ok(None);
        }
        std::fs::write(path, []).unwrap();
        self.open(&path.into(), Role::Writable).map(Some)
    }
}

/// Space that the former mapping has freed, or has given to a map, is free for the new one.
#[test]
fn maps_that_outlive_the_opening_of_a_disk_neither_show_nor_change_what_lies_there_now() {
    for directory in directories() {
        let (base, index) = (directory.path().join("base"), directory.path().join("disk.scratch"));
        std::fs::write(&base, vec![9; SIZE as usize]).unwrap();
        let kept = ImageOptions::new(&base).with(|options| {
            options.format = Some(Format::Raw);
            (options.scratch, options.keep) = (true, Some(index.clone()));
        });
        let disk = Arc::new(ringdisk_image::open(&kept, &Anew).unwrap());
        let threads = reactors(1);
        let mut harness = harness(&threads);
        let shared = Arc::clone(&disk) as Arc<dyn Disk>;
        let queue = harness.open(&shared, 0).unwrap();
        call(&mut harness, queue, Request::write(0, vec![1; 65536]));
        let read = disk.map_read(0, 65536).expect("it lies in memory");
        let write = disk.map_write(0, 65536);
        disk.reopen(false, || ringdisk_image::open(&kept, &Anew)).unwrap();
        call(&mut harness, queue, Request::Discard { offset: 0, length: 65536 });
        call(&mut harness, queue, Request::Flush);
        call(&mut harness, queue, Request::write(65536, vec![2; 1 << 19]));
        read.read_at(0, &mut [0; 512]).unwrap_err();
        read.commit().unwrap_err();
        if let Some(mut map) = write {
            let _ = map.fill(0, 65536, CANCELLED);
        }
        let bytes = call(&mut harness, queue, Request::read(65536, 1 << 19));
        assert!(bytes.iter().all(|byte| *byte == 2), "in {directory:?}");
        assert_eq!(shown(&*disk, 0, 1024).unwrap(), [0; 1024], "maps are made anew");
        drop(harness);
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
        disk.close().unwrap();
    }
}

#[test]
fn a_disk_whose_layer_could_not_be_opened_again_says_so_and_nobody_waits_for_it() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = make(directory.path(), Kind::Qcow2, false);
    let before = disk.block_status(&StatusQuery::all()).unwrap();
    let own = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    let file = std::fs::File::options().write(true).open(own.join("image")).unwrap();
    file.write_all_at(b"gone", 0).unwrap();
    disk.edit_online(&ClosedEdit::CreateSnapshot(NewSnapshot::new("one"))).unwrap_err();
    for walk in [before, disk.block_status(&StatusQuery::all()).unwrap()] {
        let error = walk.map(|run| run.map(drop)).find_map(Result::err).unwrap().to_string();
        assert!(error.contains("open the disk anew"), "{error}");
    }
}

#[test]
fn a_file_that_becomes_shorter_beneath_a_map_is_an_error() {
    for directory in directories() {
        let disk = make(directory.path(), Kind::Raw, true);
        let map = disk.map_read(0, 65536).unwrap();
        map.read_at(0, &mut [0; 65536]).unwrap();
        let own = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
        let file = std::fs::File::options().write(true).open(own.join("base")).unwrap();
        file.set_len(4096).unwrap();
        map.read_at(8192, &mut [0; 4096]).unwrap_err();
        map.commit().unwrap_err();
        assert!(disk.map_read(8192, 4096).is_none(), "a read says what is wrong");
    }
}
