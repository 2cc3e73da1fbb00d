//! What a user says about one drive: `file=disk.qcow2,format=qcow2,engine=io_uring,cache=none,...`.

use crate::filters::{DELAY_MAX_MS, FilterOptions};
use crate::help;
use crate::keyval::{self, KeyValue};
use crate::passed::{self, PassedDescriptors};
use crate::shown::ShownOptions;
use crate::size::parse_size;
use block::{Error, ErrorKind, Result};
use engine::{CacheMode, EngineKind};
use image::{ErrorPolicy, FileName, Format};
use memory::Placement;
use nix::unistd::Group;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How the bytes of a drive are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveFormat {
    /// The file is the disk.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
    /// A scratch overlay that was kept.
    Scratch,
    /// No file at all: reads give zeros, writes go nowhere. For measurements.
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

/// One drive, as asked for: a disk, and the export that it gets at once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DriveOptions {
    /// The disk.
    pub disk: DiskOptions,
    /// How guests reach it. One disk can have more exports than this one.
    pub export: ExportOptions,
}

/// What a disk is, for all its users.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DiskOptions {
    /// What a daemon calls it; `disk0`, `disk1`... where not given.
    pub name: Option<String>,
    /// The image; `None` for a null disk only.
    pub file: Option<FileName>,
    /// Its format; guessed from its contents where not given.
    pub format: Option<DriveFormat>,
    /// How bytes reach the storage.
    pub engine: EngineKind,
    /// What is cached where.
    pub cache: CacheMode,
    /// Every write is durable when it completes, through the page cache.
    pub sync: bool,
    /// With io_uring: a thread of the kernel submits.
    pub sqpoll: bool,
    /// Nobody writes it: the file is opened read-only.
    pub read_only: bool,
    /// Everything that is written goes to temporary files, and is gone with the disk; the image is opened read-only.
    pub snapshot: bool,
    /// The directory in which those files are kept, with names, instead.
    pub keep: Option<PathBuf>,
    /// The name of those files, where it is not the disk's: of one that got its own name only later.
    pub keep_as: Option<std::ffi::OsString>,
    /// What guests read as the disk's serial number, at most 20 bytes.
    pub serial: String,
    /// Size of a null disk.
    pub size_bytes: Option<u64>,
    /// Every request waits so long before it begins: for tests and measurements. The same as a filter `delay` above all
    /// others.
    pub delay_ms: Option<u32>,
    /// What happens to requests before they get to the image or null disk. The first is the nearest to the guest.
    pub filters: Vec<FilterOptions>,
    /// What happens to requests that the storage fails.
    pub on_error: ErrorPolicy,
    /// The same where the storage has no space left.
    pub on_no_space: ErrorPolicy,
    /// Memory for an image's tables, over all layers of its chain.
    pub l2_cache_bytes: Option<u64>,
    /// So many layers below the image were tops before: they are opened for writing where nobody else uses them. No key
    /// sets this.
    pub former_tops: usize,
    /// How long to wait for the lock of a process that was killed: until its last write has landed it keeps the lock.
    pub lock_timeout_s: Option<u32>,
}

/// How a disk is offered to guests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ExportOptions {
    /// Guests of this export cannot write, whoever else can.
    pub read_only: bool,
    /// Where the guest's monitor connects.
    pub socket: Option<PathBuf>,
    /// The socket is this descriptor: whoever passed it to this program listens on it already.
    pub socket_descriptor: Option<RawFd>,
    /// Who may connect: the socket's permissions, 0600 where not given, 0660 where it has a group of its own.
    pub socket_mode: Option<u32>,
    /// The number of the group that the socket gets.
    pub socket_group: Option<u32>,
    /// Request queues offered to the guest.
    pub queues: Option<u16>,
    /// Largest ring that a guest may set up.
    pub queue_size: Option<u16>,
    /// Packed rings are offered, too.
    pub packed: bool,
    /// What the guest is told instead of what the disk says.
    pub shown: ShownOptions,
    /// The guest's memory is registered with io_uring, which pins it.
    pub fixed_buffers: bool,
    /// What the guest's memory may lie in.
    pub guest_memory: Placement,
    /// The most memory that a guest's monitor may share.
    pub guest_memory_max_bytes: Option<u64>,
    /// How long a reactor without work looks for more before it sleeps. Reactors serve queues of all exports, so the
    /// longest time holds for all (see `Daemon::poll_max_us_of`).
    pub poll_max_us: Option<u32>,
}

