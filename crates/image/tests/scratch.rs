//! Disks whose writes are thrown away: the conformance suite, random requests against the model, running out of space.

mod common;

use block::{Disk, Error, ErrorKind, File, IoError, IoErrorKind, IoResult, OpFlags, Result};
use common::{Chain, Layer, SimOpener, name};
use memory::Mapping;
use ringdisk_image::{FileName, HostSpace, Image, ImageOptions, Opener, Role, ScratchFiles, Space, TemporaryFiles};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::conformance::{Subject, run};
use testkit::{
    Fault, FaultAction, ModelDisk, OpKind, OpenedDisk, Request, Session, SimFileOptions, SimHarness, SimStorage,
    Workload, mix, stamped,
};

/// Space of a file up to a limit, which tests move.
struct Limited(Arc<AtomicU64>, Option<HostSpace>);

impl Space for Limited {
    fn reserve(&self, offset: u64, length_bytes: u64) -> IoResult {
        match offset + length_bytes > self.0.load(Ordering::Relaxed) {
            true => Err(IoError::new(IoErrorKind::NoSpace)),
            false => self.1.as_ref().map_or(Ok(()), |space| space.reserve(offset, length_bytes)),
        }
    }
}

/// Simulated files, and scratch overlays whose data are one, too.
struct WithScratch {
    files: SimOpener,
    limit: Arc<AtomicU64>,
    index_limit: Arc<AtomicU64>,
    lacks_mapping: bool,
}

struct Temporary(SimStorage, [Arc<AtomicU64>; 2], bool);

impl TemporaryFiles for Temporary {
    fn directory(&self) -> PathBuf {
        "/simulated".into()
    }

    fn scratch(&self) -> Result<ScratchFiles> {
        if self.2 {
            return Err(Error::new(ErrorKind::Unsupported, "no mapping here"));
        }
        let (index, _) = Mapping::anonymous_file(c"index", 4096).unwrap();
        let index = std::fs::File::from(index);
        index.set_len(0).unwrap();
        let [of_index, of_data] = self.1.clone();
        let host = HostSpace::of(index.try_clone().unwrap());
        let spaces: [Arc<dyn Space>; 2] = [Arc::new(Limited(of_index, Some(host))), Arc::new(Limited(of_data, None))];
        Ok(ScratchFiles { index, data: self.image()?, spaces })
    }

    fn image(&self) -> Result<Arc<dyn File>> {
        let options = SimFileOptions { grows_with_zeros: true, ..SimFileOptions::default() };
        Ok(self.0.create("temporary", 0, options))
    }
}

