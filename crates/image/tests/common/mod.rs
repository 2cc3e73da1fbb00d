//! Images on simulated storage.

#![allow(unreachable_pub, dead_code, reason = "each test program uses a part of it")]

use block::{Disk, Error, ErrorKind, File, OpFlags, Result};
use format_qcow2::{Barrier, CreateOptions as Qcow2Options};
use ringdisk_image::{CreateOptions, FileName, Format, Image, ImageOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use testkit::{OpenedDisk, Request, Session, SimFileOptions, SimStorage, mix, qcow2_check, stamped};

/// Opens files of a simulated storage by name.
pub struct SimOpener(pub SimStorage);

impl Opener for SimOpener {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        let name = name.to_string();
        let missing = || Error::new(ErrorKind::Io, format!("no simulated file '{name}'"));
        Ok(self.0.file(&name).ok_or_else(missing)?)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// A layer of a chain.
#[derive(Debug, Clone)]
pub enum Layer {
    /// A raw image in a file of so many bytes, full of data.
    Raw(u64),
    /// A qcow2 image, with some data where it is not the top layer.
    Qcow2 { size_bytes: u64, cluster_size: u64, version: u32, refcount_bits: u32 },
    /// The same with extended L2 entries.
    Extended { size_bytes: u64, cluster_size: u64 },
    /// With an external data file, raw or not.
    External { size_bytes: u64, cluster_size: u64, raw: bool, extended: bool },
}

impl Layer {
    pub fn qcow2(size_bytes: u64, cluster_size: u64) -> Self {
        Self::Qcow2 { size_bytes, cluster_size, version: 3, refcount_bits: 16 }
    }

    /// Bytes of the disk.
    pub fn size_bytes(&self) -> u64 {
        match self {
            // A disk has whole sectors.
            Self::Raw(size_bytes)
            | Self::Qcow2 { size_bytes, .. }
            | Self::Extended { size_bytes, .. }
            | Self::External { size_bytes, .. } => size_bytes.next_multiple_of(512),
        }
    }

    /// What writes like to align to.
    pub fn granule_bytes(&self) -> u64 {
        match self {
            Self::Raw(_) => 4096,
            Self::Qcow2 { cluster_size, .. } => *cluster_size,
            Self::Extended { cluster_size, .. } => cluster_size / 32,
            Self::External { cluster_size, extended, .. } => cluster_size / if *extended { 32 } else { 1 },
        }
    }

    fn is_external(&self) -> bool {
        matches!(self, Self::External { .. })
    }

    fn create_options(&self) -> Qcow2Options {
        match *self {
            Self::Qcow2 { size_bytes, cluster_size, version, refcount_bits } => {
                Qcow2Options::default().with(|options| {
                    options.size_bytes = size_bytes;
                    options.cluster_size = cluster_size;
                    options.version = version;
                    options.refcount_bits = refcount_bits;
                })
            }
            Self::Extended { size_bytes, cluster_size } => Qcow2Options::default().with(|options| {
                options.size_bytes = size_bytes;
                options.cluster_size = cluster_size;
                options.extended_l2 = true;
            }),
            Self::External { size_bytes, cluster_size, raw, extended } => {
                let options = Qcow2Options::default().with(|options| {
                    options.size_bytes = size_bytes;
                    options.cluster_size = cluster_size;
                });
                options.with(|options| {
                    options.data_file_raw = raw;
                    options.extended_l2 = extended;
                })
            }
            Self::Raw(size_bytes) => Qcow2Options::default().with(|options| options.size_bytes = size_bytes),
        }
    }

    fn format(&self) -> Format {
        match self {
            Self::Raw(_) => Format::Raw,
            Self::Qcow2 { .. } | Self::Extended { .. } | Self::External { .. } => Format::Qcow2,
        }
    }
}

/// A chain of images; the top comes first.
#[derive(Debug, Clone)]
pub struct Chain {
    pub layers: Vec<Layer>,
    /// How the top file behaves.
    pub file: SimFileOptions,
    /// A file of fixed length, as a block device is: so many bytes.
    pub device_bytes: Option<u64>,
    /// Whether the top has been used before: tables to load, space to overwrite and to free.
    pub used: bool,
    /// The top file, made by another program; otherwise we make it.
    pub made: Option<Arc<Vec<u8>>>,
    /// Memory for tables: by default all of them fit.
    pub table_cache_bytes: Option<u64>,
    pub seed: u64,
}

impl Chain {
    pub fn of(layers: Vec<Layer>) -> Self {
        Self {
            layers,
            file: SimFileOptions::default(),
            device_bytes: None,
            used: false,
            made: None,
            table_cache_bytes: None,
            seed: 1,
        }
    }

    pub fn top(&self) -> &Layer {
        &self.layers[0]
    }

    /// The chain on fresh storage, all of it durable.
    pub fn storage(&self) -> SimStorage {
        let storage = SimStorage::new(self.seed);
        for index in (0..self.layers.len()).rev() {
            self.make(&storage, index);
        }
        // Only what is on the files counts.
        storage.process_killed(0)
    }

    fn make(&self, storage: &SimStorage, index: usize) {
        let layer = &self.layers[index];
        // A file of the host that becomes longer has zeros there. A raw layer that is taken into relies on it.
        let grows_with_zeros = matches!(layer, Layer::Raw(_));
        let below = SimFileOptions { grows_with_zeros, ..SimFileOptions::default() };
        let options = if index == 0 { self.file.clone() } else { below };
        let data_options = options.clone();
        if let Some(bytes) = self.made.as_ref().filter(|_| index == 0) {
            storage.create_with(&name(0), bytes, options);
            return;
        }
        match layer {
            Layer::Raw(size_bytes) => {
                let bytes = stamped(1000 + index as u64, 0, *size_bytes as usize);
                storage.create_with(&name(index), &bytes, options);
            }
            Layer::Qcow2 { .. } | Layer::Extended { .. } | Layer::External { .. } => {
                let length = self.device_bytes.filter(|_| index == 0).unwrap_or(0);
                let file: Arc<dyn File> = storage.create(&name(index), length, options);
                let below = self.layers.get(index + 1);
                let options = layer.create_options().with(|options| {
                    options.backing_file = below.map(|_| name(index + 1));
                    options.backing_format = below.map(|layer| layer.format().to_string());
                    options.data_file = layer.is_external().then(|| data_name(index));
                });
                let data =
                    layer.is_external().then(|| storage.create(&data_name(index), 0, data_options) as Arc<dyn File>);
                ringdisk_image::create_with_data(&file, data.as_ref(), &CreateOptions::Qcow2(options)).unwrap();
            }
        }
        if index > 0 || self.used {
            self.sprinkle(storage, index);
        }
    }

    /// Data, zeros and holes in a layer that others build on.
    fn sprinkle(&self, storage: &SimStorage, index: usize) {
        let layer = &self.layers[index];
        let open = |storage: &SimStorage| open_as(storage, index, layer.format(), false, &[]);
        let mut session = Session::open(storage, &open, self.seed, 1).unwrap();
        let (size, granule) = (layer.size_bytes(), layer.granule_bytes());
        let mut at = 0;
        for step in 0.. {
            let length = (1 + mix(self.seed, step) % 5) * granule.min(size / 16) / 512 * 512;
            if at + length > size {
                break;
            }
            let request = match mix(step, self.seed) % 3 {
                0 => Request::WriteZeroes { offset: at, length, may_unmap: true, flags: OpFlags::NONE },
                1 => Request::write(at, stamped(1000 + index as u64, at, length as usize)),
                _ => Request::Flush,
            };
            session.call(request).unwrap();
            at += length;
        }
        session.close().unwrap();
    }

    /// Opens the top.
    pub fn open(&self, storage: &SimStorage) -> Result<OpenedDisk> {
        self.open_without(storage, &[])
    }

    /// As [`Chain::open`], without some barriers.
    pub fn open_without(&self, storage: &SimStorage, barriers: &[Barrier]) -> Result<OpenedDisk> {
        open_with(storage, &self.options(), barriers)
    }

    /// As [`Chain::open`], with other options.
    pub fn open_with(&self, storage: &SimStorage, change: impl FnOnce(&mut ImageOptions)) -> Result<OpenedDisk> {
        open_with(storage, &self.options().with(change), &[])
    }

    fn options(&self) -> ImageOptions {
        ImageOptions::new(&name(0)).with(|options| {
            options.format = Some(self.top().format());
            options.table_cache_bytes = self.table_cache_bytes;
        })
    }

    /// The top's metadata are sound (leaks at most), and nothing has changed a layer below.
    pub fn check(&self, storage: &SimStorage, original: &SimStorage) -> std::result::Result<(), String> {
        for index in 1..self.layers.len() {
            if storage.bytes(&name(index)) != original.bytes(&name(index)) {
                return Err(format!("the backing file '{}' was changed", name(index)));
            }
        }
        match self.top() {
            Layer::Raw(_) => Ok(()),
            Layer::Qcow2 { .. } | Layer::Extended { .. } | Layer::External { .. } => {
                let report = qcow2_check(&storage.bytes(&name(0)))?;
                report.sound()?;
                match report.snapshots_digest == qcow2_check(&original.bytes(&name(0)))?.snapshots_digest {
                    true => Ok(()),
                    false => Err("what a snapshot holds has changed".to_owned()),
                }
            }
        }
    }
}

/// The external data file of a layer.
pub fn data_name(index: usize) -> String {
    format!("layer{index}.data")
}

/// The file of a layer.
pub fn name(index: usize) -> String {
    format!("layer{index}")
}

/// Images as qemu-img makes them: with internal snapshots, so that clusters and tables have refcounts above one, and
/// with compressed clusters. Empty where the tool is missing: a skip by hand, an error in CI.
pub fn made_by_qemu() -> Vec<Chain> {
    let directory = tempfile::tempdir().unwrap();
    let size_bytes = 128 << 10;
    let half: Vec<u8> = (0..size_bytes).map(|at| if at / 5000 % 3 == 0 { 0 } else { (at / 3) as u8 }).collect();
    std::fs::write(directory.path().join("raw"), half).unwrap();
    let mut chains = Vec::new();
    for (compress, cluster_size, refcount_bits, extended) in [
        (false, 1024, 16, "off"),
        (true, 4096, 16, "off"),
        (true, 1024, 8, "off"),
        (false, 16384, 16, "on"),
        (true, 16384, 16, "on"),
    ] {
        let options = format!("cluster_size={cluster_size},refcount_bits={refcount_bits},extended_l2={extended}");
        let mut convert = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", &options, "raw", "image"];
        if compress {
            convert.insert(1, "-c");
        }
        for arguments in [convert, vec!["snapshot", "-c", "one", "image"], vec!["snapshot", "-c", "two", "image"]] {
            match std::process::Command::new("qemu-img").args(&arguments).current_dir(&directory).output() {
                Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
                Err(_) => {
                    assert!(std::env::var_os("CI").is_none(), "qemu-img is missing (Debian package qemu-utils)");
                    eprintln!("skipped: qemu-img is missing (Debian package qemu-utils)");
                    return Vec::new();
                }
            }
        }
        let made = Some(Arc::new(std::fs::read(directory.path().join("image")).unwrap()));
        let layer = Layer::Qcow2 { size_bytes, cluster_size, version: 3, refcount_bits };
        chains.push(Chain { made, ..Chain::of(vec![layer]) });
    }
    chains
}

/// Opens one layer as a disk.
pub fn open_as(
    storage: &SimStorage,
    index: usize,
    format: Format,
    read_only: bool,
    skipped: &[Barrier],
) -> Result<OpenedDisk> {
    open_with(
        storage,
        &ImageOptions::new(&name(index)).with(|options| {
            options.format = Some(format);
            options.read_only = read_only;
        }),
        skipped,
    )
}

fn open_with(storage: &SimStorage, options: &ImageOptions, skipped: &[Barrier]) -> Result<OpenedDisk> {
    let image: Arc<Image> = Arc::new(ringdisk_image::open(options, &SimOpener(storage.clone()))?);
    skipped.iter().for_each(|barrier| image.skip_barrier_for_test(*barrier));
    let disk: Arc<dyn Disk> = Arc::clone(&image) as Arc<dyn Disk>;
    Ok(OpenedDisk { disk, close: Box::new(move || image.close()) })
}

/// Seeds to try: `RINGDISK_SEEDS=n` widens a run, `RINGDISK_SEED=s` begins at another.
pub fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |key: &str| std::env::var(key).ok().and_then(|value| value.parse::<u64>().ok());
    let first = number("RINGDISK_SEED").unwrap_or(1);
    first..first + number("RINGDISK_SEEDS").unwrap_or(default)
}
