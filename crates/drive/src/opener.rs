//! Turns a user's options into files and disks: the one place that names both formats and engines.

use crate::filters::FilterOptions;
use crate::options::{DiskOptions, DriveFormat};
use crate::temporary::InTemporaryDirectory;
use block::{Disk, Error, ErrorKind, File, Result};
use engine::{CacheMode, EngineKind, OpenOptions};
use file_http::HttpUrl;
use file_nbd::NbdUri;
use file_rbd::{RbdName, RbdOptions};
use image::{
    BackingPolicy, DelayOptions, ErrorPolicy, FileName, FilterDisk, Format, Hold, HoldControl, Image, ImageOptions,
    NullDisk, Opener, Role, TableCacheStats, TemporaryFiles, ThrottleMember,
};
use memory::BufferAccount;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long [`EngineOpener`] waits for the lock of a process that was killed, by default.
pub const LOCK_TIMEOUT_S: u32 = 30;

/// Opens the files of an image with one engine and cache mode, under QEMU's locks.
#[derive(Debug, Clone)]
pub struct EngineOpener {
    options: OpenOptions,
    descriptor: Option<Arc<OwnedFd>>,
    /// Whether to ask servers which file they have, even if the process or a cache knows.
    anew: bool,
    /// What messages call the files of this host that it opens.
    called: Option<String>,
}

impl Default for EngineOpener {
    fn default() -> Self {
        Self::of_disk(&DiskOptions::default())
    }
}

impl EngineOpener {
    /// Makes an opener with the options of `disk`.
    #[must_use]
    pub fn of_disk(disk: &DiskOptions) -> Self {
        Self { options: open_options(disk), descriptor: None, anew: false, called: None }
    }

    /// Sets another cache mode.
    #[must_use]
    pub fn with_cache(mut self, cache: CacheMode) -> Self {
        self.options.cache = cache;
        self
    }

    /// Sets how long to wait for locks that no living process seems to hold.
    #[must_use]
    pub fn with_lock_timeout(mut self, timeout: Duration) -> Self {
        self.options.lock_timeout = timeout;
        self
    }

    /// Sets another engine.
    #[must_use]
    pub fn with_engine(mut self, engine: EngineKind) -> Self {
        self.options.engine = engine;
        self
    }

    /// Adds an open file of the caller. Its descriptor's number is its name, as in `fd:3`.
    #[must_use]
    pub fn with_descriptor(mut self, descriptor: OwnedFd) -> Self {
        self.descriptor = Some(Arc::new(descriptor));
        self
    }

    /// Sets the account of buffer memory that requests use. An opener is for one disk.
    #[must_use]
    pub fn with_buffers(mut self, buffers: BufferAccount) -> Self {
        self.options.buffers = buffers;
        self
    }

    /// For files that may have been replaced: servers are asked again, whatever is known of their files.
    #[must_use]
    pub fn anew(mut self) -> Self {
        self.anew = true;
        self
    }

    /// For a file that is going to get this name: messages call it so.
    #[must_use]
    pub fn called(mut self, name: &FileName) -> Self {
        self.called = Some(name.to_string());
        self
    }

    /// Opens a file by its protocol.
    fn open_by_name(&self, name: &FileName, options: &OpenOptions) -> Result<Arc<dyn File>> {
        match name {
            FileName::File(path) => match &self.called {
                Some(name) => engine::open_as(path, name, options),
                None => engine::open(path, options),
            },
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
            FileName::VhostUser(socket) => crate::vhost_user::open(socket, options.read_only),
            FileName::Nbd(uri) => file_nbd::open(&NbdUri::parse(uri)?, options.read_only, &options.buffers),
            FileName::Http(url) => {
                let open = if self.anew { file_http::open_anew } else { file_http::open };
                open(&HttpUrl::parse(url)?, options.read_only, &options.buffers)
            }
            FileName::Rbd(image) => file_rbd::open(&RbdName::parse(image)?, &rbd_options(options)),
            _ => {
                Err(Error::new(ErrorKind::Unsupported, format!("'{name}': no file with this protocol is opened here")))
            }
        }
    }

    /// Takes no locks, to look at an image that another process is writing.
    #[must_use]
    pub fn without_locks(mut self) -> Self {
        self.options.lock = false;
        self
    }

    /// For files that are filled in one go: the storage begins to write before the flush at the end.
    #[must_use]
    pub fn writing_behind(mut self) -> Self {
        self.options.write_behind = true;
        self
    }
}

fn rbd_options(options: &OpenOptions) -> RbdOptions {
    RbdOptions::default().with(|rbd| {
        rbd.read_only = options.read_only;
        rbd.lock = options.lock;
        rbd.lock_timeout = options.lock_timeout;
        // Without librbd's cache, a write that has ended is durable.
        rbd.cached = !options.cache.is_direct() && options.has_volatile_cache();
        rbd.buffers = options.buffers.clone();
    })
}