impl Opener for WithScratch {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        assert_ne!(role, Role::Writable, "'{name}' is opened for writing");
        self.files.open(name, role)
    }

    fn temporary(&self) -> Result<Box<dyn TemporaryFiles>> {
        let limits = [&self.index_limit, &self.limit].map(Arc::clone);
        Ok(Box::new(Temporary(self.files.0.clone(), limits, self.lacks_mapping)))
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

fn open_on(chain: &Chain, opener: &WithScratch, read_only: bool) -> Result<OpenedDisk> {
    let options = ImageOptions::new(&name(0)).with(|options| {
        options.format = Some(match chain.top() {
            Layer::Raw(_) => ringdisk_image::Format::Raw,
            _ => ringdisk_image::Format::Qcow2,
        });
        options.scratch = true;
        options.read_only = read_only;
    });
    let image: Arc<Image> = Arc::new(ringdisk_image::open(&options, opener)?);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as Arc<dyn Disk>;
    Ok(OpenedDisk { disk, close: Box::new(move || image.close()) })
}

fn opener(storage: &SimStorage) -> WithScratch {
    let [limit, index_limit] = [(); 2].map(|()| Arc::new(AtomicU64::new(u64::MAX)));
    WithScratch { files: SimOpener(storage.clone()), limit, index_limit, lacks_mapping: false }
}

/// The chain's own files have not changed.
fn assert_untouched(chain: &Chain, storage: &SimStorage, original: &SimStorage) {
    for index in 0..chain.layers.len() {
        assert!(storage.bytes(&name(index)) == original.bytes(&name(index)), "'{}' was changed", name(index));
    }
}

const SIZE: u64 = 1 << 20;

fn conforms(chain: &Chain, lacks_mapping: bool) {
    for seed in common::seeds(1) {
        let mut made = Vec::new();
        let mut make = |read_only| {
            let storage = chain.storage();
            let opener = WithScratch { lacks_mapping, ..opener(&storage) };
            let opened = open_on(chain, &opener, read_only).unwrap();
            made.push(storage);
            Some(opened.disk)
        };
        let mut subject = Subject { make: &mut make, keeps_data: true, seed };
        run(&mut SimHarness::new(seed, 3), &mut subject).assert_passed();
        for storage in made {
            assert_untouched(chain, &storage, &chain.storage());
        }
    }
}

#[test]
fn a_scratch_overlay_conforms_over_every_kind_of_image_and_changes_none() {
    conforms(&Chain::of(vec![Layer::Raw(SIZE)]), false);
    conforms(&Chain::of(vec![Layer::Raw(SIZE + 1636)]), false);
    conforms(&Chain { used: true, ..Chain::of(vec![Layer::qcow2(SIZE, 4096)]) }, false);
    conforms(&Chain::of(vec![Layer::qcow2(SIZE + 1536, 65536), Layer::Raw(SIZE / 2 + 100)]), false);
    let chain = vec![Layer::qcow2(SIZE, 512), Layer::qcow2(SIZE / 2, 4096), Layer::Raw(SIZE / 4)];
    conforms(&Chain { used: true, ..Chain::of(chain) }, false);
    let device = SimFileOptions { block_device: true, ..SimFileOptions::default() };
    conforms(&Chain { file: device, ..Chain::of(vec![Layer::Raw(SIZE)]) }, false);
}

#[test]
fn where_nothing_can_be_mapped_a_temporary_image_conforms() {
    conforms(&Chain::of(vec![Layer::Raw(SIZE + 512)]), true);
    conforms(&Chain { used: true, ..Chain::of(vec![Layer::qcow2(SIZE, 65536)]) }, true);
}

#[test]
fn random_requests_read_as_the_model_says_and_the_next_open_starts_anew() {
    for seed in common::seeds(12) {
        let size = (5 << 20) + 512 * (mix(seed, 1) % 20);
        let layers = match seed % 3 {
            0 => vec![Layer::Raw(size)],
            1 => vec![Layer::qcow2(size, 65536)],
            _ => vec![Layer::qcow2(size, 4096), Layer::Raw(size / 2 + 100)],
        };
        let chain = Chain { used: true, seed, ..Chain::of(layers) };
        let (original, storage) = (chain.storage(), chain.storage());
        let opener = opener(&storage);
        let open = |_: &SimStorage| open_on(&chain, &opener, false);
        let contents = Session::open(&storage, &open, seed, 1).unwrap().read_all().unwrap();
        for round in 0..2 {
            let mut model = ModelDisk::new(&contents, true);
            let queues = 1 + (mix(seed, round) % 3) as usize;
            let mut session = Session::open(&storage, &open, mix(seed, round), queues).unwrap();
            let workload = Workload {
                first_tag: 1 + (round << 32),
                depth: 1 + (mix(seed, 7) % 12) as usize,
                ..Workload::new(mix(seed, round), 200, chain.top().size_bytes(), 4096)
            };
            let ids = session.queues.clone();
            let result = workload
                .run(&mut session.harness, &ids, &mut model, &|| 0)
                .and_then(|_| session.read_all())
                .and_then(|contents| model.check_live(&contents))
                .and_then(|()| session.close());
            result.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{chain:?}"));
            assert_untouched(&chain, &storage, &original);
        }
    }
}

#[test]
fn a_full_disk_fails_the_write_that_needs_more_and_nothing_else() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let opener = opener(&storage);
    opener.limit.store(8 * 4096, Ordering::Relaxed);
    let open = |_: &SimStorage| open_on(&chain, &opener, false);
    let mut session = Session::open(&storage, &open, 1, 1).unwrap();
    let before = session.read_all().unwrap();
    let write = |page: u64| Request::write(page * 4096, stamped(page, page * 4096, 4096));
    let mut failed = 0;
    for page in 0..16 {
        failed += u64::from(session.call(write(page)).is_err());
    }
    assert_eq!(failed, 8, "there is space for half of the pages");
    session.call(Request::Flush).unwrap();
    session.call(write(3)).expect("what has space is overwritten");
    let part = Request::write(9 * 4096 + 512, vec![7; 512]);
    assert!(session.call(part.clone()).is_err());
    let zeroes = Request::WriteZeroes { offset: 4096, length: 4096, may_unmap: true, flags: OpFlags::NONE };
    session.call(zeroes).unwrap();
    session.call(part).expect("a page that was zeroed gives its space back");
    assert!(session.call(write(10)).is_err());
    opener.limit.store(u64::MAX, Ordering::Relaxed);
    session.call(write(10)).expect("space was made");
    let mut expected = before;
    for page in [0, 2, 3, 4, 5, 6, 7, 10_u64] {
        let at = page as usize * 4096;
        expected[at..at + 4096].copy_from_slice(&stamped(page, page * 4096, 4096));
    }
    expected[4096..8192].fill(0);
    expected[9 * 4096 + 512..9 * 4096 + 1024].fill(7);
    assert!(session.read_all().unwrap() == expected);
}

