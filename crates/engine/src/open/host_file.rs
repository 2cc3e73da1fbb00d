//! A file of the host behind [`block::File`], the interface that images see.

use crate::file::device_facts;
use crate::file::holes;
use crate::file::image_lock;
use crate::file::open_file::OpenFile;
use crate::queue::engines::Engines;
use crate::queue::host_queue::HostQueue;
use block::{
    Error, ErrorKind, File, FileInfo, FileQueue, Lifetime, Locks, MapPiece, PastEnd, ReactorCtx, Result, Topology,
};
use memory::{BufferAccount, MappedRange};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

/// With smaller granules, one call for each takes longer than walking over the pages.
const GRANULE_BYTES_MIN: u64 = 32 << 10;

/// An open file or block device. See [`crate::open`].
#[derive(Debug)]
pub(crate) struct HostFile {
    file: Arc<OpenFile>,
}

impl HostFile {
    pub(crate) fn new(file: OpenFile) -> Self {
        Self { file: Arc::new(file) }
    }
}

impl File for HostFile {
    fn info(&self) -> &FileInfo {
        &self.file.info
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some(self.file.identity)
    }

    fn topology(&self) -> Topology {
        self.file.topology
    }

    fn overwrites_in_place(&self) -> bool {
        true
    }

    fn lifetime(&self) -> Option<Lifetime> {
        let stat = rustix::fs::fstat(&self.file.fd).ok().filter(|_| self.file.info.block_device)?;
        device_facts::lifetime(&device_facts::directory(&stat))
    }

    fn length_bytes(&self) -> Result<u64> {
        let length = holes::length_of(&self.file.fd, self.file.info.block_device);
        length.map_err(|error| Error::io(format!("cannot learn the length of '{}'", self.file.info.name), error))
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        if self.file.info.block_device {
            return Ok(None);
        }
        let stat = rustix::fs::fstat(&self.file.fd);
        let stat =
            stat.map_err(|errno| Error::io(format!("cannot look at '{}'", self.file.info.name), errno.into()))?;
        // In units of 512 bytes. Some file systems report zero for a file whose data are kept elsewhere.
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        Ok((blocks > 0).then(|| blocks.saturating_mul(512)))
    }

    fn hole_at(&self, offset: u64, length: u64) -> Result<(bool, u64)> {
        let found = holes::hole_at(&self.file.fd, self.file.info.block_device, offset, length);
        found.map_err(|error| Error::io(format!("cannot look for holes in '{}'", self.file.info.name), error))
    }

    fn hole_or_granule_at(&self, offset: u64, length: u64, granule_bytes: u64) -> Result<(bool, u64)> {
        if !self.file.walks_to_holes || granule_bytes < GRANULE_BYTES_MIN {
            return self.hole_at(offset, length);
        }
        let found = holes::hole_or_granule_at(&self.file.fd, offset, length, granule_bytes);
        found.map_err(|error| Error::io(format!("cannot look for holes in '{}'", self.file.info.name), error))
    }

    fn map(&self, offset: u64, length_bytes: usize, past_end: PastEnd, pieces: &mut Vec<MapPiece>) -> bool {
        self.file.map(offset, length_bytes, past_end, pieces)
    }

    fn can_map_reserved(&self) -> bool {
        self.file.can_map_reserved()
    }

    fn map_reserved(&self, offset: u64, length_bytes: usize) -> Option<MappedRange> {
        self.file.map_reserved(offset, length_bytes)
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        let name = &self.file.info.name;
        let Some(engines) = ctx.as_any().downcast_ref::<Engines>() else {
            let message = format!("'{name}' is a file of the host: it works on the engine's own reactors only");
            return Err(Error::new(ErrorKind::Unsupported, message));
        };
        let (engine, target) = engines.attach(&self.file).map_err(|error| error.in_context(format!("'{name}'")))?;
        if !self.file.alignment.is_none() && !self.file.info.read_only {
            self.file.rmw_lock.opened_on(engines.reactor());
        }
        self.file.extents.start(&self.file.fd, engines.processors());
        Ok(Rc::new(HostQueue::on_reactor(engine, target, Rc::clone(engines.tasks()))))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(HostQueue::blocking(Arc::clone(&self.file))))
    }

    fn buffers(&self) -> &BufferAccount {
        &self.file.buffers
    }

    fn lock_again(&self, for_writing: bool) -> Result<()> {
        match self.file.info.locks {
            Locks::Held => image_lock::lock_again(self.file.fd.as_fd(), &self.file.info.name, for_writing),
            Locks::NotWanted | Locks::Lacking => Ok(()),
        }
    }

    fn copy_source(&self) -> Option<BorrowedFd<'_>> {
        // The kernel would copy through the page cache, which a file with direct I/O must not use.
        (self.file.page_cached && !self.file.info.block_device).then(|| self.file.fd.as_fd())
    }
}