fn open_options(disk: &DiskOptions) -> OpenOptions {
    OpenOptions::default().with(|options| {
        options.engine = disk.engine;
        options.cache = disk.cache;
        options.sync = disk.sync;
        options.lock_timeout = Duration::from_secs(disk.lock_timeout_s.unwrap_or(LOCK_TIMEOUT_S).into());
    })
}

impl Opener for EngineOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        // A file that is not written is locked only against writers, so overlays may share their base.
        let read_only = !matches!(role, Role::Writable);
        let options = self.options.clone().with(|options| options.read_only = read_only);
        self.open_by_name(name, &options)
    }

    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        match engine::create(path, 0) {
            Err(_) if path.exists() => Ok(None),
            // If it cannot be opened it stays: whoever was faster has found it empty, and may have filled it by now.
            made => made.and_then(|()| self.open(&path.into(), Role::Writable)).map(Some),
        }
    }

    fn unmake(&self, path: &Path) {
        // Best effort: a later use of the file reports what is wrong with it.
        let _ = std::fs::remove_file(path);
    }

    fn sync_directory_of(&self, path: &Path) -> Result<()> {
        engine::sync_directory_of(path)
    }

    fn temporary(&self) -> Result<Box<dyn TemporaryFiles>> {
        Ok(Box::new(InTemporaryDirectory::new(&self.options)))
    }
}

fn check_is_device(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(meta) if !meta.file_type().is_block_device() => {
            let path = path.display();
            let message = format!("'host_device:{path}' is no block device: name a file without 'host_device:'");
            Err(Error::new(ErrorKind::BadOption, message))
        }
        // A file that cannot be looked at cannot be opened either.
        _ => Ok(()),
    }
}

/// An opened disk, and its image, which must be closed in the end.
pub struct OpenedDisk {
    /// The disk with its filters.
    pub disk: Arc<dyn Disk>,
    /// The disk's image; `None` for a null disk.
    pub image: Option<Arc<Image>>,
    /// The disk's filters `throttle`, the nearest to the guest first.
    pub throttles: Vec<Arc<ThrottleMember>>,
    /// Holds requests that the storage fails, if the options say so.
    pub hold: Option<Arc<HoldControl>>,
    /// The disk below the filter that holds requests.
    below_hold: Arc<dyn Disk>,
}

impl OpenedDisk {
    /// Returns the disk for one export. If the disk holds requests, there is also the filter that holds those of this
    /// export.
    #[must_use]
    pub fn for_export(&self) -> (Arc<dyn Disk>, Option<Hold>) {
        let Some(control) = &self.hold else { return (Arc::clone(&self.disk), None) };
        let hold = Hold::new(Arc::clone(control));
        (Arc::new(FilterDisk::new(Arc::clone(&self.below_hold), hold.clone())), Some(hold))
    }

    /// Describes each layer in a line: format, file, engine.
    #[must_use]
    pub fn layers(&self) -> Vec<String> {
        self.image.as_ref().map_or_else(|| vec!["null".to_owned()], |image| image.describe_layers())
    }

    /// Returns the counters of the image's tables in memory; `None` if it has no tables.
    #[must_use]
    pub fn table_cache_stats(&self) -> Option<TableCacheStats> {
        let stats = self.image.as_ref().map(|image| image.cache_stats());
        stats.filter(|stats| stats.limit_bytes > 0)
    }

    /// Writes data that are still in memory, and flushes. No queue of the disk may be open.
    pub fn close(&self) -> Result<()> {
        self.image.as_ref().map_or(Ok(()), |image| image.close())
    }
}

/// Opens the disk that `options` describe. `listed` are other files that the user named; images may use them as backing
/// files.
pub fn open_disk(options: &DiskOptions, allow_backing: BackingPolicy, listed: &[PathBuf]) -> Result<OpenedDisk> {
    open_disk_with(&EngineOpener::of_disk(options), options, allow_backing, listed)
}

/// As [`open_disk`], but takes files from `opener`.
pub fn open_disk_with(
    opener: &dyn Opener,
    options: &DiskOptions,
    allow_backing: BackingPolicy,
    listed: &[PathBuf],
) -> Result<OpenedDisk> {
    if options.format == Some(DriveFormat::Null) {
        let disk = NullDisk::new(options.size_bytes.unwrap_or(0), options.serial.clone());
        return filtered(Arc::new(disk), None, options);
    }
    let format = options.format.and_then(DriveFormat::of_image);
    let image_options = image_options(options, format, allow_backing, listed)?;
    let image = Arc::new(image::open(&image_options, opener).map_err(name_readonly)?);
    filtered(Arc::clone(&image) as Arc<dyn Disk>, Some(image), options)
}

/// Opens the files of a running image again, for [`Image::reopen`]: its present layers, opened as `options` say.
pub fn open_again(
    opener: &EngineOpener,
    options: &DiskOptions,
    image: &Image,
    allow_backing: BackingPolicy,
    listed: &[PathBuf],
) -> Result<Image> {
    let format = image.said_formats().next().flatten();
    let mut options = options.clone();
    options.file = image.said_image_names().next();
    options.former_tops = image.former_tops();
    // A kept scratch overlay is one of the layers.
    if options.keep.take().is_some() {
        options.snapshot = false;
    }
    let mut listed = listed.to_vec();
    let is_named = |name: &FileName| name.path().is_some() || name.is_remote();
    listed.extend(image.file_names().filter(is_named).map(|name| name.look_at()));
    let opener = Again { opener, locked: image.written_files() };
    image::open(&image_options(&options, format, allow_backing, &listed)?, &opener).map_err(name_readonly)
}

