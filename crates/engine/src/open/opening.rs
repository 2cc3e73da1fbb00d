//! Opening and making files.

use super::host_file::HostFile;
use super::probe::{self, Host};
use crate::base::call::survive_file_size_limit;
use crate::base::options::{CacheMode, EngineKind, OpenOptions};
use crate::file::alignment::Alignment;
use crate::file::device_facts;
use crate::file::extent_preload::ExtentPreload;
use crate::file::holes;
use crate::file::image_lock;
use crate::file::in_place::InPlace;
use crate::file::mapped::{MappedFile, host_has_swap};
use crate::file::open_file::{OpenFile, Storage, Traits};
use crate::file::rmw_lock::RmwLock;
use crate::file::storage::{self, Abilities};
use crate::file::write_behind::WriteBehind;
use block::{Error, ErrorKind, File, FileInfo, Locks, Result};
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Opens a regular file or block device, and locks it (see [`OpenOptions::lock`]).
pub fn open(path: &Path, options: &OpenOptions) -> Result<Arc<dyn File>> {
    open_as(path, &path.display().to_string(), options)
}

/// As [`open`]. Messages call the file `name`, which it is going to get.
pub fn open_as(path: &Path, name: &str, options: &OpenOptions) -> Result<Arc<dyn File>> {
    options.check()?;
    // The type is checked before opening: opening a named pipe waits for its other end, and opening some devices has
    // effects.
    let stat = rustix::fs::stat(path).map_err(|errno| cannot_open(name, errno, options))?;
    storage::check_type(&stat, name)?;
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let direct = if options.cache.is_direct() { OFlags::DIRECT } else { OFlags::empty() };
    let flags = OFlags::CLOEXEC | OFlags::NOCTTY | access | direct;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| cannot_open(name, errno, options))?;
    open_fd(fd, name, options)
}

fn cannot_open(name: &str, errno: Errno, options: &OpenOptions) -> Error {
    let may_read = matches!(errno, Errno::ACCESS | Errno::PERM | Errno::ROFS) && !options.read_only;
    let hint = match errno {
        _ if may_read => " for writing (change its permissions)",
        Errno::INVAL if options.cache.is_direct() => {
            " with direct I/O, which its file system does not have (take a cache mode that uses the page cache: writeback, \
             writethrough)"
        }
        _ => "",
    };
    let error = Error::io(format!("Could not open '{name}'{hint}"), errno.into());
    if may_read { error.only_for_writing() } else { error }
}

