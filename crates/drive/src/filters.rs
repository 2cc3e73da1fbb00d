//! Filters of a drive: `filter=NAME:key=value:key=value`. The key `filter` is repeated for each filter. The first is
//! the nearest to the guest, as with nbdkit.

use crate::keyval;
use crate::size::{human_size, parse_size};
use crate::throttling::{THROTTLE_KEYS, ThrottleOptions};
use block::{Disk, Error, ErrorKind, IoError, Result};
use image::{Delay, DelayOptions, ErrorOptions, Errors, FilterDisk, RequestKind, Throttle, ThrottleMember, WriteLog};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A filter with its options.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilterOptions {
    /// Delays requests: `delay:ms=5`, `delay:us=200:bandwidth=100M`.
    Delay(DelayOptions),
    /// Limits the rate: `throttle:iops-total=500:bps-read=10M:group=web`.
    Throttle(ThrottleOptions),
    /// Fails chosen requests: `error:kinds=write+flush:every=100:errno=ENOSPC`.
    Error(ErrorOptions),
    /// Logs every change to this file, for `ringdisk replay`: `log:file=changes.log`.
    Log(PathBuf),
}

/// The longest delay: guests give up a request after half a minute.
pub(crate) const DELAY_MAX_MS: u32 = 10_000;

const NAMES: [&str; 4] = ["delay", "error", "log", "throttle"];
const DELAY_KEYS: [&str; 5] = ["ms", "us", "bandwidth", "request-us", "jitter-us"];
const LOG_KEYS: [&str; 1] = ["file"];
const ERROR_KEYS: [&str; 7] = ["kinds", "offset", "length", "after", "every", "count", "errno"];
/// Error numbers of storage, by their names on Linux.
const ERRNOS: [(&str, i32); 8] = [
    ("EIO", 5),
    ("ENOSPC", 28),
    ("EPERM", 1),
    ("ENOMEM", 12),
    ("EINVAL", 22),
    ("EROFS", 30),
    ("EOPNOTSUPP", 95),
    ("ETIMEDOUT", 110),
];

/// A disk with a filter over it, and the disk's place in a group if the filter is a throttle.
pub type Filtered = (Arc<dyn Disk>, Option<Arc<ThrottleMember>>);

impl FilterOptions {
    /// Lists the values of `filter=`.
    pub(crate) fn help() -> String {
        let usage = |name: &str, keys: &[&str]| format!("{name}:KEY=VALUE:... ({})", keys.join(", "));
        [
            usage("delay", &DELAY_KEYS),
            usage("error", &ERROR_KEYS),
            usage("log", &LOG_KEYS),
            usage("throttle", &THROTTLE_KEYS),
        ]
        .join(", ")
    }

    /// Parses `NAME:key=value:...`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for part in parts {
            let pair = part.split_once('=');
            let (key, value) =
                pair.ok_or_else(|| bad(format!("filter={text}: '{part}' is not of the form key=value")))?;
            if pairs.iter().any(|(other, _)| *other == key) {
                return Err(bad(format!("filter={text}: '{key}' is given twice")));
            }
            pairs.push((key, value));
        }
        match name {
            "delay" => delay(&pairs).map(Self::Delay),
            "error" => error(&pairs).map(Self::Error),
            "log" => log_file(&pairs).map(Self::Log),
            "throttle" => ThrottleOptions::parse(&pairs).map(Self::Throttle),
            _ => return Err(keyval::unknown("filter", name, &NAMES)),
        }
        .map_err(|error| error.in_context(format!("filter={text}")))
    }

    /// Puts this filter over `disk`. For a throttle, also returns the disk's place in its group.
    pub fn over(&self, disk: Arc<dyn Disk>) -> Result<Filtered> {
        let disk: Arc<dyn Disk> = match self {
            Self::Delay(options) => Arc::new(FilterDisk::new(disk, Delay::new(*options))),
            Self::Error(options) => Arc::new(FilterDisk::new(disk, Errors::new(options.clone()))),
            Self::Log(path) => Arc::new(FilterDisk::new(disk, write_log(path)?)),
            Self::Throttle(options) => {
                let throttle = Throttle::new(options.group());
                let member = throttle.member();
                return Ok((Arc::new(FilterDisk::new(disk, throttle)), Some(member)));
            }
        };
        Ok((disk, None))
    }
}

fn log_file(pairs: &[(&str, &str)]) -> Result<PathBuf> {
    match pairs {
        [("file", path)] if !path.is_empty() => Ok(PathBuf::from(path)),
        [] | [("file", _)] => Err(bad("a log needs file=PATH".to_owned())),
        [("file", _), (key, _), ..] | [(key, _), ..] => {
            Err(keyval::unknown("key of the filter 'log':", key, &LOG_KEYS))
        }
    }
}

/// Makes a log in a new file, or continues a log. Refuses any other file.
fn write_log(path: &Path) -> Result<WriteLog> {
    let what = || format!("the write log '{}'", path.display());
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.map_err(|error| Error::io(format!("cannot open {}", what()), error))?;
    WriteLog::new(file).map_err(|error| error.in_context(format!("cannot use {}", what())))
}

