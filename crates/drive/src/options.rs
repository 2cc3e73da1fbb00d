//! A user's options of one drive: `file=disk.qcow2,format=qcow2,engine=io_uring,cache=none,...`.

#[cfg(test)]
mod tests;
mod values;

pub use values::LOCK_TIMEOUT_MAX_S;

use crate::choices::{SWITCH, one_of};
use crate::filters::FilterOptions;
use crate::help;
use crate::keyval::{self, KeyValue};
use crate::passed::{self, PassedDescriptors};
use crate::shown::ShownOptions;
use crate::size::parse_size;
use block::Result;
use engine::{CacheMode, EngineKind};
use image::{ErrorPolicy, FileName, Format};
use memory::Placement;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use values::{
    FORMATS, QUEUES_MAX, bad, count, delay_ms, given_twice, group, is_question, lock_timeout_s, media, mode, name,
    non_empty_path, parsed, poll_max_us, queue_size, serial, size, values_of,
};

/// The format of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveFormat {
    /// The file is the disk.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
    /// A kept scratch overlay.
    Scratch,
    /// No file: reads return zeros, writes are dropped. For measurements.
    Null,
}

impl From<Format> for DriveFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
            Format::Scratch => Self::Scratch,
        }
    }
}

impl DriveFormat {
    /// Returns the format of the image; `None` if there is no image.
    #[must_use]
    pub fn of_image(self) -> Option<Format> {
        match self {
            Self::Raw => Some(Format::Raw),
            Self::Qcow2 => Some(Format::Qcow2),
            Self::Scratch => Some(Format::Scratch),
            Self::Null => None,
        }
    }
}

/// A drive: a disk, and its first export.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DriveOptions {
    /// The options of the disk.
    pub disk: DiskOptions,
    /// The options of the export. A disk can have more exports.
    pub export: ExportOptions,
}

/// The options of a disk, common to all its exports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DiskOptions {
    /// The disk's name in a daemon; `disk0`, `disk1`... if not given.
    pub name: Option<String>,
    /// The image; `None` only for a null disk.
    pub file: Option<FileName>,
    /// The image's format; guessed from its contents if not given.
    pub format: Option<DriveFormat>,
    /// The engine, which moves bytes to and from the storage.
    pub engine: EngineKind,
    /// The use of caches.
    pub cache: CacheMode,
    /// Whether every write is durable when it completes, through the page cache.
    pub sync: bool,
    /// Whether writes are refused. The file is then opened read-only.
    pub read_only: bool,
    /// Whether writes go to temporary files, which disappear with the disk. The image is then opened read-only.
    pub snapshot: bool,
    /// Keeps those files instead, with names, in this directory.
    pub keep: Option<PathBuf>,
    /// The name of the kept files, if it differs from the disk's: for a disk that was named only later.
    pub keep_as: Option<std::ffi::OsString>,
    /// The serial number that guests read, at most 20 bytes.
    pub serial: String,
    /// Size of a null disk.
    pub size_bytes: Option<u64>,
    /// The delay before every request, for tests and measurements. The same as a filter `delay` above all others.
    pub delay_ms: Option<u32>,
    /// Filters above the image or null disk. The first is the nearest to the guest.
    pub filters: Vec<FilterOptions>,
    /// The policy for requests that the storage fails.
    pub on_error: ErrorPolicy,
    /// The policy for requests that find no space.
    pub on_no_space: ErrorPolicy,
    /// The limit of memory for an image's tables, over all layers of its chain.
    pub l2_cache_bytes: Option<u64>,
    /// How many layers below the image are opened for writing if they are not in use: they were tops before. No key
    /// sets this.
    pub former_tops: usize,
    /// Files that the disk may rest on, beside those that are allowed for all disks. No key sets this.
    pub bases: Vec<PathBuf>,
    /// How long to wait for the lock of a process that was killed: the process keeps the lock until its last write has
    /// landed.
    pub lock_timeout_s: Option<u32>,
    /// Properties that guests see instead of the disk's own. An export can override them.
    pub shown: ShownOptions,
}

