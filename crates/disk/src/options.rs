//! Says which image to open, and how.

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

    /// Names the image at `path`.
    pub fn path(path: impl AsRef<Path>) -> Self {
        Self::new(DiskOptions::of_file(path.as_ref()))
    }

    /// Takes the image from drive options, as in `ringdisk serve --drive`: `file=disk.qcow2,cache=none`. Options of an
    /// export (its socket, its queues) are refused.
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

    /// Names the image behind an open descriptor: a regular file or a block device, open for reading and, unless the
    /// disk is read-only, for writing. [`Options::also_allow`] must list the files that the image names, by absolute
    /// path.
    pub fn descriptor(descriptor: OwnedFd) -> Self {
        let name = FileName::Descriptor(descriptor.as_raw_fd());
        Self { descriptor: Some(descriptor), ..Self::new(DiskOptions::of_file(name)) }
    }

    /// Sets the image's format, "raw" or "qcow2". Without it, the first bytes decide. A disk that was only guessed to
    /// be raw refuses writes that would make it look like another format.
    pub fn format(mut self, format: &str) -> Result<Self> {
        self.disk.format = Some(format.parse::<Format>()?.into());
        Ok(self)
    }

    /// Opens the files for reading only; writes fail.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.disk.read_only = read_only;
        self
    }

    /// Sets which files the image may name.
    pub fn allow_backing(mut self, policy: BackingPolicy) -> Self {
        self.allow_backing = policy;
        self
    }

    /// Adds a file that the image may name, besides those that its policy allows.
    pub fn also_allow(mut self, path: impl Into<PathBuf>) -> Self {
        self.listed.push(path.into());
        self
    }

    /// Sets the account of a [`BufferBudget`](crate::BufferBudget) from which the disk's requests take memory for
    /// buffers. Without it there is no limit.
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
