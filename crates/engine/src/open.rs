//! Opening and making files.

use crate::host_file::HostFile;
use crate::target::{Alignment, OpenFile};
use crate::{EngineKind, OpenOptions};
use block::{Error, ErrorKind, File, FileInfo, Result};
use rustix::fs::{FileType, Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Opens a file or block device.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Arc<dyn File>> {
    options.check()?;
    let name = path.display().to_string();
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
    flags |= if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    if options.cache.is_direct() {
        flags |= OFlags::DIRECT;
    }
    let fd = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| Error::io(format!("cannot open '{name}'"), error.into()))?;
    open_fd(fd, &name, options)
}

/// As [`open`], for a descriptor that is open already; `name` stands for it in messages.
pub fn open_fd(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<Arc<dyn File>> {
    options.check()?;
    let stat = rustix::fs::fstat(&fd).map_err(|error| Error::io(format!("cannot look at '{name}'"), error.into()))?;
    let block_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let length_bytes = crate::sys::length_of(&fd, block_device)
        .map_err(|error| Error::io(format!("cannot learn the length of '{name}'"), error))?;
    let engine = match options.engine {
        EngineKind::Auto => EngineKind::IoUring,
        other => other,
    };
    let info = FileInfo {
        name: name.into(),
        length_bytes,
        read_only: options.read_only,
        offset_alignment_bytes: 1,
        memory_alignment_bytes: 1,
        can_discard: true,
        discard_zeroes: true,
        fast_zeroes: true,
        block_device,
        can_grow: !block_device,
        engine: format!("{engine}, cache={}", options.cache),
    };
    Ok(Arc::new(HostFile::new(OpenFile {
        fd,
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        info,
        engine,
        alignment: Alignment::NONE,
        write_through: !options.has_volatile_cache(),
        ignore_flush: options.cache == crate::CacheMode::Unsafe,
        zeroes_rung: AtomicU8::new(0),
    })))
}

/// Makes a new file of `length_bytes` that reads as zeros. Fails if the name exists.
pub fn create(path: &Path, length_bytes: u64) -> Result<()> {
    let fails = |error: rustix::io::Errno| {
        let kind = if error == rustix::io::Errno::EXIST { ErrorKind::BadOption } else { ErrorKind::Io };
        let error = std::io::Error::from(error);
        Error::with_source(kind, format!("cannot create '{}'", path.display()), error)
    };
    let flags = OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
    let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map_err(fails)?;
    rustix::fs::ftruncate(&fd, length_bytes).map_err(fails)
}
