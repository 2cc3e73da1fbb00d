//! What each side needs to begin TLS: certificates, or keys that both share.

use crate::keys::SharedKeys;
use crate::shared::Shared;
use crate::{Channel, Credentials, shake_hands};
use block::Result;
use rustls::{Connection, ServerConfig, ServerConnection};
use std::fmt;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// The file of shared keys in a directory of credentials, as QEMU calls it.
const KEYS: &str = "keys.psk";

/// The credentials of a server.
#[derive(Clone)]
pub enum ServerTls {
    /// A certificate.
    Certificates(Arc<ServerConfig>),
    /// The keys of its clients.
    Keys(Arc<SharedKeys>),
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Certificates(_) => f.write_str("Certificates"),
            Self::Keys(keys) => keys.fmt(f),
        }
    }
}

impl ServerTls {
    /// Reads a directory: shared keys if there is a `keys.psk` and no `server-cert.pem`, or else certificates.
    pub fn of(credentials: &Credentials, verifies_peers: bool) -> Result<Self> {
        match credentials.has(KEYS) && !credentials.has("server-cert.pem") {
            true => {
                let keys = Arc::new(SharedKeys::in_file(&credentials.path(KEYS))?);
                // If the library is missing, the server fails at its start, not at its first client.
                keys.serve()?;
                Ok(Self::Keys(keys))
            }
            false => Ok(Self::Certificates(credentials.server(verifies_peers)?)),
        }
    }

    /// Begins a session with one client.
    pub fn begin(&self) -> io::Result<Handshake> {
        Ok(Handshake(match self {
            Self::Certificates(config) => {
                let session = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
                Kind::Certified(Box::new(Connection::Server(session)))
            }
            Self::Keys(keys) => Kind::Shared(Box::new(keys.serve().map_err(io::Error::other)?)),
        }))
    }
}

/// The credentials of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientTls {
    /// An authority, and perhaps a certificate.
    Certificates(Credentials),
    /// A file of keys, and perhaps the user's name.
    Keys(PathBuf, Option<String>),
}

impl ClientTls {
    /// Begins a session with the server `host`. (With shared keys the name does not matter: only the server has the
    /// key.)
    pub fn begin(&self, host: &str) -> Result<Handshake> {
        Ok(Handshake(match self {
            Self::Certificates(credentials) => Kind::Certified(Box::new(credentials.connect(host)?)),
            Self::Keys(file, user) => Kind::Shared(Box::new(SharedKeys::in_file(file)?.connect(user.as_deref())?)),
        }))
    }
}

/// A session before its handshake.
#[derive(Debug)]
pub struct Handshake(Kind);

#[derive(Debug)]
enum Kind {
    Certified(Box<Connection>),
    Shared(Box<Shared>),
}

impl Handshake {
    /// Runs the handshake on a blocking socket. A time limit of the socket limits the whole handshake.
    pub fn run(self, socket: &mut (impl Read + Write)) -> io::Result<Channel> {
        match self.0 {
            Kind::Certified(mut session) => {
                shake_hands(&mut session, socket)?;
                Channel::new(*session)
            }
            Kind::Shared(mut session) => {
                let arrived = session.shake_hands(socket)?;
                Ok(Channel::of(session, &arrived))
            }
        }
    }
}
