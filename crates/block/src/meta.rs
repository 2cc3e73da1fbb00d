//! How formats read and write their tables: through a file queue, by awaiting each operation.
//!
//! Awaiting gives the order: await a write, then await a [`MetaIo::flush`], and the write is durable before everything
//! that is started later. Nothing else orders operations.

use crate::{File, FileOp, FileQueue, IoResult, PastEnd, Result};
use memory::{AlignedBuf, IoBuf};
use std::rc::Rc;

/// A file, for metadata. Clones share the queue.
#[derive(Clone)]
pub struct MetaIo {
    queue: Rc<dyn FileQueue>,
    /// The file of the guest data, if that is another file.
    data: Option<Rc<dyn FileQueue>>,
    content_bytes: Option<u64>,
}

impl MetaIo {
    /// Makes metadata I/O through `queue`.
    #[must_use]
    pub fn new(queue: Rc<dyn FileQueue>) -> Self {
        Self { queue, data: None, content_bytes: None }
    }

    /// Makes blocking metadata I/O on a file, and asks the file how much it holds.
    pub fn of_file(file: &dyn File) -> Result<Self> {
        Ok(Self { content_bytes: file.allocated_bytes()?, ..Self::new(file.open_blocking()?) })
    }

    /// Returns how many bytes of the file are not holes, if known: a hint of how much there is to read.
    #[must_use]
    pub fn content_bytes(&self) -> Option<u64> {
        self.content_bytes
    }

    /// Adds the file of an image whose guest data lie in a file of their own. It must be flushed too.
    #[must_use]
    pub fn with_data(self, data: Rc<dyn FileQueue>) -> Self {
        Self { data: Some(data), ..self }
    }

    /// Returns the queue of the guest data's file, if that is a file of its own.
    #[must_use]
    pub fn data(&self) -> Option<&Rc<dyn FileQueue>> {
        self.data.as_ref()
    }

    /// Returns the queue, for data.
    #[must_use]
    pub fn queue(&self) -> &Rc<dyn FileQueue> {
        &self.queue
    }

    /// Reads exactly `length_bytes` at `offset`. The caller has capped the length.
    pub async fn read(&self, offset: u64, length_bytes: usize, past_end: PastEnd) -> IoResult<AlignedBuf> {
        let buf = IoBuf::try_zeroed(length_bytes)?;
        self.queue.start(FileOp::Read { offset, data: buf.whole(), past_end }).await?;
        Ok(reclaim(buf))
    }

    /// Writes `bytes` at `offset`; not durable before a flush.
    pub async fn write(&self, offset: u64, bytes: AlignedBuf) -> IoResult {
        let data = IoBuf::from_aligned(bytes).whole();
        self.queue.start(FileOp::Write { offset, data, fua: false }).await
    }

    /// Makes all writes to the metadata's file that completed before durable. Does not flush the guest data's file.
    pub async fn flush(&self) -> IoResult {
        self.queue.start(FileOp::Flush).await
    }

    /// Zeroes a range in the cheapest way.
    pub async fn write_zeroes(&self, offset: u64, length: u64, may_unmap: bool) -> IoResult {
        self.queue.start(FileOp::WriteZeroes { offset, length, may_unmap }).await
    }

    /// Gives a range back to the host.
    pub async fn discard(&self, offset: u64, length: u64) -> IoResult {
        self.queue.start(FileOp::Discard { offset, length }).await
    }

    /// Makes the file exactly `length` bytes long.
    pub async fn set_length(&self, length: u64) -> IoResult {
        self.queue.start(FileOp::SetLength { length }).await
    }
}

/// Takes the bytes back from a buffer whose operation is complete. They are copied if the engine still holds a handle.
fn reclaim(buf: IoBuf) -> AlignedBuf {
    buf.into_aligned().unwrap_or_else(|shared| AlignedBuf::copy_of(&shared.whole().to_vec()))
}
