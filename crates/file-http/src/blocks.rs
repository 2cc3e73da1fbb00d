//! Blocks of the file: in memory, being fetched, and those that a sequential reader will want next.

use crate::answer::Pin;
use crate::cache::{BLOCK_BYTES, Cache};
use crate::remote::Remote;
use bytes::Bytes;
use memory::to_usize;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// Blocks of one request.
const RUN_BLOCKS_MAX: u64 = 16;
/// The most blocks in memory beside those that readers hold.
const MEMORY_BLOCKS_MAX: usize = 512;
/// The most bytes that reads of one file hold at once. Other reads wait.
const READING_BYTES_MAX: usize = 64 << 20;
/// The most sequential readers that are followed.
const STREAMS_MAX: usize = 8;
/// The first step of read-ahead.
const AHEAD_BYTES_MIN: u64 = 256 << 10;

type Found = Option<Result<Bytes, ()>>;

#[derive(Debug)]
enum Slot {
    Ready { bytes: Bytes, used: u64 },
    Coming(watch::Receiver<Found>),
}

/// A reader that may go on where it stopped.
#[derive(Debug, Default, Clone, Copy)]
struct Stream {
    next: u64,
    ahead_bytes: u64,
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    slots: HashMap<u64, Slot>,
    /// Blocks in memory by their last use.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    streams: [Stream; STREAMS_MAX],
}

#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) remote: Remote,
    pub(crate) pin: Pin,
    pub(crate) cache: Option<Arc<Cache>>,
    runtime: Handle,
    state: Mutex<State>,
    reading: Semaphore,
}

/// Pieces of a range, and the permit for their bytes.
pub(crate) type Held<'a> = (Vec<Bytes>, SemaphorePermit<'a>);

/// A block for a reader.
enum Wanted {
    Here(Bytes),
    Coming(watch::Receiver<Found>),
}

/// A block that is being fetched, and the channel to its readers.
type Coming = (u64, watch::Sender<Found>);

impl State {
    /// Finds a block that is in memory or being fetched.
    fn find(&mut self, block: u64) -> Option<Wanted> {
        let use_now = self.uses;
        match self.slots.get_mut(&block)? {
            Slot::Ready { bytes, used } => {
                let bytes = bytes.clone();
                self.by_use.remove(used);
                *used = use_now;
                self.by_use.insert(use_now, block);
                self.uses = use_now.saturating_add(1);
                Some(Wanted::Here(bytes))
            }
            // If the task ended without a result, the block is fetched again.
            Slot::Coming(receiver) if receiver.has_changed().is_err() && receiver.borrow().is_none() => None,
            Slot::Coming(receiver) => Some(Wanted::Coming(receiver.clone())),
        }
    }

    fn begin(&mut self, block: u64) -> (watch::Sender<Found>, watch::Receiver<Found>) {
        let (sender, receiver) = watch::channel(None);
        self.slots.insert(block, Slot::Coming(receiver.clone()));
        (sender, receiver)
    }

    fn end(&mut self, block: u64, found: &Result<Bytes, ()>) {
        let used = self.uses;
        self.uses = used.saturating_add(1);
        match found {
            Ok(bytes) => {
                self.slots.insert(block, Slot::Ready { bytes: bytes.clone(), used });
                self.by_use.insert(used, block);
            }
            Err(()) => drop(self.slots.remove(&block)),
        }
        while self.by_use.len() > MEMORY_BLOCKS_MAX
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.slots.remove(&oldest);
        }
    }

    /// Returns how many bytes to read ahead of this read, if its reader reads in order.
    fn ahead(&mut self, range: &Range<u64>, most: u64) -> u64 {
        let used = self.uses;
        self.uses = used.saturating_add(1);
        let follows = |stream: &&mut Stream| {
            let slack = stream.next.saturating_sub(AHEAD_BYTES_MIN)..=stream.next.saturating_add(AHEAD_BYTES_MIN);
            stream.next != 0 && slack.contains(&range.start)
        };
        if let Some(stream) = self.streams.iter_mut().find(follows) {
            let ahead =
                stream.ahead_bytes.saturating_mul(2).clamp(AHEAD_BYTES_MIN, most.max(AHEAD_BYTES_MIN)).min(most);
            *stream = Stream { next: stream.next.max(range.end), ahead_bytes: ahead, used };
            return ahead;
        }
        if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
            *oldest = Stream { next: range.end, ahead_bytes: 0, used };
        }
        0
    }
}

