//! Names of disks at NBD servers, as the NBD project defines them (`doc/uri.md`).

use block::{Error, ErrorKind, Result};
use nbd_tls::{ClientTls, Credentials};
use percent_encoding::percent_decode_str;
use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The port of NBD.
const PORT: u16 = 10809;
/// How long to wait for a server that has gone, by default.
const RECONNECT: Duration = Duration::from_secs(30);

/// The default for the number of connections, and the most.
const CONNECTIONS: usize = 2;
const CONNECTIONS_MAX: usize = 16;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A Unix socket.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String, u16),
}

/// The name of a disk at a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    text: String,
    pub(crate) place: Place,
    pub(crate) export: Vec<u8>,
    pub(crate) reconnect: Duration,
    /// The most connections.
    pub(crate) connections: usize,
    /// For `nbds://`: certificates or keys, and the name in the server's certificate.
    pub(crate) tls: Option<(ClientTls, String)>,
}

impl NbdUri {
    /// Reads `nbd://HOST[:PORT]/[EXPORT]` or `nbd+unix:///[EXPORT]?socket=PATH`. Both take `reconnect-s=SECONDS`, how
    /// long to wait for a server that has gone, and `connections=N`, the most connections if the server allows several.
    /// With TLS they are `nbds://` and `nbds+unix://`. Then `tls-certificates=DIRECTORY` has the certificates in QEMU's
    /// layout, and `tls-hostname=NAME` is the name in the server's certificate. With `tls-psk-file=FILE` there are
    /// shared keys instead, and the user is that in `nbds://USER@HOST`.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::BadOption, format!("'{text}': {why}"));
        let (scheme, rest) = text.split_once("://").ok_or_else(|| {
            bad("an NBD disk is named as nbd://HOST:PORT/EXPORT or as nbd+unix:///EXPORT?socket=PATH")
        })?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export: Vec<u8> = percent_decode_str(export).collect();
        let (mut socket, mut reconnect, mut connections) = (None, RECONNECT, CONNECTIONS);
        let (mut certificates, mut keys, mut host) = (None, None, None);
        for (key, value) in form_urlencoded::parse(query.replace('+', "%2B").as_bytes()) {
            match key.as_ref() {
                "socket" => socket = Some(value.into_owned()),
                "reconnect-s" => {
                    let seconds = value.parse::<u16>().map_err(|_| bad("reconnect-s takes 0 to 65535 seconds"))?;
                    reconnect = Duration::from_secs(seconds.into());
                }
                "connections" => {
                    let count = value.parse().ok().filter(|count| (1..=CONNECTIONS_MAX).contains(count));
                    connections = count.ok_or_else(|| bad("connections takes 1 to 16"))?;
                }
                "tls-certificates" => certificates = Some(value.into_owned()),
                "tls-hostname" => host = Some(value.into_owned()),
                "tls-psk-file" => keys = Some(value.into_owned()),
                other => {
                    let known = "socket, reconnect-s, connections, tls-certificates, tls-psk-file, tls-hostname";
                    return Err(bad(&format!("unknown parameter '{other}' (known are {known})")));
                }
            }
        }
        let plain = scheme.strip_prefix("nbds").map(|rest| format!("nbd{rest}"));
        let has_tls = plain.is_some();
        let place = match (plain.as_deref().unwrap_or(scheme), socket) {
            ("nbd+unix", Some(socket)) if host_of(authority).is_empty() && !socket.is_empty() => {
                Place::Unix(socket.into())
            }
            ("nbd+unix", _) => return Err(bad("a Unix socket is named as nbd+unix:///EXPORT?socket=PATH")),
            ("nbd", None) => tcp(authority).ok_or_else(|| bad("a server is named as nbd://HOST:PORT/EXPORT"))?,
            ("nbd", Some(_)) => return Err(bad("socket= belongs to nbd+unix://")),
            _ => return Err(bad("unknown scheme (known are nbd, nbd+unix, nbds, nbds+unix)")),
        };
        let what = match (certificates, keys) {
            (Some(directory), None) => Some(ClientTls::Certificates(Credentials::in_directory(directory))),
            (None, Some(file)) => {
                let user = authority.rsplit_once('@').map(|(user, _)| percent_decode_str(user).decode_utf8_lossy());
                Some(ClientTls::Keys(file.into(), user.map(Cow::into_owned)))
            }
            (None, None) => None,
            (Some(_), Some(_)) => return Err(bad("tls-certificates= and tls-psk-file= exclude each other")),
        };
        let tls = match (has_tls, what) {
            (true, Some(what)) => {
                let host = host.unwrap_or_else(|| match &place {
                    Place::Unix(_) => "localhost".to_owned(),
                    Place::Tcp(host, _) => host.clone(),
                });
                Some((what, host))
            }
            (true, None) => {
                let needs = "TLS needs tls-certificates=DIRECTORY with ca-cert.pem in it, or tls-psk-file=FILE";
                return Err(bad(needs));
            }
            (false, None) if host.is_none() => None,
            (false, _) => {
                let belong = "tls-certificates=, tls-psk-file= and tls-hostname= belong to nbds:// and nbds+unix://";
                return Err(bad(belong));
            }
        };
        Ok(Self { text: text.to_owned(), place, export, reconnect, connections, tls })
    }
}

