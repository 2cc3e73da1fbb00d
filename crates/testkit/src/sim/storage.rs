//! The storage of a simulated host: named files, a log of their events, and power cuts.

use super::fault::{Fault, FaultAction, OpKind};
use super::state::{Effect, End, FileState, OpId};
use crate::dice::{Dice, mix};
use block::{FileInfo, FileOp, Locks};
use memory::BufferAccount;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The behaviour of a simulated file. The default promises as little as a useful file on Linux does. It grows, it
/// punches holes that read as zeros, and added space has no defined contents.
#[derive(Debug, Clone)]
pub struct SimFileOptions {
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether discard works.
    pub can_discard: bool,
    /// Whether discarded ranges read as zeros. If not, each sector keeps its contents, or becomes zeros or garbage.
    pub discard_zeroes: bool,
    /// Whether the file reports that zeroing is cheap.
    pub fast_zeroes: bool,
    /// Whether it is a device, which never changes its length.
    pub block_device: bool,
    /// Whether added space reads as zeros, as on a well-behaved file system without a crash.
    pub grows_with_zeros: bool,
    /// Growing beyond this length fails with no space.
    pub max_length_bytes: u64,
    /// The direct-I/O alignment that the file reports. It serves any alignment.
    pub alignment_bytes: u32,
    /// The locks that the file reports.
    pub locks: Locks,
    /// The account of buffer memory that requests use.
    pub buffers: BufferAccount,
}

impl Default for SimFileOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            can_discard: true,
            discard_zeroes: true,
            fast_zeroes: true,
            block_device: false,
            grows_with_zeros: false,
            max_length_bytes: 1 << 40,
            alignment_bytes: 1,
            locks: Locks::Held,
            buffers: BufferAccount::default(),
        }
    }
}

/// Operations of the process after one that was killed have numbers from here on.
const FIRST_OP_AFTER_KILL: OpId = 1 << 32;

/// An entry of the log.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Push { op: OpId, file: usize, effect: Effect },
    Apply { op: OpId, file: usize, from: u64, to: u64, bytes: Option<Arc<[u8]>> },
    Complete { op: OpId, file: usize, end: End },
}

#[derive(Debug, Clone)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) options: SimFileOptions,
    pub(crate) state: FileState,
    pub(crate) faults: Vec<Fault>,
    pub(crate) pushed: [u64; OpKind::ALL.len()],
    pub(crate) written_bytes: u64,
}

pub(crate) struct Storage {
    pub(crate) files: Vec<FileEntry>,
    next_op: OpId,
    /// The storage's clock: the number of events so far.
    events: u64,
    log: Option<Recording>,
    salt: u64,
    stalled_released: bool,
}

/// A log of everything that changed the storage since [`SimStorage::record`].
#[derive(Clone)]
pub struct Recording {
    files: Vec<FileEntry>,
    first_event: u64,
    events: Vec<Event>,
    salt: u64,
}

/// Simulated storage, shared by all users of its files.
#[derive(Clone)]
pub struct SimStorage {
    inner: Arc<Mutex<Storage>>,
}

impl fmt::Debug for SimStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimStorage")
    }
}