/// Opens a file without locks if it is also open for writing: our own locks would refuse it.
struct Again<'a> {
    opener: &'a EngineOpener,
    locked: Vec<(u64, u64)>,
}

impl Opener for Again<'_> {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let identity = name.path().and_then(|path| std::fs::metadata(path).ok()).map(|meta| (meta.dev(), meta.ino()));
        let opener = self.opener.clone();
        match identity.is_some_and(|identity| self.locked.contains(&identity)) {
            true => opener.without_locks().open(name, role),
            false => opener.with_lock_timeout(Duration::ZERO).open(name, role),
        }
    }

    fn temporary(&self) -> Result<Box<dyn TemporaryFiles>> {
        self.opener.temporary()
    }
}

fn image_options(
    options: &DiskOptions,
    format: Option<Format>,
    allow_backing: BackingPolicy,
    listed: &[PathBuf],
) -> Result<ImageOptions> {
    let name = options.file.clone().unwrap_or_else(|| FileName::from(""));
    let keep = kept_overlay(options)?;
    Ok(ImageOptions::new(name).with(|open| {
        open.format = format;
        open.read_only = options.read_only;
        open.scratch = options.snapshot;
        open.keep = keep;
        open.allow_backing = allow_backing;
        open.listed = listed.iter().chain(&options.bases).cloned().collect();
        open.former_tops = options.former_tops;
        open.serial = options.serial.clone();
        open.volatile_cache = open_options(options).has_volatile_cache();
        open.table_cache_bytes = options.l2_cache_bytes;
    }))
}

/// Returns the index file of the scratch overlay that `options` keep, if they keep one. It has the name of the disk, or
/// else of the image.
pub fn kept_overlay(options: &DiskOptions) -> Result<Option<PathBuf>> {
    let Some(directory) = &options.keep else { return Ok(None) };
    let image = || options.file.as_ref().and_then(FileName::path).and_then(Path::file_name);
    let own = options.keep_as.as_deref().or(options.name.as_ref().map(AsRef::as_ref));
    let name = own.or_else(image).ok_or_else(|| {
        let what = "keep= needs a name for the files that it keeps: give the disk one by name=";
        Error::new(ErrorKind::BadOption, format!("'{}': {what}", options.display_name()))
    })?;
    let mut name = name.to_owned();
    name.push(".scratch");
    Ok(Some(directory.join(name)))
}

/// Adds the drive's key to the error of an image that can only be read.
fn name_readonly(error: Error) -> Error {
    match error.is_only_for_writing() {
        true => Error::new(error.kind(), format!("{error}, or set readonly=on to only read it")),
        false => error,
    }
}

/// Puts its filters over the disk.
fn filtered(disk: Arc<dyn Disk>, image: Option<Arc<Image>>, options: &DiskOptions) -> Result<OpenedDisk> {
    let late = options.delay_ms.filter(|delay_ms| *delay_ms > 0);
    let late = late.map(|ms| FilterOptions::Delay(DelayOptions::of(Duration::from_millis(u64::from(ms)))));
    let (mut disk, mut throttles) = (disk, Vec::new());
    for filter in options.filters.iter().rev().chain(&late) {
        let (above, throttle) = filter.over(disk)?;
        disk = above;
        throttles.extend(throttle);
    }
    throttles.reverse();
    let holds = [options.on_error, options.on_no_space].contains(&ErrorPolicy::Hold);
    let hold = holds.then(|| {
        let control = Arc::new(HoldControl::default());
        control.set_policies(Some(options.on_error), Some(options.on_no_space));
        control
    });
    let below_hold = Arc::clone(&disk);
    // Nearest to the guest: requests that are tried again pass the other filters again.
    if let Some(control) = &hold {
        disk = Arc::new(FilterDisk::new(disk, Hold::new(Arc::clone(control))));
    }
    Ok(OpenedDisk { disk, image, throttles, hold, below_hold })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_made_and_cannot_be_opened_stays_for_whoever_uses_it_by_then() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.scratch");
        // Linux AIO does not go with the page cache, which is found out when the file is there.
        let opener = EngineOpener::default().with_engine(EngineKind::LinuxAio).with_cache(CacheMode::Writeback);
        let error = opener.make(&path).err().unwrap();
        assert_ne!(error.kind(), ErrorKind::Locked, "{error}");
        assert!(path.exists(), "another may have filled it");
        assert!(EngineOpener::default().make(&path).unwrap().is_none());
        assert_eq!(EngineOpener::default().open(&path.into(), Role::Writable).unwrap().length_bytes().unwrap(), 0);
    }
}
