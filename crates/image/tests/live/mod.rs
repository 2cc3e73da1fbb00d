//! A chain of images in files, on real reactors, with a history of what was written.

#![allow(dead_code, reason = "each test program uses a part of it")]

use block::{Disk, DiskIo, ErrorKind, File, Op, OpFlags, ReactorCtx, ReactorHandle, Result, Task};
use engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{
    CopyWatch, CreateOptions, FileName, Format, Image, ImageOptions, MirrorEnd, MirrorScope, MirrorTarget, NewBelow,
    OpenedOverlay, Opener, Role,
};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use testkit::{HistoryLoad, RunningLoad, SectorHistory, qcow2_check};

const REACTORS: usize = 4;

pub(crate) struct HostOpener;

/// As [`HostOpener`], past the page cache.
struct DirectOpener;

fn open_file(path: &Path, read_only: bool, cache: CacheMode) -> Result<Arc<dyn File>> {
    let options = OpenOptions::default().with(|options| {
        options.engine = EngineKind::Auto;
        options.cache = cache;
        options.read_only = read_only;
    });
    engine::open(path, &options)
}

impl HostOpener {
    pub(crate) fn open_path(&self, path: &Path, read_only: bool) -> Result<Arc<dyn File>> {
        open_file(path, read_only, CacheMode::Writeback)
    }
}

impl Opener for DirectOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        open_file(name.path().unwrap(), role != Role::Writable, CacheMode::None)
    }
}

impl Opener for HostOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        self.open_path(name.path().unwrap(), role != Role::Writable)
    }
}

/// The layers of a disk, the lowest first: their cluster sizes.
pub(crate) struct Shape {
    size_bytes: u64,
    clusters: Vec<u64>,
    extended_top: bool,
    direct: bool,
    is_raw: bool,
}

impl Shape {
    pub(crate) fn with_extended_top(mut self) -> Self {
        self.extended_top = true;
        self
    }

    /// Its files are used past the page cache.
    pub(crate) fn with_direct_io(mut self) -> Self {
        self.direct = true;
        self
    }

    /// One raw image.
    pub(crate) fn raw(size_bytes: u64) -> Self {
        Self { is_raw: true, ..Self::qcow2(size_bytes, &[512]) }
    }

    pub(crate) fn qcow2(size_bytes: u64, clusters: &[u64]) -> Self {
        Self { size_bytes, clusters: clusters.to_vec(), extended_top: false, direct: false, is_raw: false }
    }
}

fn format_of(path: &Path) -> Format {
    let is_qcow2 = std::fs::read(path).unwrap().starts_with(b"QFI\xfb");
    if is_qcow2 { Format::Qcow2 } else { Format::Raw }
}

pub(crate) fn create(path: &Path, size_bytes: u64, cluster_size: u64, below: Option<&Path>, extended: bool) {
    let options = Qcow2Options::default().with(|options| {
        options.size_bytes = size_bytes;
        options.cluster_size = cluster_size;
        options.extended_l2 = extended;
        options.backing_file = below.map(|below| below.display().to_string());
        options.backing_format = below.map(|below| format_of(below).to_string());
    });
    engine::create(path, 0).unwrap();
    let file = HostOpener.open_path(path, false).unwrap();
    ringdisk_image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
}

pub(crate) fn open(path: &Path) -> Arc<Image> {
    let options = ImageOptions::new(path).with(|options| options.format = Some(Format::Qcow2));
    Arc::new(ringdisk_image::open(&options, &HostOpener).unwrap())
}

