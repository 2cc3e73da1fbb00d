//! Commit and rebase change images where they lie: seen through the overlay the disk never changes, whatever breaks,
//! and running the job again finishes it.

use block::{Disk, Error, ErrorKind, File, IoError, OpFlags, Result, StatusQuery};
use format_qcow2::{BitmapAction, CreateOptions as Qcow2Options};
use image::{Backing, BackingPolicy, CreateOptions, FileName, Format, GrowBy, ImageOptions, Opener, Role};
use ringdisk_jobs::{CommitOptions, Control, RebaseOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::{
    Fault, FaultAction, OpKind, OpenedDisk, Request, Session, SimFileOptions, SimHandle, SimReactor, SimStorage, mix,
    qcow2_check, stamped,
};

struct SimOpener(SimStorage);

impl Opener for SimOpener {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        let missing = || Error::new(ErrorKind::Io, format!("no simulated file '{name}'"));
        Ok(self.0.file(&name.to_string()).ok_or_else(missing)?)
    }

    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        let path = path.to_str().unwrap();
        if self.0.file(path).is_some() {
            return Ok(None);
        }
        Ok(Some(self.0.create(path, 0, SimFileOptions::default())))
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// An image of a chain.
struct Layer {
    name: &'static str,
    size_bytes: u64,
    /// Zero: a raw image.
    cluster_size: u64,
    version: u32,
    extended_l2: bool,
    /// Its data lie in a file of their own.
    external: bool,
    /// A kept scratch overlay.
    kept: bool,
    backing: Option<(&'static str, &'static str)>,
    /// Decides what is written to it.
    stamp: u64,
}

const RAW: Layer = Layer { cluster_size: 0, stamp: 1, ..qcow2("base", None) };

const fn qcow2(name: &'static str, backing: Option<(&'static str, &'static str)>) -> Layer {
    let size_bytes = 160 << 10;
    let (cluster_size, extended_l2, external, kept) = (4096, false, false, false);
    Layer { name, size_bytes, cluster_size, version: 3, extended_l2, external, kept, backing, stamp: 2 }
}

fn data_name(name: &str) -> String {
    format!("{name}.data")
}

impl Layer {
    fn format(&self) -> Format {
        match self.cluster_size {
            _ if self.kept => Format::Scratch,
            0 => Format::Raw,
            _ => Format::Qcow2,
        }
    }

    fn make(&self, storage: &SimStorage) {
        if self.format() == Format::Raw {
            let bytes = stamped(self.stamp, 0, self.size_bytes as usize);
            // On every file system, the part by which a file grows reads as zeros.
            let options = SimFileOptions { grows_with_zeros: true, ..SimFileOptions::default() };
            storage.create_with(self.name, &bytes, options);
            return;
        }
        match self.kept {
            true => self.make_kept(storage),
            false => self.make_qcow2(storage),
        }
        self.write(storage);
    }

    fn make_kept(&self, storage: &SimStorage) {
        let (below, format) = self.backing.unwrap();
        let options = ImageOptions::new(below).with(|options| {
            options.format = Some(format.parse().unwrap());
            options.scratch = true;
            options.keep = Some(self.name.into());
        });
        image::open(&options, &SimOpener(storage.clone())).unwrap().close().unwrap();
    }

    fn make_qcow2(&self, storage: &SimStorage) {
        let file: Arc<dyn File> = storage.create(self.name, 0, SimFileOptions::default());
        let options = Qcow2Options::default().with(|options| {
            options.size_bytes = self.size_bytes;
            options.cluster_size = self.cluster_size;
            options.version = self.version;
            options.backing_file = self.backing.map(|(name, _)| name.to_owned());
            options.backing_format = self.backing.map(|(_, format)| format.to_owned());
            options.extended_l2 = self.extended_l2;
            options.data_file = self.external.then(|| data_name(self.name));
        });
        let new_data = || storage.create(&data_name(self.name), 0, SimFileOptions::default()) as Arc<dyn File>;
        let data = self.external.then(new_data);
        image::create_with_data(&file, data.as_ref(), &CreateOptions::Qcow2(options)).unwrap();
    }

    fn write(&self, storage: &SimStorage) {
        let mut session = Session::open(storage, &|storage| open(storage, self.name, false), self.stamp, 1).unwrap();
        let mut at = 0;
        for step in 0.. {
            let length = (1 + mix(self.stamp, step) % 12) * 1024;
            if at + length > self.size_bytes {
                break;
            }
            match mix(step, self.stamp) % 4 {
                0 => {
                    let zeroes = Request::WriteZeroes { offset: at, length, may_unmap: true, flags: OpFlags::NONE };
                    session.call(zeroes).map(drop).unwrap();
                }
                1 | 2 => {
                    let write = Request::write(at, stamped(1000 + self.stamp, at, length as usize));
                    session.call(write).map(drop).unwrap();
                }
                _ => {}
            }
            at += length;
        }
        session.close().unwrap();
    }
}

fn open(storage: &SimStorage, name: &str, read_only: bool) -> Result<OpenedDisk> {
    let mut options = ImageOptions::new(name);
    options.allow_backing = BackingPolicy::Any;
    options.read_only = read_only;
    let image = Arc::new(image::open(&options, &SimOpener(storage.clone()))?);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as Arc<dyn Disk>;
    Ok(OpenedDisk { disk, close: Box::new(move || image.close()) })
}

fn contents(storage: &SimStorage, name: &str) -> std::result::Result<Vec<u8>, String> {
    let mut session = Session::open(storage, &|storage| open(storage, name, true), 1, 1)?;
    let contents = session.read_all()?;
    session.close()?;
    Ok(contents)
}

enum Job {
    Commit { base: Option<&'static str>, keep: bool },
    Rebase { to: Option<(&'static str, &'static str)>, compress: bool },
}

/// Images, and a job on the one named `top`.
struct Case {
    layers: Vec<Layer>,
    job: Job,
}

impl Case {
    fn storage(&self) -> SimStorage {
        let storage = SimStorage::new(1);
        self.layers.iter().for_each(|layer| layer.make(&storage));
        storage.process_killed(0)
    }

    fn run(&self, storage: &SimStorage) -> Result<()> {
        let reactor = SimReactor::new(7);
        let handle: Arc<dyn block::ReactorHandle> = SimHandle::new(&reactor);
        let opener = SimOpener(storage.clone());
        let cancel = AtomicBool::new(false);
        let mut step = |_| reactor.run_until_idle();
        let mut control = Control::new(&cancel, &mut step);
        match &self.job {
            Job::Commit { base, keep } => {
                let options = CommitOptions::new("top").with(|options| {
                    options.format = self.layers.last().map(Layer::format);
                    options.base = base.map(PathBuf::from);
                    options.keep = *keep;
                    options.allow_backing = BackingPolicy::Any;
                    options.rate = None;
                    options.change_snapshots = false;
                });
                ringdisk_jobs::commit(&options, &opener, &[handle], &mut control)
            }
            Job::Rebase { to, compress } => {
                let backing = |(file, format): (&str, &str)| Backing { file: file.into(), format: Some(format.into()) };
                let options = RebaseOptions::new("top").with(|options| {
                    options.format = Some(Format::Qcow2);
                    options.backing = to.map(backing);
                    options.name_only = false;
                    options.compress = *compress;
                    options.allow_backing = BackingPolicy::Any;
                    options.change_snapshots = false;
                });
                ringdisk_jobs::rebase(&options, &opener, &opener, &[handle], &mut control)
            }
        }
    }

    /// The guest sees what it saw, and every image is sound.
    fn judge(&self, storage: &SimStorage, expected: &[u8]) -> std::result::Result<(), String> {
        for layer in self.layers.iter().filter(|layer| layer.format() == Format::Qcow2) {
            let report = qcow2_check(&storage.bytes(layer.name))?;
            report.sound().map_err(|wrong| format!("'{}': {wrong}", layer.name))?;
        }
        let seen = contents(storage, "top")?;
        match seen.iter().zip(expected).position(|(seen, expected)| seen != expected) {
            None if seen.len() == expected.len() => Ok(()),
            at => Err(format!("the disk has changed at byte {at:?}")),
        }
    }

    /// What must hold when the job is done.
    fn judge_done(&self, storage: &SimStorage, expected: &[u8]) -> std::result::Result<(), String> {
        self.judge(storage, expected)?;
        match &self.job {
            Job::Commit { base, keep } => {
                let base = base.unwrap_or(self.layers[self.layers.len() - 2].name);
                let seen = contents(storage, base)?;
                let length = expected.len().min(seen.len());
                if seen[..length] != expected[..length] || seen.len() < expected.len() {
                    return Err(format!("'{base}' does not hold what the overlay shows"));
                }
                let allocated = match self.layers.last().is_some_and(|top| top.kept) {
                    true => storage.bytes("top.data").len() as u64 / 4096,
                    false => qcow2_check(&storage.bytes("top"))?.allocated_clusters,
                };
                match (allocated == 0) != *keep {
                    true => Ok(()),
                    false => Err(format!("the overlay holds {allocated} clusters")),
                }
            }
            Job::Rebase { to, compress } => {
                let options = ImageOptions::new("top").with(|options| options.allow_backing = BackingPolicy::Any);
                let image = image::open(&options, &SimOpener(storage.clone())).map_err(|error| error.to_string())?;
                let mut runs = image.block_status(&StatusQuery::all()).map_err(|error| error.to_string())?;
                let compressed = runs.any(|run| run.is_ok_and(|run| run.depth == 0 && run.compressed));
                if compressed != *compress {
                    return Err(format!("compressed clusters in the overlay: {compressed}"));
                }
                let below = image.file_names().nth(1).map(|name| name.to_string());
                match below.as_deref() == to.map(|(name, _)| name) {
                    true => Ok(()),
                    false => Err(format!("the backing file is {below:?}")),
                }
            }
        }
    }

    fn survives_power_cuts(&self, stride: u64) {
        let storage = self.storage();
        let expected = contents(&storage, "top").unwrap();
        storage.record();
        self.run(&storage).unwrap();
        self.judge_done(&storage, &expected).unwrap();
        self.judge_done(&storage.power_cut(1), &expected).unwrap();
        let mut replay = storage.take_recording().replay();
        let mut moments = 0;
        while let Some(now) = replay.advance() {
            if !now.is_multiple_of(stride) {
                continue;
            }
            moments += 1;
            for seed in 0..2 {
                let after = replay.power_cut(seed);
                self.judge(&after, &expected)
                    .unwrap_or_else(|wrong| panic!("cut at event {now}, seed {seed}: {wrong}"));
                if (moments + seed) % 8 == 0 {
                    self.run(&after).unwrap_or_else(|error| panic!("cut at event {now}, again: {error}"));
                    let done = self.judge_done(&after, &expected);
                    done.unwrap_or_else(|wrong| panic!("cut at event {now}, run again: {wrong}"));
                }
            }
        }
        assert!(moments > 15, "only {moments} moments");
    }

    fn survives_faults(&self, file: &str, errno: i32, stride: u64) {
        let original = self.storage();
        let expected = contents(&original, "top").unwrap();
        let mut failed = 0;
        for kind in OpKind::ALL {
            for nth in (0..).step_by(stride as usize) {
                let storage = original.process_killed(0);
                let before = storage.pushed(file, kind);
                storage.inject(file, Fault::nth(kind, nth, FaultAction::Scatter(IoError::from_errno(errno))));
                let ended = self.run(&storage);
                if storage.pushed(file, kind) <= before + nth {
                    break;
                }
                failed += u64::from(ended.is_err());
                storage.clear_faults();
                let place = || format!("{kind:?} {nth} of '{file}'");
                for after in [storage.process_killed(nth), storage.power_cut(nth)] {
                    self.judge(&after, &expected).unwrap_or_else(|wrong| panic!("{}: {wrong}", place()));
                }
                let after = storage.process_killed(nth);
                self.run(&after).unwrap_or_else(|error| panic!("{}, again: {error}", place()));
                self.judge_done(&after, &expected).unwrap_or_else(|wrong| panic!("{}, again: {wrong}", place()));
            }
        }
        assert!(failed > 3, "only {failed} faults were told");
    }
}

fn commit_cases() -> Vec<Case> {
    let small = |name, backing| Layer { size_bytes: 100 << 10, ..qcow2(name, backing) };
    let shorter = (98 << 10) + 512;
    let commit = |layers| Case { layers, job: Job::Commit { base: None, keep: false } };
    vec![
        commit(vec![RAW, Layer { stamp: 3, ..qcow2("top", Some(("base", "raw"))) }]),
        // The base is shorter than the overlay, and its clusters are larger.
        commit(vec![Layer { size_bytes: 100 << 10, ..RAW }, Layer { stamp: 4, ..qcow2("top", Some(("base", "raw"))) }]),
        commit(vec![
            RAW,
            Layer { cluster_size: 16384, ..qcow2("middle", Some(("base", "raw"))) },
            Layer { stamp: 5, ..qcow2("top", Some(("middle", "qcow2"))) },
        ]),
        commit(vec![
            RAW,
            qcow2("middle", Some(("base", "raw"))),
            Layer { stamp: 6, version: 2, cluster_size: 8192, ..small("top", Some(("middle", "qcow2"))) },
        ]),
        // The same holds for the layer below a base that is shorter than the overlay, once the base has grown.
        commit(vec![
            RAW,
            Layer { size_bytes: shorter, ..qcow2("middle", Some(("base", "raw"))) },
            Layer { stamp: 11, ..qcow2("top", Some(("middle", "qcow2"))) },
        ]),
        commit(vec![
            RAW,
            Layer { size_bytes: shorter, version: 2, ..qcow2("middle", Some(("base", "raw"))) },
            Layer { stamp: 12, ..qcow2("top", Some(("middle", "qcow2"))) },
        ]),
        commit(vec![
            RAW,
            Layer {
                size_bytes: shorter,
                cluster_size: 16384,
                extended_l2: true,
                ..qcow2("middle", Some(("base", "raw")))
            },
            Layer { stamp: 13, ..qcow2("top", Some(("middle", "qcow2"))) },
        ]),
        commit(vec![
            RAW,
            Layer { size_bytes: shorter, external: true, ..qcow2("middle", Some(("base", "raw"))) },
            Layer { stamp: 14, ..qcow2("top", Some(("middle", "qcow2"))) },
        ]),
        // The files of the data count as no layers.
        commit(vec![RAW, Layer { stamp: 15, external: true, ..qcow2("top", Some(("base", "raw"))) }]),
        Case {
            job: Job::Commit { base: Some("base"), keep: true },
            ..commit(vec![
                RAW,
                qcow2("middle", Some(("base", "raw"))),
                Layer { stamp: 7, ..qcow2("top", Some(("middle", "qcow2"))) },
            ])
        },
        // The middle hides from the overlay what the base has behind the middle's end.
        Case {
            job: Job::Commit { base: Some("base"), keep: true },
            ..commit(vec![
                RAW,
                small("middle", Some(("base", "raw"))),
                Layer { stamp: 8, ..qcow2("top", Some(("middle", "qcow2"))) },
            ])
        },
    ]
}

fn rebase_cases() -> Vec<Case> {
    let other = Layer { name: "other", size_bytes: 120 << 10, stamp: 20, ..qcow2("other", None) };
    let chain = |backing: Option<(&'static str, &'static str)>| {
        vec![
            RAW,
            Layer { stamp: 9, ..qcow2("middle", Some(("base", "raw"))) },
            Layer { stamp: 20, ..qcow2("other", None) },
            Layer { stamp: 10, ..qcow2("top", backing) },
        ]
    };
    let rebase = |layers, to| Case { layers, job: Job::Rebase { to, compress: false } };
    // Clusters are larger than single writes, so some hold the guest's own data only in part.
    let compressing = |to, top: Layer| {
        let top = Layer { name: "top", backing: Some(("middle", "qcow2")), ..top };
        let layers = chain(None).into_iter().take(3).chain([top]).collect();
        Case { layers, job: Job::Rebase { to, compress: true } }
    };
    let large = || Layer { stamp: 16, cluster_size: 16384, ..qcow2("top", None) };
    let mut shorter = chain(Some(("middle", "qcow2")));
    shorter[2] = other;
    vec![
        rebase(chain(Some(("middle", "qcow2"))), Some(("base", "raw"))),
        rebase(chain(Some(("middle", "qcow2"))), None),
        rebase(chain(None), Some(("other", "qcow2"))),
        rebase(shorter, Some(("other", "qcow2"))),
        // What the lowest layer holds is not in the file that the one above it has for its data.
        rebase(
            vec![
                RAW,
                Layer { stamp: 34, external: true, ..qcow2("middle", Some(("base", "raw"))) },
                Layer { stamp: 57, ..qcow2("top", Some(("middle", "qcow2"))) },
            ],
            Some(("middle.data", "raw")),
        ),
        compressing(None, large()),
        compressing(Some(("other", "qcow2")), Layer { extended_l2: true, ..large() }),
        compressing(Some(("other", "qcow2")), Layer { version: 2, size_bytes: (150 << 10) + 512, ..large() }),
        compressing(Some(("base", "raw")), Layer { stamp: 17, cluster_size: 512, ..large() }),
    ]
}

#[test]
fn a_power_cut_at_any_moment_of_a_commit_changes_nothing_that_the_guest_sees() {
    for case in commit_cases() {
        case.survives_power_cuts(1);
    }
}

/// Kept scratch overlays of a raw and of a qcow2 image.
fn kept_cases() -> [Case; 2] {
    let kept = |stamp, backing| Layer { kept: true, stamp, ..qcow2("top", Some(backing)) };
    let commit = |layers| Case { layers, job: Job::Commit { base: None, keep: false } };
    [
        commit(vec![RAW, kept(21, ("base", "raw"))]),
        commit(vec![RAW, qcow2("middle", Some(("base", "raw"))), kept(22, ("middle", "qcow2"))]),
    ]
}

#[test]
fn a_power_cut_at_any_moment_of_a_commit_of_a_kept_overlay_changes_nothing_that_the_guest_sees() {
    for case in kept_cases() {
        case.survives_power_cuts(1);
    }
}

#[test]
fn a_fault_at_any_step_of_a_commit_of_a_kept_overlay_changes_nothing_and_the_job_can_be_run_again() {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    let [raw, qcow2] = kept_cases();
    raw.survives_faults("base", ENOSPC, 1);
    raw.survives_faults("top", EIO, 1);
    qcow2.survives_faults("middle", ENOSPC, 1);
    qcow2.survives_faults("top", EIO, 1);
}

#[test]
fn a_power_cut_at_any_moment_of_a_rebase_changes_nothing_that_the_guest_sees() {
    for case in rebase_cases() {
        case.survives_power_cuts(1);
    }
}

#[test]
fn a_fault_at_any_step_of_a_commit_or_rebase_changes_nothing_and_the_job_can_be_run_again() {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    let (commit, rebase) = (commit_cases(), rebase_cases());
    commit[0].survives_faults("base", ENOSPC, 1);
    commit[0].survives_faults("top", EIO, 1);
    commit[2].survives_faults("middle", ENOSPC, 1);
    commit[7].survives_faults("middle", EIO, 1);
    commit[7].survives_faults("middle.data", ENOSPC, 1);
    rebase[0].survives_faults("top", ENOSPC, 1);
    rebase[3].survives_faults("top", EIO, 1);
    rebase[6].survives_faults("top", ENOSPC, 1);
}

#[test]
fn a_commit_gives_no_other_formats_header_to_a_base_that_was_only_guessed_to_be_raw() {
    for format in [None, Some("raw")] {
        let storage = SimStorage::new(1);
        RAW.make(&storage);
        let file: Arc<dyn File> = storage.create("top", 0, SimFileOptions::default());
        let options = Qcow2Options::default().with(|options| {
            options.size_bytes = RAW.size_bytes;
            options.backing_file = Some("base".to_owned());
            options.backing_format = format.map(str::to_owned);
        });
        image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
        let header = storage.bytes("top")[..512].to_vec();
        // A guest may do this: its disk is qcow2.
        let mut session = Session::open(&storage, &|storage| open(storage, "top", false), 1, 1).unwrap();
        session.call(Request::write(0, header.clone())).map(drop).unwrap();
        session.close().unwrap();

        let commit = Case { layers: Vec::new(), job: Job::Commit { base: None, keep: false } };
        let done = commit.run(&storage);
        let written = storage.bytes("base").starts_with(&header);
        assert_eq!((done.is_ok(), written), (format.is_some(), format.is_some()), "{format:?}: {done:?}");
        assert!(contents(&storage, "top").unwrap().starts_with(&header));
    }
}

#[test]
fn a_raw_image_for_which_there_is_no_space_and_one_whose_growth_is_given_up_keep_their_size() {
    let storage = SimStorage::new(1);
    RAW.make(&storage);
    let before = storage.bytes("base");
    let cancel = AtomicBool::new(false);
    let grow = |progress: &mut dyn FnMut(ringdisk_jobs::Progress)| {
        let image = image::open(&ImageOptions::new("base"), &SimOpener(storage.clone())).unwrap();
        let mut control = Control::new(&cancel, progress);
        ringdisk_jobs::resize(image, 5 << 20, false, GrowBy::Zeros, &mut control)
    };
    let no_space = FaultAction::Scatter(IoError::from_errno(28));
    storage.inject("base", Fault::nth(OpKind::Write, 1, no_space));
    let mut told = 0;
    assert!(grow(&mut |_| told += 1).is_err() && told == 1);
    assert!(storage.bytes("base") == before);
    storage.clear_faults();
    assert!(grow(&mut |_| cancel.store(true, Ordering::Relaxed)).is_err());
    assert!(storage.bytes("base") == before);
    cancel.store(false, Ordering::Relaxed);
    grow(&mut |_| {}).unwrap();
    assert!(storage.bytes("base").len() == 5 << 20);
}

#[test]
fn whatever_breaks_a_commit_a_bitmap_of_the_base_that_is_believed_knows_what_was_written() {
    let layers = vec![qcow2("base", None), Layer { stamp: 11, ..qcow2("top", Some(("base", "qcow2"))) }];
    let case = Case { layers, job: Job::Commit { base: None, keep: false } };
    let original = case.storage();
    let base: Arc<dyn File> = original.file("base").unwrap();
    let add = BitmapAction::Add { granularity_bytes: Some(512) };
    image::edit_bitmaps(&base, Format::Qcow2, &[("b".to_owned(), add)], &mut |_, _| true).unwrap();
    let before = contents(&original, "base").unwrap();
    let (mut believed, mut lost) = (0, 0);
    for nth in 0.. {
        let storage = original.process_killed(0);
        let pushed = storage.pushed("base", OpKind::Write);
        storage.inject("base", Fault::nth(OpKind::Write, nth, FaultAction::Scatter(IoError::EIO)));
        let done = case.run(&storage);
        let hit = storage.pushed("base", OpKind::Write) > pushed + nth;
        storage.clear_faults();
        let after = contents(&storage, "base").unwrap();
        let file: Arc<dyn File> = storage.file("base").unwrap();
        let in_use = image::bitmaps(&file, Format::Qcow2).unwrap()[0].in_use;
        lost += usize::from(in_use);
        if !in_use {
            let bits = image::read_bitmap(&file, Format::Qcow2, "b").unwrap();
            let differs = |at: &usize| before[*at..][..512] != after[*at..][..512];
            let missed = (0..before.len()).step_by(512).filter(differs).find(|at| !bits.is_set(*at as u64));
            assert_eq!(missed, None, "write {nth}");
            believed += usize::from(done.is_err());
        }
        if !hit {
            done.unwrap();
            break;
        }
    }
    assert!(believed > 3 && lost > 1, "{believed} believed after a failure, {lost} lost");
}