impl Blocks {
    pub(crate) fn new(remote: Remote, pin: Pin, cache: Option<Cache>, runtime: Handle) -> Self {
        Self {
            remote,
            pin,
            cache: cache.map(Arc::new),
            runtime,
            state: Mutex::default(),
            reading: Semaphore::new(READING_BYTES_MAX),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let end = blocks.end.saturating_mul(BLOCK_BYTES).min(self.pin.length_bytes);
        blocks.start.saturating_mul(BLOCK_BYTES).min(end)..end
    }

    /// Reads a range of the file as pieces. They count against the limit until they are dropped.
    pub(crate) async fn read(self: &Arc<Self>, range: Range<u64>) -> Result<Held<'_>, ()> {
        let length = range.end.saturating_sub(range.start).min(READING_BYTES_MAX as u64);
        let share = self.reading.acquire_many(u32::try_from(length).unwrap_or(u32::MAX)).await.map_err(drop)?;
        let mut pieces = Vec::new();
        for (block, wanted) in self.want(&range) {
            let bytes = match wanted {
                Wanted::Here(bytes) => bytes,
                Wanted::Coming(mut receiver) => {
                    let found = receiver.wait_for(Option::is_some).await.map_err(drop)?;
                    found.clone().unwrap_or(Err(()))?
                }
            };
            let start = block.saturating_mul(BLOCK_BYTES);
            let within = |at: u64| to_usize(at.saturating_sub(start)).min(bytes.len());
            pieces.push(bytes.slice(within(range.start)..within(range.end)));
        }
        Ok((pieces, share))
    }

    /// Finds all blocks of a range. Begins to fetch the missing ones, and those to be read ahead.
    fn want(self: &Arc<Self>, range: &Range<u64>) -> Vec<(u64, Wanted)> {
        let blocks = range.start.checked_div(BLOCK_BYTES).unwrap_or(0)..range.end.div_ceil(BLOCK_BYTES);
        let (mut wanted, mut missing) = (Vec::new(), Vec::new());
        let mut state = self.state();
        for block in blocks.clone() {
            let found = state.find(block).unwrap_or_else(|| {
                let (sender, receiver) = state.begin(block);
                missing.push((block, sender));
                Wanted::Coming(receiver)
            });
            wanted.push((block, found));
        }
        let ahead = state.ahead(range, self.remote.url().options.read_ahead_bytes).div_ceil(BLOCK_BYTES);
        let last = self.pin.length_bytes.div_ceil(BLOCK_BYTES);
        // Reads ahead in large steps: only when less than half of it is left.
        let half = blocks.end.saturating_add(ahead.div_ceil(2)).min(last.saturating_sub(1));
        if ahead > 0 && (!missing.is_empty() || state.find(half).is_none()) {
            for block in blocks.end..blocks.end.saturating_add(ahead).min(last) {
                if state.find(block).is_none() {
                    missing.push((block, state.begin(block).0));
                }
            }
        }
        drop(state);
        for run in runs(missing) {
            self.runtime.spawn(Arc::clone(self).load(run));
        }
        wanted
    }

