//! Bytes between a TLS connection and a socket.

use crate::timed::wait_until;
use rustix::event::{PollFd, PollFlags};
use rustls::Connection;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// What lies here on its way in. Nothing more is read from the peer meanwhile.
const HELD_BYTES_MAX: usize = 1 << 20;
/// What lies here on its way out.
const SENDING_BYTES_MAX: usize = 1 << 20;
const READ_BYTES: usize = 64 << 10;

/// How long a peer may take for what it is still to be told, when there is nobody behind it any more.
const DRAIN: Duration = Duration::from_secs(10);

/// Agrees with the peer on keys, on a socket that waits. Who gives `outer` a time limit limits all of it.
pub fn shake_hands(session: &mut Connection, outer: &mut (impl Read + Write)) -> io::Result<()> {
    while session.is_handshaking() {
        session.complete_io(outer)?;
    }
    // What comes last of the keys, or why there are none.
    while session.wants_write() {
        session.write_tls(outer)?;
    }
    Ok(())
}

/// Carries bytes between `outer`, which speaks TLS, and `inner`, until one of them ends. Any stream socket will do for
/// `outer`. When `inner` has ended, `outer` has ten seconds to take what is left.
pub fn relay(session: Connection, outer: UnixStream, inner: UnixStream) -> io::Result<()> {
    relay_and_drain(session, outer, inner, DRAIN)
}

fn relay_and_drain(mut session: Connection, outer: UnixStream, inner: UnixStream, drain: Duration) -> io::Result<()> {
    outer.set_nonblocking(true)?;
    inner.set_nonblocking(true)?;
    session.set_buffer_limit(Some(SENDING_BYTES_MAX));
    let mut relay = Relay {
        session,
        outer,
        inner,
        held: Vec::new(),
        sent: 0,
        outer_ended: false,
        inner_ended: false,
        drain,
        drained_until: None,
    };
    relay.decrypt()?;
    while !relay.has_ended() {
        relay.turn()?;
    }
    Ok(())
}

struct Relay {
    session: Connection,
    outer: UnixStream,
    inner: UnixStream,
    /// Plain bytes for `inner`, and how many of them are gone.
    held: Vec<u8>,
    sent: usize,
    outer_ended: bool,
    inner_ended: bool,
    drain: Duration,
    /// Set when nobody is behind `inner` any more.
    drained_until: Option<Instant>,
}

