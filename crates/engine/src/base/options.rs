//! Options for opening a file: engine, cache mode, locks.

use block::{Error, ErrorKind};
use memory::BufferAccount;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Which engine carries out a file's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// The best engine that kernel and file allow; [`block::FileInfo::engine`] says which and why.
    #[default]
    Auto,
    /// io_uring.
    IoUring,
    /// Linux AIO (`io_submit`): only for files opened with `O_DIRECT`.
    LinuxAio,
    /// A pool of threads that make blocking calls.
    Threads,
}

impl EngineKind {
    /// Every value, as written in options.
    pub const NAMES: [&'static str; 4] = ["auto", "io_uring", "linux-aio", "threads"];
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::Threads => "threads",
        })
    }
}

impl FromStr for EngineKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::IoUring),
            "linux-aio" => Ok(Self::LinuxAio),
            "threads" => Ok(Self::Threads),
            _ => Err(unknown("engine", text, &Self::NAMES)),
        }
    }
}

/// The use of the host's page cache, and when a write counts as complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Page cache; writes are durable after a flush.
    #[default]
    Writeback,
    /// `O_DIRECT`; writes are durable after a flush (the drive has a cache of its own).
    None,
    /// Page cache for reads; a write completes when it is durable.
    Writethrough,
    /// `O_DIRECT`; a write completes when it is durable.
    Directsync,
    /// Page cache; flushes are ignored. A crash of the host may lose or damage the disk.
    Unsafe,
}

impl CacheMode {
    /// Every value, as written in options.
    pub const NAMES: [&'static str; 5] = ["writeback", "none", "writethrough", "directsync", "unsafe"];

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// Whether the guest is told of a volatile cache: completed writes need a flush to be durable.
    #[must_use]
    pub fn has_volatile_cache(self) -> bool {
        matches!(self, Self::Writeback | Self::None | Self::Unsafe)
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Writeback => "writeback",
            Self::None => "none",
            Self::Writethrough => "writethrough",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        })
    }
}

impl FromStr for CacheMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "writeback" => Ok(Self::Writeback),
            "none" => Ok(Self::None),
            "writethrough" => Ok(Self::Writethrough),
            "directsync" => Ok(Self::Directsync),
            "unsafe" => Ok(Self::Unsafe),
            _ => Err(unknown("cache", text, &Self::NAMES)),
        }
    }
}

fn unknown(key: &str, value: &str, names: &[&str]) -> Error {
    let message = format!("{key}={value} is not known; valid values of {key} are: {}", names.join(", "));
    Error::new(ErrorKind::BadOption, message)
}

/// Options of [`crate::open`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// The engine.
    pub engine: EngineKind,
    /// The cache mode.
    pub cache: CacheMode,
    /// Open for reading only. Also decides the lock: a read-only image (a backing file) may have several readers at the
    /// same time. An image that is written belongs to one opener.
    pub read_only: bool,
    /// Every write is durable when it completes, as with `O_DSYNC`, whatever the cache mode.
    pub sync: bool,
    /// Written data go to the storage soon, not only with the next flush. For a file that is filled in one go, so that
    /// the storage works meanwhile.
    pub write_behind: bool,
    /// Take QEMU's image locks, so that other programs and this one refuse an image in use.
    pub lock: bool,
    /// How long to wait for locks that no living process seems to hold: those of a killed process stay until its last
    /// write has landed. Locks of a living process, which may be ending, are waited for a second at most.
    pub lock_timeout: Duration,
    /// The buffer account that the file's requests use. Without limit by default.
    pub buffers: BufferAccount,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            engine: EngineKind::default(),
            cache: CacheMode::default(),
            read_only: false,
            sync: false,
            write_behind: false,
            lock: true,
            lock_timeout: Duration::ZERO,
            buffers: BufferAccount::default(),
        }
    }
}

impl OpenOptions {
    /// Changes some options: `OpenOptions::default().with(|options| options.read_only = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Whether completed writes can be lost without a flush. This is what a guest is told about a volatile cache.
    #[must_use]
    pub fn has_volatile_cache(&self) -> bool {
        self.cache.has_volatile_cache() && !self.sync
    }

    /// Refuses combinations that contradict themselves.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.sync && self.cache == CacheMode::Unsafe {
            let message = "sync=on contradicts cache=unsafe, which ignores flushes; leave out one of them";
            return Err(Error::new(ErrorKind::BadOption, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_as_itself_and_others_list_the_valid_ones() {
        for name in EngineKind::NAMES {
            assert_eq!(name.parse::<EngineKind>().unwrap().to_string(), name);
        }
        for name in CacheMode::NAMES {
            assert_eq!(name.parse::<CacheMode>().unwrap().to_string(), name);
        }
        let error = "wb".parse::<CacheMode>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadOption);
        for name in CacheMode::NAMES {
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}
