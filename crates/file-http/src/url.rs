//! Names of files on web servers. The part behind `#` is never sent: it holds options for reading.

use block::{Error, ErrorKind, Result};
use hyper::Uri;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How long requests to a failing server are retried, by default.
const RETRY: Duration = Duration::from_secs(90);
const READ_AHEAD_BYTES: u64 = 4 << 20;
const READ_AHEAD_BYTES_MAX: u64 = 64 << 20;
const CACHE_BYTES: u64 = 10 << 30;
/// A smaller cache would hold no useful part of a disk.
const CACHE_BYTES_MIN: u64 = 16 << 20;
const KEYS: &str = "cache, cache-size, retry-s, read-ahead, revalidate, ca-file, netrc-file, headers-file";

/// The name of a file on a web server, and how it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpUrl {
    /// The address for requests. Messages never show it.
    pub(crate) uri: Uri,
    shown: String,
    pub(crate) options: HttpOptions,
}

/// The options behind `#`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HttpOptions {
    /// The directory of the cache.
    pub(crate) cache: Option<PathBuf>,
    /// The most bytes in that directory.
    pub(crate) cache_bytes: u64,
    pub(crate) retry: Duration,
    pub(crate) read_ahead_bytes: u64,
    /// Ask the server at each opening whether the cached file is still current.
    pub(crate) revalidate: bool,
    /// Certificates that are trusted beside the system's.
    pub(crate) ca_file: Option<PathBuf>,
    pub(crate) netrc_file: Option<PathBuf>,
    /// Lines that are sent with each request.
    pub(crate) headers_file: Option<PathBuf>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            cache: None,
            cache_bytes: CACHE_BYTES,
            retry: RETRY,
            read_ahead_bytes: READ_AHEAD_BYTES,
            revalidate: false,
            ca_file: None,
            netrc_file: None,
            headers_file: None,
        }
    }
}

impl HttpUrl {
    /// Reads `http://HOST[:PORT]/PATH[?QUERY]` or `https://...`, with our own options behind `#`, as in
    /// `#cache=/var/cache/ringdisk&retry-s=60`.
    pub fn parse(text: &str) -> Result<Self> {
        let (place, keys) = text.split_once('#').unwrap_or((text, ""));
        let shown = shown(place);
        let bad = |why: &str| Error::new(ErrorKind::BadOption, format!("'{shown}': {why}"));
        let named = || bad("a file on a web server is named as https://HOST/PATH");
        let uri: Uri = place.parse().map_err(|_| named())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err(named());
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            let why = "a password in a name is seen by everybody: leave user and password out, and name a file with them \
                       (#netrc-file=FILE, or the variable NETRC)";
            return Err(bad(why));
        }
        let options = options(keys).map_err(|why| bad(&why))?;
        Ok(Self { uri, shown, options })
    }

    /// Returns a key that all names of a file share.
    pub(crate) fn key(&self) -> String {
        self.uri.to_string()
    }
}

fn options(text: &str) -> Result<HttpOptions, String> {
    let mut options = HttpOptions::default();
    for (key, value) in form_urlencoded::parse(text.replace('+', "%2B").as_bytes()) {
        let path = || match value.is_empty() {
            true => Err(format!("{key}= takes a path")),
            false => Ok(Some(PathBuf::from(value.as_ref()))),
        };
        let size = |least: u64, most: u64| {
            let size = size_bytes(&value).filter(|size| (least..=most).contains(size));
            size.ok_or_else(|| format!("{key}= takes a size from {} KiB on, such as 512M or 10G", least >> 10))
        };
        match key.as_ref() {
            "cache" => options.cache = path()?,
            "cache-size" => options.cache_bytes = size(CACHE_BYTES_MIN, u64::MAX)?,
            "read-ahead" => {
                options.read_ahead_bytes =
                    size(0, READ_AHEAD_BYTES_MAX).map_err(|_| "read-ahead= takes a size up to 64M; 0 is none")?;
            }
            "retry-s" => {
                let seconds = value.parse::<u16>().map_err(|_| "retry-s= takes 0 to 65535 seconds")?;
                options.retry = Duration::from_secs(seconds.into());
            }
            "revalidate" => {
                options.revalidate = match value.as_ref() {
                    "on" => true,
                    "off" => false,
                    _ => return Err("revalidate= takes on or off".into()),
                }
            }
            "ca-file" => options.ca_file = path()?,
            "netrc-file" => options.netrc_file = path()?,
            "headers-file" => options.headers_file = path()?,
            other => return Err(format!("unknown key '{other}' behind '#' (known are {KEYS})")),
        }
    }
    Ok(options)
}

