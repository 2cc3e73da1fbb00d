//! Blocks on the local disk: a sparse file with the blocks, and an index with a checksum for each.
//!
//! A process compares every block with its checksum when it first reads it. So nothing is flushed: a block that a crash
//! has damaged counts as missing and is fetched again. All processes that fill a block write the same bytes, so they
//! need a lock only to create and remove files.

use crate::answer::{Pin, Version, is_weak};
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use memory::to_usize;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// What is asked for is whole blocks.
pub(crate) const BLOCK_BYTES: u64 = 64 << 10;
/// Before the sums.
const HEADER_BYTES: usize = 4096;
const SUM_BYTES: u64 = 8;
const MAGIC: &str = "ringdisk http cache, version 1";
/// The most room that a process takes at once.
const SHARE_BYTES_MAX: u64 = 16 << 20;
const DATA: &str = "data";
const INDEX: &str = "index";

#[derive(Debug)]
pub(crate) struct Cache {
    directory: PathBuf,
    limit_bytes: u64,
    data: File,
    index: File,
    length_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A bit for each block whose checksum was found right.
    checked: Vec<u64>,
    /// Bytes that may be filled before the directory is looked at again.
    share_bytes: u64,
    /// The log already says that nothing more is kept.
    is_full: bool,
}

/// A lock of the directory, held while files are created and removed.
struct Locked(#[allow(dead_code, reason = "unlocks when it is closed")] File);

fn failed(path: &Path, error: impl Into<io::Error>) -> Error {
    Error::io(format!("cache '{}'", path.display()), error.into())
}

fn open_private(path: &Path, create: bool) -> io::Result<File> {
    // Other users may not read what a server gave to this one.
    OpenOptions::new().read(true).write(true).create(create).mode(0o600).open(path)
}

fn lock(directory: &Path) -> Result<Locked> {
    let path = directory.join("lock");
    let file = open_private(&path, true).map_err(|error| failed(&path, error))?;
    flock(&file, FlockOperation::LockExclusive).map_err(|error| failed(&path, error))?;
    Ok(Locked(file))
}

fn paths(directory: &Path, key: &str) -> [PathBuf; 2] {
    let name = format!("{:032x}", xxh3_128(key.as_bytes()));
    [DATA, INDEX].map(|kind| directory.join(format!("{name}.{kind}")))
}

/// Returns the checksum of a block; never zero, which marks a missing block.
fn sum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes).max(1)
}

impl Cache {
    /// Opens the blocks kept earlier; also returns which file they are of.
    pub(crate) fn find(directory: &Path, limit_bytes: u64, key: &str) -> Result<Option<(Self, Pin)>> {
        std::fs::create_dir_all(directory).map_err(|error| failed(directory, error))?;
        let _locked = lock(directory)?;
        Self::find_locked(directory, limit_bytes, key)
    }

