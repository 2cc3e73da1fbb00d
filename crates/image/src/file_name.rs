//! Names of files: a protocol, and a rest that the protocol interprets.

use crate::nbd_place;
use block::{Error, ErrorKind, Result};
use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The name of a file that an image consists of, as its user gives it: `disk.qcow2`, `file:disk.qcow2`,
/// `host_device:/dev/sdb`, `fd:3`, `vhost-user:/run/disk.sock`, `nbd://host/disk`, `https://host/disk`, `rbd:pool/disk`.
///
/// A name without a protocol is a path. As in QEMU, a colon behind a slash is part of the path, so `./a:b` is a file.
/// Images name files by path; some policies also let them name servers' files: see [`crate::BackingPolicy`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileName {
    /// A regular file or a block device.
    File(PathBuf),
    /// A block device; no regular file is accepted.
    HostDevice(PathBuf),
    /// A descriptor that this program got at its start.
    Descriptor(RawFd),
    /// A disk that a vhost-user server offers at this socket.
    VhostUser(PathBuf),
    /// A file without a name, made in this directory and gone when it is closed. Users cannot give it.
    Temporary(PathBuf),
    /// A disk of an NBD server: the whole URI, `nbd://...` or `nbd+unix://...`, with TLS `nbds://...` or `nbds+unix://...`.
    Nbd(String),
    /// A file on a web server: the whole URL, `http://...` or `https://...`, with the options behind `#`.
    Http(String),
    /// An image of a Ceph cluster: the whole name, `rbd:POOL/IMAGE[@SNAPSHOT][:KEY=VALUE...]`.
    Rbd(String),
}

