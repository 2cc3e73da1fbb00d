//! What the headers of an answer say about a file.

use hyper::header::{CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, LAST_MODIFIED, RETRY_AFTER};
use hyper::{HeaderMap as Headers, StatusCode};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// A longer version header is ignored.
const TAG_BYTES_MAX: usize = 1024;

/// The longest file. A server that names more would make us hold a table for all of it.
const LENGTH_BYTES_MAX: u64 = 64 << 40;

/// The file as it was when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pin {
    pub(crate) length_bytes: u64,
    pub(crate) version: Version,
}

/// A mark that changes with the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Version {
    /// The entity tag, if it is strong: files with the same weak tag may differ in their bytes.
    Tag(String),
    /// `Last-Modified`.
    Date(String),
    /// The server gives no mark: only a changed length is noticed.
    Unknown,
}

impl Version {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name| {
            let value = headers.get(name)?.to_str().ok()?.trim();
            let is_plain = !value.is_empty() && value.len() <= TAG_BYTES_MAX && !value.contains(char::is_control);
            is_plain.then(|| value.to_owned())
        };
        text(ETAG)
            .filter(|tag| !is_weak(tag))
            .map(Self::Tag)
            .or_else(|| text(LAST_MODIFIED).map(Self::Date))
            .unwrap_or(Self::Unknown)
    }
}

/// Whether an entity tag is weak: equal tags then do not mean equal bytes.
pub(crate) fn is_weak(tag: &str) -> bool {
    tag.starts_with("W/")
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => write!(f, "tag {tag}"),
            Self::Date(date) => write!(f, "date {date}"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// Reads `Content-Range`: the bytes that follow, and the file's length. `None` for the bytes if the answer says that
/// there are none.
fn content_range(headers: &Headers) -> Option<(Option<RangeInclusive<u64>>, u64)> {
    let (range, total) = headers.get(CONTENT_RANGE)?.to_str().ok()?.trim().strip_prefix("bytes ")?.split_once('/')?;
    let total = total.parse().ok()?;
    if range == "*" {
        return Some((None, total));
    }
    let (first, last) = range.split_once('-')?;
    Some((Some(first.parse().ok()?..=last.parse().ok()?), total))
}

/// The meaning of an answer to a request for a part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The part follows.
    Part { first: u64, last: u64, pin: Pin },
    /// The file is empty.
    Empty { pin: Pin },
    /// The file is at this address.
    Elsewhere(String),
    /// Ask again, perhaps after this time.
    Later(Option<Duration>),
    /// The server refuses the request.
    Refused(&'static str),
    /// The server does not serve parts of files.
    NoParts,
    /// The part is outside the file.
    Outside,
}

pub(crate) fn meaning(status: StatusCode, headers: &Headers) -> Meaning {
    let coded = headers.get(CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
    let pin = |length_bytes| Pin { length_bytes, version: Version::of(headers) };
    match status.as_u16() {
        206 if coded => Meaning::Refused("the server sends parts of a compressed form, not of the file"),
        206 => match content_range(headers) {
            Some((_, LENGTH_BYTES_MAX..)) => Meaning::Refused("the server says that the file has 64 TiB or more"),
            Some((Some(range), total)) if range.start() <= range.end() && *range.end() < total => {
                Meaning::Part { first: *range.start(), last: *range.end(), pin: pin(total) }
            }
            _ => Meaning::Refused("the server does not say which part of the file it sends"),
        },
        200 if headers.get("content-length").is_some_and(|length| length == "0") => Meaning::Empty { pin: pin(0) },
        200 => Meaning::NoParts,
        416 => match content_range(headers) {
            Some((None, 0)) => Meaning::Empty { pin: pin(0) },
            _ => Meaning::Outside,
        },
        301 | 302 | 303 | 307 | 308 => {
            let location = headers.get("location").and_then(|location| location.to_str().ok());
            location.map_or(Meaning::Refused("it leads elsewhere and does not say where"), |location| {
                Meaning::Elsewhere(location.to_owned())
            })
        }
        401 => {
            Meaning::Refused("401, the server wants to know who asks (#netrc-file=FILE or #headers-file=FILE says it)")
        }
        403 => Meaning::Refused("403, the server does not allow it"),
        404 => Meaning::Refused("404, the server has no such file"),
        410 => Meaning::Refused("410, the file is gone"),
        407 => Meaning::Refused("407, a proxy wants to know who asks"),
        408 | 425 | 429 | 500.. => {
            let seconds = headers.get(RETRY_AFTER).and_then(|after| after.to_str().ok()?.trim().parse().ok());
            Meaning::Later(seconds.map(Duration::from_secs))
        }
        _ => Meaning::Refused("the server answers with what fits no request for a part of a file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(status: u16, headers: &[(&str, &str)]) -> Meaning {
        let pairs = headers
            .iter()
            .map(|(name, value)| (hyper::header::HeaderName::try_from(*name).unwrap(), (*value).try_into().unwrap()));
        meaning(status.try_into().unwrap(), &pairs.collect())
    }

    #[test]
    fn an_answer_is_believed_only_if_it_says_what_it_sends() {
        let pin = |version| Pin { length_bytes: 10, version };
        assert_eq!(
            said(206, &[("content-range", "bytes 0-4/10"), ("etag", "\"a\""), ("last-modified", "d")]),
            Meaning::Part { first: 0, last: 4, pin: pin(Version::Tag("\"a\"".into())) }
        );
        assert_eq!(
            said(206, &[("content-range", "bytes 0-4/10"), ("last-modified", "d")]),
            Meaning::Part { first: 0, last: 4, pin: pin(Version::Date("d".into())) }
        );
        let weak = [("content-range", "bytes 0-4/10"), ("etag", "W/\"a\""), ("last-modified", "d")];
        let by = |headers, version| (said(206, headers), Meaning::Part { first: 0, last: 4, pin: pin(version) });
        let (found, expected) = by(&weak, Version::Date("d".into()));
        assert_eq!(found, expected);
        let (found, expected) = by(&weak[..2], Version::Unknown);
        assert_eq!(found, expected);
        for total in [64_u64 << 40, u64::MAX] {
            let range = format!("bytes 0-4/{total}");
            assert!(matches!(said(206, &[("content-range", &range)]), Meaning::Refused(_)), "{range}");
        }
        for range in ["bytes 0-10/10", "bytes 4-0/10", "bytes 0-4/*", "bytes -4/10", "lines 0-4/10", ""] {
            assert!(matches!(said(206, &[("content-range", range)]), Meaning::Refused(_)), "{range}");
        }
        let coded = [("content-range", "bytes 0-4/10"), ("content-encoding", "gzip")];
        assert!(matches!(said(206, &coded), Meaning::Refused(_)));
        assert_eq!(said(200, &[("content-length", "10")]), Meaning::NoParts);
        assert!(matches!(said(416, &[("content-range", "bytes */0")]), Meaning::Empty { .. }));
        assert_eq!(said(416, &[("content-range", "bytes */9")]), Meaning::Outside);
        assert_eq!(said(503, &[("retry-after", "7")]), Meaning::Later(Some(Duration::from_secs(7))));
        assert_eq!(said(302, &[("location", "/x")]), Meaning::Elsewhere("/x".into()));
        assert!(matches!(said(404, &[]), Meaning::Refused(_)) && matches!(said(100, &[]), Meaning::Refused(_)));
    }
}