    fn find_locked(directory: &Path, limit_bytes: u64, key: &str) -> Result<Option<(Self, Pin)>> {
        let [data_path, index_path] = paths(directory, key);
        let open = |path: &Path| match open_private(path, false) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(path, error)),
        };
        let (Some(data), Some(index)) = (open(&data_path)?, open(&index_path)?) else { return Ok(None) };
        // An unreadable header was damaged; the cache is made anew.
        let Some(pin) = read_header(&index, key) else { return Ok(None) };
        if data.metadata().map_err(|error| failed(&data_path, error))?.len() != pin.length_bytes {
            return Ok(None);
        }
        // Files are removed in the order of their last use.
        let _ = index.set_modified(SystemTime::now());
        let cache = Self::of(directory, limit_bytes, data, index, pin.length_bytes)?;
        Ok(Some((cache, pin)))
    }

    /// Creates the files for a cache, or opens those that another process has created meanwhile for the same file.
    pub(crate) fn create(directory: &Path, limit_bytes: u64, key: &str, pin: &Pin) -> Result<Self> {
        let _locked = lock(directory)?;
        if let Some((cache, found)) = Self::find_locked(directory, limit_bytes, key)?
            && found == *pin
        {
            return Ok(cache);
        }
        let [data_path, index_path] = paths(directory, key);
        // Processes that still read the old files keep them open.
        for path in [&index_path, &data_path] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(path, error)),
                _ => {}
            }
        }
        let data = open_private(&data_path, true).map_err(|error| failed(&data_path, error))?;
        data.set_len(pin.length_bytes).map_err(|error| failed(&data_path, error))?;
        let index = open_private(&index_path, true).map_err(|error| failed(&index_path, error))?;
        index.write_all_at(&header(key, pin), 0).map_err(|error| failed(&index_path, error))?;
        Self::of(directory, limit_bytes, data, index, pin.length_bytes)
    }

    fn of(directory: &Path, limit_bytes: u64, data: File, index: File, length_bytes: u64) -> Result<Self> {
        // Locked files are not removed.
        flock(&data, FlockOperation::LockShared).map_err(|error| failed(directory, error))?;
        let words = to_usize(length_bytes.div_ceil(BLOCK_BYTES).div_ceil(64));
        let mut checked = Vec::new();
        let room = checked.try_reserve_exact(words);
        room.map_err(|error| failed(directory, io::Error::new(io::ErrorKind::OutOfMemory, error)))?;
        checked.resize(words, 0);
        let state = Mutex::new(State { checked, ..State::default() });
        Ok(Self { directory: directory.to_owned(), limit_bytes, data, index, length_bytes, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a block, if it is there and its checksum is right.
    pub(crate) fn read(&self, block: u64) -> Option<Bytes> {
        let is_checked = self.state().is_checked(block);
        let mut own = [0; SUM_BYTES as usize];
        if !is_checked {
            self.index.read_exact_at(&mut own, place_of_sum(block)).ok()?;
            if own == [0; SUM_BYTES as usize] {
                return None;
            }
        }
        let start = block.checked_mul(BLOCK_BYTES)?;
        let length = self.length_bytes.checked_sub(start)?.min(BLOCK_BYTES);
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        self.data.read_exact_at(&mut bytes, start).ok()?;
        if !is_checked {
            if sum(&bytes) != u64::from_le_bytes(own) {
                return None;
            }
            self.state().check(block);
        }
        Some(bytes.into())
    }

    /// Keeps blocks from `first` on, if there is room.
    pub(crate) fn write(&self, first: u64, bytes: &Bytes) {
        let mut state = self.state();
        if state.share_bytes < bytes.len() as u64 {
            match self.take_share() {
                Ok(0) => {
                    if !std::mem::replace(&mut state.is_full, true) {
                        let directory = self.directory.display();
                        tracing::warn!("cache '{directory}' is full of files in use: more of them is not kept");
                    }
                    return;
                }
                Ok(share_bytes) => (state.share_bytes, state.is_full) = (share_bytes, false),
                Err(error) => return self.give_up(&mut state, &error),
            }
        }
        state.share_bytes = state.share_bytes.saturating_sub(bytes.len() as u64);
        drop(state);
        if let Err(error) = self.store(first, bytes) {
            self.give_up(&mut self.state(), &Error::io("a block cannot be kept", error));
        }
    }

    fn give_up(&self, state: &mut State, error: &Error) {
        if !std::mem::replace(&mut state.is_full, true) {
            tracing::warn!("cache '{}': {error}", self.directory.display());
        }
    }

    fn store(&self, first: u64, bytes: &Bytes) -> io::Result<()> {
        self.data.write_all_at(bytes, first.saturating_mul(BLOCK_BYTES))?;
        let sums = bytes.chunks(BLOCK_BYTES as usize).flat_map(|block| sum(block).to_le_bytes());
        self.index.write_all_at(&sums.collect::<Vec<u8>>(), place_of_sum(first))
    }

    /// Takes room for the next blocks, in bytes: zero if there is none. Unused files are removed for it.
    fn take_share(&self) -> Result<u64> {
        let share_bytes = SHARE_BYTES_MAX.min(self.limit_bytes.checked_div(4).unwrap_or(0));
        let _locked = lock(&self.directory)?;
        let mut entries = entries(&self.directory).map_err(|error| failed(&self.directory, error))?;
        let mut held = entries.iter().fold(0_u64, |sum, entry| sum.saturating_add(entry.held_bytes));
        entries.sort_by_key(|entry| entry.used);
        for entry in entries {
            if held.saturating_add(share_bytes) <= self.limit_bytes {
                return Ok(share_bytes);
            }
            if entry.remove_unused() {
                held = held.saturating_sub(entry.held_bytes);
            }
        }
        Ok(if held.saturating_add(share_bytes) <= self.limit_bytes { share_bytes } else { 0 })
    }
}

impl State {
    fn place(block: u64) -> (usize, u64) {
        let word = to_usize(block.checked_div(64).unwrap_or(0));
        (word, 1 << (block & 63))
    }

    fn is_checked(&self, block: u64) -> bool {
        let (word, bit) = Self::place(block);
        self.checked.get(word).is_some_and(|word| word & bit != 0)
    }

    fn check(&mut self, block: u64) {
        let (word, bit) = Self::place(block);
        if let Some(word) = self.checked.get_mut(word) {
            *word |= bit;
        }
    }
}

/// The two files of one address.
struct Entry {
    data: PathBuf,
    index: PathBuf,
    used: SystemTime,
    held_bytes: u64,
}

impl Entry {
    fn remove_unused(&self) -> bool {
        let is_unused = match open_private(&self.data, false) {
            Ok(data) => flock(&data, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        // The index is removed first: without its data it would be wrong.
        is_unused && std::fs::remove_file(&self.index).is_ok() && std::fs::remove_file(&self.data).is_ok()
    }
}

fn entries(directory: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for found in std::fs::read_dir(directory)? {
        let data = found?.path();
        if data.extension().is_none_or(|kind| kind != DATA) {
            continue;
        }
        let index = data.with_extension(INDEX);
        let Ok(meta) = data.metadata() else { continue };
        let index_meta = index.metadata().ok();
        let blocks = index_meta.as_ref().map_or(0, |meta| meta.blocks()).saturating_add(meta.blocks());
        let used = index_meta.and_then(|meta| meta.modified().ok()).unwrap_or(SystemTime::UNIX_EPOCH);
        // `blocks` counts units of 512 bytes, whatever the file system's block size is.
        entries.push(Entry { data, index, used, held_bytes: blocks.saturating_mul(512) });
    }
    Ok(entries)
}

fn place_of_sum(block: u64) -> u64 {
    block.saturating_mul(SUM_BYTES).saturating_add(HEADER_BYTES as u64)
}

/// Returns the header, in lines that people can read, too. Its last line is a checksum of the others. The address
/// appears only as a hash, as it may hold secrets.
fn header(key: &str, pin: &Pin) -> Vec<u8> {
    let (length, version) = (pin.length_bytes, &pin.version);
    let address = xxh3_128(key.as_bytes());
    let mut text =
        format!("{MAGIC}\naddress {address:032x}\nblock {BLOCK_BYTES}\nlength {length}\nversion {version}\n");
    text += &format!("sum {:016x}\n", xxh3_64(text.as_bytes()));
    let mut bytes = text.into_bytes();
    bytes.resize(HEADER_BYTES, 0);
    bytes
}

fn read_header(index: &File, key: &str) -> Option<Pin> {
    let mut bytes = [0; HEADER_BYTES];
    index.read_exact_at(&mut bytes, 0).ok()?;
    let text = std::str::from_utf8(&bytes).ok()?;
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let version = match value("version")?.split_once(' ')? {
        // An older version kept files with weak tags.
        ("tag", tag) if is_weak(tag) => return None,
        ("tag", tag) => Version::Tag(tag.to_owned()),
        ("date", date) => Version::Date(date.to_owned()),
        _ => return None,
    };
    let pin = Pin { length_bytes: value("length")?.parse().ok()?, version };
    // A header counts only if it is exactly what would be written for this file.
    (header(key, &pin) == bytes).then_some(pin)
}

/// Refuses to keep a file whose version is unknown: a change would not be noticed.
pub(crate) fn check_version(pin: &Pin) -> Result<()> {
    match pin.version {
        Version::Unknown => Err(Error::new(
            ErrorKind::Unsupported,
            "the server names neither an entity tag nor a date, so the file cannot be cached: leave cache= out",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 64 << 20;

    fn pin(tag: &str) -> Pin {
        Pin { length_bytes: (BLOCK_BYTES * 3) + 100, version: Version::Tag(tag.into()) }
    }

    fn block(number: u8) -> Bytes {
        vec![number; BLOCK_BYTES as usize].into()
    }

    #[test]
    fn blocks_are_found_again_and_damaged_ones_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert!(Cache::find(path, LIMIT, "a").unwrap().is_none());
        let cache = Cache::create(path, LIMIT, "a", &pin("1")).unwrap();
        assert!(cache.read(0).is_none());
        cache.write(1, &[block(1), block(2)].concat().into());
        cache.write(3, &vec![3; 100].into());
        drop(cache);
        let (cache, found) = Cache::find(path, LIMIT, "a").unwrap().unwrap();
        assert_eq!(found, pin("1"));
        assert_eq!(
            [0, 1, 2, 3, 4].map(|at| cache.read(at).map(|bytes| bytes.len())),
            [None, Some(65536), Some(65536), Some(100), None]
        );
        assert!(cache.read(2).unwrap() == block(2));
        // A crash has kept the sum and lost the data.
        let (cache, _) = Cache::find(path, LIMIT, "a").unwrap().unwrap();
        let [data, index] = paths(path, "a");
        open_private(&data, false).unwrap().write_all_at(&[0; 4096], BLOCK_BYTES + 8192).unwrap();
        assert!(cache.read(1).is_none() && cache.read(2).is_some());
        cache.write(1, &block(1));
        assert!(cache.read(1).unwrap() == block(1));
        // A damaged head is none; another version begins anew.
        assert!(Cache::find(path, LIMIT, "b").unwrap().is_none());
        open_private(&index, false).unwrap().write_all_at(b"X", 100).unwrap();
        assert!(Cache::find(path, LIMIT, "a").unwrap().is_none());
        let anew = Cache::create(path, LIMIT, "a", &pin("2")).unwrap();
        assert!(anew.read(1).is_none());
        assert!(cache.read(1).is_some(), "whoever reads the old one keeps it");
    }

    #[test]
    fn a_full_cache_gives_up_what_nobody_uses_and_then_keeps_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let (path, limit) = (directory.path(), 16 * BLOCK_BYTES);
        let large = Pin { length_bytes: BLOCK_BYTES * 64, version: Version::Date("x".into()) };
        let fill = |cache: &Cache| (0..64).for_each(|at| cache.write(at, &block(at as u8 + 1)));
        let kept = |cache: &Cache| (0..64).filter(|at| cache.read(*at).is_some()).count();
        let first = Cache::create(path, limit, "first", &large).unwrap();
        fill(&first);
        let held = kept(&first);
        assert!((8..=16).contains(&held), "{held}");
        // The first one is in use, then it is not.
        let second = Cache::create(path, limit, "second", &large).unwrap();
        fill(&second);
        assert_eq!((kept(&first), kept(&second)), (held, 0));
        drop(first);
        fill(&second);
        assert!(Cache::find(path, limit, "first").unwrap().is_none());
        assert!((8..=16).contains(&kept(&second)));
    }
}