/// Reads a number of bytes, or of KiB, MiB, GiB, TiB.
fn size_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let shift = match text.get(digits.len()..)? {
        "" => 0,
        "k" | "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Returns the name for messages. Passwords and queries are left out: queries hold signatures and keys.
pub(crate) fn shown(text: &str) -> String {
    let (place, query) = text.split_once('?').map_or((text, ""), |(place, _)| (place, "?..."));
    let place = match place.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) =
                rest.find('/').map_or((rest, ""), |at| rest.split_at_checked(at).unwrap_or((rest, "")));
            let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
            format!("{scheme}://{host}{path}")
        }
        None => place.to_owned(),
    };
    place + query
}

/// Returns the address to which a redirect leads.
pub(crate) fn redirected(from: &Uri, location: &str) -> Option<Uri> {
    let location = location.split_once('#').map_or(location, |(place, _)| place);
    let (scheme, authority) = (from.scheme_str()?, from.authority()?.as_str());
    let text = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let directory = from.path().rsplit_once('/').map_or("", |(directory, _)| directory);
        format!("{scheme}://{authority}{directory}/{location}")
    };
    let uri: Uri = text.parse().ok()?;
    let is_web = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty());
    // A redirect never leads from TLS to plain HTTP.
    let is_weaker = scheme == "https" && uri.scheme_str() == Some("http");
    (is_web && !is_weaker).then_some(uri)
}

impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_hash_says_how_a_file_is_read() {
        let url =
            HttpUrl::parse("https://h:1/a/b.qcow2?x=1#cache=/var/c+d&cache-size=1G&retry-s=5&read-ahead=0").unwrap();
        assert_eq!(url.uri.to_string(), "https://h:1/a/b.qcow2?x=1");
        let HttpOptions { cache, cache_bytes, retry, read_ahead_bytes, .. } = url.options;
        assert_eq!((cache, cache_bytes), (Some("/var/c+d".into()), 1 << 30));
        assert_eq!((retry, read_ahead_bytes), (Duration::from_secs(5), 0));
    }

    #[test]
    fn nothing_that_may_be_secret_is_in_a_message() {
        for text in
            ["https://h/x?secret", "https://me:secret@h/x", "https://me:secret@h", "https://h/x?secret#nonsense=1"]
        {
            let said = match HttpUrl::parse(text) {
                Ok(url) => url.to_string(),
                Err(error) => error.to_string(),
            };
            assert!(!said.contains("secret") && said.contains("https://h"), "{said}");
        }
    }

    #[test]
    fn names_that_lead_nowhere_say_what_is_right() {
        for (text, hint) in [
            ("https://", "https://HOST/PATH"),
            ("ftp://h/x", "https://HOST/PATH"),
            ("https://a@h/x", "netrc-file"),
            ("https://h/x#chache=/d", "cache-size"),
            ("https://h/x#cache=", "path"),
            ("https://h/x#cache-size=1", "16384 KiB"),
            ("https://h/x#retry-s=x", "65535"),
        ] {
            let error = HttpUrl::parse(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }

    #[test]
    fn redirects_are_resolved_and_never_lead_out_of_tls() {
        let from: Uri = "https://h:8/a/b?q".parse().unwrap();
        for (location, to) in [
            ("c", Some("https://h:8/a/c")),
            ("/c?d#e", Some("https://h:8/c?d")),
            ("//i/c", Some("https://i/c")),
            ("https://i/c", Some("https://i/c")),
            ("http://i/c", None),
            ("file:///etc/passwd", None),
        ] {
            assert_eq!(redirected(&from, location), to.map(|to| to.parse().unwrap()), "{location}");
        }
    }
}