    /// Loads blocks from the cache, and those that it does not have from the server.
    async fn load(self: Arc<Self>, run: Vec<Coming>) {
        let Some(cache) = self.cache.clone() else { return self.fetch(run).await };
        let numbers: Vec<u64> = run.iter().map(|(block, _)| *block).collect();
        let kept = move || numbers.into_iter().map(|block| cache.read(block)).collect::<Vec<_>>();
        let kept = self.runtime.spawn_blocking(kept).await.unwrap_or_default();
        let mut missing = Vec::new();
        for ((block, sender), bytes) in run.into_iter().zip(kept) {
            match bytes {
                Some(bytes) => self.give(block, &sender, Ok(bytes)),
                None => missing.push((block, sender)),
            }
        }
        for run in runs(missing) {
            self.runtime.spawn(Arc::clone(&self).fetch(run));
        }
    }

    async fn fetch(self: Arc<Self>, run: Vec<Coming>) {
        let (Some((first, _)), count) = (run.first(), run.len() as u64) else { return };
        let first = *first;
        let range = self.bytes_of(&(first..first.saturating_add(count)));
        let bytes = self.remote.part(range, &self.pin).await;
        if let (Ok(bytes), Some(cache)) = (&bytes, self.cache.clone()) {
            let bytes = bytes.clone();
            let keep = move || cache.write(first, &bytes);
            // Kept before it is given to readers, so that the next process finds what this one has read.
            let _ = self.runtime.spawn_blocking(keep).await;
        }
        for (index, (block, sender)) in run.iter().enumerate() {
            let start = index.saturating_mul(BLOCK_BYTES as usize);
            let part = bytes.as_ref().ok().and_then(|bytes| {
                let end = start.saturating_add(BLOCK_BYTES as usize).min(bytes.len());
                // A copy, since a part of the longer answer would keep all of it.
                bytes.get(start..end).map(Bytes::copy_from_slice)
            });
            self.give(*block, sender, part.ok_or(()));
        }
    }

    fn give(&self, block: u64, sender: &watch::Sender<Found>, found: Result<Bytes, ()>) {
        self.state().end(block, &found);
        // Perhaps nobody waits any more.
        let _ = sender.send(Some(found));
    }
}

/// Groups neighbours into requests.
fn runs(missing: Vec<Coming>) -> Vec<Vec<Coming>> {
    let mut runs: Vec<Vec<Coming>> = Vec::new();
    for coming in missing {
        let next = |run: &Vec<Coming>| run.last().and_then(|(block, _)| block.checked_add(1));
        match runs.last_mut() {
            Some(run) if next(run) == Some(coming.0) && (run.len() as u64) < RUN_BLOCKS_MAX => run.push(coming),
            _ => runs.push(vec![coming]),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_ahead_grows_for_who_reads_in_order_and_not_for_others() {
        let mut state = State::default();
        let most = 1 << 20;
        let ahead: Vec<u64> = (0..6).map(|index| state.ahead(&(index << 16..(index + 1) << 16), most) >> 10).collect();
        assert_eq!(ahead, [0, 256, 512, 1024, 1024, 1024]);
        // Somebody else reads elsewhere, the first one goes on.
        assert_eq!(state.ahead(&(50 << 20..51 << 20), most), 0);
        assert_eq!(state.ahead(&(6 << 16..7 << 16), most), most);
        assert_eq!(state.ahead(&(90 << 20..91 << 20), most), 0);
        assert_eq!(state.ahead(&(7 << 16..8 << 16), 0), 0);
    }

    #[test]
    fn memory_keeps_what_was_used_last() {
        let mut state = State::default();
        for block in 0..MEMORY_BLOCKS_MAX as u64 + 3 {
            state.begin(block);
            state.end(block, &Ok(Bytes::new()));
            assert!(state.find(0).is_some());
        }
        assert!(state.find(1).is_none() && state.find(3).is_none() && state.find(4).is_some());
        assert_eq!((state.slots.len(), state.by_use.len()), (MEMORY_BLOCKS_MAX, MEMORY_BLOCKS_MAX));
        state.begin(9000);
        assert!(state.find(9000).is_none(), "its task is gone");
        let kept = state.begin(9001);
        assert!(state.find(9001).is_some());
        state.end(9001, &Err(()));
        assert!(state.find(9001).is_none());
        drop(kept);
    }
}
