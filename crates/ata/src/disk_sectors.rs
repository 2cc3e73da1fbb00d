//! Shows any disk of the block interface to callers that wait.

use crate::Sectors;
use block::{
    Disk, DiskInfo, DiskIo, IoError, IoResult, Op, OpFlags, ReactorHandle, Result, Task, reclaim, run_and_wait,
};
use memory::{AlignedBuf, IoBuf};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

thread_local! {
    /// The queues on this reactor's thread, by number.
    static HERE: RefCell<BTreeMap<u64, Rc<DiskIo>>> = const { RefCell::new(BTreeMap::new()) };
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// A queue of a disk on a reactor's thread. Its calls wait for the reactor, so never make them on that thread.
pub struct DiskSectors {
    disk: Arc<dyn Disk>,
    reactor: Arc<dyn ReactorHandle>,
    queue: u64,
    /// The buffer of requests. It goes to the reactor and back, so once it is large enough, requests allocate nothing.
    buffer: Option<AlignedBuf>,
}

impl DiskSectors {
    /// Opens a queue of `disk` on `reactor`.
    pub fn open(disk: Arc<dyn Disk>, reactor: Arc<dyn ReactorHandle>) -> Result<Self> {
        let queue = NEXT.fetch_add(1, Ordering::Relaxed);
        let opened = Arc::clone(&disk);
        run_and_wait(&*reactor, move |ctx| {
            let io = DiskIo::open(&*opened, ctx)?;
            HERE.with_borrow_mut(|here| here.insert(queue, io));
            Ok(())
        })??;
        Ok(Self { disk, reactor, queue, buffer: None })
    }

    /// Runs a request on the reactor and waits for it. If the reactor has ended, that is an error of the storage.
    fn wait<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        request: impl FnOnce(Rc<DiskIo>) -> F + Send + 'static,
    ) -> IoResult<T> {
        let (sender, receiver) = sync_channel(1);
        let queue = self.queue;
        let job = Box::new(move |ctx: &Rc<dyn block::ReactorCtx>| {
            // Without the queue the sender is dropped, which the caller notices.
            let Some(io) = HERE.with_borrow(|here| here.get(&queue).cloned()) else { return };
            ctx.spawn(Task::new(async move {
                // This fails only if the calling thread is gone.
                let _ = sender.send(request(io).await);
            }));
        });
        self.reactor.run(job).map_err(|_| IoError::EIO)?;
        receiver.recv().map_err(|_| IoError::EIO)
    }

    fn buffer(&mut self, length_bytes: usize) -> AlignedBuf {
        self.buffer
            .take()
            .filter(|buffer| buffer.len() >= length_bytes)
            .unwrap_or_else(|| AlignedBuf::zeroed(length_bytes))
    }
}

impl Sectors for DiskSectors {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> IoResult {
        let (buffer, length_bytes) = (self.buffer(into.len()), into.len());
        let (result, buffer) = self.wait(move |io| async move {
            let shared = IoBuf::from_aligned(buffer);
            let result = io.run(Op::read(offset, shared.whole().slice(0, length_bytes))).await;
            (result, reclaim(shared))
        })?;
        if let (Ok(()), Some(bytes)) = (result, buffer.get(..length_bytes)) {
            into.copy_from_slice(bytes);
        }
        self.buffer = Some(buffer);
        result
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> IoResult {
        let (mut buffer, length_bytes) = (self.buffer(from.len()), from.len());
        if let Some(bytes) = buffer.get_mut(..length_bytes) {
            bytes.copy_from_slice(from);
        }
        let (result, buffer) = self.wait(move |io| async move {
            let shared = IoBuf::from_aligned(buffer);
            let data = shared.whole().slice(0, length_bytes);
            let result = io.run(Op::write(offset, data, OpFlags::NONE)).await;
            (result, reclaim(shared))
        })?;
        self.buffer = Some(buffer);
        result
    }

    fn flush(&mut self) -> IoResult {
        self.wait(|io| async move { io.run(Op::Flush).await })?
    }

    fn set_volatile_cache(&mut self, volatile: bool) {
        self.disk.set_volatile_cache(volatile);
    }
}

impl Drop for DiskSectors {
    fn drop(&mut self) {
        let queue = self.queue;
        // Fails only if the reactor has ended, and its queues with it.
        let _ = run_and_wait(&*self.reactor, move |_| drop(HERE.with_borrow_mut(|here| here.remove(&queue))));
    }
}
