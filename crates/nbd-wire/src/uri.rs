//! URIs of disks at NBD servers, taken apart as the NBD project defines them (`doc/uri.md`).

use crate::WireError;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The port of NBD.
const PORT: u16 = 10809;
/// All but the plain characters of a URI's path.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Server {
    /// A Unix socket.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String, u16),
}

/// The parts of a URI, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uri {
    /// Whether it asks for TLS.
    pub has_tls: bool,
    /// The name before the host's, which shared keys use.
    pub user: Option<String>,
    /// Where the server is.
    pub server: Server,
    /// The name of the disk there.
    pub export: Vec<u8>,
    /// The keys and values behind the place, in their order. `socket` is not among them: it is in `server`.
    pub parameters: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Uri {
    /// Takes `nbd://HOST[:PORT]/[EXPORT]` or `nbd+unix:///[EXPORT]?socket=PATH` apart. With TLS they are `nbds://` and
    /// `nbds+unix://`. Fails if there is no such place. Whether the parameters make sense is for the caller to say.
    pub fn parse(text: &str) -> Result<Self, WireError> {
        let no_scheme = "an NBD disk is named as nbd://HOST:PORT/EXPORT or as nbd+unix:///EXPORT?socket=PATH";
        let (scheme, rest) = text.split_once("://").ok_or(WireError(no_scheme))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, place) = match authority.rsplit_once('@') {
            Some((user, place)) => (Some(percent_decode_str(user).decode_utf8_lossy().into_owned()), place),
            None => (None, authority),
        };
        let (has_tls, is_unix) = match scheme {
            "nbd" => (false, false),
            "nbd+unix" => (false, true),
            "nbds" => (true, false),
            "nbds+unix" => (true, true),
            _ => return Err(WireError("unknown scheme (known are nbd, nbd+unix, nbds, nbds+unix)")),
        };
        let (mut sockets, parameters): (Vec<_>, Vec<_>) = pairs_of(query).partition(|(key, _)| key == b"socket");
        // The last one counts, as of all parameters.
        let server = match (is_unix, sockets.pop()) {
            (true, Some((_, path))) if place.is_empty() && !path.is_empty() => {
                Server::Unix(OsString::from_vec(path).into())
            }
            (true, _) => return Err(WireError("a Unix socket is named as nbd+unix:///EXPORT?socket=PATH")),
            (false, None) => tcp(place).ok_or(WireError("a server is named as nbd://HOST:PORT/EXPORT"))?,
            (false, Some(_)) => return Err(WireError("socket= belongs to nbd+unix://")),
        };
        Ok(Self { has_tls, user, server, export: percent_decode_str(export).collect(), parameters })
    }

    /// Writes the URI that says where the disk is, and nothing else: without user and parameters.
    #[must_use]
    pub fn address(&self) -> String {
        let scheme = if self.has_tls { "nbds" } else { "nbd" };
        let export = percent_encode(&self.export, ESCAPED);
        match &self.server {
            Server::Unix(socket) => {
                let socket = percent_encode(socket.as_os_str().as_bytes(), ESCAPED);
                format!("{scheme}+unix:///{export}?socket={socket}")
            }
            Server::Tcp(host, port) => {
                let host = match host.contains(':') {
                    true => format!("[{host}]"),
                    false => percent_encode(host.as_bytes(), ESCAPED).to_string(),
                };
                let port = if *port == PORT { String::new() } else { format!(":{port}") };
                format!("{scheme}://{host}{port}/{export}")
            }
        }
    }
}

fn tcp(place: &str) -> Option<Server> {
    let (host, port) = match place.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']')?;
            (host, rest.strip_prefix(':').or(rest.is_empty().then_some(""))?)
        }
        None => place.split_once(':').unwrap_or((place, "")),
    };
    let port = if port.is_empty() { PORT } else { port.parse().ok()? };
    let host = String::from_utf8(percent_decode_str(host).collect()).ok()?;
    (!host.is_empty()).then_some(Server::Tcp(host, port))
}

/// The keys and values of a query, decoded. A '+' stands for itself.
fn pairs_of(query: &str) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> + '_ {
    let decoded = |text: &str| percent_decode_str(text).collect();
    query.split('&').filter(|pair| !pair.is_empty()).map(move |pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(key), decoded(value))
    })
}

impl fmt::Display for Server {
    /// Says in words where it is.
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
    fn a_uri_says_where_a_server_is_and_what_the_disk_is_called() {
        let unix = |path: &str| Server::Unix(path.into());
        let tcp = |host: &str, port| Server::Tcp(host.into(), port);
        for (text, server, export, address) in [
            ("nbd+unix:///?socket=/run/a.sock", unix("/run/a.sock"), "", "nbd+unix:///?socket=/run/a.sock"),
            ("nbd+unix:///a%20b?&socket=/s&socket=/c+%2F", unix("/c+/"), "a b", "nbd+unix:///a%20b?socket=/c%2B/"),
            ("nbd://host", tcp("host", PORT), "", "nbd://host/"),
            ("nbd://host:99/a/b?x=y", tcp("host", 99), "a/b", "nbd://host:99/a/b"),
            ("nbds://[::1]:99/x", tcp("::1", 99), "x", "nbds://[::1]:99/x"),
            ("nbd://me:secret@[::1]/x", tcp("::1", PORT), "x", "nbd://[::1]/x"),
        ] {
            let uri = Uri::parse(text).unwrap();
            assert_eq!(
                (&uri.server, &*uri.export, uri.has_tls),
                (&server, export.as_bytes(), text.starts_with("nbds"))
            );
            assert_eq!(uri.address(), address, "{text}");
            let again = Uri { user: None, parameters: Vec::new(), ..uri };
            assert_eq!(Uri::parse(address), Ok(again), "and it leads to the same place");
        }
    }

    #[test]
    fn users_and_parameters_come_decoded_and_in_order() {
        let uri = Uri::parse("nbds+unix://m%65@/?a=%FF&socket=/s&b&a=1+2").unwrap();
        assert_eq!(uri.user.as_deref(), Some("me"));
        let pairs: [(&[u8], &[u8]); 3] = [(b"a", b"\xff"), (b"b", b""), (b"a", b"1+2")];
        assert_eq!(uri.parameters, pairs.map(|(key, value)| (key.to_vec(), value.to_vec())));
    }

    #[test]
    fn a_uri_that_leads_nowhere_is_refused_with_what_is_right() {
        for (text, hint) in [
            ("nbd:unix:/run/x", "nbd+unix:///"),
            ("nbd+unix:///x", "socket=PATH"),
            ("nbd+unix:///x?socket=", "socket=PATH"),
            ("nbd+unix://host/x?socket=/s", "socket=PATH"),
            ("nbd://", "HOST:PORT"),
            ("nbd://h:99999/", "HOST:PORT"),
            ("nbd://[::1]9/", "HOST:PORT"),
            ("nbd://h/?socket=/s", "belongs to nbd+unix"),
            ("http://h/", "unknown scheme"),
        ] {
            let error = Uri::parse(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
