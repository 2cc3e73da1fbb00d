//! What an NBD export is made with: the server's address, TLS, names.

use super::passed::{Listener, PassedListener, path_of};
use super::place::{GROUP_SOCKET_MODE, PassedSocket};
use block::{Error, ErrorKind, Result};
use drive::absolute;
use export_nbd::{Limits, NbdListener};
use export_vhost_user::ListenSocket;
use std::cmp::Ordering;
use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

/// By default a Unix socket is for this user only, or for its group if it has one of its own.
const SOCKET_MODE: u32 = 0o600;

/// The address of an NBD server.
#[derive(Debug, Clone)]
pub enum NbdAddress {
    /// A Unix socket at this path.
    Unix(PathBuf),
    /// `ADDRESS:PORT`. Anybody who can reach it can use the disks there, unless TLS asks for a certificate.
    Tcp(String),
    /// A socket that was passed to this program. It is the same address under all of its numbers.
    Passed {
        /// The number of its descriptor.
        number: RawFd,
        /// Identifies the socket.
        inode: u64,
        /// Where it listens.
        at: Box<Self>,
    },
}

impl NbdAddress {
    /// Reads a word of a command line: `ADDRESS:PORT`, or a path. A path that looks like an address has a `/` in it.
    pub fn parse(text: &str) -> Result<Self> {
        let looks_like_address = text.contains(':') || text.parse::<IpAddr>().is_ok();
        match looks_like_address && !text.contains('/') {
            true => Self::parse_tcp(text),
            false => Ok(Self::Unix(absolute(Path::new(text)))),
        }
    }

    /// Reads a word of a command line that must be `ADDRESS:PORT`.
    pub fn parse_tcp(text: &str) -> Result<Self> {
        let is_ipv6 = |text: &str| text.parse::<Ipv6Addr>().is_ok();
        let why = match text.rsplit_once(':') {
            None => "the port is missing: write ADDRESS:PORT".to_owned(),
            Some((before, _)) if text.ends_with(']') || is_ipv6(text) && !is_ipv6(before) => {
                "the port is missing: write [ADDRESS]:PORT".to_owned()
            }
            Some((_, port)) if port.parse::<u16>().is_err() => {
                format!("'{port}' is no port from 1 to 65535 (write a socket's path with a '/': './{text}')")
            }
            Some(_) => return Ok(Self::Tcp(text.to_owned())),
        };
        Err(Error::new(ErrorKind::BadOption, format!("'{text}': {why}")))
    }

    /// Returns the address of a listening socket that was passed to this program under a number.
    pub fn passed(number: RawFd) -> Result<Self> {
        let PassedListener { listener, inode } = PassedListener::of(number)?;
        let at = match &listener {
            Listener::Tcp(listener) => listener.local_addr().ok().map(|at| Self::Tcp(at.to_string())),
            Listener::Unix(listener) => path_of(listener).map(Self::Unix),
        };
        let at = at.unwrap_or_else(|| Self::Unix(format!("fd:{number}").into()));
        Ok(Self::Passed { number, inode, at: Box::new(at) })
    }

    /// Returns the passed socket that this is.
    pub(crate) fn passed_socket(&self) -> Option<PassedSocket> {
        match self {
            Self::Passed { inode, .. } => Some(PassedSocket { inode: *inode, is_for_nbd: true }),
            Self::Unix(_) | Self::Tcp(_) => None,
        }
    }

    fn identity(&self) -> Identity<'_> {
        match self {
            Self::Unix(path) => Identity::Unix(path),
            Self::Tcp(address) => Identity::Tcp(address),
            Self::Passed { inode, .. } => Identity::Passed(*inode),
        }
    }

    /// Returns the NBD URI that clients use for an export here.
    #[must_use]
    pub fn uri(&self, export: &str, has_tls: bool) -> String {
        let scheme = if has_tls { "nbds" } else { "nbd" };
        match self {
            Self::Unix(path) => {
                format!("{scheme}+unix:///{}?socket={}", escaped(export), escaped(&path.to_string_lossy()))
            }
            Self::Tcp(address) => format!("{scheme}://{address}/{}", escaped(export)),
            Self::Passed { at, .. } => at.uri(export, has_tls),
        }
    }

    pub(crate) fn listen(&self, access: SocketAccess) -> Result<(NbdListener, Option<ListenSocket>)> {
        if !matches!(self, Self::Unix(_)) && access != SocketAccess::default() {
            let what = format!("'{self}': socket-mode and socket-group are for a Unix socket that is made here");
            return Err(Error::new(ErrorKind::BadOption, what));
        }
        match self {
            Self::Passed { number, .. } => match PassedListener::of(*number)?.listener {
                Listener::Unix(listener) => Ok((NbdListener::Unix(listener), None)),
                Listener::Tcp(listener) => Ok((NbdListener::Tcp(listener), None)),
            },
            Self::Unix(path) => {
                let mode = access.mode.unwrap_or(if access.group.is_some() { GROUP_SOCKET_MODE } else { SOCKET_MODE });
                let socket = ListenSocket::of_mode_and_group(path, mode, access.group)?;
                let failed = |error| Error::io(format!("cannot duplicate the socket '{}'", path.display()), error);
                let listener = socket.listener().try_clone().map_err(failed)?;
                Ok((NbdListener::Unix(listener), Some(socket)))
            }
            Self::Tcp(address) => {
                if address.rsplit_once(':').is_some_and(|(_, port)| port.parse() == Ok(0_u16)) {
                    let what = format!("'{address}': port 0 would be another one at each start: name a port");
                    return Err(Error::new(ErrorKind::BadOption, what));
                }
                let failed = |error| Error::io(format!("cannot listen at '{address}'"), error);
                Ok((NbdListener::Tcp(TcpListener::bind(address).map_err(failed)?), None))
            }
        }
    }
}