/// Returns the part behind a user's name. Only shared keys use that name.
fn host_of(authority: &str) -> &str {
    authority.rsplit_once('@').map_or(authority, |(_, host)| host)
}

fn tcp(authority: &str) -> Option<Place> {
    let authority = host_of(authority);
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']')?;
            (host, rest.strip_prefix(':').or(rest.is_empty().then_some(""))?)
        }
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    let port = if port.is_empty() { PORT } else { port.parse().ok()? };
    let host = String::from_utf8(percent_decode_str(host).collect()).ok()?;
    (!host.is_empty()).then_some(Place::Tcp(host, port))
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "the socket '{}'", path.display()),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_where_a_server_is_and_what_the_disk_is_called() {
        let unix = |path: &str| Place::Unix(path.into());
        let tcp = |host: &str, port| Place::Tcp(host.into(), port);
        for (text, place, export) in [
            ("nbd+unix:///?socket=/run/a.sock", unix("/run/a.sock"), ""),
            ("nbd+unix:///my%20disk?socket=/run/a+b%2Fc", unix("/run/a+b/c"), "my disk"),
            ("nbd://host", tcp("host", PORT), ""),
            ("nbd://host:99/a/b", tcp("host", 99), "a/b"),
            ("nbd://[::1]:99/x", tcp("::1", 99), "x"),
            ("nbd://me@[::1]/x", tcp("::1", PORT), "x"),
        ] {
            let uri = NbdUri::parse(text).unwrap();
            assert_eq!(
                (uri.place, uri.export, uri.reconnect),
                (place, export.as_bytes().to_vec(), RECONNECT),
                "{text}"
            );
        }
        let patient = NbdUri::parse("nbd://h/?reconnect-s=5").unwrap();
        assert_eq!(patient.reconnect, Duration::from_secs(5));
    }

    #[test]
    fn names_that_lead_nowhere_say_what_is_right() {
        for (text, hint) in [
            ("nbd:unix:/run/x", "nbd+unix:///"),
            ("nbd+unix:///x", "socket=PATH"),
            ("nbd+unix://host/x?socket=/s", "socket=PATH"),
            ("nbd://", "HOST:PORT"),
            ("nbd://h:99999/", "HOST:PORT"),
            ("nbd://h/?sokcet=/x", "socket, reconnect-s"),
            ("nbd://h/?reconnect-s=x", "65535"),
            ("nbds://h/", "tls-certificates"),
            ("nbd://h/?tls-certificates=/d", "nbds://"),
            ("nbd://h/?tls-psk-file=/k", "nbds://"),
            ("nbds://h/?tls-psk-file=/k&tls-certificates=/d", "exclude"),
        ] {
            let error = NbdUri::parse(text).unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains(text), "{error}");
        }
    }
}
