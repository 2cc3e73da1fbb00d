//! Guests that work on a disk from several queues, and check each byte that they read against a [`SectorHistory`].

use crate::dice::Dice;
use crate::history::{SectorHistory, bytes_of};
use block::{Disk, DiskIo, IoError, Op, OpFlags, ReactorHandle, Task};
use memory::AlignedBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

const SECTOR: u64 = block::SECTOR_BYTES;

/// A load. The same seed makes the same requests.
#[derive(Debug, Clone)]
pub struct HistoryLoad {
    /// Requests in flight on each queue.
    pub depth: usize,
    /// The most sectors of a request.
    pub sectors_max: u64,
    /// Percentage of writes among the requests.
    pub write_percent: u64,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Default for HistoryLoad {
    fn default() -> Self {
        Self { depth: 6, sectors_max: 24, write_percent: 50, seed: 1 }
    }
}

struct Work {
    history: Arc<SectorHistory>,
    stop: AtomicBool,
    operations: AtomicU64,
    faults: Mutex<Vec<String>>,
    load: HistoryLoad,
}

/// A load that runs until it is stopped.
pub struct RunningLoad {
    work: Arc<Work>,
    /// Closed when the last task has ended.
    ended: Receiver<()>,
}

impl HistoryLoad {
    /// Starts the load, with a queue on each of these reactors.
    #[must_use]
    pub fn start(
        &self,
        disk: &Arc<dyn Disk>,
        reactors: &[Arc<dyn ReactorHandle>],
        history: &Arc<SectorHistory>,
    ) -> RunningLoad {
        let work = Arc::new(Work {
            history: Arc::clone(history),
            stop: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            faults: Mutex::default(),
            load: self.clone(),
        });
        let (sender, ended) = channel::<()>();
        for (index, reactor) in reactors.iter().enumerate() {
            let (work, disk, sender) = (Arc::clone(&work), Arc::clone(disk), sender.clone());
            let job = move |ctx: &Rc<dyn block::ReactorCtx>| match DiskIo::open(disk.as_ref(), ctx) {
                Err(error) => work.fault(format!("cannot open a queue: {error}")),
                Ok(io) => (0..work.load.depth).for_each(|task| {
                    let dice = Dice::new(crate::mix(work.load.seed, (index * 1000 + task) as u64));
                    let guest = Guest { io: Rc::clone(&io), work: Arc::clone(&work), dice, _ended: sender.clone() };
                    ctx.spawn(Task::new(guest.run()));
                }),
            };
            reactor.run(Box::new(job)).expect("a reactor that runs");
        }
        RunningLoad { work, ended }
    }
}

impl Work {
    fn fault(&self, fault: String) {
        self.faults.lock().expect("no test panics here").push(fault);
    }
}

impl RunningLoad {
    /// Returns how many requests have ended so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.work.operations.load(Ordering::Relaxed)
    }

    /// Waits until this many more requests have ended, or there was an error.
    pub fn wait_for_more(&self, operations: u64) {
        let until = self.operations() + operations;
        while self.operations() < until && self.work.faults.lock().expect("no test panics here").is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Ends the load of a dead disk, whose requests may never end. Returns the reads that no write explains.
    #[must_use]
    pub fn abandon(self) -> Vec<String> {
        self.work.stop.store(true, Ordering::Relaxed);
        let mut faults = std::mem::take(&mut *self.work.faults.lock().expect("no test panics here"));
        faults.retain(|fault| !fault.contains("failed"));
        faults
    }

    /// Ends the load and waits for its requests. Returns the errors: reads that nothing explains, and requests that
    /// failed.
    #[must_use]
    pub fn finish(self) -> Vec<String> {
        self.work.stop.store(true, Ordering::Relaxed);
        // All senders are gone when all tasks have ended.
        let _ = self.ended.recv();
        std::mem::take(&mut *self.work.faults.lock().expect("no test panics here"))
    }
}

struct Guest {
    io: Rc<DiskIo>,
    work: Arc<Work>,
    dice: Dice,
    _ended: Sender<()>,
}

impl Guest {
    async fn run(mut self) {
        while !self.work.stop.load(Ordering::Relaxed) {
            if let Err(fault) = self.request().await {
                return self.work.fault(fault);
            }
            self.work.operations.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn request(&mut self) -> Result<(), String> {
        let sectors = self.work.history.sectors();
        let count = 1 + self.dice.below(self.work.load.sectors_max.min(sectors));
        // Half of the requests are in the same sixteenth of the disk.
        let room = if self.dice.chance(50) { sectors } else { sectors / 16 };
        let first = self.dice.below(room.saturating_sub(count) + 1);
        let kind = self.dice.below(100);
        if kind < 3 {
            return self.flush().await;
        }
        match kind < 3 + self.work.load.write_percent {
            true => self.write(first, count).await,
            false => self.read(first, count).await,
        }
    }

    async fn flush(&self) -> Result<(), String> {
        let begun = self.work.history.now();
        self.io.run(Op::Flush).await.map_err(|error| failed("flush", 0, error))?;
        self.work.history.end_flush(begun);
        Ok(())
    }

    async fn write(&mut self, first: u64, count: u64) -> Result<(), String> {
        let history = Arc::clone(&self.work.history);
        if self.dice.chance(5) {
            // Whole clusters are freed if the range covers some.
            let count = (count * 16).min(history.sectors() - first);
            let write = history.begin_zeroes(first, count);
            let (offset, length) = (first * SECTOR, count * SECTOR);
            let op = Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
            self.io.run(op).await.map_err(|error| failed("write of zeros", first, error))?;
            history.end_write(write);
            return Ok(());
        }
        let write = history.begin_write(first, count);
        let mut buf = AlignedBuf::copy_of(&bytes_of(write));
        let length = (count * SECTOR) as usize;
        let written = self.io.write(first * SECTOR, &mut buf, 0..length).await;
        written.map_err(|error| failed("write", first, error))?;
        history.end_write(write);
        Ok(())
    }

    async fn read(&self, first: u64, count: u64) -> Result<(), String> {
        let length = (count * SECTOR) as usize;
        let mut buf = AlignedBuf::zeroed(length);
        let since = self.work.history.now();
        let read = self.io.read(first * SECTOR, &mut buf, length).await;
        read.map_err(|error| failed("read", first, error))?;
        self.work.history.check_read(first, &buf[..length], since)
    }
}

fn failed(what: &str, first: u64, error: IoError) -> String {
    format!("a {what} at sector {first} failed: {error}")
}