impl SimStorage {
    /// Makes storage without files. The seed decides the contents of undefined space.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::of_files(Vec::new(), seed, 0)
    }

    fn of_files(files: Vec<FileEntry>, salt: u64, events: u64) -> Self {
        let storage = Storage { files, next_op: 1, events, log: None, salt, stalled_released: false };
        Self { inner: Arc::new(Mutex::new(storage)) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Storage> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a durable file of zeros.
    pub fn create(&self, name: &str, length_bytes: u64, options: SimFileOptions) -> Arc<SimFile> {
        let mut storage = self.lock();
        let salt = mix(storage.salt, storage.files.len() as u64);
        let state = FileState::new(length_bytes, salt, options.grows_with_zeros);
        let entry = FileEntry {
            name: name.to_owned(),
            options,
            state,
            faults: Vec::new(),
            pushed: Default::default(),
            written_bytes: 0,
        };
        storage.files.push(entry);
        let index = storage.files.len() - 1;
        drop(storage);
        self.handle(index)
    }

    /// Makes a durable file with these contents.
    pub fn create_with(&self, name: &str, bytes: &[u8], options: SimFileOptions) -> Arc<SimFile> {
        let file = self.create(name, bytes.len() as u64, options);
        self.lock().files[file.index].state.load(0, bytes);
        file
    }

    /// Returns the file of this name.
    #[must_use]
    pub fn file(&self, name: &str) -> Option<Arc<SimFile>> {
        let index = self.lock().files.iter().position(|file| file.name == name)?;
        Some(self.handle(index))
    }

    fn handle(&self, index: usize) -> Arc<SimFile> {
        let storage = self.lock();
        let entry = &storage.files[index];
        let options = &entry.options;
        let info = FileInfo {
            name: entry.name.clone(),
            length_bytes: entry.state.length(),
            read_only: options.read_only,
            offset_alignment_bytes: options.alignment_bytes,
            memory_alignment_bytes: options.alignment_bytes,
            can_discard: options.can_discard,
            discard_zeroes: options.can_discard && options.discard_zeroes,
            fast_zeroes: options.fast_zeroes,
            block_device: options.block_device,
            can_grow: !options.block_device,
            locks: options.locks,
            in_memory: false,
            engine: "simulated".to_owned(),
        };
        let buffers = options.buffers.clone();
        Arc::new(SimFile { storage: self.clone(), index, info, buffers })
    }

    /// Returns the whole contents of a file, as reads see them.
    ///
    /// # Panics
    /// If there is no such file.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        let storage = self.lock();
        let Some(entry) = storage.files.iter().find(|file| file.name == name) else { panic!("no file '{name}'") };
        let mut bytes = vec![0; entry.state.length() as usize];
        entry.state.read(0, &mut bytes);
        bytes
    }

    /// Injects a fault into a file.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn inject(&self, name: &str, fault: Fault) {
        let mut storage = self.lock();
        let Some(entry) = storage.files.iter_mut().find(|file| file.name == name) else { panic!("no file '{name}'") };
        entry.faults.push(fault);
    }

    /// Removes all faults. Stalled operations go on.
    pub fn clear_faults(&self) {
        let mut storage = self.lock();
        storage.files.iter_mut().for_each(|file| file.faults.clear());
        storage.stalled_released = true;
    }

    /// Lets stalled operations go on.
    pub fn release_stalled(&self) {
        self.lock().stalled_released = true;
    }

    /// Returns how many operations of `kind` were pushed to a file so far.
    #[must_use]
    pub fn pushed(&self, name: &str, kind: OpKind) -> u64 {
        let storage = self.lock();
        storage.files.iter().find(|file| file.name == name).map_or(0, |file| file.pushed[kind as usize])
    }

    /// Returns how many bytes of data were pushed to a file so far.
    #[must_use]
    pub fn written_bytes(&self, name: &str) -> u64 {
        self.lock().files.iter().find(|file| file.name == name).map_or(0, |file| file.written_bytes)
    }

    /// Returns the storage's clock, which counts events (a push, a part applied, a completion) of everything but reads.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.lock().events
    }

    /// Returns the storage after a power cut now. The seed decides which writes are lost.
    #[must_use]
    pub fn power_cut(&self, seed: u64) -> Self {
        let storage = self.lock();
        cut_files(&storage.files, storage.salt, storage.events, seed, false)
    }

    /// Returns the storage after only the process died. Operations in flight happened, happened in part, or did not
    /// happen.
    #[must_use]
    pub fn process_killed(&self, seed: u64) -> Self {
        let storage = self.lock();
        cut_files(&storage.files, storage.salt, storage.events, seed, true)
    }

    /// As [`SimStorage::process_killed`], but what was not flushed is as volatile as before: a later power cut may lose it.
    #[must_use]
    pub fn left_by_killed(&self, seed: u64) -> Self {
        let storage = self.lock();
        files_left_by_killed(&storage.files, storage.salt, storage.events, seed)
    }

    /// Starts a log. Nothing may be in flight.
    pub fn record(&self) {
        let mut storage = self.lock();
        let recording = Recording {
            files: storage.files.clone(),
            first_event: storage.events,
            events: Vec::new(),
            salt: storage.salt,
        };
        storage.log = Some(recording);
    }

    /// Ends the log that [`SimStorage::record`] started, and returns it.
    ///
    /// # Panics
    /// If none was started.
    #[must_use]
    pub fn take_recording(&self) -> Recording {
        match self.lock().log.take() {
            Some(recording) => recording,
            None => panic!("no recording was started"),
        }
    }
}

fn cut_files(files: &[FileEntry], salt: u64, events: u64, seed: u64, keep_applied: bool) -> SimStorage {
    let mut dice = Dice::new(mix(seed, events));
    let after = files.iter().map(|file| FileEntry {
        state: file.state.cut(&mut dice, keep_applied),
        faults: Vec::new(),
        ..file.clone()
    });
    SimStorage::of_files(after.collect(), salt, 0)
}