/// By what addresses are the same or differ.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Identity<'a> {
    Unix(&'a Path),
    Tcp(&'a str),
    Passed(u64),
}

impl PartialEq for NbdAddress {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for NbdAddress {}

impl PartialOrd for NbdAddress {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for NbdAddress {
    fn cmp(&self, other: &Self) -> Ordering {
        self.identity().cmp(&other.identity())
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => f.write_str(address),
            Self::Passed { at, .. } => at.fmt(f),
        }
    }
}

/// Escapes `text` for a URI: other characters than its plain ones become `%XX`.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => escaped.push(byte.into()),
            _ => drop(write!(escaped, "%{byte:02X}")),
        }
    }
    escaped
}

/// The TLS options of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdTls {
    /// The directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`.
    pub credentials: PathBuf,
    /// Clients must use TLS; otherwise they may.
    pub is_required: bool,
    /// Clients need a certificate of the same authority.
    pub verifies_peers: bool,
}

impl NbdTls {
    /// Makes options with which clients must use TLS, and need a certificate.
    #[must_use]
    pub fn new(credentials: impl Into<PathBuf>) -> Self {
        Self { credentials: credentials.into(), is_required: true, verifies_peers: true }
    }
}

/// Who may connect to a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SocketAccess {
    /// Its permissions: 0600 if not given, 0660 if it has a group of its own.
    pub mode: Option<u32>,
    /// The number of its group.
    pub group: Option<u32>,
}

/// The options of an NBD export.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdOptions {
    /// The server's address.
    pub address: NbdAddress,
    /// Who may connect, if that is a Unix socket.
    pub access: SocketAccess,
    /// The export's name; by default the disk's name.
    pub name: Option<String>,
    /// What clients are told about it.
    pub description: String,
    /// Clients cannot write.
    pub read_only: bool,
    /// Persistent bitmaps that clients can ask for.
    pub bitmaps: Vec<String>,
    /// Serve the disk even if a bitmap cannot be read. Queries for it fail until it can. Otherwise that is an error.
    pub allows_unreadable_bitmaps: bool,
    /// The most connections at once at this address; by default the server's limit. Others wait.
    pub connections: Option<u16>,
    /// Certificates, if clients may or must use TLS.
    pub tls: Option<NbdTls>,
}

impl NbdOptions {
    /// Makes the default options for an address.
    #[must_use]
    pub fn at(address: NbdAddress) -> Self {
        let (description, bitmaps) = (String::new(), Vec::new());
        Self {
            address,
            access: SocketAccess::default(),
            name: None,
            description,
            read_only: false,
            bitmaps,
            allows_unreadable_bitmaps: false,
            connections: None,
            tls: None,
        }
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.map_or(Limits::default().connections, usize::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_addresses_or_paths_and_uris_are_escaped() {
        let is = |text: &str, address: NbdAddress| NbdAddress::parse(text).unwrap() == address;
        for text in ["127.0.0.1:10809", "[::1]:10809", "::1:8080", "host:1"] {
            assert!(is(text, NbdAddress::Tcp(text.to_owned())), "{text}");
        }
        for text in ["/run/a:1", "nbd.sock", "./a:x"] {
            assert!(is(text, NbdAddress::Unix(absolute(Path::new(text)))), "{text}");
        }
        let unix = NbdAddress::Unix("/run/a b?.nbd".into());
        assert_eq!(unix.uri("c&d/e", false), "nbd+unix:///c%26d/e?socket=/run/a%20b%3F.nbd");
        assert_eq!(NbdAddress::parse("[::1]:9").unwrap().uri("", true), "nbds://[::1]:9/");
    }

    #[test]
    fn an_address_without_a_port_or_with_a_wrong_one_is_refused_with_what_to_write() {
        for (address, why) in [
            ("127.0.0.1", "write ADDRESS:PORT"),
            ("::1", "write [ADDRESS]:PORT"),
            ("[::1]", "write [ADDRESS]:PORT"),
            ("127.0.0.1:", "'' is no port"),
            ("127.0.0.1:1x", "'1x' is no port"),
            ("127.0.0.1:65536", "'65536' is no port"),
        ] {
            let refused = NbdAddress::parse(address).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::BadOption);
            assert!(refused.to_string().contains(why), "{refused}");
        }
        assert!(NbdAddress::parse_tcp("localhost").unwrap_err().to_string().contains("write ADDRESS:PORT"));
    }
}
