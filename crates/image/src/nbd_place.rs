//! What a disk of an NBD server is: where its server is, and the name of its export. All else in a URI says how the disk is
//! used, and with which credentials.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::borrow::Cow;
use std::ffi::OsString;
use std::net::IpAddr;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The port of NBD.
const PORT: u16 = 10809;
/// All but the plain characters of a URI's path.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// An NBD URI without options, credentials, and different spellings of the same place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NbdPlace {
    pub(crate) has_tls: bool,
    server: Server,
    export: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Server {
    Unix(PathBuf),
    Tcp(String, u16),
}

impl NbdPlace {
    /// Reads a URI; `None` if it names no place.
    pub(crate) fn parse(uri: &str) -> Option<Self> {
        let (scheme, rest) = uri.split_once("://")?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let server = match scheme {
            "nbd+unix" | "nbds+unix" => {
                // As in the client, the last one counts, and '+' is a character like others.
                let socket = pairs_of(query).filter(|(key, _)| key == b"socket").last()?.1;
                Server::Unix(PathBuf::from(OsString::from_vec(socket)))
            }
            "nbd" | "nbds" => tcp(authority)?,
            _ => return None,
        };
        let export = percent_decode_str(export).collect();
        Some(Self { has_tls: scheme.starts_with("nbds"), server, export })
    }

    /// Whether two lead to one disk, with or without TLS.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.export == other.export && self.server.canonical() == other.server.canonical()
    }
}

impl std::fmt::Display for NbdPlace {
    /// Writes the URI.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use std::os::unix::ffi::OsStrExt;
        let scheme = if self.has_tls { "nbds" } else { "nbd" };
        let export = percent_encode(&self.export, ESCAPED);
        match &self.server {
            Server::Unix(socket) => {
                let socket = percent_encode(socket.as_os_str().as_bytes(), ESCAPED);
                write!(f, "{scheme}+unix:///{export}?socket={socket}")
            }
            Server::Tcp(host, port) => {
                write!(f, "{scheme}://")?;
                match host.contains(':') {
                    true => write!(f, "[{host}]")?,
                    false => write!(f, "{}", percent_encode(host.as_bytes(), ESCAPED))?,
                }
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")
            }
        }
    }
}

impl Server {
    /// One form of all names that surely lead here: a socket's path without links, and one name of this host.
    fn canonical(&self) -> Self {
        match self {
            Self::Unix(socket) => {
                let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
                Self::Unix(socket.canonicalize().unwrap_or_else(|_| whole(socket)))
            }
            Self::Tcp(host, port) => {
                let address = host.parse::<IpAddr>();
                let host = match address {
                    Ok(address) if address.is_loopback() => "localhost".to_owned(),
                    Ok(address) => address.to_string(),
                    Err(_) => host.clone(),
                };
                Self::Tcp(host, *port)
            }
        }
    }
}

fn tcp(authority: &str) -> Option<Server> {
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']')?;
            (host, rest.strip_prefix(':').unwrap_or(rest))
        }
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    let port = if port.is_empty() { PORT } else { port.parse().ok()? };
    let host = String::from_utf8(percent_decode_str(host).collect()).ok()?;
    (!host.is_empty()).then(|| Server::Tcp(host.to_ascii_lowercase(), port))
}

/// The keys and values of a query, decoded. A '+' stands for itself.
fn pairs_of(query: &str) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> + '_ {
    let decoded = |text: &str| percent_decode_str(text).collect();
    query.split('&').map(move |pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(key), decoded(value))
    })
}

/// Returns the URI that says where the disk is, and nothing else. One that names no place loses its options.
pub(crate) fn without_options(uri: &str) -> Cow<'_, str> {
    match NbdPlace::parse(uri) {
        Some(place) => Cow::Owned(place.to_string()),
        None => Cow::Borrowed(uri.split_once('?').map_or(uri, |(place, _)| place)),
    }
}

/// Whether two URIs lead to one disk.
pub(crate) fn is_same(one: &str, other: &str) -> bool {
    let places = NbdPlace::parse(one).zip(NbdPlace::parse(other));
    places.map_or(one == other, |(one, other)| one.is_same(&other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_named_by_its_place_and_its_export_alone() {
        for (uri, place) in [
            ("nbd://h/x", "nbd://h/x"),
            ("nbd://H:10809/x?connections=4", "nbd://h/x"),
            ("nbd://me:secret@h:99/a%20b", "nbd://h:99/a%20b"),
            ("nbd://h", "nbd://h/"),
            ("nbds://h/x?tls-certificates=/pki/me&reconnect-s=5", "nbds://h/x"),
            ("nbds://[::1]:7/x", "nbds://[::1]:7/x"),
            ("nbd+unix:///%61?connections=2&socket=/run/a%2Fb+c", "nbd+unix:///a?socket=/run/a/b%2Bc"),
            ("nbds+unix:///a?tls-hostname=h&socket=/s", "nbds+unix:///a?socket=/s"),
            ("nbd+unix:///a%ff?socket=/s", "nbd+unix:///a%FF?socket=/s"),
            ("nbd://h:99999/x?connections=1", "nbd://h:99999/x"),
        ] {
            assert_eq!(without_options(uri), place, "{uri}");
            assert_eq!(without_options(place), place, "and it stays so");
        }
    }

    #[test]
    fn other_spellings_and_options_are_no_other_disk() {
        for (one, other) in [
            ("nbd://h/x", "nbd://h:10809/x?reconnect-s=5"),
            ("nbd://h/x", "nbds://me@H/%78?tls-certificates=/d"),
            ("nbd://localhost/x", "nbd://127.0.0.1/x"),
            ("nbd://[::1]/x", "nbd://[0:0:0:0:0:0:0:1]/x"),
            ("nbd+unix:///?socket=/run/s", "nbd+unix:///?connections=1&socket=%2Frun%2Fs"),
        ] {
            assert!(is_same(one, other) && is_same(other, one), "{one} {other}");
        }
        for (one, other) in [
            ("nbd://h/x", "nbd://h/y"),
            ("nbd://h/x", "nbd://h:10810/x"),
            ("nbd://h/x", "nbd://i/x"),
            ("nbd://h/a", "nbd://h/A"),
            ("nbd+unix:///a?socket=/s", "nbd+unix:///a?socket=/t"),
            ("nbd+unix:///a?socket=/s", "nbd://s/a"),
        ] {
            assert!(!is_same(one, other), "{one} {other}");
        }
    }

    #[test]
    fn links_to_a_socket_lead_to_one_disk() {
        let dir = tempfile::tempdir().unwrap();
        let [socket, link] = ["socket", "link"].map(|name| dir.path().join(name));
        std::fs::write(&socket, "").unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let uri = |path: &Path| format!("nbd+unix:///x?socket={}", path.display());
        assert!(is_same(&uri(&socket), &uri(&link)));
        assert!(is_same(&uri(&dir.path().join("./socket")), &uri(&socket)));
    }
}
