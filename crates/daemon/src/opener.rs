//! Files and disks from what a user said: the one place where formats' and engines' names meet.

use crate::drive::{DriveFormat, DriveOptions};
use block::{Disk, ErrorKind, File, Result};
use engine::OpenOptions;
use image::{BackingPolicy, DelayDisk, Format, Image, ImageOptions, NullDisk, Opener, Role, TableCacheStats};
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
}

impl EngineOpener {
    /// Files as `drive` asks for them.
    #[must_use]
    pub fn of_drive(drive: &DriveOptions) -> Self {
        Self { options: open_options(drive) }
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

fn open_options(drive: &DriveOptions) -> OpenOptions {
    OpenOptions {
        engine: drive.engine,
        cache: drive.cache,
        sync: drive.sync,
        sqpoll: drive.sqpoll,
        ..OpenOptions::default()
    }
}

impl Opener for EngineOpener {
    fn open(&self, path: &Path, role: Role) -> Result<Arc<dyn File>> {
        // Everything that is not written is locked against writers only, so overlays may share their base.
        let read_only = !matches!(role, Role::Writable);
        let options = OpenOptions { read_only, ..self.options.clone() };
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match engine::open(path, &options) {
                Err(error) if error.kind() == ErrorKind::Locked && Instant::now() < deadline => {
                    std::thread::sleep(LOCK_RETRY);
                }
                opened => return opened,
            }
        }
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

/// Opens what `drive` describes. `listed` are other files that the user named, which images may use as backing files.
pub fn open_drive(drive: &DriveOptions, allow_backing: BackingPolicy, listed: &[PathBuf]) -> Result<OpenedDisk> {
    let format = match drive.format {
        Some(DriveFormat::Null) => {
            let disk = NullDisk::new(drive.size_bytes.unwrap_or(0), drive.serial.clone());
            return Ok(OpenedDisk { disk: delayed(Arc::new(disk), drive), image: None });
        }
        Some(DriveFormat::Raw) => Some(Format::Raw),
        Some(DriveFormat::Qcow2) => Some(Format::Qcow2),
        None => None,
    };
    let path = drive.file.clone().unwrap_or_default();
    let options = ImageOptions {
        format,
        read_only: drive.read_only,
        allow_backing,
        listed: listed.to_vec(),
        serial: drive.serial.clone(),
        volatile_cache: open_options(drive).has_volatile_cache(),
        table_cache_bytes: drive.l2_cache_bytes,
        ..ImageOptions::new(path)
    };
    let image = Arc::new(image::open(&options, &EngineOpener::of_drive(drive))?);
    Ok(OpenedDisk { disk: delayed(Arc::clone(&image) as Arc<dyn Disk>, drive), image: Some(image) })
}

fn delayed(disk: Arc<dyn Disk>, drive: &DriveOptions) -> Arc<dyn Disk> {
    match drive.delay_ms {
        Some(delay_ms) if delay_ms > 0 => Arc::new(DelayDisk::new(disk, Duration::from_millis(u64::from(delay_ms)))),
        _ => disk,
    }
}
