//! The name of a disk at an NBD server, and how this client reaches it.

use block::{Error, ErrorKind, Result};
use nbd_tls::{ClientTls, Credentials};
use nbd_wire::{Server, Uri};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

/// How long to wait for a server that has gone, by default.
const RECONNECT: Duration = Duration::from_secs(30);

/// The default for the number of connections, and the most.
const CONNECTIONS: usize = 2;
const CONNECTIONS_MAX: usize = 16;

/// The name of a disk at a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    text: String,
    pub(crate) server: Server,
    pub(crate) export: Vec<u8>,
    pub(crate) reconnect: Duration,
    /// The most connections.
    pub(crate) connections: usize,
    /// For `nbds://`: certificates or keys, and the name in the server's certificate.
    pub(crate) tls: Option<(ClientTls, String)>,
}

/// What the parameters of a URI say, apart from the place.
struct Parameters {
    reconnect: Duration,
    connections: usize,
    certificates: Option<PathBuf>,
    keys: Option<PathBuf>,
    host: Option<String>,
}

impl Parameters {
    fn read(pairs: Vec<(Vec<u8>, Vec<u8>)>) -> Result<Self, String> {
        let (reconnect, connections) = (RECONNECT, CONNECTIONS);
        let mut read = Self { reconnect, connections, certificates: None, keys: None, host: None };
        for (key, value) in pairs {
            let text = std::str::from_utf8(&value).ok();
            match &*key {
                b"reconnect-s" => {
                    let seconds: Option<u16> = text.and_then(|text| text.parse().ok());
                    read.reconnect = Duration::from_secs(seconds.ok_or("reconnect-s takes 0 to 65535 seconds")?.into());
                }
                b"connections" => {
                    let count = text.and_then(|text| text.parse().ok());
                    let count = count.filter(|count| (1..=CONNECTIONS_MAX).contains(count));
                    read.connections = count.ok_or("connections takes 1 to 16")?;
                }
                b"tls-certificates" => read.certificates = Some(OsString::from_vec(value).into()),
                b"tls-hostname" => read.host = Some(text.ok_or("tls-hostname takes a name in UTF-8")?.to_owned()),
                b"tls-psk-file" => read.keys = Some(OsString::from_vec(value).into()),
                other => {
                    let known = "socket, reconnect-s, connections, tls-certificates, tls-psk-file, tls-hostname";
                    return Err(format!("unknown parameter '{}' (known are {known})", String::from_utf8_lossy(other)));
                }
            }
        }
        Ok(read)
    }

    /// Returns how the client proves itself and checks the server, if the URI asks for TLS.
    fn tls(self, has_tls: bool, user: Option<String>, server: &Server) -> Result<Option<(ClientTls, String)>, String> {
        let what = match (self.certificates, self.keys) {
            (Some(directory), None) => Some(ClientTls::Certificates(Credentials::in_directory(directory))),
            (None, Some(file)) => Some(ClientTls::Keys(file, user)),
            (None, None) => None,
            (Some(_), Some(_)) => return Err("tls-certificates= and tls-psk-file= exclude each other".to_owned()),
        };
        match (has_tls, what) {
            (true, Some(what)) => {
                let host = self.host.unwrap_or_else(|| match server {
                    Server::Unix(_) => "localhost".to_owned(),
                    Server::Tcp(host, _) => host.clone(),
                });
                Ok(Some((what, host)))
            }
            (true, None) => {
                Err("TLS needs tls-certificates=DIRECTORY with ca-cert.pem in it, or tls-psk-file=FILE".to_owned())
            }
            (false, None) if self.host.is_none() => Ok(None),
            (false, _) => {
                let these = "tls-certificates=, tls-psk-file= and tls-hostname=";
                Err(format!("{these} belong to nbds:// and nbds+unix://"))
            }
        }
    }
}

impl NbdUri {
    /// Reads `nbd://HOST[:PORT]/[EXPORT]` or `nbd+unix:///[EXPORT]?socket=PATH`. Both take `reconnect-s=SECONDS`, how
    /// long to wait for a server that has gone, and `connections=N`, the most connections if the server allows several.
    /// With TLS they are `nbds://` and `nbds+unix://`. Then `tls-certificates=DIRECTORY` has the certificates in QEMU's
    /// layout, and `tls-hostname=NAME` is the name in the server's certificate. With `tls-psk-file=FILE` there are
    /// shared keys instead, and the user is that in `nbds://USER@HOST`.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |why: String| Error::new(ErrorKind::BadOption, format!("'{text}': {why}"));
        let uri = Uri::parse(text).map_err(|why| bad(why.to_string()))?;
        let parameters = Parameters::read(uri.parameters).map_err(bad)?;
        let (reconnect, connections) = (parameters.reconnect, parameters.connections);
        let tls = parameters.tls(uri.has_tls, uri.user, &uri.server).map_err(bad)?;
        Ok(Self { text: text.to_owned(), server: uri.server, export: uri.export, reconnect, connections, tls })
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_where_a_disk_is_and_how_it_is_reached() {
        let plain = NbdUri::parse("nbd://me@host/a%20b").unwrap();
        assert_eq!((&plain.server, &*plain.export), (&Server::Tcp("host".into(), 10809), &b"a b"[..]));
        assert_eq!((plain.reconnect, plain.connections, plain.tls), (RECONNECT, CONNECTIONS, None));
        let patient = NbdUri::parse("nbd+unix:///?socket=/s%FF&reconnect-s=5&connections=16").unwrap();
        assert_eq!(patient.server, Server::Unix(OsString::from_vec(b"/s\xff".to_vec()).into()));
        assert_eq!((patient.reconnect, patient.connections), (Duration::from_secs(5), 16));
        for (text, user, name) in [
            ("nbds://me@h/?tls-psk-file=/k", Some("me"), "h"),
            ("nbds+unix:///?socket=/s&tls-psk-file=/k", None, "localhost"),
            ("nbds://h/?tls-psk-file=/k&tls-hostname=other", None, "other"),
        ] {
            let keys = ClientTls::Keys("/k".into(), user.map(str::to_owned));
            assert_eq!(NbdUri::parse(text).unwrap().tls, Some((keys, name.to_owned())), "{text}");
        }
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
            ("nbd://h/?connections=17", "1 to 16"),
            ("nbds://h/?tls-hostname=%FF", "UTF-8"),
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