/// The options of an export.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ExportOptions {
    /// Whether guests of this export cannot write, even if others can.
    pub read_only: bool,
    /// The socket to which the guest's monitor connects.
    pub socket: Option<PathBuf>,
    /// The socket as a descriptor: the program that passed it has made it listen already.
    pub socket_descriptor: Option<RawFd>,
    /// The socket's permissions. 0600 if not given; 0660 if the socket has its own group.
    pub socket_mode: Option<u32>,
    /// The socket's group, as a number.
    pub socket_group: Option<u32>,
    /// The number of request queues offered to the guest.
    pub queues: Option<u16>,
    /// The largest ring that a guest may set up.
    pub queue_size: Option<u16>,
    /// Properties that the guest of this export sees, if they differ from the disk's options.
    pub shown: ShownOptions,
    /// Whether the guest's memory is registered with io_uring, which pins it.
    pub fixed_buffers: bool,
    /// The kinds of files that the guest's memory may lie in.
    pub guest_memory: Placement,
    /// The most memory that a guest's monitor may share.
    pub guest_memory_max_bytes: Option<u64>,
    /// How long a reactor without work polls before it sleeps. Reactors serve queues of all exports, so the longest
    /// time applies to all (see `Daemon::poll_max_us_of`).
    pub poll_max_us: Option<u32>,
}

/// The meaning of an option string.
#[derive(Debug)]
pub enum ParsedDrive {
    /// A drive.
    Drive(Box<DriveOptions>),
    /// Help that the user asked for (`format=?`).
    Help(String),
}

impl DiskOptions {
    /// Makes options with all defaults, on this file. A path is taken as it is.
    #[must_use]
    pub fn of_file(file: impl Into<FileName>) -> Self {
        Self { file: Some(file.into()), ..Self::default() }
    }

    /// Makes options of a null disk.
    #[must_use]
    pub fn null(size_bytes: u64) -> Self {
        Self { format: Some(DriveFormat::Null), size_bytes: Some(size_bytes), ..Self::default() }
    }

    /// Returns the file's name, or a substitute for messages.
    #[must_use]
    pub fn display_name(&self) -> String {
        match &self.file {
            Some(file) => file.to_string(),
            None => "null disk".to_owned(),
        }
    }

    /// Returns the default path of the socket: beside the image. `None` if the disk has no path.
    #[must_use]
    pub fn default_socket(&self) -> Option<PathBuf> {
        self.file.as_ref().and_then(FileName::path).map(socket_beside)
    }
}

impl From<DiskOptions> for DriveOptions {
    /// Takes the disk's options, with all defaults for its export.
    fn from(disk: DiskOptions) -> Self {
        Self { disk, export: ExportOptions::default() }
    }
}

impl DriveOptions {
    /// Makes options with all defaults, on this file.
    #[must_use]
    pub fn of_file(file: impl Into<FileName>) -> Self {
        DiskOptions::of_file(file).into()
    }

    /// Makes options of a null disk.
    #[must_use]
    pub fn null(size_bytes: u64) -> Self {
        DiskOptions::null(size_bytes).into()
    }

