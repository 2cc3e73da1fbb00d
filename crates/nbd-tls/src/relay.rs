//! Bytes between a TLS connection and a socket.

use crate::timed::wait_until;
use rustix::event::{PollFd, PollFlags};
use rustls::Connection;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// What lies here on its way in. Nothing more is read from the peer meanwhile.
const HELD_BYTES_MAX: usize = 1 << 20;
/// What lies here on its way out.
const SENDING_BYTES_MAX: usize = 1 << 20;
/// What is taken at once to be encrypted: so little that the peer has a part to work on meanwhile.
const PLAIN_BYTES: usize = 64 << 10;
/// What is taken of the peer's at once. (The session itself would take 4 KiB with a call.)
const ARRIVED_BYTES: usize = 256 << 10;

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

fn relay_and_drain(session: Connection, outer: UnixStream, inner: UnixStream, drain: Duration) -> io::Result<()> {
    Relay::new(session, outer, inner, drain)?.run()
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

struct Relay {
    session: Connection,
    outer: UnixStream,
    inner: UnixStream,
    /// For plain bytes of `inner`.
    plain: Vec<u8>,
    /// What has arrived from the peer, and which part of it the session has not taken yet.
    arrived: Vec<u8>,
    rest: Range<usize>,
    /// Plain bytes for `inner`: how many there are, and how many of them are gone.
    held: Vec<u8>,
    filled: usize,
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
    /// Takes what has come with the last of the keys, too.
    fn new(mut session: Connection, outer: UnixStream, inner: UnixStream, drain: Duration) -> io::Result<Self> {
        outer.set_nonblocking(true)?;
        inner.set_nonblocking(true)?;
        session.set_buffer_limit(Some(SENDING_BYTES_MAX));
        let mut relay = Self {
            session,
            outer,
            inner,
            plain: vec![0; PLAIN_BYTES],
            arrived: vec![0; ARRIVED_BYTES],
            rest: 0..0,
            held: Vec::new(),
            filled: 0,
            sent: 0,
            outer_ended: false,
            inner_ended: false,
            drain,
            drained_until: None,
        };
        relay.decrypt()?;
        relay.give()?;
        Ok(relay)
    }

    fn run(&mut self) -> io::Result<()> {
        while !self.has_ended() {
            match self.turn() {
                // Nobody is left to be told that this side has ended.
                Err(error) if self.inner_ended && is_gone(&error) => break,
                turned => turned?,
            }
        }
        Ok(())
    }

    fn waiting(&self) -> usize {
        self.filled.saturating_sub(self.sent)
    }

    fn has_ended(&self) -> bool {
        let is_told = self.inner_ended && !self.session.wants_write();
        is_told || self.outer_ended && self.waiting() == 0
    }

    fn turn(&mut self) -> io::Result<()> {
        let reads_outer = !self.outer_ended && self.waiting() < HELD_BYTES_MAX;
        if reads_outer && !self.rest.is_empty() {
            // It is here, so nothing tells of it.
            self.take_rest()?;
            return self.give();
        }
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
            self.receive()?;
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

    /// Takes what has arrived from the peer.
    fn receive(&mut self) -> io::Result<()> {
        match went(self.outer.read(&mut self.arrived))? {
            Some(0) => self.outer_ended = true,
            Some(count) => self.rest = 0..count,
            None => {}
        }
        self.take_rest()
    }

    /// Has the session take what has arrived, as far as there is room for it.
    fn take_rest(&mut self) -> io::Result<()> {
        while !self.rest.is_empty() && !self.outer_ended && self.waiting() < HELD_BYTES_MAX {
            let mut rest = self.arrived.get(self.rest.clone()).unwrap_or_default();
            self.session.read_tls(&mut rest)?;
            self.rest.start = self.rest.end.saturating_sub(rest.len());
            self.decrypt()?;
        }
        Ok(())
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
        let end = self.filled.saturating_add(state.plaintext_bytes_to_read());
        if self.held.len() < end {
            self.held.resize(end, 0);
        }
        if let Some(room) = self.held.get_mut(self.filled..end) {
            self.session.reader().read_exact(room)?;
        }
        self.filled = end;
        self.outer_ended |= state.peer_has_closed();
        Ok(())
    }

    fn encrypt(&mut self) -> io::Result<()> {
        match went(self.inner.read(&mut self.plain))? {
            Some(0) => {
                self.inner_ended = true;
                self.session.send_close_notify();
            }
            // There is room for it: nothing else was waiting.
            Some(count) => self.session.writer().write_all(self.plain.get(..count).unwrap_or_default())?,
            None => {}
        }
        Ok(())
    }

    fn give(&mut self) -> io::Result<()> {
        while self.waiting() > 0 {
            match went(self.inner.write(self.held.get(self.sent..self.filled).unwrap_or_default()))? {
                Some(count) => self.sent = self.sent.saturating_add(count),
                None => {
                    self.forget_sent();
                    return Ok(());
                }
            }
        }
        (self.filled, self.sent) = (0, 0);
        Ok(())
    }

    /// Who is behind `inner` may always have something left to take: what is gone makes room now and then.
    fn forget_sent(&mut self) {
        if self.sent >= HELD_BYTES_MAX {
            self.held.copy_within(self.sent..self.filled, 0);
            (self.filled, self.sent) = (self.waiting(), 0);
        }
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
    fn a_reader_that_is_always_behind_does_not_have_it_hold_all_that_ever_passed() {
        const PART: usize = 64 << 10;
        let directory = tempfile::tempdir().unwrap();
        certificates(directory.path());
        let credentials = Credentials::in_directory(directory.path());
        let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
        let (mut server, inner) = UnixStream::pair().unwrap();
        let config = credentials.server(false).unwrap();
        let mut ours = Connection::Server(rustls::ServerConnection::new(config).unwrap());
        let shaken = std::thread::spawn(move || {
            shake_hands(&mut ours, &mut to_client).unwrap();
            (ours, to_client)
        });
        let mut theirs = credentials.connect("localhost").unwrap();
        shake_hands(&mut theirs, &mut to_server).unwrap();
        let (session, outer) = shaken.join().unwrap();
        let mut relay = Relay::new(session, outer, inner, DRAIN).unwrap();
        let (mut next, mut behind) = (0_u8, 0);
        for round in 0..400_u32 {
            theirs.writer().write_all(&[round as u8; PART]).unwrap();
            while theirs.wants_write() {
                theirs.write_tls(&mut to_server).unwrap();
            }
            relay.turn().unwrap();
            if behind < 10 {
                // More than lies in the socket.
                behind += 1;
                continue;
            }
            let mut bytes = vec![0; PART];
            server.read_exact(&mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == next));
            next = next.wrapping_add(1);
        }
        assert!(relay.held.len() < 4 << 20, "it holds {} bytes", relay.held.len());
    }

    #[test]
    fn a_peer_that_has_gone_when_this_side_ends_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        certificates(directory.path());
        let credentials = Credentials::in_directory(directory.path());
        let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
        let (server, inner) = UnixStream::pair().unwrap();
        let config = credentials.server(false).unwrap();
        let mut ours = Connection::Server(rustls::ServerConnection::new(config).unwrap());
        let shaken = std::thread::spawn(move || {
            shake_hands(&mut ours, &mut to_client).unwrap();
            (ours, to_client)
        });
        shake_hands(&mut credentials.connect("localhost").unwrap(), &mut to_server).unwrap();
        let (session, outer) = shaken.join().unwrap();
        let mut relay = Relay::new(session, outer, inner, DRAIN).unwrap();
        // As an NBD client and its server end: one says goodbye, and the other closes at once.
        (&server).write_all(b"goodbye").unwrap();
        relay.turn().unwrap();
        assert!(to_server.read(&mut [0; 4096]).unwrap() > 0);
        drop((to_server, server));
        relay.run().unwrap();
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