/// What GET_ID can carry (virtio 1.3, 5.2.6).
const SERIAL_MAX_BYTES: usize = 20;
/// Longer names make no log more readable.
const NAME_MAX_BYTES: usize = 32;
/// More queues than any guest has CPUs for.
const QUEUES_MAX: u16 = 256;
/// The largest ring that exports serve.
const QUEUE_SIZE_MAX: u16 = 1024;
/// A second: whoever wants more wants a reactor that never sleeps.
const POLL_MAX_US: u32 = 1_000_000;
/// An hour: storage that takes longer for a write needs a person.
pub const LOCK_TIMEOUT_MAX_S: u32 = 3600;

const FORMATS: [(&str, DriveFormat); 4] = [
    ("raw", DriveFormat::Raw),
    ("qcow2", DriveFormat::Qcow2),
    ("scratch", DriveFormat::Scratch),
    ("null", DriveFormat::Null),
];
const SWITCH: [(&str, bool); 2] = [("on", true), ("off", false)];

/// What an option string turned out to be.
#[derive(Debug)]
pub enum ParsedDrive {
    /// A drive.
    Drive(Box<DriveOptions>),
    /// The user asked what a key takes (`format=?`): the answer.
    Help(String),
}

impl DiskOptions {
    /// Everything by default, on this file. A path is taken as it is.
    #[must_use]
    pub fn of_file(file: impl Into<FileName>) -> Self {
        Self { file: Some(file.into()), ..Self::default() }
    }

    /// A null disk.
    #[must_use]
    pub fn null(size_bytes: u64) -> Self {
        Self { format: Some(DriveFormat::Null), size_bytes: Some(size_bytes), ..Self::default() }
    }

    /// The file's name, or what stands for it in messages.
    #[must_use]
    pub fn display_name(&self) -> String {
        match &self.file {
            Some(file) => file.to_string(),
            None => "null disk".to_owned(),
        }
    }

    /// The default place of its socket: beside the image. A disk without a place has none.
    #[must_use]
    pub fn default_socket(&self) -> Option<PathBuf> {
        self.file.as_ref().and_then(FileName::path).map(socket_beside)
    }
}

impl From<DiskOptions> for DriveOptions {
    /// The disk, with every option of its export at its default.
    fn from(disk: DiskOptions) -> Self {
        Self { disk, export: ExportOptions::default() }
    }
}

impl DriveOptions {
    /// Everything by default, on this file.
    #[must_use]
    pub fn of_file(file: impl Into<FileName>) -> Self {
        DiskOptions::of_file(file).into()
    }

    /// A null disk.
    #[must_use]
    pub fn null(size_bytes: u64) -> Self {
        DiskOptions::null(size_bytes).into()
    }