fn delay(pairs: &[(&str, &str)]) -> Result<DelayOptions> {
    let mut options = DelayOptions::default();
    for (key, value) in pairs {
        match *key {
            "ms" => options.delay += Duration::from_millis(number(key, value)?),
            "us" => options.delay += Duration::from_micros(number(key, value)?),
            "bandwidth" => options.bytes_per_second = Some(bandwidth(value)?),
            "request-us" => options.request = Duration::from_micros(number(key, value)?),
            "jitter-us" => options.jitter = Duration::from_micros(number(key, value)?),
            _ => return Err(keyval::unknown("key of the filter 'delay':", key, &DELAY_KEYS)),
        }
    }
    if options.delay.saturating_add(options.jitter) > Duration::from_millis(u64::from(DELAY_MAX_MS)) {
        return Err(bad(format!("a delay is at most {DELAY_MAX_MS} ms")));
    }
    if options.request > REQUEST_MAX {
        return Err(bad(format!("request-us: a request takes at most {} us on the link", REQUEST_MAX.as_micros())));
    }
    if options == DelayOptions::default() {
        return Err(bad("says nothing: a delay needs ms=, us=, bandwidth=, request-us= or jitter-us=".to_owned()));
    }
    Ok(options)
}

/// The most that a request takes on the link: a full queue must end before its guest gives up.
const REQUEST_MAX: Duration = Duration::from_millis(10);

/// The least bandwidth: a request of a mebibyte must end before its guest gives up.
const BANDWIDTH_MIN: u64 = 64 << 10;

fn bandwidth(value: &str) -> Result<u64> {
    match parse_size(value) {
        Ok(bytes) if bytes >= BANDWIDTH_MIN => Ok(bytes),
        Ok(_) => Err(bad(format!("bandwidth={value}: takes bytes a second, from {} on", human_size(BANDWIDTH_MIN)))),
        Err(error) => Err(error.in_context("bandwidth")),
    }
}

fn error(pairs: &[(&str, &str)]) -> Result<ErrorOptions> {
    let mut options = ErrorOptions::default();
    let mut length = None;
    for (key, value) in pairs {
        match *key {
            "kinds" => options.kinds = kinds(value)?,
            "offset" => options.range.start = size(key, value)?,
            "length" => length = Some(size(key, value)?),
            "after" => options.after = number(key, value)?,
            "every" => options.every = at_least_one(key, value)?,
            "count" => options.count = at_least_one(key, value)?,
            "errno" => options.error = errno(value)?,
            _ => return Err(keyval::unknown("key of the filter 'error':", key, &ERROR_KEYS)),
        }
    }
    if let Some(length) = length {
        options.range.end = options.range.start.saturating_add(length);
    }
    Ok(options)
}

fn kinds(value: &str) -> Result<Vec<RequestKind>> {
    let names = RequestKind::NAMES.map(|(name, _)| name);
    let kind = |word: &str| {
        let found = RequestKind::NAMES.into_iter().find(|(name, _)| *name == word);
        found.map(|(_, kind)| kind).ok_or_else(|| keyval::unknown("kind of request", word, &names))
    };
    value.split('+').map(kind).collect()
}

fn errno(value: &str) -> Result<IoError> {
    let found = ERRNOS.iter().find(|(name, _)| *name == value);
    let names = ERRNOS.map(|(name, _)| name);
    found
        .map(|(_, number)| IoError::from_errno(*number))
        .ok_or_else(|| keyval::unknown("value of 'errno':", value, &names))
}

fn number(key: &str, value: &str) -> Result<u64> {
    let number = value.parse::<u32>().ok().map(u64::from);
    number.ok_or_else(|| bad(format!("{key}={value}: takes a number up to {}", u32::MAX)))
}

fn at_least_one(key: &str, value: &str) -> Result<u64> {
    match number(key, value)? {
        0 => Err(bad(format!("{key}={value}: takes a number from 1 on"))),
        number => Ok(number),
    }
}

fn size(key: &str, value: &str) -> Result<u64> {
    parse_size(value).map_err(|error| error.in_context(key))
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed_error(text: &str) -> ErrorOptions {
        match FilterOptions::parse(text) {
            Ok(FilterOptions::Error(options)) => options,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_key_of_every_filter_is_read() {
        let FilterOptions::Delay(delay) = FilterOptions::parse("delay:ms=1:us=500:bandwidth=100M").unwrap() else {
            panic!("no delay");
        };
        assert_eq!((delay.delay, delay.bytes_per_second), (Duration::from_micros(1500), Some(100 << 20)));
        let FilterOptions::Delay(delay) = FilterOptions::parse("delay:request-us=10:jitter-us=500").unwrap() else {
            panic!("no delay");
        };
        assert_eq!((delay.request, delay.jitter), (Duration::from_micros(10), Duration::from_micros(500)));
        let all = parsed_error("error");
        assert_eq!(all, ErrorOptions::default());
        let text = "error:kinds=write+write-zeroes:offset=1M:length=64k:after=10:every=3:count=2:errno=ENOSPC";
        let some = parsed_error(text);
        assert_eq!(some.kinds, [RequestKind::Write, RequestKind::WriteZeroes]);
        assert_eq!(some.range, 1 << 20..(1 << 20) + (64 << 10));
        assert_eq!((some.after, some.every, some.count, some.error.errno()), (10, 3, 2, 28));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_could_be() {
        for (text, part) in [
            ("dealy:ms=1", "did you mean 'delay'?"),
            ("delay", "needs ms="),
            ("delay:ms", "key=value"),
            ("delay:ms=1:ms=2", "twice"),
            ("delay:sec=1", "ms, us, bandwidth"),
            ("delay:request-us=20000", "10000 us"),
            ("delay:ms=9999:jitter-us=2000", "10000 ms"),
            ("delay:ms=20000", "10000 ms"),
            ("delay:bandwidth=1", "64"),
            ("error:kinds=writes", "did you mean 'write'?"),
            ("error:kinds=", "read, write"),
            ("error:every=0", "from 1 on"),
            ("error:errno=EBADIDEA", "EIO, ENOSPC"),
            ("error:rate=1", "kinds, offset"),
            ("log", "file=PATH"),
            ("log:path=x", "file"),
        ] {
            let message = FilterOptions::parse(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