/// Opens an image whose last user is just letting it go.
fn open_soon(path: &Path, direct: bool) -> Arc<Image> {
    let options = ImageOptions::new(path).with(|options| options.format = Some(format_of(path)));
    let opener: &dyn Opener = if direct { &DirectOpener } else { &HostOpener };
    loop {
        match ringdisk_image::open(&options, opener) {
            Ok(image) => return Arc::new(image),
            Err(error) if error.kind() == ErrorKind::Locked => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) struct Bench {
    pub(crate) image: Arc<Image>,
    pub(crate) history: Arc<SectorHistory>,
    directory: TempDir,
    threads: Vec<ReactorThread>,
    size_bytes: u64,
    /// Paths of the layers, the lowest first.
    layers: Mutex<Vec<PathBuf>>,
    made: AtomicUsize,
}

impl Bench {
    /// A chain; each layer is written to before the next is put on it.
    pub(crate) fn new(shape: &Shape) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let spawn = |index| {
            Reactor::spawn(ReactorConfig::default().with(|config| config.name = format!("test-{index}"))).unwrap()
        };
        let threads: Vec<_> = (0..REACTORS).map(spawn).collect();
        let history = Arc::new(SectorHistory::new((shape.size_bytes / 512) as usize));
        let mut layers: Vec<PathBuf> = Vec::new();
        let mut image = None;
        for (index, cluster) in shape.clusters.iter().enumerate() {
            let path = directory.path().join(format!("layer{index}"));
            let is_top = index + 1 == shape.clusters.len();
            match shape.is_raw {
                true => engine::create(&path, shape.size_bytes).unwrap(),
                false => {
                    let below = layers.last().map(PathBuf::as_path);
                    create(&path, shape.size_bytes, *cluster, below, is_top && shape.extended_top);
                }
            }
            layers.push(path.clone());
            let opened = open_soon(&path, shape.direct);
            if !is_top {
                let load = HistoryLoad { seed: 100 + index as u64, ..HistoryLoad::default() };
                let load = load.start(&(Arc::clone(&opened) as _), &handles(&threads), &history);
                load.wait_for_more(600);
                assert_eq!(load.finish(), [""; 0]);
                opened.close().unwrap();
                continue;
            }
            image = Some(opened);
        }
        let (image, size_bytes, made) = (image.unwrap(), shape.size_bytes, AtomicUsize::new(0));
        Self { image, history, directory, threads, size_bytes, layers: Mutex::new(layers), made }
    }

    /// A chain of images that were made before, the lowest first, which holds this.
    pub(crate) fn of_images(directory: TempDir, layers: Vec<PathBuf>, contents: &[u8]) -> Self {
        let spawn = |index| {
            Reactor::spawn(ReactorConfig::default().with(|config| config.name = format!("test-{index}"))).unwrap()
        };
        Self {
            image: open_soon(layers.last().unwrap(), false),
            history: Arc::new(SectorHistory::holding(contents)),
            directory,
            threads: (0..REACTORS).map(spawn).collect(),
            size_bytes: contents.len() as u64,
            layers: Mutex::new(layers),
            made: AtomicUsize::new(0),
        }
    }

    pub(crate) fn start(&self, load: HistoryLoad) -> RunningLoad {
        load.start(&(Arc::clone(&self.image) as Arc<dyn Disk>), &handles(&self.threads), &self.history)
    }

    /// Zeroes these sectors; what the tables can give back is given back.
    pub(crate) fn give_back(&self, sectors: Range<u64>) {
        let (sender, done) = std::sync::mpsc::channel();
        let (history, image) = (Arc::clone(&self.history), Arc::clone(&self.image));
        let job = move |ctx: &Rc<dyn ReactorCtx>| {
            let io = DiskIo::open(image.as_ref(), ctx).unwrap();
            ctx.spawn(Task::new(async move {
                let count = sectors.end - sectors.start;
                let write = history.begin_zeroes(sectors.start, count);
                let (offset, length) = (sectors.start * 512, count * 512);
                let zeroes = Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
                io.run(zeroes).await.unwrap();
                history.end_write(write);
                sender.send(()).unwrap();
            }));
        };
        handles(&self.threads)[0].run(Box::new(job)).unwrap();
        done.recv().unwrap();
    }

    /// How long the top layer's file is, and how many bytes of it are no holes.
    pub(crate) fn file_bytes(&self) -> (u64, u64) {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(self.top()).unwrap();
        (found.len(), found.blocks() * 512)
    }

    /// A path for a file that is not there yet.
    pub(crate) fn new_path(&self) -> PathBuf {
        self.directory.path().join(format!("new{}", self.made.fetch_add(1, Ordering::Relaxed)))
    }

    pub(crate) fn top(&self) -> PathBuf {
        self.image.file_names().next().unwrap().path().unwrap().to_owned()
    }

    /// The layers' files, the top first.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.image.file_names().map(|name| name.path().unwrap().to_owned()).collect()
    }

    /// Has the top rest on something else.
    pub(crate) fn move_onto(&self, below: NewBelow, watch: &CopyWatch) -> Result<()> {
        ringdisk_image::move_onto(&self.image, below, watch, || Ok(()))
    }

    /// A new image over the top, at this path.
    pub(crate) fn overlay(&self, path: &Path, cluster_size: u64) -> OpenedOverlay {
        create(path, self.size_bytes, cluster_size, Some(&self.top()), false);
        let file = HostOpener.open_path(path, false).unwrap();
        OpenedOverlay::open(&FileName::from(path), file).unwrap()
    }

    pub(crate) fn put_overlay(&self, cluster_size: u64) {
        let path = self.new_path();
        let opened = self.overlay(&path, cluster_size);
        let results = ringdisk_image::put_overlay(vec![(Arc::clone(&self.image), opened)], || Ok(())).unwrap();
        results.into_iter().for_each(Result::unwrap);
        self.layers.lock().unwrap().push(path);
    }

    /// A new image to copy the disk to, and its path.
    pub(crate) fn new_target(&self, format: Format, scope: MirrorScope) -> (MirrorTarget, PathBuf) {
        let path = self.new_path();
        match format {
            Format::Raw => engine::create(&path, self.size_bytes).unwrap(),
            _ => {
                let below = self.files().get(1).filter(|_| scope == MirrorScope::Top).cloned();
                create(&path, self.size_bytes, 16384, below.as_deref(), false);
            }
        }
        let file = HostOpener.open_path(&path, false).unwrap();
        (MirrorTarget::open(&FileName::from(&path), file, format, scope, true).unwrap(), path)
    }

    /// Copies the disk, which goes over to the copy or not.
    pub(crate) fn mirror(&self, target: MirrorTarget, end: MirrorEnd, watch: &CopyWatch) -> Result<()> {
        ringdisk_image::mirror(&self.image, target, end, watch, || Ok(()))
    }

    pub(crate) fn take_back(&self) {
        ringdisk_image::take_back(&self.image, &CopyWatch::default(), || Ok(())).unwrap();
        let gone = self.layers.lock().unwrap().pop().unwrap();
        qcow2_check(&std::fs::read(&gone).unwrap()).unwrap().sound().unwrap();
        let bytes = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&gone).unwrap()) * 512;
        assert!(bytes < self.size_bytes / 4, "{bytes} bytes of a layer that was taken off stay in use");
        std::fs::remove_file(gone).unwrap();
    }

    /// Closes the disk. Its files are sound, and another program reads from them what was written.
    pub(crate) fn assert_sound_and_as_written(self) {
        let top = self.top();
        let names: Vec<_> = self.image.file_names().zip(self.image.formats()).collect();
        let top_format = names[0].1;
        self.image.close().unwrap();
        drop(self.image);
        for (name, _) in names.iter().filter(|(_, format)| *format == Format::Qcow2) {
            qcow2_check(&std::fs::read(name.path().unwrap()).unwrap()).unwrap().sound().unwrap();
        }
        let raw = self.directory.path().join("as-written.raw");
        let format = top_format.to_string();
        let convert = ["convert", "-U", "-f", &format, "-O", "raw"];
        match Command::new("qemu-img").args(convert).arg(&top).arg(&raw).status() {
            Ok(status) => assert!(status.success(), "qemu-img reads {}", top.display()),
            Err(_) if std::env::var_os("CI").is_none() => return,
            Err(error) => panic!("qemu-img: {error}"),
        }
        let bytes = std::fs::read(raw).unwrap();
        assert_eq!(bytes.len() as u64, self.size_bytes);
        self.history.check_read(0, &bytes, self.history.now()).unwrap();
    }
}

fn handles(threads: &[ReactorThread]) -> Vec<Arc<dyn ReactorHandle>> {
    threads.iter().map(ReactorThread::handle).collect()
}