    /// Where the export's socket is made: where it was asked for, or in the disk's usual place. None is made if one was
    /// passed.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        let usual = || self.disk.default_socket().filter(|_| self.export.socket_descriptor.is_none());
        self.export.socket.clone().or_else(usual)
    }

    /// Reads `key=value,...`. The value `?` or `help` asks what a key takes. As the whole text, it asks which keys
    /// there are.
    pub fn parse(text: &str) -> Result<ParsedDrive> {
        Self::parse_with(text, &PassedDescriptors::default())
    }

    /// As [`DriveOptions::parse`], where a descriptor can be named as the service manager named it: `file=fd:NAME`.
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

    /// Whether `key` is one of a drive and takes `value`, whatever else the drive has.
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
            "sqpoll" => disk.sqpoll = one_of(key, value, &SWITCH)?,
            "fixed-buffers" => export.fixed_buffers = one_of(key, value, &SWITCH)?,
            "guest-memory" => export.guest_memory = one_of(key, value, &Placement::NAMES)?,
            "guest-memory-max" => {
                let bytes = parse_size(value).map_err(|error| error.in_context(key.as_str()))?;
                export.guest_memory_max_bytes = Some(bytes);
            }
            "packed" => export.packed = one_of(key, value, &SWITCH)?,
            "readonly" => disk.read_only = one_of(key, value, &SWITCH)?,
            "snapshot" => disk.snapshot = one_of(key, value, &SWITCH)?,
            "keep" => disk.keep = Some(non_empty_path(key, value)?),
            "serial" => disk.serial = serial(value)?,
            "size" => disk.size_bytes = Some(size(value)?),
            "queues" | "num-queues" if export.queues.is_some() => {
                return Err(bad("queues= and num-queues= mean the same: give one of them".to_owned()));
            }
            "queues" | "num-queues" => export.queues = Some(count(key, value, QUEUES_MAX)?),
            "write-cache" => export.shown.write_cache = Some(one_of(key, value, &SWITCH)?),
            "secure-erase" => export.shown.secure_erase = one_of(key, value, &SWITCH)?,
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
            "queue-size" => export.queue_size = Some(power_of_two(key, value, QUEUE_SIZE_MAX)?),
            _ if export.shown.set(key, value)? => {}
            _ => return Err(keyval::unknown("drive key", key, &help::key_names())),
        }
        Ok(())
    }

    /// `fd=`: what it is shows by itself.
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

    /// Combinations that cannot be meant.
    pub(crate) fn check(&self) -> Result<()> {
        self.export.shown.check()?;
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
            _ if disk.sqpoll || self.export.fixed_buffers => self.check_io_uring(is_null),
            _ => Ok(()),
        }
    }

    /// Options for io_uring only.
    fn check_io_uring(&self, is_null: bool) -> Result<()> {
        let disk = &self.disk;
        let option = if disk.sqpoll { "sqpoll=on" } else { "fixed-buffers=on" };
        match disk.engine {
            _ if is_null => Err(bad(format!("{option} has no meaning for format=null: it has no engine"))),
            EngineKind::Auto | EngineKind::IoUring => Ok(()),
            other => Err(bad(format!("{option} is for engine=io_uring; engine={other} has nothing like it"))),
        }
    }
}

/// The default place of an image's socket.
#[must_use]
pub fn socket_beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".sock");
    PathBuf::from(name)
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

fn given_twice(what: &str) -> Error {
    bad(format!("the drive has {what} already: give one of file=, socket= and fd= for it"))
}

fn is_question(text: &str) -> bool {
    matches!(text, "?" | "help")
}

fn names<'a, T>(choices: &[(&'a str, T)]) -> Vec<&'a str> {
    choices.iter().map(|(name, _)| *name).collect()
}

/// The values a key takes, where they can be listed.
fn values_of(key: &str) -> Option<Vec<&'static str>> {
    match key {
        "format" => Some(names(&FORMATS)),
        "engine" => Some(EngineKind::NAMES.to_vec()),
        "cache" => Some(CacheMode::NAMES.to_vec()),
        "on-error" | "on-no-space" => Some(names(&ErrorPolicy::NAMES)),
        "guest-memory" => Some(names(&Placement::NAMES)),
        "sync" | "sqpoll" | "fixed-buffers" | "packed" | "secure-erase" | "write-cache" | "readonly" | "snapshot" => {
            Some(names(&SWITCH))
        }
        _ => None,
    }
}

fn not_a_value(key: &str, value: &str, valid: &[&str]) -> Error {
    keyval::unknown(&format!("value of '{key}':"), value, valid)
}

fn one_of<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> Result<T> {
    let found = choices.iter().find(|(name, _)| *name == value);
    found.map(|(_, choice)| *choice).ok_or_else(|| not_a_value(key, value, &names(choices)))
}

fn parsed<T: FromStr>(key: &str, value: &str, valid: &[&str]) -> Result<T> {
    value.parse().map_err(|_| not_a_value(key, value, valid))
}

fn non_empty_path(key: &str, value: &str) -> Result<PathBuf> {
    match value {
        "" => Err(bad(format!("{key}= needs a path"))),
        path => Ok(PathBuf::from(path)),
    }
}