impl FileName {
    /// The protocols that can stand before a colon.
    pub const PROTOCOLS: [&'static str; 11] =
        ["file", "host_device", "fd", "vhost-user", "nbd", "nbd+unix", "nbds", "nbds+unix", "http", "https", "rbd"];

    /// Parses a name that a user gave. (A path that is certainly one becomes a name by `into()`.)
    pub fn parse(text: impl AsRef<OsStr>) -> Result<Self> {
        let text = text.as_ref();
        match split_protocol(text) {
            // The name of a file need not be text.
            None => Ok(Self::File(text.as_bytes().strip_prefix(b"file:").map_or(text, OsStr::from_bytes).into())),
            Some(("file", path)) => Ok(Self::File(PathBuf::from(path))),
            Some(("host_device", path)) => Ok(Self::HostDevice(PathBuf::from(path))),
            Some(("vhost-user", "")) => Err(bad("vhost-user: takes the path of a socket".to_owned())),
            Some(("vhost-user", socket)) => Ok(Self::VhostUser(PathBuf::from(socket))),
            Some((protocol @ ("nbd" | "nbd+unix" | "nbds" | "nbds+unix"), place)) if place.starts_with("//") => {
                let name = format!("{protocol}:{place}");
                match without_secrets(&name) {
                    Cow::Borrowed(_) => Ok(Self::Nbd(name)),
                    Cow::Owned(shown) => Err(bad(format!(
                        "'{shown}': NBD knows no passwords, and everybody can see a name: put a shared key into a file \
                         (tls-psk-file=)"
                    ))),
                }
            }
            Some((protocol @ ("http" | "https"), place)) if place.starts_with("//") => {
                Ok(Self::Http(format!("{protocol}:{place}")))
            }
            Some(("rbd", image)) => Ok(Self::Rbd(format!("rbd:{image}"))),
            Some(("fd", number)) => {
                let known = number.parse().ok().filter(|number| *number >= 0);
                known.map(Self::Descriptor).ok_or_else(|| {
                    bad(format!(
                        "'fd:{number}': fd: takes the number of a descriptor that was passed, for example fd:3"
                    ))
                })
            }
            Some((protocol, _)) => {
                let (text, known) = (shown(text), Self::PROTOCOLS.join(", "));
                let right = match protocol {
                    // QEMU's old names: nbd:HOST:PORT and nbd:unix:PATH.
                    "nbd" | "nbd+unix" | "nbds" | "nbds+unix" => {
                        "an NBD disk is named as nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH".to_owned()
                    }
                    "http" | "https" => "a file on a web server is named as https://HOST/FILE".to_owned(),
                    _ => format!("known are {known}"),
                };
                Err(bad(format!("Unknown protocol '{protocol}' ({right}; a file of that name is './{text}')")))
            }
        }
    }

    /// Returns its path in the host's file system; `None` if it has none.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) | Self::HostDevice(path) => Some(path),
            Self::Descriptor(_)
            | Self::VhostUser(_)
            | Self::Temporary(_)
            | Self::Nbd(_)
            | Self::Http(_)
            | Self::Rbd(_) => None,
        }
    }

    /// Whether it lies at a server, named by a URI, or in a cluster.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Nbd(_) | Self::Http(_) | Self::Rbd(_))
    }

    /// Returns the name of what lies at a server, without options of this program and without credentials: neither those
    /// behind `#`, nor those about a cluster or a connection.
    #[must_use]
    pub fn address(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Http(url) => Some(Cow::Borrowed(url.split_once('#').map_or(url, |(address, _)| address))),
            Self::Nbd(uri) => Some(nbd_place::without_options(uri)),
            Self::Rbd(name) => Some(Cow::Borrowed(split_options(name).0)),
            _ => None,
        }
    }

    /// Returns the name by which an image that rests on this file can keep it in its header: its path, or the name that
    /// its server knows. `None` if it has no such name, or one with a secret in it: headers are readable.
    #[must_use]
    pub fn in_header(&self) -> Option<Cow<'_, str>> {
        match self.path() {
            Some(path) => path.to_str().map(Cow::Borrowed),
            None => self.address().filter(|address| without_secrets(address) == **address),
        }
    }

    /// Returns where this program can look at the file: its path, its descriptor's path under `/proc`, or its server's
    /// socket. A URI comes back unchanged.
    #[must_use]
    pub fn look_at(&self) -> PathBuf {
        match self {
            Self::File(path) | Self::HostDevice(path) | Self::VhostUser(path) | Self::Temporary(path) => path.clone(),
            Self::Descriptor(number) => PathBuf::from(format!("/proc/self/fd/{number}")),
            Self::Nbd(uri) | Self::Http(uri) | Self::Rbd(uri) => PathBuf::from(uri),
        }
    }

    /// Returns the same name with another path. A name without a path stays as it is.
    pub(crate) fn try_map_path(&self, change: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<Self> {
        Ok(match self {
            Self::File(path) => Self::File(change(path)?),
            Self::HostDevice(path) => Self::HostDevice(change(path)?),
            Self::Descriptor(_)
            | Self::VhostUser(_)
            | Self::Temporary(_)
            | Self::Nbd(_)
            | Self::Http(_)
            | Self::Rbd(_) => self.clone(),
        })
    }

    /// Whether the file disappears with the disk.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Temporary(_))
    }

    /// Whether two canonical names lead to the same file, whatever their protocols.
    #[must_use]
    pub fn is_same_file(&self, other: &Self) -> bool {
        match (self.path(), other.path()) {
            (Some(own), Some(other)) => own == other,
            _ if let (Self::Rbd(own), Self::Rbd(other)) = (self, other) => {
                // Two clusters may have images of the same name.
                let cluster = |name| split_options(name).1.filter(|(key, _)| *key != "id").collect::<Vec<_>>();
                split_options(own).0 == split_options(other).0 && cluster(own) == cluster(other)
            }
            _ if let (Self::Nbd(own), Self::Nbd(other)) = (self, other) => nbd_place::is_same(own, other),
            _ if self.is_remote() => self.address() == other.address(),
            _ => self == other,
        }
    }
}

/// The protocol of an image of a cluster.
const RBD: &str = "rbd:";
/// How names begin that may have secrets in them.
const WITH_SECRETS: [&str; 7] = ["http://", "https://", "nbd://", "nbd+unix://", "nbds://", "nbds+unix://", RBD];

