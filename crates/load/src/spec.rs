//! A workload, its end, and the caller's hooks.

use crate::range::Range;
use crate::verify::VerifyState;
use block::{DiskInfo, Error, ErrorKind, Result};
use memory::IoBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The order of offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Uniformly random over the range. The same seed gives the same offsets.
    Random {
        /// Seed of the random generator.
        seed: u64,
    },
    /// One block after the other. Each queue walks its own part of the range, again and again.
    Sequential,
}

/// The end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// After this time, without the warm-up.
    Runtime(Duration),
    /// After this many requests, spread over the queues.
    Requests(u64),
    /// When each queue has walked its part of the range once. Only with [`Pattern::Sequential`].
    OnePass,
}

/// The contents of the range before a verified run.
#[derive(Debug, Clone)]
pub enum Initial {
    /// Anything: blocks are checked from their first write on.
    Unknown,
    /// Zeros.
    Zeros,
    /// The result of an earlier run over the same range, with the same block size and seed.
    State(VerifyState),
}

/// Verification: writes carry a pattern, and reads are checked against it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Verify {
    /// A number that goes into every sector, so that data of different runs differ.
    pub seed: u64,
    /// The contents before the run.
    pub initial: Initial,
}

impl Verify {
    /// Verifies with a pattern of this seed, over these contents.
    #[must_use]
    pub fn new(seed: u64, initial: Initial) -> Self {
        Self { seed, initial }
    }
}

/// A workload.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BenchSpec {
    /// Requests in flight on each queue.
    pub queue_depth: u32,
    /// Number of queues; one is opened on each of the first reactors given.
    pub queues: u32,
    /// The size of a request, in bytes. Offsets are multiples of it, counted from the range's start.
    pub block_bytes: u32,
    /// Percentage of reads among reads and writes.
    pub read_percent: u8,
    /// Order of offsets.
    pub pattern: Pattern,
    /// Start of the range.
    pub offset_bytes: u64,
    /// Length of the range. `None` means to the end of the disk.
    pub length_bytes: Option<u64>,
    /// The end of the run.
    pub stop: Stop,
    /// The time before anything is counted.
    pub warmup: Duration,
    /// A queue flushes after this many writes; `None` for no flushes.
    pub flush_every: Option<u32>,
    /// Whether writes must be durable before they complete.
    pub fua: bool,
    /// Whether and how to check the data of reads.
    pub verify: Option<Verify>,
    /// Reads look at the bytes in place, and writes build theirs in space of the disk ([`block::Disk::map_read`],
    /// [`block::Disk::map_write`]). Where the disk provides no map, requests are used.
    pub maps: bool,
    /// Make the bytes of each write, and look at those of each read, as a program does that uses the disk: in the
    /// requests' buffers, or in maps. Not together with `verify`, which touches all bytes anyway.
    pub touch: bool,
    /// The server's processes, whose CPU time is reported.
    pub server_pids: Vec<u32>,
    /// Record latency over time, in pieces of this length. It takes eight bytes a request.
    pub moments: Option<Duration>,
    /// How long requests in flight may take after the end. Then they are given up.
    pub drain_timeout: Duration,
}

impl Default for BenchSpec {
    fn default() -> Self {
        Self {
            queue_depth: 32,
            queues: 1,
            block_bytes: 4096,
            read_percent: 100,
            pattern: Pattern::Random { seed: 1 },
            offset_bytes: 0,
            length_bytes: None,
            stop: Stop::Runtime(Duration::from_secs(5)),
            warmup: Duration::ZERO,
            flush_every: None,
            fua: false,
            verify: None,
            maps: false,
            touch: false,
            server_pids: Vec::new(),
            moments: None,
            drain_timeout: Duration::from_secs(60),
        }
    }
}

/// Allocates a buffer of this length; called on the reactor's thread.
pub type Alloc = Arc<dyn Fn(usize) -> Result<IoBuf> + Send + Sync>;

/// Reads named counters that only grow (kicks, system calls). The run reports their growth.
pub type Counters = Arc<dyn Fn() -> Vec<(&'static str, u64)> + Send + Sync>;

/// Reads how many harvests of the server's engines had each number of completions. The counts only grow.
pub type HarvestLengths = Arc<dyn Fn() -> Vec<u64> + Send + Sync>;

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// From 0 to 1.
    pub fraction: f64,
    /// Requests completed so far.
    pub requests: u64,
    /// Errors and mismatches so far.
    pub failures: u64,
}

/// Hooks of a caller into a run.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct Hooks<'a> {
    /// Allocates buffers, for example in memory shared with the server, so that nothing is copied. `None` for the run's
    /// own memory.
    pub alloc: Option<Alloc>,
    /// Counters to report.
    pub counters: Option<Counters>,
    /// Harvests of the server to report.
    pub harvests: Option<HarvestLengths>,
    /// Called a few times a second on the caller's thread.
    pub progress: Option<&'a dyn Fn(Progress)>,
    /// Set to end the run early.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Hooks<'_> {
    /// Changes some of the hooks: `Hooks::default().with(|hooks| hooks.cancel = Some(flag))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// The most blocks that a verified run tracks (12 bytes each).