/// Permissions in octal, as chmod(1) takes them. Execution means nothing for a socket, but who asks for 777 gets it.
fn mode(key: &str, value: &str) -> Result<u32> {
    let digits = value.strip_prefix("0o").unwrap_or(value);
    let mode = u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o777 && !digits.starts_with('+'));
    mode.ok_or_else(|| bad(format!("{key}={value}: takes permissions in octal, for example 0660")))
}

/// A group by its name or number.
fn group(key: &str, value: &str) -> Result<u32> {
    let no_group = || bad(format!("{key}={value}: this host has no such group; it takes a group's name or number"));
    match value.parse::<u32>() {
        // The kernel takes this number for "as it was".
        Ok(u32::MAX) => Err(no_group()),
        Ok(number) => Ok(number),
        Err(_) => match Group::from_name(value) {
            Ok(Some(group)) => Ok(group.gid.as_raw()),
            Ok(None) => Err(no_group()),
            Err(errno) => Err(Error::io(format!("{key}={value}: cannot look the group up"), errno.into())),
        },
    }
}

/// A name that can stand in a command line, a log and a path.
fn name(key: &str, value: &str, said: Option<&str>) -> Result<String> {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    if said.is_some() {
        return Err(bad("a drive has one name: give name= or id=, which mean the same".to_owned()));
    }
    if value.is_empty() || value.len() > NAME_MAX_BYTES || !value.chars().all(is_plain) {
        return Err(bad(format!("{key}={value}: a name has 1 to {NAME_MAX_BYTES} letters, digits, '-', '_' and '.'")));
    }
    Ok(value.to_owned())
}

fn serial(value: &str) -> Result<String> {
    if value.len() > SERIAL_MAX_BYTES {
        return Err(bad(format!(
            "the serial '{value}' is longer than the {SERIAL_MAX_BYTES} bytes that a guest reads"
        )));
    }
    if value.contains('\0') {
        return Err(bad("a serial cannot contain a zero byte".to_owned()));
    }
    Ok(value.to_owned())
}

/// QEMU's option, for command lines that carry it.
fn media(value: &str) -> Result<()> {
    match value {
        "disk" => Ok(()),
        other => Err(bad(format!("media={other}: a drive is a disk; for one that cannot be written give readonly=on"))),
    }
}

fn size(value: &str) -> Result<u64> {
    let bytes = parse_size(value).map_err(|error| error.in_context("size"))?;
    if bytes == 0 || bytes % block::SECTOR_BYTES != 0 {
        return Err(bad(format!("size={value}: a disk has a whole, non-zero number of 512-byte sectors")));
    }
    Ok(bytes)
}

fn count(key: &str, value: &str, most: u16) -> Result<u16> {
    let number = value.parse::<u16>().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| bad(format!("{key}={value}: takes a number from 1 to {most}")))
}

fn poll_max_us(key: &str, value: &str) -> Result<u32> {
    let number = value.parse::<u32>().ok().filter(|number| *number <= POLL_MAX_US);
    number.ok_or_else(|| bad(format!("{key}={value}: takes microseconds, from 0 (never poll) to {POLL_MAX_US}")))
}

fn delay_ms(key: &str, value: &str) -> Result<u32> {
    let number = value.parse::<u32>().ok().filter(|number| *number <= DELAY_MAX_MS);
    number.ok_or_else(|| bad(format!("{key}={value}: takes milliseconds, from 0 to {DELAY_MAX_MS}")))
}

fn lock_timeout_s(key: &str, value: &str) -> Result<u32> {
    let number = value.parse::<u32>().ok().filter(|number| *number <= LOCK_TIMEOUT_MAX_S);
    number.ok_or_else(|| bad(format!("{key}={value}: takes seconds, from 0 (do not wait) to {LOCK_TIMEOUT_MAX_S}")))
}