/// Splits a name into its protocol and the rest behind the colon.
fn split_protocol(text: &OsStr) -> Option<(&str, &str)> {
    // A name that is not text has none of the other protocols: it is a path in another encoding.
    text.to_str()?.split_once(':').filter(|(before, _)| !before.contains('/'))
}

/// Splits a name into the image of a cluster and the options about the cluster, as keys and values. A colon behind a
/// backslash is part of a name.
fn split_options(name: &str) -> (&str, impl Iterator<Item = (&str, &str)> + Clone) {
    let (protocol, rest) =
        name.split_once(':').map_or((0, name), |(before, rest)| (before.len().saturating_add(1), rest));
    let mut is_escaped = false;
    let is_end = move |char: char| {
        let ends = char == ':' && !is_escaped;
        is_escaped = char == '\\' && !is_escaped;
        ends
    };
    let mut parts = rest.split(is_end);
    let image = parts.next().map_or(0, str::len);
    let options = parts.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    (name.get(..protocol.saturating_add(image)).unwrap_or(name), options)
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

impl fmt::Display for FileName {
    /// Writes the name as messages show it: a path as it is, everything else with its protocol.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) | Self::HostDevice(path) => path.display().fmt(f),
            Self::Descriptor(number) => write!(f, "fd:{number}"),
            Self::VhostUser(socket) => write!(f, "vhost-user:{}", socket.display()),
            Self::Temporary(directory) => write!(f, "a temporary file in {}", directory.display()),
            Self::Nbd(uri) => f.write_str(uri),
            Self::Http(name) | Self::Rbd(name) => f.write_str(&without_secrets(name)),
        }
    }
}

/// Returns a name for messages. A URL's password, query and fragment may be secret, so they are left out. Of the
/// options about a cluster, only the user and the configuration are shown.
#[must_use]
pub fn without_secrets(name: &str) -> Cow<'_, str> {
    if name.starts_with(RBD) {
        let (image, options) = split_options(name);
        let show = |(key, value)| match key {
            "id" | "conf" => format!(":{key}={value}"),
            _ => format!(":{key}=..."),
        };
        return Cow::Owned(image.chars().chain(options.map(show).collect::<String>().chars()).collect());
    }
    let Some((protocol, rest)) = name.split_once("://") else { return Cow::Borrowed(name) };
    if protocol.starts_with("nbd") {
        // It knows no passwords, and a name with one is refused.
        let (authority, place) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let user = authority.rsplit_once('@').and_then(|(user, host)| Some((user.split_once(':')?.0, host)));
        let shown = user.map(|(user, host)| format!("{protocol}://{user}@{host}{place}"));
        return shown.map_or(Cow::Borrowed(name), Cow::Owned);
    }
    if !matches!(protocol, "http" | "https") {
        return Cow::Borrowed(name);
    }
    let place = rest.split_once('#').map_or(rest, |(place, _)| place);
    let (place, query) = place.split_once('?').map_or((place, ""), |(place, _)| (place, "?..."));
    let (authority, path) = place.split_at(place.find('/').unwrap_or(place.len()));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    Cow::Owned(format!("{protocol}://{host}{path}{query}"))
}