/// Whether a call did something; not if it would have to wait.
fn went(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Relay {
    fn waiting(&self) -> usize {
        self.held.len().saturating_sub(self.sent)
    }

    fn has_ended(&self) -> bool {
        let is_told = self.inner_ended && !self.session.wants_write();
        is_told || self.outer_ended && self.waiting() == 0
    }

    fn turn(&mut self) -> io::Result<()> {
        let reads_outer = !self.outer_ended && self.waiting() < HELD_BYTES_MAX;
        // What is not sent yet is bounded.
        let reads_inner = !self.inner_ended && !self.session.wants_write();
        let when = |wanted: bool, flag| if wanted { flag } else { PollFlags::empty() };
        let outer = when(reads_outer, PollFlags::IN) | when(self.session.wants_write(), PollFlags::OUT);
        let inner = when(reads_inner, PollFlags::IN) | when(self.waiting() > 0, PollFlags::OUT);
        let (outer, inner) = self.wait(outer, inner)?;
        if self.drained_until.is_none() && (self.inner_ended || inner.intersects(PollFlags::ERR | PollFlags::HUP)) {
            self.drained_until = Instant::now().checked_add(self.drain);
        }
        let arrives = PollFlags::IN | PollFlags::ERR | PollFlags::HUP;
        if reads_outer && outer.intersects(arrives) {
            match went(self.session.read_tls(&mut self.outer))? {
                Some(0) => self.outer_ended = true,
                Some(_) => self.decrypt()?,
                None => {}
            }
        }
        if reads_inner && inner.intersects(arrives) {
            self.encrypt()?;
        }
        while self.session.wants_write() && went(self.session.write_tls(&mut self.outer))?.is_some() {}
        self.give()
    }

    /// Waits for any of these. One of which nothing is wanted is not looked at: that it has gone would be told for ever.
    /// Only of `inner` that is to be known once, even while what it sends has to wait.
    fn wait(&self, outer: PollFlags, inner: PollFlags) -> io::Result<(PollFlags, PollFlags)> {
        let (outer_fd, inner_fd) = (PollFd::new(&self.outer, outer), PollFd::new(&self.inner, inner));
        let looks_at_inner = !inner.is_empty() || self.drained_until.is_none() && !self.inner_ended;
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(2);
        if !outer.is_empty() {
            fds.push(outer_fd);
        }
        if looks_at_inner {
            fds.push(inner_fd);
        }
        if self.drained_until.is_none() && self.inner_ended {
            // The time for the rest begins.
            return Ok((PollFlags::empty(), PollFlags::empty()));
        }
        wait_until(&mut fds, self.drained_until)?;
        let mut found = fds.iter().map(PollFd::revents);
        let outer = if outer.is_empty() { outer } else { found.next().unwrap_or(PollFlags::empty()) };
        Ok((outer, found.next().unwrap_or(PollFlags::empty())))
    }

    /// What the peer has sent, in plain.
    fn decrypt(&mut self) -> io::Result<()> {
        let state = match self.session.process_new_packets() {
            Ok(state) => state,
            Err(error) => {
                // The peer may be told why.
                let _ = self.session.write_tls(&mut self.outer);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        };
        let here = self.held.len();
        self.held.resize(here.saturating_add(state.plaintext_bytes_to_read()), 0);
        if let Some(room) = self.held.get_mut(here..) {
            self.session.reader().read_exact(room)?;
        }
        self.outer_ended |= state.peer_has_closed();
        self.give()
    }

    fn encrypt(&mut self) -> io::Result<()> {
        let mut bytes = [0; READ_BYTES];
        match went(self.inner.read(&mut bytes))? {
            Some(0) => {
                self.inner_ended = true;
                self.session.send_close_notify();
            }
            // There is room for it: nothing else was waiting.
            Some(count) => self.session.writer().write_all(bytes.get(..count).unwrap_or_default())?,
            None => {}
        }
        Ok(())
    }

    fn give(&mut self) -> io::Result<()> {
        while self.waiting() > 0 {
            match went(self.inner.write(self.held.get(self.sent..).unwrap_or_default()))? {
                Some(count) => self.sent = self.sent.saturating_add(count),
                None => return Ok(()),
            }
        }
        self.held.clear();
        self.sent = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Credentials;
    use std::path::Path;
    use std::sync::Arc;

    fn certificates(directory: &Path) {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["localhost".into()]).unwrap();
        std::fs::write(directory.join("ca-cert.pem"), cert.pem()).unwrap();
        std::fs::write(directory.join("server-cert.pem"), cert.pem()).unwrap();
        std::fs::write(directory.join("server-key.pem"), signing_key.serialize_pem()).unwrap();
    }

    /// A relay on each side, and the plain ends of both.
    fn connected(credentials: &Credentials) -> [UnixStream; 2] {
        let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
        let (client, client_inner) = UnixStream::pair().unwrap();
        let (server, server_inner) = UnixStream::pair().unwrap();
        let mut theirs = credentials.connect("localhost").unwrap();
        let config = credentials.server(false).unwrap();
        let mut ours = Connection::Server(rustls::ServerConnection::new(Arc::clone(&config)).unwrap());
        std::thread::spawn(move || {
            shake_hands(&mut ours, &mut to_client).unwrap();
            let _ = relay(ours, to_client, server_inner);
        });
        std::thread::spawn(move || {
            shake_hands(&mut theirs, &mut to_server).unwrap();
            let _ = relay(theirs, to_server, client_inner);
        });
        [client, server]
    }

    #[test]
    fn what_goes_in_at_one_end_comes_out_at_the_other_in_both_directions_at_once() {
        let directory = tempfile::tempdir().unwrap();
        certificates(directory.path());
        let [client, server] = connected(&Credentials::in_directory(directory.path()));
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|index| ((index * 7) >> 3) as u8).collect();
        std::thread::scope(|scope| {
            for end in [&client, &server] {
                let bytes = &bytes;
                scope.spawn(move || (&*end).write_all(bytes).unwrap());
                scope.spawn(move || {
                    let mut found = vec![0; bytes.len()];
                    (&*end).read_exact(&mut found).unwrap();
                    assert!(found == *bytes);
                });
            }
        });
    }

    #[test]
    fn a_peer_that_takes_nothing_any_more_does_not_hold_the_relay_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        certificates(directory.path());
        let credentials = Credentials::in_directory(directory.path());
        let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
        let (server, server_inner) = UnixStream::pair().unwrap();
        let config = credentials.server(false).unwrap();
        let mut ours = Connection::Server(rustls::ServerConnection::new(config).unwrap());
        let relays = std::thread::spawn(move || {
            shake_hands(&mut ours, &mut to_client).unwrap();
            relay_and_drain(ours, to_client, server_inner, Duration::from_millis(50))
        });
        shake_hands(&mut credentials.connect("localhost").unwrap(), &mut to_server).unwrap();
        // More than lies in sockets and buffers: some of it never gets into the relay.
        server.set_nonblocking(true).unwrap();
        while (&server).write(&[1; 65536]).is_ok() || {
            std::thread::sleep(Duration::from_millis(20));
            (&server).write(&[1; 65536]).is_ok()
        } {}
        drop(server);
        let error = relays.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }

    #[test]
    fn all_that_was_written_before_the_end_arrives() {
        let directory = tempfile::tempdir().unwrap();
        certificates(directory.path());
        let [client, server] = connected(&Credentials::in_directory(directory.path()));
        let bytes = vec![5; 2_000_000];
        let writes = std::thread::spawn(move || (&server).write_all(&bytes).unwrap());
        let mut found = Vec::new();
        (&client).read_to_end(&mut found).unwrap();
        writes.join().unwrap();
        assert_eq!(found.len(), 2_000_000);
    }

    #[test]
    fn credentials_that_are_missing_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let credentials = Credentials::in_directory(directory.path());
        assert!(credentials.server(true).unwrap_err().to_string().contains("ca-cert.pem"));
        certificates(directory.path());
        std::fs::remove_file(directory.path().join("server-key.pem")).unwrap();
        assert!(credentials.server(true).unwrap_err().to_string().contains("server-key.pem"));
        assert!(credentials.connect("no name").is_err() && credentials.connect("localhost").is_ok());
    }
}