fn power_of_two(key: &str, value: &str, most: u16) -> Result<u16> {
    let number = count(key, value, most)?;
    if !number.is_power_of_two() {
        return Err(bad(format!("{key}={value}: takes a power of two up to {most}")));
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn drive(text: &str) -> DriveOptions {
        match DriveOptions::parse(text).unwrap() {
            ParsedDrive::Drive(drive) => *drive,
            ParsedDrive::Help(help) => panic!("{text} gave help: {help}"),
        }
    }

    fn refusal(text: &str) -> String {
        DriveOptions::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn every_key_is_read() {
        let read = drive(
            "name=root.0,file=a,,b.img,format=qcow2,engine=io_uring,cache=none,serial=disk 1,readonly=on,snapshot=off,\
             sync=on,sqpoll=on,fixed-buffers=on,guest-memory=locked,guest-memory-max=4G,secure-erase=on,\
             queues=4,queue-size=256,packed=on,poll-max-us=0,write-cache=off,media=disk,cyls=1,heads=2,secs=3,\
             logical-block-size=4k,physical-block-size=8k,alignment-offset=4k,min-io-size=16k,opt-io-size=1M,\
             discard-granularity=64k,size-max=128k,seg-max=64,delay-ms=3,on-error=hold,on-no-space=hold,\
             filter=error:every=9,filter=delay:ms=1,\
             l2-cache-size=1.5M,lock-timeout-s=90,socket=/run/a.sock,socket-mode=0660,socket-group=0",
        );
        let expected = DriveOptions {
            disk: DiskOptions {
                name: Some("root.0".to_owned()),
                file: Some("a,b.img".into()),
                format: Some(DriveFormat::Qcow2),
                engine: EngineKind::IoUring,
                cache: CacheMode::None,
                sync: true,
                sqpoll: true,
                read_only: true,
                snapshot: false,
                keep: None,
                keep_as: None,
                serial: "disk 1".to_owned(),
                size_bytes: None,
                delay_ms: Some(3),
                filters: ["error:every=9", "delay:ms=1"].map(|text| FilterOptions::parse(text).unwrap()).to_vec(),
                on_error: ErrorPolicy::Hold,
                on_no_space: ErrorPolicy::Hold,
                former_tops: 0,
                l2_cache_bytes: Some(1536 << 10),
                lock_timeout_s: Some(90),
            },
            export: ExportOptions {
                read_only: false,
                socket: Some(PathBuf::from("/run/a.sock")),
                socket_descriptor: None,
                socket_mode: Some(0o660),
                socket_group: Some(0),
                queues: Some(4),
                queue_size: Some(256),
                packed: true,
                shown: ShownOptions {
                    cylinders: Some(1),
                    heads: Some(2),
                    sectors: Some(3),
                    logical_block_bytes: Some(4096),
                    physical_block_bytes: Some(8192),
                    secure_erase: true,
                    alignment_offset_bytes: Some(4096),
                    minimum_io_bytes: Some(16384),
                    optimal_io_bytes: Some(1 << 20),
                    discard_granularity_bytes: Some(65536),
                    size_max_bytes: Some(131_072),
                    seg_max: Some(64),
                    write_cache: Some(false),
                },
                fixed_buffers: true,
                guest_memory: Placement::Locked,
                guest_memory_max_bytes: Some(4 << 30),
                poll_max_us: Some(0),
            },
        };
        assert_eq!(read, expected);
        assert!(drive("file=x,snapshot=on").disk.snapshot);
        assert_eq!(drive("file=x,num-queues=3").export.queues, Some(3));
        assert_eq!(drive("format=null,size=4G"), DriveOptions::null(4 << 30));
        let passed = drive("file=fd:3,socket=fd:4");
        assert_eq!((passed.disk.file, passed.export.socket_descriptor), (Some(FileName::Descriptor(3)), Some(4)));
        assert_eq!(drive("file=x,socket=./fd:4").socket(), Some(PathBuf::from("./fd:4")));
        assert_eq!(drive("file=x,socket-group=root,socket-mode=600").export.socket_group, Some(0));
        assert_eq!(drive("file=x").socket(), Some(PathBuf::from("x.sock")));
    }

    #[test]
    fn a_passed_descriptor_is_an_image_or_a_socket_by_what_it_is() {
        let image = tempfile::tempfile().unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (image, socket) = (image.as_raw_fd(), socket.as_raw_fd());
        let both = drive(&format!("fd={socket},fd={image}"));
        assert_eq!(both.disk.file, Some(FileName::Descriptor(image)));
        assert_eq!((both.export.socket_descriptor, both.socket()), (Some(socket), None));
        for (text, what) in [
            (format!("fd={image},fd={image}"), "an image"),
            (format!("file=x,fd={image}"), "an image"),
            (format!("fd={image},file=x"), "an image"),
            (format!("file=x,fd={socket},fd={socket}"), "a socket"),
            (format!("file=x,socket=/run/a.sock,fd={socket}"), "a socket"),
            (format!("file=x,fd={socket},socket=/run/a.sock"), "a socket"),
        ] {
            assert!(refusal(&text).contains(&format!("has {what} already")), "{text}: {}", refusal(&text));
        }
    }

    #[test]
    fn unknown_keys_and_values_list_the_valid_ones() {
        let message = refusal("file=x,fromat=raw");
        assert!(message.contains("did you mean 'format'?"), "{message}");
        assert!(help::key_names().iter().all(|key| message.contains(key)), "{message}");
        for (text, key, listed) in [
            ("file=x,format=qcow", "format", "raw, qcow2, scratch, null"),
            ("file=x,engine=uring", "engine", "auto, io_uring, linux-aio, threads"),
            ("file=x,cache=write-back", "cache", "writeback, none, writethrough, directsync, unsafe"),
            ("file=x,readonly=yes", "readonly", "on, off"),
            ("file=x,sync=1", "sync", "on, off"),
        ] {
            let message = refusal(text);
            assert!(message.contains(key) && message.contains(listed), "{text}: {message}");
        }
    }

    #[test]
    fn a_question_mark_lists_what_a_key_takes() {
        for (text, part) in [
            ("format=?", "raw, qcow2, scratch, null"),
            ("file=x,cache=help", "directsync"),
            ("filter=?", "bandwidth"),
            ("?", "queue-size"),
        ] {
            match DriveOptions::parse(text).unwrap() {
                ParsedDrive::Help(help) => assert!(help.contains(part), "{help}"),
                ParsedDrive::Drive(drive) => panic!("{drive:?}"),
            }
        }
    }

    #[test]
    fn impossible_values_and_combinations_are_refused() {
        for text in [
            "format=raw",
            "format=null",
            "format=null,size=4G,file=x",
            "file=x,size=4G",
            "format=null,size=0",
            "format=null,size=4G,readonly=on",
            "format=null,size=4G,snapshot=on",
            "file=x,readonly=on,snapshot=on",
            "format=null,size=1000",
            "file=",
            "file=nbd:localhost",
            "file=vhost-user:/run/x.sock,socket=/run/y.sock",
            "file=x,name=",
            "file=x,name=a/b",
            "file=x,name=a,id=b",
            "file=fd:three",
            "file=x,serial=123456789012345678901",
            "file=x,queues=0",
            "file=x,queues=257",
            "file=x,queue-size=100",
            "file=x,queues=2,num-queues=2",
            "file=x,media=cdrom",
            "file=x,cyls=0",
            "file=x,heads=256",
            "file=x,cyls=5,heads=4",
            "file=x,logical-block-size=8G",
            "file=x,seg-max=none",
            "file=x,write-cache=writeback",
            "file=x,poll-max-us=-1",
            "file=x,poll-max-us=2000000",
            "file=x,delay-ms=20000",
            "file=x,l2-cache-size=lots",
            "file=x,lock-timeout-s=3601",
            "file=x,lock-timeout-s=2m",
            "format=null,size=4G,l2-cache-size=1M",
            "file=x,sync=on,cache=unsafe",
            "file=x,sqpoll=on,engine=threads",
            "file=x,fixed-buffers=on,engine=linux-aio",
            "format=null,size=4G,sqpoll=on",
            "file=x,file=y",
            "file=x,socket=fd:nothing-has-this-name",
            "file=x,socket=fd:4,socket-mode=0660",
            "file=x,socket-mode=rw",
            "file=x,socket-mode=1777",
            "file=x,socket-group=no-group-is-called-so",
            "file=x,fd=999999",
        ] {
            assert!(DriveOptions::parse(text).is_err(), "{text}");
        }
    }
}