const MAX_TRACKED_BLOCKS: u64 = 1 << 26;
/// The most bytes of a queue's buffers.
const MAX_BUFFERS_BYTES: u64 = 4 << 30;

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

/// Buffers in shared memory take whole pages.
const PAGE_BYTES: usize = 4096;

impl BenchSpec {
    /// Changes some of the options: `BenchSpec::default().with(|spec| spec.queue_depth = 4)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Returns how many bytes of shared memory a run needs for the buffers of all its queues.
    pub fn buffers_bytes(&self) -> usize {
        let buffer = (self.block_bytes as usize).next_multiple_of(PAGE_BYTES);
        buffer.saturating_mul(self.queue_depth as usize).saturating_mul(self.queues as usize)
    }

    /// Checks the workload against the disk and the number of reactors. Returns the range.
    pub(crate) fn check(&self, disk: &DiskInfo, reactors: usize) -> Result<Range> {
        let block = u64::from(self.block_bytes);
        let logical = u64::from(disk.logical_block_bytes.max(512));
        if block == 0 || !block.is_multiple_of(logical) || !self.offset_bytes.is_multiple_of(logical) {
            return Err(bad(format!(
                "block size {block} and offset {} must be multiples of the disk's block of {logical} bytes",
                self.offset_bytes
            )));
        }
        if self.touch && self.verify.is_some() {
            return Err(bad("a run that verifies makes its bytes in its own way"));
        }
        if self.maps && self.fua {
            return Err(bad(
                "what is committed by a map is made durable by a flush: it cannot be asked for with the map",
            ));
        }
        if self.queue_depth == 0 || u64::from(self.queue_depth) * block > MAX_BUFFERS_BYTES {
            return Err(bad(format!(
                "depth {} with blocks of {block} bytes: the depth must be at least 1, and depth x block at most {} MiB",
                self.queue_depth,
                MAX_BUFFERS_BYTES >> 20
            )));
        }
        if self.queues == 0 || self.queues as usize > reactors {
            return Err(bad(format!("{} queues need as many reactors; there are {reactors}", self.queues)));
        }
        if self.read_percent > 100 {
            return Err(bad(format!("a read share of {} percent is more than all", self.read_percent)));
        }
        if disk.read_only && self.read_percent < 100 {
            return Err(bad("the disk is read-only: only reads (100 percent) can be measured"));
        }
        if self.stop == Stop::OnePass && self.pattern != Pattern::Sequential {
            return Err(bad("one pass over the range needs the sequential pattern"));
        }
        if self.stop == Stop::OnePass && !self.warmup.is_zero() {
            return Err(bad("one pass over the range leaves nothing to warm up with"));
        }
        self.check_range(disk, logical)
    }

    fn check_range(&self, disk: &DiskInfo, logical: u64) -> Result<Range> {
        let room = disk.size_bytes.saturating_sub(self.offset_bytes);
        let length = self.length_bytes.unwrap_or(room);
        let length_bytes = length - length % logical;
        let least = u64::from(self.block_bytes) * u64::from(self.queues);
        if length > room || length_bytes < least {
            return Err(bad(format!(
                "the range {}+{length} must lie in the disk of {} bytes and hold a block for each queue ({least} bytes)",
                self.offset_bytes, disk.size_bytes
            )));
        }
        let mut range = Range { offset_bytes: self.offset_bytes, length_bytes, block_bytes: self.block_bytes };
        if self.stop != Stop::OnePass {
            // Without walking the whole range, a short last block is not used.
            range.length_bytes -= length_bytes % u64::from(self.block_bytes);
        }
        if let Some(verify) = &self.verify {
            self.check_verify(verify, &mut range)?;
        }
        Ok(range)
    }

    fn check_verify(&self, verify: &Verify, range: &mut Range) -> Result<()> {
        if range.blocks() > MAX_TRACKED_BLOCKS {
            return Err(bad(format!(
                "a verified range of {} blocks is too long: at most {MAX_TRACKED_BLOCKS}; give a shorter length",
                range.blocks()
            )));
        }
        if let Initial::State(state) = &verify.initial
            && (!state.fits(range) || state.seed() != verify.seed)
        {
            return Err(bad("the state of the earlier run is of another range, block size or seed"));
        }
        let part = range.blocks() / u64::from(self.queues);
        if part <= u64::from(self.queue_depth) {
            return Err(bad(format!(
                "a verified run needs more blocks a queue ({part}) than requests in flight ({})",
                self.queue_depth
            )));
        }
        Ok(())
    }
}