    /// Returns the path at which the export's socket is made: the given one, or the disk's default. `None` if a socket
    /// was passed.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        let usual = || self.disk.default_socket().filter(|_| self.export.socket_descriptor.is_none());
        self.export.socket.clone().or_else(usual)
    }

    /// Parses `key=value,...`. The value `?` or `help` asks for the values of a key. As the whole text, it asks for all
    /// keys.
    pub fn parse(text: &str) -> Result<ParsedDrive> {
        Self::parse_with(text, &PassedDescriptors::default())
    }

    /// As [`DriveOptions::parse`], but also accepts a service manager's name for a descriptor: `file=fd:NAME`.
    pub fn parse_with(text: &str, passed: &PassedDescriptors) -> Result<ParsedDrive> {
        if is_question(text) {
            return Ok(ParsedDrive::Help(help::of_keys()));
        }
        let mut drive = Self::default();
        for pair in keyval::parse_with_repeats(text, &["filter", "fd"])? {
            if is_question(&pair.value)
                && let Some(values) = values_of(&pair.key)
            {
                return Ok(ParsedDrive::Help(format!("Values of '{}': {}", pair.key, values.join(", "))));
            }
            if is_question(&pair.value) && pair.key == "filter" {
                return Ok(ParsedDrive::Help(format!("Values of 'filter': {}", FilterOptions::help())));
            }
            drive.set(&pair, passed)?;
        }
        drive.check()?;
        Ok(ParsedDrive::Drive(Box::new(drive)))
    }

    /// Returns the keys in `text` that are for a guest's socket, rings, memory or view of the disk: an NBD client has none of
    /// these.
    pub fn keys_for_guests(text: &str, passed: &PassedDescriptors) -> Result<Vec<String>> {
        let mut keys = Vec::new();
        for pair in keyval::parse_with_repeats(text, &["filter", "fd"])? {
            let mut alone = Self::default();
            alone.set(&pair, passed)?;
            // Reactors poll for clients as well.
            alone.export.poll_max_us = None;
            if alone.export != ExportOptions::default() || alone.disk.shown != ShownOptions::default() {
                keys.push(pair.key);
            }
        }
        Ok(keys)
    }

    /// Checks that `key` is a drive's key and takes `value`, whatever the other options.
    pub fn check_value(key: &str, value: &str) -> Result<()> {
        let pair = KeyValue { key: key.to_owned(), value: value.to_owned() };
        Self::default().set(&pair, &PassedDescriptors::default())
    }

    pub(crate) fn set(&mut self, KeyValue { key, value }: &KeyValue, passed: &PassedDescriptors) -> Result<()> {
        let Self { disk, export } = self;
        let descriptor = || value.strip_prefix("fd:").map(|word| passed.number_of(word)).transpose();
        match key.as_str() {
            "name" | "id" => disk.name = Some(name(key, value, disk.name.as_deref())?),
            "file" if disk.file.is_some() => return Err(given_twice("an image")),
            "file" => {
                let name = || FileName::parse(non_empty_path(key, value)?);
                disk.file = Some(descriptor()?.map(FileName::Descriptor).map_or_else(name, Ok)?);
            }
            "socket" if export.socket_descriptor.is_some() => return Err(given_twice("a socket")),
            "socket" => match descriptor()? {
                Some(number) => export.socket_descriptor = Some(number),
                None => export.socket = Some(non_empty_path(key, value)?),
            },
            "socket-mode" => export.socket_mode = Some(mode(key, value)?),
            "socket-group" => export.socket_group = Some(group(key, value)?),
            "fd" => self.set_descriptor(passed.number_of(value)?)?,
            "format" => disk.format = Some(one_of(key, value, &FORMATS)?),
            "engine" => disk.engine = parsed(key, value, &EngineKind::NAMES)?,
            "cache" => disk.cache = parsed(key, value, &CacheMode::NAMES)?,
            "sync" => disk.sync = one_of(key, value, &SWITCH)?,
            "fixed-buffers" => export.fixed_buffers = one_of(key, value, &SWITCH)?,
            "guest-memory" => export.guest_memory = one_of(key, value, &Placement::NAMES)?,
            "guest-memory-max" => {
                let bytes = parse_size(value).map_err(|error| error.in_context(key.as_str()))?;
                export.guest_memory_max_bytes = Some(bytes);
            }
            "readonly" => disk.read_only = one_of(key, value, &SWITCH)?,
            "snapshot" => disk.snapshot = one_of(key, value, &SWITCH)?,
            "keep" => disk.keep = Some(non_empty_path(key, value)?),
            "serial" => disk.serial = serial(value)?,
            "size" => disk.size_bytes = Some(size(value)?),
            "queues" | "num-queues" if export.queues.is_some() => {
                return Err(bad("queues= and num-queues= mean the same: give one of them".to_owned()));
            }
            "queues" | "num-queues" => export.queues = Some(count(key, value, QUEUES_MAX)?),
            "media" => media(value)?,
            "poll-max-us" => export.poll_max_us = Some(poll_max_us(key, value)?),
            "delay-ms" => disk.delay_ms = Some(delay_ms(key, value)?),
            "filter" => disk.filters.push(FilterOptions::parse(value)?),
            "on-error" => disk.on_error = one_of(key, value, &ErrorPolicy::NAMES)?,
            "on-no-space" => disk.on_no_space = one_of(key, value, &ErrorPolicy::NAMES)?,
            "l2-cache-size" => {
                disk.l2_cache_bytes = Some(parse_size(value).map_err(|error| error.in_context(key.as_str()))?);
            }
            "lock-timeout-s" => disk.lock_timeout_s = Some(lock_timeout_s(key, value)?),
            "queue-size" => export.queue_size = Some(queue_size(key, value)?),
            _ if disk.shown.set(key, value)? => {}
            _ => return Err(keyval::unknown("drive key", key, &help::key_names())),
        }
        Ok(())
    }

    /// Sets the descriptor of `fd=`: a socket or an image, depending on the descriptor's type.
    fn set_descriptor(&mut self, number: RawFd) -> Result<()> {
        let Self { disk, export } = self;
        match passed::is_socket(number) {
            None => Err(bad(format!("fd={number}: nothing was passed under that number"))),
            Some(true) if export.socket.is_some() || export.socket_descriptor.is_some() => Err(given_twice("a socket")),
            Some(true) => {
                export.socket_descriptor = Some(number);
                Ok(())
            }
            Some(false) if disk.file.is_some() => Err(given_twice("an image")),
            Some(false) => {
                disk.file = Some(FileName::Descriptor(number));
                Ok(())
            }
        }
    }

    /// Refuses combinations that make no sense.
    pub(crate) fn check(&self) -> Result<()> {
        self.disk.shown.check()?;
        let disk = &self.disk;
        let is_null = disk.format == Some(DriveFormat::Null);
        match (&disk.file, is_null) {
            (None, false) => Err(bad("a drive needs file=PATH (or format=null,size=SIZE)".to_owned())),
            (Some(FileName::VhostUser(_)), _) => Err(bad(
                "a drive cannot be the disk of another server: file=vhost-user: is for image commands".to_owned(),
            )),
            (Some(_), true) => Err(bad("format=null has no file: leave file= out, or name another format".to_owned())),
            _ if is_null && disk.size_bytes.is_none() => {
                Err(bad("format=null needs a size, for example size=4G".to_owned()))
            }
            _ if is_null && disk.read_only => {
                Err(bad("readonly=on has no meaning for format=null: it keeps nothing".to_owned()))
            }
            _ if is_null && disk.snapshot => {
                Err(bad("snapshot=on has no meaning for format=null: it keeps nothing".to_owned()))
            }
            _ if disk.read_only && disk.snapshot => {
                Err(bad("readonly=on and snapshot=on contradict each other: choose one".to_owned()))
            }
            _ if disk.keep.is_some() && !disk.snapshot => {
                Err(bad("keep= says where the files of snapshot=on are kept: give that, too".to_owned()))
            }
            _ if is_null && disk.l2_cache_bytes.is_some() => {
                Err(bad("l2-cache-size has no meaning for format=null: it has no tables".to_owned()))
            }
            _ if is_null && disk.lock_timeout_s.is_some() => {
                Err(bad("lock-timeout-s has no meaning for format=null: it has no lock".to_owned()))
            }
            _ if !is_null && disk.size_bytes.is_some() => {
                Err(bad("size= is for format=null only; an image has its own size".to_owned()))
            }
            _ if self.export.socket_descriptor.is_some()
                && (self.export.socket_mode.is_some() || self.export.socket_group.is_some()) =>
            {
                let message =
                    "socket-mode= and socket-group= are for a socket that is made here, not for one that was passed";
                Err(bad(message.to_owned()))
            }
            _ if disk.sync && matches!(disk.cache, CacheMode::Unsafe) => {
                Err(bad("sync=on and cache=unsafe contradict each other: choose one".to_owned()))
            }
            _ if self.export.fixed_buffers => self.check_io_uring(is_null),
            _ => Ok(()),
        }
    }

    /// Refuses `fixed-buffers=on` where io_uring is not used.
    fn check_io_uring(&self, is_null: bool) -> Result<()> {
        match self.disk.engine {
            _ if is_null => Err(bad("fixed-buffers=on has no meaning for format=null: it has no engine".to_owned())),
            EngineKind::Auto | EngineKind::IoUring => Ok(()),
            other => Err(bad(format!("fixed-buffers=on is for engine=io_uring; engine={other} has nothing like it"))),
        }
    }
}

/// Reads the permissions of a socket, in octal.
pub fn parse_socket_mode(text: &str) -> Result<u32> {
    mode("socket-mode", text)
}

/// Reads the group of a socket: its name or its number. Returns the number.
pub fn parse_socket_group(text: &str) -> Result<u32> {
    group("socket-group", text)
}

/// Returns the default path of an image's socket.
#[must_use]
pub fn socket_beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".sock");
    PathBuf::from(name)
}
