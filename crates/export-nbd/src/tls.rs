//! TLS before a connection: a thread for each client talks to it until it has asked for TLS, and then carries bytes between
//! it and a socket. A reactor has the other end of that, and knows nothing of TLS.

use block::{Error, LogLimit, Result};
use nbd_tls::{Connection, Credentials, ServerConfig, ServerConnection, Timed, relay, shake_hands, widen};
use nbd_wire::Reader;
use nbd_wire::numbers::{answer, handshake, option};
use nbd_wire::option::{GREETING_BYTES, OptionHeader, put_answer, put_greeting};
use std::io::{self, Read as _, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options before TLS, and what they may hold.
const OPTIONS_MAX: usize = 32;
const OPTION_BYTES_MAX: u32 = 16 << 10;
const OPTION_HEADER_BYTES: usize = 16;
/// For what a client without TLS is still to get, when its disk is served no more.
const DRAIN: Duration = Duration::from_secs(10);

/// How a server uses TLS.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    is_required: bool,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("is_required", &self.is_required).finish_non_exhaustive()
    }
}

impl Tls {
    /// With the server's certificate and key in `credentials`. Where TLS is required, clients that do not ask for it learn
    /// nothing and get nothing. With `verifies_peers` they need a certificate of the same authority.
    pub fn new(credentials: &Credentials, is_required: bool, verifies_peers: bool) -> Result<Self> {
        Ok(Self { config: credentials.server(verifies_peers)?, is_required })
    }

    /// Takes a client; gives the socket that stands for it. `guard` is held as long as the client has a thread.
    pub(crate) fn front(&self, client: OwnedFd, patience: Duration, guard: impl Send + 'static) -> Result<OwnedFd> {
        let failed = |error| Error::io("cannot begin TLS", error);
        let (own, given) = UnixStream::pair().map_err(failed)?;
        given.set_nonblocking(true).map_err(failed)?;
        [&own, &given].into_iter().for_each(widen);
        let (tls, client) = (self.clone(), UnixStream::from(client));
        let serve = move || {
            let _guard = guard;
            if let Err(error) = tls.serve(client, own, patience) {
                static TIMES: LogLimit = LogLimit::new();
                if let Some(times) = TIMES.admit() {
                    tracing::info!(times, "an NBD client is disconnected: {error}");
                }
            }
        };
        std::thread::Builder::new().name("nbd-tls".into()).spawn(serve).map_err(failed)?;
        Ok(given.into())
    }

    /// Up to the end of the TLS handshake, a client has `patience` in all, however it divides its bytes.
    fn serve(&self, stream: UnixStream, mut own: UnixStream, patience: Duration) -> io::Result<()> {
        let until = Instant::now().checked_add(patience).unwrap_or_else(Instant::now);
        // The connection's own greeting has been sent by us.
        own.read_exact(&mut [0; GREETING_BYTES])?;
        let behind = own.try_clone()?;
        let mut client = Timed::until(&stream, &behind, until)?;
        let mut out = Vec::new();
        put_greeting(&mut out, handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        client.write_all(&out)?;
        let mut flags = [0; 4];
        client.read_exact(&mut flags)?;
        own.write_all(&flags)?;
        for _ in 0..OPTIONS_MAX {
            let mut head = [0; OPTION_HEADER_BYTES];
            client.read_exact(&mut head)?;
            let broken = || io::Error::new(io::ErrorKind::InvalidData, "an option is not well formed");
            let read = OptionHeader::read(&mut Reader::new(&head)).ok().flatten();
            let OptionHeader { option, length_bytes } = read.ok_or_else(broken)?;
            if option == option::STARTTLS && length_bytes == 0 {
                say(&mut client, option, answer::ACK, "")?;
                let session = ServerConnection::new(Arc::clone(&self.config)).map_err(io::Error::other)?;
                let mut session = Connection::Server(session);
                shake_hands(&mut session, &mut client)?;
                return relay(session, stream, own);
            }
            if !self.is_required {
                own.write_all(&head)?;
                return carry(&stream, own);
            }
            if length_bytes > OPTION_BYTES_MAX {
                return Err(broken());
            }
            let mut data = vec![0; usize::try_from(length_bytes).unwrap_or(0)];
            client.read_exact(&mut data)?;
            match option {
                option::ABORT => return say(&mut client, option, answer::ACK, ""),
                // It has no answer that says no.
                option::EXPORT_NAME => return Err(io::Error::other("it did not ask for TLS")),
                _ => say(&mut client, option, answer::ERR_TLS_REQD, "this server serves with TLS only")?,
            }
        }
        Err(io::Error::other("it did not ask for TLS"))
    }
}

fn say(client: &mut impl Write, option: u32, kind: u32, text: &str) -> io::Result<()> {
    let mut out = Vec::new();
    put_answer(&mut out, option, kind, text.as_bytes());
    client.write_all(&out)
}

/// A client that goes on without TLS.
fn carry(client: &UnixStream, own: UnixStream) -> io::Result<()> {
    let (from_client, mut to_own) = (client.try_clone()?, own.try_clone()?);
    let inwards = std::thread::Builder::new().name("nbd-plain".into()).spawn(move || {
        let behind = to_own.try_clone()?;
        let _ = io::copy(&mut Timed::while_there(&from_client, &behind, DRAIN)?, &mut to_own);
        to_own.shutdown(Shutdown::Write)
    })?;
    // A client that takes nothing any more is left when nobody is behind it.
    let _ = io::copy(&mut &own, &mut Timed::while_there(client, &own, DRAIN)?);
    let _ = client.shutdown(Shutdown::Both);
    let _ = own.shutdown(Shutdown::Both);
    let _ = inwards.join();
    Ok(())
}
