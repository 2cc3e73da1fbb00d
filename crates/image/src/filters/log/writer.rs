//! The thread that writes a log: a file's `write` can wait for storage, which a reactor must not.

use super::reader::LogReader;
use super::record::{LOG_SECTOR_BYTES, LogEntry, LoggedKind, superblock};
use block::{Completion, Error, ErrorKind, IoError, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most requests that are written before their ends are reported.
const BATCH: usize = 256;

const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// A request that has ended below, handed over by its queue.
pub(super) struct Ended {
    pub(super) entry: LogEntry,
    /// Empty if the data are zeros: the file stays sparse there.
    pub(super) data: Vec<u8>,
    pub(super) durable: bool,
    /// Whether a flush came before it.
    pub(super) preflush: bool,
    pub(super) completion: Completion,
    pub(super) queue: Arc<Told>,
}

/// Tells a queue of requests that are in the log.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) wake: OwnedFd,
    ends: Mutex<Vec<(Completion, usize)>>,
}

impl Told {
    pub(super) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        Ok(Self { wake, ends: Mutex::default() })
    }

    /// Takes the completions since the last call, each with the bytes that were held for it.
    pub(super) fn take(&self) -> Vec<(Completion, usize)> {
        std::mem::take(&mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn tell(&self, end: (Completion, usize)) {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).push(end);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// Starts the thread over `file`: a new file, or a log to be continued. The thread ends when the last sender is
/// dropped.
pub(super) fn start(file: File) -> Result<Sender<Ended>> {
    let failed = |error| Error::io("cannot look at the write log", error);
    let (entries, end) = match file.metadata().map_err(failed)?.len() {
        0 => (0, LOG_SECTOR_BYTES as u64),
        _ => end_of_log(file.try_clone().map_err(failed)?)?,
    };
    // Cuts off what an earlier daemon began and did not count.
    file.set_len(end).map_err(|error| Error::io("cannot set the length of the write log", error))?;
    let log = Log { file, entries, end, broken: false };
    log.write_superblock().map_err(|error| Error::io("cannot write the log", error))?;
    let (sender, receiver) = channel();
    std::thread::Builder::new()
        .name("write-log".to_owned())
        .spawn(move || log.run(&receiver))
        .map_err(|error| Error::io("cannot start the log's thread", error))?;
    Ok(sender)
}

fn end_of_log(file: File) -> Result<(u64, u64)> {
    let mut reader = LogReader::new(file)?;
    while let Some(request) = reader.next_entry()? {
        let _ = request;
    }
    Ok((reader.entries(), reader.end()))
}

struct Log {
    file: File,
    entries: u64,
    end: u64,
    /// Writing has failed: later entries would not follow on what is in the file.
    broken: bool,
}

impl Log {
    fn run(mut self, receiver: &Receiver<Ended>) {
        while let Ok(first) = receiver.recv() {
            let batch: Vec<Ended> = std::iter::once(first).chain(receiver.try_iter().take(BATCH)).collect();
            let written = if self.broken { Err(broken()) } else { self.write(&batch) };
            let result = written.map_err(|error| {
                if !std::mem::replace(&mut self.broken, true) {
                    tracing::error!("the write log cannot be written, so every write fails from now on: {error}");
                }
                IoError::from(error)
            });
            for Ended { data, completion, queue, .. } in batch {
                let result = completion.result.and(result);
                queue.tell((Completion { result, ..completion }, data.len()));
            }
        }
    }

    /// Writes the entries, then their number.
    fn write(&mut self, batch: &[Ended]) -> std::io::Result<()> {
        for Ended { entry, data, preflush, .. } in batch {
            if *preflush {
                self.append(LogEntry { offset: 0, length_bytes: 0, kind: LoggedKind::Flush }, &[])?;
            }
            self.append(*entry, data)?;
        }
        if self.file.metadata()?.len() < self.end {
            // The last data are zeros, which were left out.
            self.file.set_len(self.end)?;
        }
        self.write_superblock()?;
        match batch.iter().any(|ended| ended.durable || ended.entry.kind == LoggedKind::Flush) {
            true => self.file.sync_data(),
            false => Ok(()),
        }
    }

    fn append(&mut self, entry: LogEntry, data: &[u8]) -> std::io::Result<()> {
        self.file.write_all_at(&entry.to_bytes(), self.end)?;
        let data_at = self.end.saturating_add(LOG_SECTOR_BYTES as u64);
        self.file.write_all_at(data, data_at)?;
        self.end = data_at.saturating_add(entry.data_bytes());
        self.entries = self.entries.saturating_add(1);
        Ok(())
    }

    fn write_superblock(&self) -> std::io::Result<()> {
        self.file.write_all_at(&superblock(self.entries), 0)
    }
}

fn broken() -> std::io::Error {
    std::io::Error::from(std::io::ErrorKind::BrokenPipe)
}

/// Locks the file for this log alone. A thread that is ending may hold the lock for a moment longer.
pub(super) fn lock(file: &File) -> Result<()> {
    let since = Instant::now();
    while rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        if since.elapsed() > LOCK_PATIENCE {
            return Err(Error::new(ErrorKind::Locked, "the write log is in use: name another file"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