/// As [`open`], for an open descriptor with the access that `options` need. `name` stands for it in messages. Switches
/// `O_DIRECT` on or off as the cache mode says.
pub fn open_fd(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<Arc<dyn File>> {
    Ok(Arc::new(HostFile::new(open_file(fd, name, options)?)))
}

pub(crate) fn open_file(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<OpenFile> {
    options.check()?;
    survive_file_size_limit();
    let facts = Facts::find_out(&fd, name, options)?;
    let Facts { block_device, page_cached, in_memory, .. } = facts;
    let mapped = in_memory.then(|| MappedFile::new(&fd, facts.length_bytes, !options.read_only)).flatten();
    let device = block_device.then(|| device_facts::directory(&facts.stat));
    let abilities = if block_device {
        storage::device_abilities(&fd, &facts.stat, options.read_only)
    } else {
        storage::file_abilities(&fd, options.read_only, facts.length_bytes)
    };
    let traits = Traits { engine: facts.engine, storage: facts.storage(&fd) };
    let info = describe(name, options, &facts, &abilities, how_served(options, &facts, traits, mapped.is_some()));
    tracing::info!("'{name}': {}", info.engine);
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let waits_for_extents = facts.engine != EngineKind::Threads && !block_device && storage::waits_for_tables(&fd);
    let writes_behind = options.write_behind && page_cached && !in_memory && options.cache != CacheMode::Unsafe;
    Ok(OpenFile {
        identity: (facts.stat.st_dev, facts.stat.st_ino),
        id,
        info,
        topology: device.as_deref().map(device_facts::topology).unwrap_or_default(),
        locked: facts.locks == Locks::Held,
        traits,
        chosen_freely: options.engine == EngineKind::Auto,
        takes_nowait: AtomicBool::new(facts.takes_nowait),
        changes_by_workers: AtomicUsize::new(0),
        walks_to_holes: !block_device && storage::walks_to_holes(&fd),
        mapped,
        in_place: InPlace::default(),
        alignment: facts.alignment,
        write_through: !options.has_volatile_cache(),
        ignore_flush: options.cache == CacheMode::Unsafe,
        page_cached,
        sync_lost: AtomicBool::new(false),
        write_behind: writes_behind.then(WriteBehind::default),
        rmw_lock: RmwLock::new(id),
        extents: ExtentPreload::new(waits_for_extents),
        fallocate_unit_bytes: abilities.fallocate_unit_bytes,
        zeroes_rung: AtomicU8::new(0),
        buffers: options.buffers.clone(),
        fd,
    })
}

/// The properties of a file that opening has found.
struct Facts {
    stat: Stat,
    length_bytes: u64,
    block_device: bool,
    locks: Locks,
    alignment: Alignment,
    page_cached: bool,
    takes_nowait: bool,
    /// The file lies in memory, and reactors copy its bytes.
    in_memory: bool,
    /// The file lies in memory, but the host has swap: workers make the calls.
    may_be_swapped: bool,
    engine: EngineKind,
    /// The reason for this engine.
    reason: String,
}

impl Facts {
    /// Finds out the facts. Also sets the descriptor's flags, and locks the file.
    fn find_out(fd: &OwnedFd, name: &str, options: &OpenOptions) -> Result<Self> {
        let stat =
            rustix::fs::fstat(fd).map_err(|errno| Error::io(format!("cannot look at '{name}'"), errno.into()))?;
        let block_device = storage::check_type(&stat, name)?;
        set_flags(fd, name, options)?;
        let locks = match options.lock {
            true => image_lock::lock(fd.as_fd(), name, options.read_only, options.lock_timeout)?,
            false => Locks::NotWanted,
        };
        let direct = options.cache.is_direct();
        let asked = if direct { storage::direct_alignment(fd, block_device, name)? } else { None };
        // A device node may lie on tmpfs too, so block devices are excluded. With engine=threads the user wants calls
        // on threads.
        let on_tmpfs = options.engine != EngineKind::Threads && !block_device && storage::is_in_memory(fd);
        let may_be_swapped = on_tmpfs && host_has_swap();
        let in_memory = on_tmpfs && !may_be_swapped;
        let takes_nowait = storage::takes_nowait(fd);
        let (engine, reason) = probe::choose(options, name, Host::get(), in_memory, takes_nowait)?;
        let length_bytes = holes::length_of(fd, block_device)
            .map_err(|error| Error::io(format!("cannot learn the length of '{name}'"), error))?;
        Ok(Self {
            stat,
            length_bytes,
            block_device,
            locks,
            alignment: asked.unwrap_or(Alignment::NONE),
            page_cached: asked.is_none(),
            takes_nowait,
            in_memory,
            may_be_swapped,
            engine,
            reason,
        })
    }

    fn storage(&self, fd: &OwnedFd) -> Storage {
        match (self.block_device, self.page_cached) {
            _ if self.in_memory => Storage::Memory,
            (_, false) => Storage::Direct,
            (true, true) => Storage::CachedDevice,
            (false, true) => Storage::PageCache {
                reads_later: storage::reads_later(fd),
                takes_nowait_writes: storage::takes_writes_without_waiting(fd),
                writes_end_in_call: storage::ends_in_call(fd),
            },
        }
    }
}

/// Describes for the user how a file is served, beside its engine.
fn how_served(options: &OpenOptions, facts: &Facts, traits: Traits, is_mapped: bool) -> &'static str {
    let on_ring = facts.engine == EngineKind::IoUring;
    match traits.storage {
        Storage::Memory if is_mapped => "; through a mapping, where that can be",
        Storage::Memory => "; by calls, as it cannot be mapped",
        _ if facts.may_be_swapped => "; the host has swap, so the file in memory is not mapped and threads copy it",
        _ if on_ring && !facts.takes_nowait => {
            "; all goes to threads, as this file system takes nothing that must not wait"
        }
        Storage::PageCache { takes_nowait_writes: false, .. } | Storage::CachedDevice
            if on_ring && !options.read_only =>
        {
            "; writes go to threads, as this page cache takes none that must not wait"
        }
        _ => "",
    }
}

fn describe(name: &str, options: &OpenOptions, facts: &Facts, abilities: &Abilities, how: &str) -> FileInfo {
    let Facts { block_device, alignment, engine, reason, .. } = facts;
    let path = match (options.cache.is_direct(), alignment.is_none()) {
        (false, _) => "page cache".to_owned(),
        (true, _) if facts.page_cached => "page cache (the file takes no direct I/O)".to_owned(),
        (true, true) => "direct I/O (any alignment)".to_owned(),
        (true, false) => format!("direct I/O ({}-byte alignment)", alignment.offset_bytes),
    };
    let sync = if options.sync { ", sync=on" } else { "" };
    let engine_words = probe::words(*engine, Host::get());
    FileInfo {
        name: name.into(),
        length_bytes: facts.length_bytes,
        read_only: options.read_only,
        offset_alignment_bytes: alignment.offset_bytes,
        memory_alignment_bytes: alignment.memory_bytes,
        can_discard: abilities.discard,
        discard_zeroes: abilities.discard_zeroes,
        fast_zeroes: abilities.fast_zeroes,
        block_device: *block_device,
        can_grow: !block_device && !options.read_only,
        locks: facts.locks,
        in_memory: facts.in_memory,
        engine: format!("{engine_words}, {path}, cache={}{sync}: chosen because {reason}{how}", options.cache),
    }
}

fn set_flags(fd: &OwnedFd, name: &str, options: &OpenOptions) -> Result<()> {
    let fails = |errno: Errno| cannot_open(name, errno, options);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(fails)?;
    let access = flags & OFlags::RWMODE;
    if access == OFlags::WRONLY || (access == OFlags::RDONLY && !options.read_only) {
        let needed = if options.read_only { "reading" } else { "reading and writing" };
        let message = format!("the descriptor of '{name}' is not open for {needed}");
        return Err(Error::new(ErrorKind::BadOption, message));
    }
    let mut wanted = flags - OFlags::NONBLOCK;
    wanted.set(OFlags::DIRECT, options.cache.is_direct());
    // Without `O_NOATIME`, reads make the file system journal the access time, again and again on a disk that is
    // written to. Only the file's owner may set the flag.
    let quiet = wanted | OFlags::NOATIME;
    match rustix::fs::fcntl_setfl(fd, quiet) {
        Err(Errno::PERM) if wanted == flags => Ok(()),
        Err(Errno::PERM) => rustix::fs::fcntl_setfl(fd, wanted).map_err(fails),
        other => other.map_err(fails),
    }
}

/// Asks the kernel to drop a file's durable pages from the page cache, also those that other programs brought in. The
/// kernel may not do so.
pub fn forget_cached(path: &Path) -> Result<()> {
    let fails =
        |errno: Errno| Error::io(format!("cannot take '{}' out of the page cache", path.display()), errno.into());
    let flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::RDONLY;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(fails)?;
    rustix::fs::fadvise(&fd, 0, None, rustix::fs::Advice::DontNeed).map_err(fails)
}

/// Makes a new file of `length_bytes` that reads as zeros. Fails if the name exists.
pub fn create(path: &Path, length_bytes: u64) -> Result<()> {
    survive_file_size_limit();
    let fails = |errno: Errno| {
        let name = path.display();
        match errno {
            Errno::EXIST => {
                let message =
                    format!("cannot create '{name}': the file exists; remove it first, or choose another name");
                Error::new(ErrorKind::BadOption, message)
            }
            _ => Error::io(format!("Could not create '{name}'"), errno.into()),
        }
    };
    let flags = OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
    let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map_err(fails)?;
    if length_bytes == 0 {
        // Whoever has found the empty file may have filled it by now.
        return Ok(());
    }
    rustix::fs::ftruncate(&fd, length_bytes).map_err(|errno| {
        // The file is not in use yet.
        let _ = std::fs::remove_file(path);
        let message = format!("cannot make '{}' {length_bytes} bytes long", path.display());
        Error::io(message, errno.into())
    })
}

/// Makes the names in the directory of `path` durable, if the directory can be synced. If not, a warning says so: the
/// directory may be writable but not readable, or its file system may lack the call, and nothing more can be done.
pub fn sync_directory_of(path: &Path) -> Result<()> {
    let directory = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    match std::fs::File::open(directory).and_then(|directory| directory.sync_all()) {
        Err(error) if cannot_be_asked(&error) => {
            tracing::warn!("nobody can say whether the name '{}' is durable: {error}", path.display());
            Ok(())
        }
        synced => {
            synced.map_err(|error| Error::io(format!("cannot make the name '{}' durable", path.display()), error))
        }
    }
}

/// Whether a directory could not even be asked to become durable.
fn cannot_be_asked(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), PermissionDenied | InvalidInput | Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_directory_that_was_asked_to_become_durable_and_did_not_fails() {
        for (errno, is_none) in [
            (Errno::ACCESS, true),
            (Errno::INVAL, true),
            (Errno::NOTSUP, true),
            (Errno::NOSYS, true),
            (Errno::IO, false),
            (Errno::NOSPC, false),
        ] {
            assert_eq!(cannot_be_asked(&errno.into()), is_none, "{errno}");
        }
        let dir = tempfile::tempdir().unwrap();
        sync_directory_of(&dir.path().join("name")).unwrap();
        sync_directory_of(Path::new("/proc/self/name")).expect("procfs has no such call");
        sync_directory_of(&dir.path().join("missing/name")).expect_err("there is no such directory");
    }
}
