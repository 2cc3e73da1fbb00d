//! Parses the values of a drive's keys, and explains errors in them.

use super::DriveFormat;
use crate::choices::{SWITCH, names, not_a_value};
use crate::filters::DELAY_MAX_MS;
use crate::size::parse_size;
use block::{Error, ErrorKind, Result};
use engine::{CacheMode, EngineKind};
use image::ErrorPolicy;
use memory::Placement;
use nix::unistd::Group;
use std::path::PathBuf;
use std::str::FromStr;

/// The most bytes that GET_ID can return (virtio 1.3, 5.2.6).
const SERIAL_MAX_BYTES: usize = 20;
/// The longest name: longer ones only make logs harder to read.
const NAME_MAX_BYTES: usize = 32;
/// The most queues: no guest has more CPUs.
pub(super) const QUEUES_MAX: u16 = 256;
/// The largest ring that exports serve.
const QUEUE_SIZE_MAX: u16 = 1024;
/// The longest poll: a second. Beyond that, a reactor that never sleeps is better.
const POLL_MAX_US: u32 = 1_000_000;
/// The longest wait: an hour. Storage that takes longer for a write needs a person.
pub const LOCK_TIMEOUT_MAX_S: u32 = 3600;

pub(super) const FORMATS: [(&str, DriveFormat); 4] = [
    ("raw", DriveFormat::Raw),
    ("qcow2", DriveFormat::Qcow2),
    ("scratch", DriveFormat::Scratch),
    ("null", DriveFormat::Null),
];

pub(super) fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

pub(super) fn given_twice(what: &str) -> Error {
    bad(format!("the drive has {what} already: give one of file=, socket= and fd= for it"))
}

pub(super) fn is_question(text: &str) -> bool {
    matches!(text, "?" | "help")
}

/// Returns the values that a key takes, if they can be listed.
pub(super) fn values_of(key: &str) -> Option<Vec<&'static str>> {
    match key {
        "format" => Some(names(&FORMATS)),
        "engine" => Some(EngineKind::NAMES.to_vec()),
        "cache" => Some(CacheMode::NAMES.to_vec()),
        "on-error" | "on-no-space" => Some(names(&ErrorPolicy::NAMES)),
        "guest-memory" => Some(names(&Placement::NAMES)),
        "sync" | "fixed-buffers" | "packed" | "secure-erase" | "write-cache" | "readonly" | "snapshot" => {
            Some(names(&SWITCH))
        }
        _ => None,
    }
}

pub(super) fn parsed<T: FromStr>(key: &str, value: &str, valid: &[&str]) -> Result<T> {
    value.parse().map_err(|_| not_a_value(key, value, valid))
}

pub(super) fn non_empty_path(key: &str, value: &str) -> Result<PathBuf> {
    match value {
        "" => Err(bad(format!("{key}= needs a path"))),
        path => Ok(PathBuf::from(path)),
    }
}

/// Parses permissions in octal, as chmod(1) does. Execution means nothing for a socket, but 777 is accepted.
pub(super) fn mode(key: &str, value: &str) -> Result<u32> {
    let digits = value.strip_prefix("0o").unwrap_or(value);
    let mode = u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o777 && !digits.starts_with('+'));
    mode.ok_or_else(|| bad(format!("{key}={value}: takes permissions in octal, for example 0660")))
}

/// Parses a group's name or number.
pub(super) fn group(key: &str, value: &str) -> Result<u32> {
    let no_group = || bad(format!("{key}={value}: this host has no such group; it takes a group's name or number"));
    match value.parse::<u32>() {
        // The kernel would leave the group unchanged for this number.
        Ok(u32::MAX) => Err(no_group()),
        Ok(number) => Ok(number),
        Err(_) => match Group::from_name(value) {
            Ok(Some(group)) => Ok(group.gid.as_raw()),
            Ok(None) => Err(no_group()),
            Err(errno) => Err(Error::io(format!("{key}={value}: cannot look the group up"), errno.into())),
        },
    }
}

/// Parses a name that can be part of a command line, a log and a path.
pub(super) fn name(key: &str, value: &str, said: Option<&str>) -> Result<String> {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    if said.is_some() {
        return Err(bad("a drive has one name: give name= or id=, which mean the same".to_owned()));
    }
    if value.is_empty() || value.len() > NAME_MAX_BYTES || !value.chars().all(is_plain) {
        return Err(bad(format!("{key}={value}: a name has 1 to {NAME_MAX_BYTES} letters, digits, '-', '_' and '.'")));
    }
    Ok(value.to_owned())
}

pub(super) fn serial(value: &str) -> Result<String> {
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

/// Checks QEMU's option `media`, for command lines that contain it.
pub(super) fn media(value: &str) -> Result<()> {
    match value {
        "disk" => Ok(()),
        other => Err(bad(format!("media={other}: a drive is a disk; for one that cannot be written give readonly=on"))),
    }
}

pub(super) fn size(value: &str) -> Result<u64> {
    let bytes = parse_size(value).map_err(|error| error.in_context("size"))?;
    if bytes == 0 || bytes % block::SECTOR_BYTES != 0 {
        return Err(bad(format!("size={value}: a disk has a whole, non-zero number of 512-byte sectors")));
    }
    Ok(bytes)
}

pub(super) fn count(key: &str, value: &str, most: u16) -> Result<u16> {
    let number = value.parse::<u16>().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| bad(format!("{key}={value}: takes a number from 1 to {most}")))
}

pub(super) fn poll_max_us(key: &str, value: &str) -> Result<u32> {
    let number = value.parse::<u32>().ok().filter(|number| *number <= POLL_MAX_US);
    number.ok_or_else(|| bad(format!("{key}={value}: takes microseconds, from 0 (never poll) to {POLL_MAX_US}")))
}

pub(super) fn delay_ms(key: &str, value: &str) -> Result<u32> {
    let number = value.parse::<u32>().ok().filter(|number| *number <= DELAY_MAX_MS);
    number.ok_or_else(|| bad(format!("{key}={value}: takes milliseconds, from 0 to {DELAY_MAX_MS}")))
}

pub(super) fn lock_timeout_s(key: &str, value: &str) -> Result<u32> {
    let number = value.parse::<u32>().ok().filter(|number| *number <= LOCK_TIMEOUT_MAX_S);
    number.ok_or_else(|| bad(format!("{key}={value}: takes seconds, from 0 (do not wait) to {LOCK_TIMEOUT_MAX_S}")))
}

/// Reads the length of a ring.
pub(super) fn queue_size(key: &str, value: &str) -> Result<u16> {
    let is_size = |number: &u16| number.is_power_of_two() && (2..=QUEUE_SIZE_MAX).contains(number);
    let what = || bad(format!("{key}={value}: takes a power of two from 2 to {QUEUE_SIZE_MAX}"));
    value.parse().ok().filter(is_size).ok_or_else(what)
}
