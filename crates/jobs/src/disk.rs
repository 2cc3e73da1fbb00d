//! Disks as jobs read and write them.

use crate::pipeline::{Pipeline, Spread, Worker};
use crate::{Control, closed::closed};
use block::{Disk, DiskInfo, DiskIo, Error, ErrorKind, Op, ReactorCtx, ReactorHandle, Result, Runs, StatusQuery};
use image::{CompressedWriter, CopyOffload, Image};
use std::rc::Rc;
use std::sync::Arc;

/// Larger units, and units that are no power of two, are ignored: they may come from an untrusted peer.
const UNIT_BYTES_MAX: u64 = 2 << 20;

/// A disk that a job reads or writes. Any disk will do; jobs use more abilities of images.
#[derive(Clone)]
pub struct JobDisk {
    disk: Arc<dyn Disk>,
    image: Option<Arc<Image>>,
    name: String,
}

impl From<&Arc<Image>> for JobDisk {
    fn from(image: &Arc<Image>) -> Self {
        let name = image.said_file_names().next().map(|name| name.to_string()).unwrap_or_default();
        Self { disk: Arc::clone(image) as _, image: Some(Arc::clone(image)), name }
    }
}

impl JobDisk {
    /// Wraps a disk that is no image. Errors call it by `name`.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, name: impl Into<String>) -> Self {
        Self { disk, image: None, name: name.into() }
    }

    /// Returns the disk's properties.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    /// Returns the disk's name in errors.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the disk as an image, if it is one.
    #[must_use]
    pub fn image(&self) -> Option<&Arc<Image>> {
        self.image.as_ref()
    }

    pub(crate) fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        self.disk.block_status(query)
    }

    /// Opens a queue on a reactor; called on its thread.
    pub(crate) fn open(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<DiskIo>> {
        DiskIo::open(self.disk.as_ref(), ctx)
    }

    /// Returns the best unit for writes, a power of two; 1 if there is none.
    pub(crate) fn unit_bytes(&self) -> u64 {
        let bytes = u64::from(self.info().topology.optimal_io_bytes);
        if bytes.is_power_of_two() && bytes <= UNIT_BYTES_MAX { bytes } else { 1 }
    }

    /// See [`Image::is_in_memory`].
    pub(crate) fn is_in_memory(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.is_in_memory())
    }

    /// See [`Image::backing_bytes`].
    pub(crate) fn backing_bytes(&self) -> Option<u64> {
        self.image.as_ref().and_then(|image| image.backing_bytes())
    }

    /// See [`Image::compressed_writer`].
    pub(crate) fn compressed_writer(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<CompressedWriter> {
        let unsupported = || Error::new(ErrorKind::Unsupported, format!("'{}' takes no compressed data", self.name));
        self.image.as_ref().ok_or_else(unsupported)?.compressed_writer(ctx)
    }

    /// Lets the host copy from `source`, where both are images. See [`Image::copy_offload`].
    pub(crate) fn copy_offload(&self, source: &Self, ctx: &Rc<dyn ReactorCtx>) -> Result<Option<CopyOffload>> {
        let images = self.image.as_ref().zip(source.image.as_ref());
        images.map(|(target, source)| target.copy_offload(source, ctx)).transpose()
    }

    /// Ends a job that wrote to the disk: makes the writes durable. A new image that is incomplete is not closed
    /// properly. No queue of the disk may be open.
    pub(crate) fn finish(
        &self,
        done: Result<()>,
        is_new: bool,
        reactors: &[Arc<dyn ReactorHandle>],
        control: &mut Control<'_>,
    ) -> Result<()> {
        match &self.image {
            Some(image) if is_new => done.and_then(|()| image.close_new()),
            Some(image) => closed(done, image),
            None => {
                done?;
                let disk = self.clone();
                let pipeline = Pipeline::start(reactors, Spread::First, 1, 0, move |ctx| Ok(Flusher(disk.open(ctx)?)));
                pipeline.push(self.name.clone(), 0, control);
                pipeline.finish(control)
            }
        }
    }
}

/// Flushes a disk; errors call it by this name.
struct Flusher(Rc<DiskIo>);

impl Worker for Flusher {
    type Item = String;
    type Scratch = ();

    fn scratch(&self) {}

    async fn work(&self, name: String, (): &mut ()) -> Result<()> {
        let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot flush '{name}'"), error);
        self.0.run(Op::Flush).await.map_err(failed)
    }
}

impl Spread {
    /// Between disks from which pieces pass unchanged to another.
    pub(crate) fn of_copies<'a>(mut disks: impl Iterator<Item = &'a JobDisk>) -> Self {
        if disks.all(JobDisk::is_in_memory) { Self::OneTaskEach } else { Self::First }
    }
}
