//! Which image, and how it is opened.

use crate::disk::Disk;
use block::{Error, ErrorKind, Result};
use drive::{DiskOptions, DriveOptions, EngineOpener, ExportOptions, ParsedDrive};
use image::{BackingPolicy, FileName, Format};
use memory::BufferAccount;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Which image to open, and how.
///
/// ```
/// use ringdisk_disk::{BackingPolicy, Options};
///
/// # fn main() -> ringdisk_disk::Result<()> {
/// let by_path = Options::path("disk.qcow2").format("qcow2")?.read_only(true);
/// let by_drive_options = Options::drive("file=disk.raw,format=raw,cache=none")?.allow_backing(BackingPolicy::Deny);
/// # drop((by_path, by_drive_options));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is opened before `open` is called"]
pub struct Options {
    disk: DiskOptions,
    allow_backing: BackingPolicy,
    listed: Vec<PathBuf>,
    descriptor: Option<OwnedFd>,
    buffers: BufferAccount,
}

impl Options {
    fn new(disk: DiskOptions) -> Self {
        Self {
            disk,
            allow_backing: BackingPolicy::default(),
            listed: Vec::new(),
            descriptor: None,
            buffers: BufferAccount::default(),
        }
    }

    /// The image at `path`.
    pub fn path(path: impl AsRef<Path>) -> Self {
        Self::new(DiskOptions::of_file(path.as_ref()))
    }

    /// The image that drive options describe, as `ringdisk serve --drive` takes them: `file=disk.qcow2,cache=none`. Those
    /// that are about an export (its socket, its queues) are refused.
    pub fn drive(options: &str) -> Result<Self> {
        match DriveOptions::parse(options)? {
            ParsedDrive::Help(help) => Err(Error::new(ErrorKind::BadOption, help)),
            ParsedDrive::Drive(drive) if drive.export != ExportOptions::default() => {
                let message = format!("'{options}' has options of an export, and this disk is not exported");
                Err(Error::new(ErrorKind::BadOption, message))
            }
            ParsedDrive::Drive(drive) => Ok(Self::new(drive.disk)),
        }
    }

    /// The image behind an open descriptor: a regular file or a block device, open for reading, and for writing unless the
    /// disk is to be read only. Files that it names have to be given with [`Options::also_allow`], by absolute path.
    pub fn descriptor(descriptor: OwnedFd) -> Self {
        let name = FileName::Descriptor(descriptor.as_raw_fd());
        Self { descriptor: Some(descriptor), ..Self::new(DiskOptions::of_file(name)) }
    }

    /// The image's format, "raw" or "qcow2". Where it is not said, the first bytes tell; a disk that is raw by such a guess
    /// only refuses writes that would make it look like another format.
    pub fn format(mut self, format: &str) -> Result<Self> {
        self.disk.format = Some(format.parse::<Format>()?.into());
        Ok(self)
    }

    /// Opens the files for reading only; writes fail.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.disk.read_only = read_only;
        self
    }

    /// Which files the image may name.
    pub fn allow_backing(mut self, policy: BackingPolicy) -> Self {
        self.allow_backing = policy;
        self
    }

    /// A file that the image may name, besides those that its policy allows.
    pub fn also_allow(mut self, path: impl Into<PathBuf>) -> Self {
        self.listed.push(path.into());
        self
    }

    /// Whose part of a [`BufferBudget`](crate::BufferBudget) the disk's requests use for buffers of their own. Without
    /// limit otherwise.
    pub fn buffers(mut self, account: BufferAccount) -> Self {
        self.buffers = account;
        self
    }

    /// Opens the image and starts its thread. Blocks.
    pub fn open(self) -> Result<Disk> {
        let mut opener = EngineOpener::of_disk(&self.disk).with_buffers(self.buffers);
        if let Some(descriptor) = self.descriptor {
            opener = opener.with_descriptor(descriptor);
        }
        let opened = drive::open_disk_with(&opener, &self.disk, self.allow_backing, &self.listed)?;
        Disk::start(opened, self.disk.display_name())
    }
}
