//! Convert, compare and dd over disks that are no images: what they need to know, they ask the disk.

use block::{Disk, Error, ErrorKind, File, Result};
use format_qcow2::CreateOptions as Qcow2Options;
use image::{
    CreateOptions, ErrorOptions, Errors, FileName, FilterDisk, Image, ImageOptions, Opener, RequestKind, Role,
};
use ringdisk_jobs::{Comparison, Control, ConvertOptions, Difference, JobDisk};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use testkit::{OpenedDisk, Request, Session, SimFileOptions, SimHandle, SimReactor, SimStorage, stamped};

const SIZE_BYTES: u64 = 1 << 20;
/// All that the source holds.
const DATA: Range<u64> = 256 << 10..320 << 10;

struct SimOpener(SimStorage);

impl Opener for SimOpener {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        let missing = || Error::new(ErrorKind::Io, format!("no simulated file '{name}'"));
        Ok(self.0.file(&name.to_string()).ok_or_else(missing)?)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

fn open(storage: &SimStorage, name: &str) -> Arc<Image> {
    Arc::new(image::open(&ImageOptions::new(name), &SimOpener(storage.clone())).unwrap())
}

fn session(storage: &SimStorage, name: &str) -> Session {
    let open = |storage: &SimStorage| {
        let image = open(storage, name);
        let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
        Ok(OpenedDisk { disk, close: Box::new(move || image.close()) })
    };
    Session::open(storage, &open, 1, 1).unwrap()
}

/// An empty target, and a source of which only some bytes hold data.
fn storage() -> SimStorage {
    let storage = SimStorage::new(1);
    for name in ["source", "target"] {
        let file: Arc<dyn File> = storage.create(name, 0, SimFileOptions::default());
        let options = Qcow2Options::default().with(|options| {
            options.size_bytes = SIZE_BYTES;
            options.cluster_size = 4096;
        });
        image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
    }
    let mut session = session(&storage, "source");
    let bytes = stamped(1, DATA.start, (DATA.end - DATA.start) as usize);
    session.call(Request::write(DATA.start, bytes)).unwrap();
    session.close().unwrap();
    storage
}

/// An image of which a job knows no more than that it is a disk. Requests of `kinds` fail where it holds no data.
fn disk(storage: &SimStorage, name: &str, kinds: &[RequestKind], range: Range<u64>) -> JobDisk {
    let errors = ErrorOptions::default().with(|options| {
        options.kinds = kinds.to_vec();
        options.range = range;
    });
    JobDisk::new(Arc::new(FilterDisk::new(open(storage, name), Errors::new(errors))), name)
}

fn with_reactor<T>(job: impl FnOnce(&[Arc<dyn block::ReactorHandle>], &mut Control<'_>) -> T) -> T {
    let reactor = SimReactor::new(7);
    let handle: Arc<dyn block::ReactorHandle> = SimHandle::new(&reactor);
    let cancel = AtomicBool::new(false);
    job(&[handle], &mut Control::new(&cancel, &mut |_| reactor.run_until_idle()))
}

#[test]
fn zeros_of_a_disk_that_is_no_image_are_not_read_and_what_was_copied_is_durable() {
    let storage = storage();
    let source = disk(&storage, "source", &[RequestKind::Read], DATA.end..SIZE_BYTES);
    let target = disk(&storage, "target", &[], 0..1);
    let options = ConvertOptions::default();
    let convert = |target: &JobDisk| {
        with_reactor(|reactors, control| {
            ringdisk_jobs::convert(std::slice::from_ref(&source), target, &options, reactors, control)
        })
    };
    convert(&target).unwrap();
    let expected = session(&storage, "source").read_all().unwrap();
    assert!(session(&storage.power_cut(1), "target").read_all().unwrap() == expected);
    drop(target);
    let unsure = disk(&storage, "target", &[RequestKind::Flush], 0..u64::MAX);
    let error = convert(&unsure).unwrap_err().to_string();
    assert!(error.contains("'target'"), "{error}");
}

#[test]
fn disks_that_are_no_images_are_compared_by_what_they_say_of_themselves() {
    let storage = storage();
    let no_zeros_read = |name| disk(&storage, name, &[RequestKind::Read], DATA.end..SIZE_BYTES);
    let compare = |strict| {
        let (source, target) = (no_zeros_read("source"), no_zeros_read("target"));
        with_reactor(|reactors, control| ringdisk_jobs::compare(&source, &target, strict, reactors, control).unwrap())
    };
    assert_eq!(compare(false), Comparison::Different(Difference::Content(DATA.start)));
    assert_eq!(compare(true), Comparison::Different(Difference::Allocation(DATA.start)));
    let (source, target) = (no_zeros_read("source"), disk(&storage, "target", &[], 0..1));
    with_reactor(|reactors, control| {
        ringdisk_jobs::dd(&source, 0..DATA.end, &target, true, reactors, control).unwrap();
    });
    assert_eq!(compare(false), Comparison::Same);
}