/// Returns options for messages, such as `file=https://...,name=a`. Each URL or image of a cluster in them is shown as
/// by [`without_secrets`]. It ends at a quotation mark, or at a comma that is not doubled.
#[must_use]
pub fn options_without_secrets(text: &str) -> String {
    let (mut shown, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(start) = WITH_SECRETS.into_iter().filter_map(|protocol| rest.find(protocol)).min() {
        let (before, from_url) = rest.split_at(start);
        let mut chars = from_url.char_indices().peekable();
        let end = loop {
            match chars.next() {
                // Of a description in JSON, or of a name: what follows it ends nothing.
                Some((_, '\\')) => drop(chars.next()),
                Some((_, ',')) if chars.next_if(|(_, next)| *next == ',').is_some() => {}
                Some((end, ',' | '"')) => break end,
                Some(_) => {}
                None => break from_url.len(),
            }
        };
        let (url, after) = from_url.split_at(end);
        shown.push_str(before);
        shown.push_str(&without_secrets(url));
        rest = after;
    }
    shown.push_str(rest);
    shown
}

/// What a user has given as the name of a file or as a description of one, for messages: without what may be secret.
#[must_use]
pub fn shown(text: impl AsRef<OsStr>) -> String {
    let text = text.as_ref().to_string_lossy();
    let is_name = WITH_SECRETS.into_iter().any(|protocol| text.starts_with(protocol));
    if is_name { without_secrets(&text).into_owned() } else { options_without_secrets(&text) }
}

impl From<PathBuf> for FileName {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

/// Takes the path as it is: no part of it counts as a protocol.
impl<T: AsRef<OsStr> + ?Sized> From<&T> for FileName {
    fn from(path: &T) -> Self {
        Self::File(PathBuf::from(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_ends_at_the_first_colon_that_no_slash_precedes() {
        let file = |path: &str| FileName::File(path.into());
        for (text, name) in [
            ("disk.raw", file("disk.raw")),
            ("file:disk.raw", file("disk.raw")),
            ("file:a:b", file("a:b")),
            ("./a:b", file("./a:b")),
            ("/dev/disk/by-path/pci-0000:00", file("/dev/disk/by-path/pci-0000:00")),
            ("host_device:/dev/sdb", FileName::HostDevice("/dev/sdb".into())),
            ("fd:3", FileName::Descriptor(3)),
            ("vhost-user:/run/a:b.sock", FileName::VhostUser("/run/a:b.sock".into())),
            ("nbd://host:1/a", FileName::Nbd("nbd://host:1/a".into())),
            ("nbd+unix:///a?socket=/s", FileName::Nbd("nbd+unix:///a?socket=/s".into())),
            ("https://h/a?b#cache=/c", FileName::Http("https://h/a?b#cache=/c".into())),
            ("rbd:p/i@s:id=a", FileName::Rbd("rbd:p/i@s:id=a".into())),
        ] {
            assert_eq!(FileName::parse(text).unwrap(), name, "{text}");
        }
    }

    #[test]
    fn a_name_of_a_known_protocol_that_lacks_its_slashes_is_shown_the_right_way() {
        let said = |text: &str| FileName::parse(text).unwrap_err().to_string();
        for text in ["nbd:localhost:10809:exportname=x", "nbd:unix:/run/s", "nbds:h"] {
            assert!(said(text).contains("named as nbd://HOST:PORT/EXPORT") && !said(text).contains("known are"));
        }
        assert!(said("https:h/x").contains("https://HOST/FILE"));
        assert!(said("ftp:h/x").contains("known are file,"));
    }

    #[test]
    fn a_message_has_no_password_and_no_query_of_a_url() {
        for (text, shown) in [
            ("https://me:secret@h:1/a?key=secret#cache=/c", "https://h:1/a?..."),
            ("http://h", "http://h"),
            ("nbd+unix:///a?socket=/s", "nbd+unix:///a?socket=/s"),
            ("nbd://me@h/a:b@c", "nbd://me@h/a:b@c"),
            ("a/b?c", "a/b?c"),
            (r"rbd:p/i\:j@s:id=me:conf=/c:key=secret\:secret:x", r"rbd:p/i\:j@s:id=me:conf=/c:key=...:x=..."),
        ] {
            assert_eq!(FileName::parse(text).unwrap().to_string(), shown);
        }
        for text in
            ["nbds://me:secret@h/x?tls-psk-file=/k", "nbd://:secret@[::1]:9/x", "nbd+unix://a:secret@?socket=/s"]
        {
            let error = FileName::parse(text).unwrap_err().to_string();
            assert!(error.contains("no passwords") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn options_in_a_message_have_no_secret_of_any_url() {
        for (text, shown) in [
            ("file=https://h/a?sig=x#cache=/c,name=a", "file=https://h/a?...,name=a"),
            ("name=a,file=http://u:p@h/a?s=1,,2,size=1", "name=a,file=http://h/a?...,size=1"),
            (r#"{"x":"https://h/a?s","y":"https://h/b?t"}"#, r#"{"x":"https://h/a?...","y":"https://h/b?..."}"#),
            ("file=https://h/a?s,,", "file=https://h/a?..."),
            ("file=nbd://me:secret@h/a?reconnect-s=5,name=a", "file=nbd://me@h/a?reconnect-s=5,name=a"),
            ("file=nbd+unix://a:secret@/x?socket=/s,name=a", "file=nbd+unix://a@/x?socket=/s,name=a"),
            ("name=a,file=nbds+unix://a:secret@/x?socket=/s", "name=a,file=nbds+unix://a@/x?socket=/s"),
            ("file=/a?b,name=é", "file=/a?b,name=é"),
            ("name=a,file=rbd:p/i:key=secret,,secret,size=1", "name=a,file=rbd:p/i:key=...,size=1"),
            (r#"{"x":"rbd:p/i:key=a\"secret","y":1}"#, r#"{"x":"rbd:p/i:key=...","y":1}"#),
        ] {
            assert_eq!(options_without_secrets(text), shown);
        }
    }

    #[test]
    fn what_a_user_has_given_is_shown_without_secrets_whatever_it_is() {
        for (text, expected) in [
            ("rbd:p/i,j:key=secret", "rbd:p/i,j:key=..."),
            ("https://me:secret@h/a,b?secret", "https://h/a,b?..."),
            ("nbds://me:secret,secret@h/a,b", "nbds://me@h/a,b"),
            ("nbd+unix://me:secret\"secret@/a?socket=/s", "nbd+unix://me@/a?socket=/s"),
            (r#"json:{"file.filename":"rbd:p/i:key=secret"}"#, r#"json:{"file.filename":"rbd:p/i:key=..."}"#),
            ("driver=raw,file.filename=rbd:p/i:key=secret", "driver=raw,file.filename=rbd:p/i:key=..."),
            ("disk.raw", "disk.raw"),
        ] {
            assert_eq!(shown(text), expected);
        }
        let error = FileName::parse("image:rbd:p/i:key=secret").unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn images_of_a_cluster_are_the_same_by_their_place_and_their_cluster() {
        let name = |text: &str| FileName::parse(text).unwrap();
        let image = name(r"rbd:p/i\:j@s:conf=/c:id=a");
        assert_eq!(image.address().as_deref(), Some(r"rbd:p/i\:j@s"));
        for (other, is_same) in [
            (r"rbd:p/i\:j@s:id=b:conf=/c", true),
            (r"rbd:p/i\:j@s", false),
            (r"rbd:p/i\:j@s:conf=/d", false),
            (r"rbd:p/i\:j:conf=/c", false),
            ("nbd://h/x", false),
        ] {
            assert_eq!(image.is_same_file(&name(other)), is_same, "{other}");
        }
    }

    #[test]
    fn a_header_gets_a_path_or_what_the_server_knows_and_no_secret() {
        for (text, kept) in [
            ("/a:b", Some("/a:b")),
            ("host_device:/dev/sdb", Some("/dev/sdb")),
            ("nbd+unix:///a?socket=/s", Some("nbd+unix:///a?socket=/s")),
            ("https://h/a#cache=/c", Some("https://h/a")),
            ("https://h/a?key=secret", None),
            ("https://me:secret@h/a", None),
            ("rbd:p/i@s:id=a:key=secret", Some("rbd:p/i@s")),
            ("fd:3", None),
        ] {
            assert_eq!(FileName::parse(text).unwrap().in_header().as_deref(), kept, "{text}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_with_a_list_of_what_is() {
        for text in ["nbd:unix:/run/x.sock", "a:b", "json:{}", ":x"] {
            let message = FileName::parse(text).unwrap_err().to_string();
            let says_what_is = message.contains("file, host_device, fd") || message.contains("nbd+unix:///EXPORT");
            assert!(says_what_is && message.contains(&format!("./{text}")), "{message}");
        }
        for text in ["fd:", "fd:x", "fd:-1", "fd:99999999999"] {
            assert!(FileName::parse(text).unwrap_err().to_string().contains("fd:3"), "{text}");
        }
    }
}