/// One after the other, both files run out of space at each step by which they grow.
#[test]
fn no_space_at_any_step_of_growth_fails_what_needs_it_and_nothing_else() {
    const PART: u64 = 4 << 20;
    let chain = Chain::of(vec![Layer::qcow2(40 * PART, 65536)]);
    for of_index in [true, false] {
        let mut steps = 0;
        for kibibytes in (8..).step_by(if of_index { 60 } else { 3 << 10 }) {
            let storage = chain.storage();
            let opener = opener(&storage);
            let limit = if of_index { &opener.index_limit } else { &opener.limit };
            limit.store(kibibytes << 10, Ordering::Relaxed);
            let open = |_: &SimStorage| open_on(&chain, &opener, false);
            let mut session = Session::open(&storage, &open, 1, 1).unwrap();
            let write = |part: u64| {
                let at = part * PART + 8192;
                Request::write(at, stamped(part, at, 512 << 10))
            };
            let done: Vec<bool> = (0..40).map(|part| session.call(write(part)).is_ok()).collect();
            let what = format!("index {of_index}, {kibibytes} KiB: {done:?}");
            let mut judge = |done: &[bool]| {
                for (part, done) in (0..).zip(done) {
                    let found = session.call(Request::read(part * PART, 1 << 20)).unwrap();
                    let (before, rest) = found.split_at(8192);
                    let (found, behind) = rest.split_at(512 << 10);
                    assert!(before.iter().chain(behind).all(|byte| *byte == 0), "{what}");
                    // What failed may be there in part, in whole sectors.
                    let wanted = stamped(part, part * PART + 8192, 512 << 10);
                    let sectors = found.chunks(512).zip(wanted.chunks(512));
                    let is_old = |sector: &[u8]| !done && sector.iter().all(|byte| *byte == 0);
                    sectors
                        .for_each(|(found, wanted)| assert!(found == wanted || is_old(found), "{what}, part {part}"));
                }
            };
            judge(&done);
            limit.store(u64::MAX, Ordering::Relaxed);
            for (part, _) in (0..).zip(&done).filter(|(_, done)| !**done) {
                session.call(write(part)).expect("there is space again");
            }
            let holds = |session: &mut Session| {
                for part in 0..40 {
                    let found = session.call(Request::read(part * PART + 8192, 512 << 10)).unwrap();
                    assert!(*found == *stamped(part, part * PART + 8192, 512 << 10), "{what}, part {part}");
                }
            };
            holds(&mut session);
            if done.iter().all(|done| *done) {
                break;
            }
            steps += 1;
        }
        assert!(steps >= 3, "index {of_index}: {steps} steps");
    }
}

#[test]
fn a_write_of_whole_pages_reads_nothing_below() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let opener = opener(&storage);
    let open = |_: &SimStorage| open_on(&chain, &opener, false);
    let mut session = Session::open(&storage, &open, 1, 1).unwrap();
    let error = FaultAction::Fail(IoError::EIO);
    storage.inject(&name(0), Fault::from_nth(OpKind::Read, 0, error));
    session.call(Request::write(8192, vec![1; 65536])).expect("whole pages need nothing from below");
    assert!(session.call(Request::write(512, vec![1; 512])).is_err(), "a part of a page does");
}
