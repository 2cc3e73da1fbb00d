//! Before a connection, where TLS is served: a thread talks to each client until it has its keys. Then a reactor takes it.

use crate::limits::OPTION_BYTES_MAX;
use crate::under_tls::UnderTls;
use block::{LogLimit, Result};
use nbd_tls::{Credentials, ServerTls, Timed, in_words};
use nbd_wire::Reader;
use nbd_wire::numbers::{answer, handshake, option};
use nbd_wire::option::{OptionHeader, put_answer, put_greeting};
use std::io::{self, Read as _, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Options before TLS.
const OPTIONS_MAX: usize = 32;
const OPTION_HEADER_BYTES: usize = 16;
const CLIENT_FLAGS_BYTES: usize = 4;

/// How a server uses TLS.
#[derive(Clone)]
pub struct Tls {
    config: ServerTls,
    is_required: bool,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("is_required", &self.is_required).finish_non_exhaustive()
    }
}

impl Tls {
    /// With the server's certificate and key in `credentials`, or with the keys there that it shares with clients. Where TLS is
    /// required, clients that do not ask for it learn nothing and get nothing. With `verifies_peers` they need a certificate
    /// of the same authority.
    pub fn new(credentials: &Credentials, is_required: bool, verifies_peers: bool) -> Result<Self> {
        Ok(Self { config: ServerTls::of(credentials, verifies_peers)?, is_required })
    }

    /// Talks to a client until it has asked for TLS and has its keys, or goes on without. A client has until `until` for all
    /// of it, however it divides its bytes. Nothing is left of one that has said goodbye.
    fn greet(&self, stream: UnixStream, ended: &UnixStream, until: Instant) -> io::Result<Option<Entered>> {
        let mut client = Timed::until(&stream, ended, until)?;
        let mut out = Vec::new();
        put_greeting(&mut out, handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        client.write_all(&out)?;
        let mut said = vec![0; CLIENT_FLAGS_BYTES];
        client.read_exact(&mut said)?;
        for _ in 0..OPTIONS_MAX {
            let mut head = [0; OPTION_HEADER_BYTES];
            client.read_exact(&mut head)?;
            let broken = || io::Error::new(io::ErrorKind::InvalidData, "an option is not well formed");
            let read = OptionHeader::read(&mut Reader::new(&head)).ok().flatten();
            let OptionHeader { option, length_bytes } = read.ok_or_else(broken)?;
            if option == option::STARTTLS && length_bytes == 0 {
                say(&mut client, option, answer::ACK, "")?;
                let shaken = self.config.begin()?.run(&mut client);
                let in_words = |error: io::Error| io::Error::new(error.kind(), format!("TLS: {}", in_words(&error)));
                let tls = Some(UnderTls::new(shaken.map_err(in_words)?));
                return Ok(Some(Entered { socket: stream.into(), tls, said }));
            }
            if !self.is_required {
                said.extend_from_slice(&head);
                return Ok(Some(Entered { socket: stream.into(), tls: None, said }));
            }
            if length_bytes > OPTION_BYTES_MAX {
                return Err(broken());
            }
            let mut data = vec![0; usize::try_from(length_bytes).unwrap_or(0)];
            client.read_exact(&mut data)?;
            match option {
                option::ABORT => {
                    say(&mut client, option, answer::ACK, "")?;
                    return Ok(None);
                }
                // It has no answer that says no.
                option::EXPORT_NAME => return Err(io::Error::other("it did not ask for TLS")),
                _ => say(&mut client, option, answer::ERR_TLS_REQD, "this server serves with TLS only")?,
            }
        }
        Err(io::Error::other("it did not ask for TLS"))
    }
}

/// A client on its way to a reactor.
pub(crate) struct Entered {
    pub(crate) socket: OwnedFd,
    pub(crate) tls: Option<UnderTls>,
    /// What it has said in answer to a greeting. Nothing if it has got none yet.
    pub(crate) said: Vec<u8>,
}

impl Entered {
    /// One that has got nothing yet.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, tls: None, said: Vec::new() }
    }
}

/// What stands before a server with TLS: a thread for each client, up to the end of its handshake.
pub(crate) struct Door {
    tls: Tls,
    /// Closed when the server ends, which the other one tells.
    open: Mutex<Option<UnixStream>>,
    ended: Arc<UnixStream>,
}

impl Door {
    pub(crate) fn new(tls: Tls) -> io::Result<Self> {
        let (open, ended) = UnixStream::pair()?;
        Ok(Self { tls, open: Mutex::new(Some(open)), ended: Arc::new(ended) })
    }

    /// Takes a client, and hands it to `enters` when it has come in.
    pub(crate) fn admit(
        &self,
        client: OwnedFd,
        until: Instant,
        enters: impl FnOnce(Entered) + Send + 'static,
    ) -> io::Result<()> {
        let (tls, ended) = (self.tls.clone(), Arc::clone(&self.ended));
        let serve = move || match tls.greet(client.into(), &ended, until) {
            Ok(Some(entered)) => enters(entered),
            Ok(None) => {}
            Err(error) => {
                static TIMES: LogLimit = LogLimit::new();
                if let Some(times) = TIMES.admit() {
                    tracing::info!(times, "an NBD client is disconnected: {error}");
                }
            }
        };
        std::thread::Builder::new().name("nbd-tls".into()).spawn(serve).map(drop)
    }

    /// Lets go of those who are still in the handshake.
    pub(crate) fn close(&self) {
        drop(self.open.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn say(client: &mut impl Write, option: u32, kind: u32, text: &str) -> io::Result<()> {
    let mut out = Vec::new();
    put_answer(&mut out, option, kind, text.as_bytes());
    client.write_all(&out)
}
