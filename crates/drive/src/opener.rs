//! Files and disks from what a user said: the one place where formats' and engines' names meet.

use crate::options::{DiskOptions, DriveFormat};
use block::{Disk, Error, ErrorKind, File, Result};
use engine::{CacheMode, EngineKind, OpenOptions};
use image::{BackingPolicy, DelayDisk, FileName, Format, Image, ImageOptions, NullDisk, Opener, Role, TableCacheStats};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
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
}

impl EngineOpener {
    /// Files as `disk` asks for them.
    #[must_use]
    pub fn of_disk(disk: &DiskOptions) -> Self {
        Self { options: open_options(disk) }
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
            match open_by_name(name, &options) {
                Err(error) if error.kind() == ErrorKind::Locked && Instant::now() < deadline => {
                    std::thread::sleep(LOCK_RETRY);
                }
                opened => return opened,
            }
        }
    }
}

/// Each protocol's way to a file.
fn open_by_name(name: &FileName, options: &OpenOptions) -> Result<Arc<dyn File>> {
    match name {
        FileName::File(path) => engine::open(path, options),
        FileName::HostDevice(path) => {
            let is_device = std::fs::metadata(path).map(|meta| meta.file_type().is_block_device());
            if let Ok(false) = is_device {
                let message =
                    format!("'host_device:{name}' is no block device: a file is named without 'host_device:'");
                return Err(Error::new(ErrorKind::BadOption, message));
            }
            engine::open(path, options)
        }
        FileName::Descriptor(number) => engine::open_inherited(*number, options),
        _ => Err(Error::new(ErrorKind::Unsupported, format!("'{name}': files with that protocol are not opened here"))),
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
    let format = match options.format {
        Some(DriveFormat::Null) => {
            let disk = NullDisk::new(options.size_bytes.unwrap_or(0), options.serial.clone());
            return Ok(OpenedDisk { disk: delayed(Arc::new(disk), options), image: None });
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
    let image = Arc::new(image::open(&image_options, &EngineOpener::of_disk(options))?);
    Ok(OpenedDisk { disk: delayed(Arc::clone(&image) as Arc<dyn Disk>, options), image: Some(image) })
}

fn delayed(disk: Arc<dyn Disk>, options: &DiskOptions) -> Arc<dyn Disk> {
    match options.delay_ms {
        Some(delay_ms) if delay_ms > 0 => Arc::new(DelayDisk::new(disk, Duration::from_millis(u64::from(delay_ms)))),
        _ => disk,
    }
}
