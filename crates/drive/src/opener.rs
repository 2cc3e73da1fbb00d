//! Files and disks from what a user said: the one place where formats' and engines' names meet.

use crate::filters::FilterOptions;
use crate::options::{DiskOptions, DriveFormat};
use block::{Disk, Error, ErrorKind, File, Result};
use engine::{CacheMode, EngineKind, OpenOptions};
use image::{
    BackingPolicy, DelayOptions, FileName, Format, Image, ImageOptions, NullDisk, Opener, Role, TableCacheStats,
};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process that was killed keeps its locks until the kernel has taken its io_uring down, a moment after it is gone:
/// whoever starts us again at once should not be told that the image is in use.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Opens the files of an image with one engine and cache mode, under QEMU's locks.
#[derive(Debug, Clone, Default)]
pub struct EngineOpener {
    options: OpenOptions,
    descriptor: Option<Arc<OwnedFd>>,
}

impl EngineOpener {
    /// Files as `disk` asks for them.
    #[must_use]
    pub fn of_disk(disk: &DiskOptions) -> Self {
        Self { options: open_options(disk), descriptor: None }
    }

    /// With another cache mode.
    #[must_use]
    pub fn with_cache(mut self, cache: CacheMode) -> Self {
        self.options.cache = cache;
        self
    }

    /// With another engine.
    #[must_use]
    pub fn with_engine(mut self, engine: EngineKind) -> Self {
        self.options.engine = engine;
        self
    }

    /// With an open file that the caller has: the descriptor's number names it, as in `fd:3`.
    #[must_use]
    pub fn with_descriptor(mut self, descriptor: OwnedFd) -> Self {
        self.descriptor = Some(Arc::new(descriptor));
        self
    }

    /// Each protocol's way to a file.
    fn open_by_name(&self, name: &FileName, options: &OpenOptions) -> Result<Arc<dyn File>> {
        match name {
            FileName::File(path) => engine::open(path, options),
            FileName::HostDevice(path) => {
                check_is_device(path)?;
                engine::open(path, options)
            }
            FileName::Descriptor(number) => match self.descriptor.as_ref().filter(|own| own.as_raw_fd() == *number) {
                Some(own) => {
                    let copy = own.try_clone();
                    let copy = copy.map_err(|error| Error::io(format!("cannot duplicate '{name}'"), error))?;
                    engine::open_fd(copy, &name.to_string(), options)
                }
                None => engine::open_inherited(*number, options),
            },
            _ => {
                Err(Error::new(ErrorKind::Unsupported, format!("'{name}': no file with this protocol is opened here")))
            }
        }
    }

    /// Without locks: to look at an image that somebody else is writing.
    #[must_use]
    pub fn without_locks(mut self) -> Self {
        self.options.lock = false;
        self
    }

    /// For files that are filled at once: the storage begins before the flush at their end.
    #[must_use]
    pub fn writing_behind(mut self) -> Self {
        self.options.write_behind = true;
        self
    }
}

fn open_options(disk: &DiskOptions) -> OpenOptions {
    OpenOptions::default().with(|options| {
        options.engine = disk.engine;
        options.cache = disk.cache;
        options.sync = disk.sync;
        options.sqpoll = disk.sqpoll;
    })
}

impl Opener for EngineOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        // Everything that is not written is locked against writers only, so overlays may share their base.
        let read_only = !matches!(role, Role::Writable);
        let options = self.options.clone().with(|options| options.read_only = read_only);
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match self.open_by_name(name, &options) {
                Err(error) if error.kind() == ErrorKind::Locked && Instant::now() < deadline => {
                    std::thread::sleep(LOCK_RETRY);
                }
                opened => return opened,
            }
        }
    }
}

fn check_is_device(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(meta) if !meta.file_type().is_block_device() => {
            let path = path.display();
            let message = format!("'host_device:{path}' is no block device: name a file without 'host_device:'");
            Err(Error::new(ErrorKind::BadOption, message))
        }
        // What cannot be looked at cannot be opened either.
        _ => Ok(()),
    }
}

/// A disk that was opened, and the image to close when it is done with.
pub struct OpenedDisk {
    /// What is served.
    pub disk: Arc<dyn Disk>,
    /// The same as an image; `None` for a null disk.
    pub image: Option<Arc<Image>>,
}

impl OpenedDisk {
    /// One line a layer: format, file, engine.
    #[must_use]
    pub fn layers(&self) -> Vec<String> {
        self.image.as_ref().map_or_else(|| vec!["null".to_owned()], |image| image.describe_layers())
    }

    /// The tables in memory of an image that has some.
    #[must_use]
    pub fn table_cache_stats(&self) -> Option<TableCacheStats> {
        let stats = self.image.as_ref().map(|image| image.cache_stats());
        stats.filter(|stats| stats.limit_bytes > 0)
    }

    /// Writes what is still in memory and flushes. No queue of the disk may be open any more.
    pub fn close(&self) -> Result<()> {
        self.image.as_ref().map_or(Ok(()), |image| image.close())
    }
}

/// Opens what `options` describes. `listed` are other files that the user named, which images may use as backing files.
pub fn open_disk(options: &DiskOptions, allow_backing: BackingPolicy, listed: &[PathBuf]) -> Result<OpenedDisk> {
    open_disk_with(&EngineOpener::of_disk(options), options, allow_backing, listed)
}

/// As [`open_disk`], with files from `opener`.
pub fn open_disk_with(
    opener: &dyn Opener,
    options: &DiskOptions,
    allow_backing: BackingPolicy,
    listed: &[PathBuf],
) -> Result<OpenedDisk> {
    let format = match options.format {
        Some(DriveFormat::Null) => {
            let disk = NullDisk::new(options.size_bytes.unwrap_or(0), options.serial.clone());
            return Ok(OpenedDisk { disk: filtered(Arc::new(disk), options), image: None });
        }
        Some(DriveFormat::Raw) => Some(Format::Raw),
        Some(DriveFormat::Qcow2) => Some(Format::Qcow2),
        None => None,
    };
    let name = options.file.clone().unwrap_or_else(|| FileName::from(""));
    let image_options = ImageOptions::new(name).with(|open| {
        open.format = format;
        open.read_only = options.read_only;
        open.allow_backing = allow_backing;
        open.listed = listed.to_vec();
        open.serial = options.serial.clone();
        open.volatile_cache = open_options(options).has_volatile_cache();
        open.table_cache_bytes = options.l2_cache_bytes;
    });
    let image = Arc::new(image::open(&image_options, opener)?);
    Ok(OpenedDisk { disk: filtered(Arc::clone(&image) as Arc<dyn Disk>, options), image: Some(image) })
}

/// The disk, seen through its filters.
fn filtered(disk: Arc<dyn Disk>, options: &DiskOptions) -> Arc<dyn Disk> {
    let disk = options.filters.iter().rev().fold(disk, |disk, filter| filter.over(disk));
    match options.delay_ms {
        Some(delay_ms) if delay_ms > 0 => {
            FilterOptions::Delay(DelayOptions::of(Duration::from_millis(u64::from(delay_ms)))).over(disk)
        }
        _ => disk,
    }
}