fn files_left_by_killed(files: &[FileEntry], salt: u64, events: u64, seed: u64) -> SimStorage {
    let mut dice = Dice::new(mix(seed, events));
    let after = files.iter().map(|file| FileEntry {
        state: file.state.left_by_killed(&mut dice, events),
        faults: Vec::new(),
        ..file.clone()
    });
    let storage = SimStorage::of_files(after.collect(), salt, events + 1);
    // What is volatile has numbers of the former process.
    storage.lock().next_op = FIRST_OP_AFTER_KILL;
    storage
}

impl Storage {
    pub(crate) fn new_op(&mut self) -> OpId {
        self.next_op += 1;
        self.next_op
    }

    pub(crate) fn stalled_released(&self) -> bool {
        self.stalled_released
    }

    /// Returns the fault that hits this operation, if any.
    pub(crate) fn fault(&mut self, file: usize, op: &FileOp) -> Option<FaultAction> {
        let (kind, entry) = (OpKind::of(op), &mut self.files[file]);
        entry.pushed[kind as usize] += 1;
        if let FileOp::Write { data, .. } = op {
            entry.written_bytes += data.length_bytes() as u64;
        }
        // Every fault counts this operation, even faults behind the one that hits.
        let mut hit = None;
        for fault in &mut entry.faults {
            if fault.hits(kind) && hit.is_none() {
                hit = Some(fault.action);
            }
        }
        if hit == Some(FaultAction::Stall) {
            self.stalled_released = false;
        }
        hit
    }

    pub(crate) fn happen(&mut self, event: Event) {
        self.events += 1;
        let now = self.events;
        carry_out(&mut self.files, &event, now);
        if let Some(log) = &mut self.log {
            log.events.push(event);
        }
    }
}

fn carry_out(files: &mut [FileEntry], event: &Event, now: u64) {
    match event {
        Event::Push { op, file, effect } => files[*file].state.push(*op, effect, now),
        Event::Apply { op, file, from, to, bytes } => files[*file].state.apply(*op, *from, *to, bytes.as_deref()),
        Event::Complete { op, file, end } => files[*file].state.complete(*op, *end, now),
    }
}

/// Walks a [`Recording`] from its start. The power can be cut at each step.
pub struct Replay {
    recording: Recording,
    at: usize,
}

impl Recording {
    /// Returns the number of events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether nothing happened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Makes a replay from the start.
    #[must_use]
    pub fn replay(self) -> Replay {
        Replay { recording: self, at: 0 }
    }
}

impl Replay {
    /// Goes on to the next write or flush boundary: the push or the completion of an operation that changes or flushes
    /// a file. Returns the storage's clock there; `None` at the end.
    pub fn advance(&mut self) -> Option<u64> {
        loop {
            let event = self.recording.events.get(self.at)?;
            self.at += 1;
            let now = self.now();
            carry_out(&mut self.recording.files, event, now);
            if !matches!(event, Event::Apply { .. }) {
                return Some(now);
            }
        }
    }

    /// Returns the storage's clock at this point of the recording.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.recording.first_event + self.at as u64
    }

    /// Returns the storage after a power cut here.
    #[must_use]
    pub fn power_cut(&self, seed: u64) -> SimStorage {
        cut_files(&self.recording.files, self.recording.salt, self.now(), seed, false)
    }

    /// Returns the storage after the process died here.
    #[must_use]
    pub fn process_killed(&self, seed: u64) -> SimStorage {
        cut_files(&self.recording.files, self.recording.salt, self.now(), seed, true)
    }

    /// As [`SimStorage::left_by_killed`], here.
    #[must_use]
    pub fn left_by_killed(&self, seed: u64) -> SimStorage {
        files_left_by_killed(&self.recording.files, self.recording.salt, self.now(), seed)
    }
}

/// A file of a [`SimStorage`].
pub struct SimFile {
    pub(super) storage: SimStorage,
    pub(super) index: usize,
    pub(super) info: FileInfo,
    pub(super) buffers: BufferAccount,
}

impl SimFile {
    /// Returns the storage of the file.
    #[must_use]
    pub fn storage(&self) -> &SimStorage {
        &self.storage
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn again(&self) -> Arc<Self> {
        let (storage, info, buffers) = (self.storage.clone(), self.info.clone(), self.buffers.clone());
        Arc::new(Self { storage, index: self.index, info, buffers })
    }
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimFile({})", self.info.name)
    }
}
