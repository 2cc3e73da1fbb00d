use super::*;
use crate::{ClientTls, Credentials, Handshake, ServerTls, Socket};
use rustls::ServerConnection;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

fn certificates(directory: &Path) {
    let rcgen::CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed(["localhost".into()]).unwrap();
    std::fs::write(directory.join("ca-cert.pem"), cert.pem()).unwrap();
    std::fs::write(directory.join("server-cert.pem"), cert.pem()).unwrap();
    std::fs::write(directory.join("server-key.pem"), signing_key.serialize_pem()).unwrap();
}

/// One side: a session and a socket that does not wait.
struct End {
    channel: Channel,
    socket: UnixStream,
}

impl End {
    fn socket(&self) -> Socket<'_> {
        Socket::new(self.socket.as_fd())
    }

    fn look(&mut self) -> io::Result<Arrival> {
        self.channel.look(&mut Socket::new(self.socket.as_fd()))
    }

    fn send(&mut self) -> io::Result<()> {
        self.channel.send(&mut Socket::new(self.socket.as_fd()))
    }

    /// Seals and sends as much of `bytes` as goes now.
    fn put(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send()?;
        let count = self.channel.seal(std::iter::once(bytes))?;
        match self.send() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(count),
        }
    }

    /// All plain bytes that are here.
    fn get(&mut self) -> io::Result<Vec<u8>> {
        let mut found = Vec::new();
        loop {
            match self.look() {
                Ok(Arrival::Plain) => drop(self.channel.take(|plain| {
                    found.extend_from_slice(plain);
                    plain.len()
                })?),
                Ok(Arrival::Nothing) => {}
                Ok(Arrival::End) => return Ok(found),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(found),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Both sessions after their handshake, and their sockets.
fn shaken() -> [(Connection, UnixStream); 2] {
    let directory = tempfile::tempdir().unwrap();
    certificates(directory.path());
    let credentials = Credentials::in_directory(directory.path());
    let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
    let mut theirs = credentials.connect("localhost").unwrap();
    let mut ours = Connection::Server(ServerConnection::new(credentials.server(false).unwrap()).unwrap());
    let serves = std::thread::spawn(move || {
        shake_hands(&mut ours, &mut to_client).unwrap();
        (ours, to_client)
    });
    shake_hands(&mut theirs, &mut to_server).unwrap();
    [(theirs, to_server), serves.join().unwrap()]
}

/// A client and a server with certificates.
fn connected() -> [End; 2] {
    shaken().map(|(session, socket)| {
        socket.set_nonblocking(true).unwrap();
        End { channel: Channel::new(session).unwrap(), socket }
    })
}

/// A handshake of both sides, and how it ends for each.
fn meet(client: Handshake, server: Handshake) -> [io::Result<End>; 2] {
    let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
    let run = |session: Handshake, socket: &mut UnixStream| {
        let channel = session.run(socket);
        socket.set_nonblocking(true).unwrap();
        channel.map(|channel| End { channel, socket: socket.try_clone().unwrap() })
    };
    let serves = std::thread::spawn(move || run(server, &mut to_client));
    let client = run(client, &mut to_server);
    drop(to_server);
    [client, serves.join().unwrap()]
}

/// The same with a key that they share.
fn connected_by_keys() -> [End; 2] {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("keys.psk"), "me:00112233445566778899aabbccddeeff\n").unwrap();
    let server = ServerTls::of(&Credentials::in_directory(directory.path()), true).unwrap();
    let client = ClientTls::Keys(directory.path().join("keys.psk"), None);
    meet(client.begin("anybody").unwrap(), server.begin().unwrap()).map(Result::unwrap)
}

/// A socket that keeps what was read.
struct Recorded(UnixStream, Vec<u8>);

impl Read for Recorded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(bytes)?;
        self.1.extend_from_slice(&bytes[..count]);
        Ok(count)
    }
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Shared keys go with two suites, and the other one takes five times as long.
#[test]
fn with_a_shared_key_aes_is_chosen() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("keys.psk"), "me:00112233445566778899aabbccddeeff\n").unwrap();
    let server = ServerTls::of(&Credentials::in_directory(directory.path()), true).unwrap().begin().unwrap();
    let client = ClientTls::Keys(directory.path().join("keys.psk"), None).begin("anybody").unwrap();
    let (to_server, mut to_client) = UnixStream::pair().unwrap();
    let serves = std::thread::spawn(move || server.run(&mut to_client).map(drop));
    let mut recorded = Recorded(to_server, Vec::new());
    client.run(&mut recorded).unwrap();
    serves.join().unwrap().unwrap();
    // RFC 8446, 4.1.3: behind the heads of record and message come a version, random bytes, and a session's name.
    let hello = recorded.1;
    let suite = 44 + usize::from(hello[43]);
    assert_eq!(hello[suite..suite + 2], [0x13, 0x01], "TLS_AES_128_GCM_SHA256");
}

#[test]
fn keys_or_names_that_differ_are_said_to_on_both_sides() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    file("keys.psk", "me:00112233445566778899aabbccddeeff\n");
    let server = ServerTls::of(&Credentials::in_directory(directory.path()), true).unwrap();
    for other in ["me:00112233445566778899aabbccddee00\n", "you:00112233445566778899aabbccddeeff\n"] {
        let client = ClientTls::Keys(file("other.psk", other), None);
        let ends = meet(client.begin("anybody").unwrap(), server.begin().unwrap());
        for end in ends {
            let said = end.map(drop).unwrap_err().to_string();
            assert!(said.contains("the shared keys do not match"), "{other}: {said}");
        }
    }
}

/// A pair of each kind.
fn pairs() -> [[End; 2]; 2] {
    [connected(), connected_by_keys()]
}

/// Some bytes, behind which others will come.
struct Part<'a>(&'a [u8]);

impl Read for Part<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.0.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { self.0.read(bytes) }
    }
}

fn would_block<T: std::fmt::Debug>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

fn numbered(length: usize) -> Vec<u8> {
    (0..length).map(|index| ((index * 7) >> 3) as u8).collect()
}

#[test]
fn what_goes_in_at_one_end_comes_out_at_the_other_in_both_directions_at_once() {
    for [mut client, mut server] in pairs() {
        let bytes = numbered(3_000_000);
        let (mut sent, mut found) = ([0; 2], [Vec::new(), Vec::new()]);
        while found.iter().any(|found| found.len() < bytes.len()) {
            for (index, end) in [&mut client, &mut server].into_iter().enumerate() {
                match end.put(&bytes[sent[index]..]) {
                    Ok(count) => sent[index] += count,
                    error => assert!(would_block(error)),
                }
                found[index].extend(end.get().unwrap());
            }
        }
        assert!(found.iter().all(|found| *found == bytes));
    }
}

#[test]
fn a_peer_that_takes_nothing_has_a_bound_and_the_rest_goes_on_where_it_stopped() {
    for [mut client, mut server] in pairs() {
        let bytes = numbered(8 << 20);
        let mut sent = 0;
        loop {
            match server.put(&bytes[sent..]) {
                Ok(count) => {
                    assert!(count <= SEALED_BYTES_MAX);
                    sent += count;
                }
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    break;
                }
            }
        }
        // Nothing more is taken in, however often it is asked.
        assert!(server.channel.wants_write() && sent < bytes.len());
        assert!((0..100).all(|_| would_block(server.put(&bytes[sent..]))));
        // It reads little by little: records are cut anywhere.
        let mut found = Vec::new();
        while found.len() < bytes.len() {
            match server.put(&bytes[sent..]) {
                Ok(count) => sent += count,
                error => assert!(would_block(error)),
            }
            let mut some = vec![0; 777 + found.len() % 5000];
            let Ok(count) = (&client.socket).read(&mut some) else { continue };
            let mut part = Part(&some[..count]);
            loop {
                match client.channel.look(&mut part) {
                    Ok(Arrival::Plain) => {
                        client.channel.take(|plain| (found.extend_from_slice(plain), plain.len()).1).unwrap();
                    }
                    Ok(Arrival::Nothing) => {}
                    end => break assert!(would_block(end)),
                }
            }
        }
        assert!(found == bytes);
    }
}

#[test]
fn a_reader_that_is_always_behind_holds_no_more_than_it_has_read_at_once() {
    for [mut client, mut server] in pairs() {
        let bytes = numbered(1 << 20);
        let (mut sent, mut taken) = (0, 0);
        for _ in 0..2000 {
            if let Ok(count) = client.put(&bytes[sent % bytes.len()..]) {
                sent += count;
            }
            // It takes a few bytes for each look.
            if matches!(server.look(), Ok(Arrival::Plain)) {
                taken += server.channel.take(|plain| plain.len().min(300)).unwrap();
                let held = server.channel.session.state().plain_bytes;
                assert!(held <= 32 << 10, "{held} plain bytes");
            }
            assert_eq!(server.channel.arrived.len(), ARRIVED_BYTES);
        }
        // What it has not taken waits in the sender's hands.
        assert!(taken > 100_000 && (0..100).any(|_| would_block(client.put(&bytes))));
    }
}

#[test]
fn an_end_that_was_said_is_told_from_one_that_was_cut() {
    [connected, connected_by_keys].into_iter().for_each(ends);
}

fn ends(connected: fn() -> [End; 2]) {
    let [mut client, mut server] = connected();
    client.put(b"all of it").unwrap();
    client.channel.close();
    client.send().unwrap();
    // What comes behind the end is no part of the stream, and the other direction goes on.
    (&client.socket).write_all(&[23, 3, 3, 0, 99, 1, 2, 3]).unwrap();
    assert_eq!(server.get().unwrap(), b"all of it");
    assert_eq!(server.look().unwrap(), Arrival::End);
    assert_eq!(server.look().unwrap(), Arrival::End);
    server.put(b"and the answer").unwrap();
    assert_eq!(client.get().unwrap(), b"and the answer");
    assert_eq!(client.put(b"more").unwrap_err().kind(), io::ErrorKind::BrokenPipe);

    let [mut client, mut server] = connected();
    client.put(b"part of it").unwrap();
    client.socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.look().unwrap(), Arrival::Plain);
    server.channel.take(<[u8]>::len).unwrap();
    let error = server.look().unwrap_err();
    assert!(error.kind() == io::ErrorKind::UnexpectedEof && error.to_string().contains("without the end"), "{error}");

    // Cut within a record: not a byte of it counts.
    let [mut client, mut server] = connected();
    client.channel.seal(std::iter::once(&[7; 5000][..])).unwrap();
    let mut record = Vec::new();
    client.channel.send(&mut record).unwrap();
    (&client.socket).write_all(&record[..4000]).unwrap();
    client.socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.look().unwrap(), Arrival::Nothing);
    assert_eq!(server.look().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn keys_change_on_both_sides_while_data_go() {
    let [mut client, mut server] = connected();
    for round in 0..200_usize {
        let bytes = numbered(10_000 + round);
        if round % 3 == 0 {
            // The other side is asked to change its keys as well.
            client.channel.renew_keys();
        }
        if round % 7 == 0 {
            server.channel.renew_keys();
        }
        for [from, to] in [[0, 1], [1, 0]] {
            let ends = [&mut client, &mut server];
            assert_eq!(ends[from].put(&bytes).unwrap(), bytes.len());
            assert!(ends[to].get().unwrap() == bytes, "round {round}");
        }
    }
}

/// Each side waits for the other's bytes, so those behind a message that is no data must not wait for more.
#[test]
fn data_right_behind_new_keys_are_there_at_once() {
    for [mut client, mut server] in pairs() {
        for _ in 0..3 {
            client.channel.renew_keys();
            assert_eq!(client.put(b"request").unwrap(), 7);
            assert_eq!(server.get().unwrap(), b"request");
            server.channel.renew_keys();
            assert_eq!(server.put(b"reply").unwrap(), 5);
            assert_eq!(client.get().unwrap(), b"reply");
        }
    }
}

/// A socket that keeps all but the first of what is to be sent.
struct Held {
    socket: UnixStream,
    has_sent: bool,
    kept: Vec<u8>,
}

impl Read for Held {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.read(bytes)
    }
}

impl Write for Held {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match std::mem::replace(&mut self.has_sent, true) {
            true => self.kept.write(bytes),
            false => self.socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A client that sends its last message of the handshake and its first bytes with one call.
#[test]
fn what_came_behind_the_handshake_with_a_shared_key_is_there_before_the_socket_is_looked_at() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("keys.psk"), "me:00112233445566778899aabbccddeeff\n").unwrap();
    let server = ServerTls::of(&Credentials::in_directory(directory.path()), true).unwrap().begin().unwrap();
    let client = ClientTls::Keys(directory.path().join("keys.psk"), None).begin("anybody").unwrap();
    let (socket, mut to_client) = UnixStream::pair().unwrap();
    let serves = std::thread::spawn(move || (server.run(&mut to_client).unwrap(), to_client));
    let mut held = Held { socket, has_sent: false, kept: Vec::new() };
    let mut client = client.run(&mut held).unwrap();
    client.seal(std::iter::once(&b"at once"[..])).unwrap();
    client.send(&mut held.kept).unwrap();
    held.socket.write_all(&held.kept).unwrap();
    let (channel, socket) = serves.join().unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut server = End { channel, socket };
    assert!(server.channel.has_arrived());
    assert_eq!(server.get().unwrap(), b"at once");
    assert!(!server.channel.has_arrived());
}

#[test]
fn all_that_is_sealed_at_once_has_room_beside_new_keys() {
    let [mut client, mut server] = connected();
    let bytes = numbered(SEALED_BYTES_MAX);
    for _ in 0..3 {
        // The server's answer goes ahead of its bytes, and then keys of its own do.
        client.channel.renew_keys();
        client.send().unwrap();
        assert!(server.get().unwrap().is_empty() && !server.channel.wants_write());
        assert_eq!(server.put(&bytes).unwrap(), bytes.len());
        assert!(client.get().unwrap() == bytes);
        server.channel.renew_keys();
        assert_eq!(server.channel.seal(std::iter::once(&bytes[..])).unwrap(), bytes.len());
        server.send().unwrap();
        assert!(client.get().unwrap() == bytes);
    }
}

#[test]
fn a_byte_that_was_changed_on_the_way_ends_it_and_the_peer_is_told_why() {
    for [mut client, mut server] in pairs() {
        client.channel.seal(std::iter::once(&b"a secret"[..])).unwrap();
        let mut record = Vec::new();
        client.channel.send(&mut record).unwrap();
        *record.last_mut().unwrap() ^= 1;
        (&client.socket).write_all(&record).unwrap();
        assert_eq!(server.look().unwrap_err().kind(), io::ErrorKind::InvalidData);
        client.put(b"not a secret").unwrap();
        assert_eq!(server.look().unwrap_err().kind(), io::ErrorKind::InvalidData, "nor does it go on");
        server.send().unwrap();
        let told = client.look().unwrap_err();
        assert!(told.kind() == io::ErrorKind::InvalidData && told.to_string().starts_with("TLS: "), "{told}");
    }
}

#[test]
fn bytes_that_are_no_records_end_it() {
    for bytes in [&[0xff; 100][..], b"HTTP/1.1 200 OK\r\n", &[23, 3, 3, 0xff, 0xff, 0, 0, 0]] {
        for [client, mut server] in pairs() {
            (&client.socket).write_all(bytes).unwrap();
            assert_eq!(server.get().unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}

#[test]
fn a_peer_that_only_changes_its_keys_is_not_listened_to_for_ever() {
    let [mut client, mut server] = connected();
    let mut asked = 0;
    let error = loop {
        client.channel.renew_keys();
        client.send().unwrap();
        asked += 1;
        match server.get() {
            Ok(found) => assert!(found.is_empty() && asked < 1000),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    // What it would have answered is bounded, too.
    let mut answers = Vec::new();
    server.channel.send(&mut answers).unwrap();
    assert!(answers.len() < 4096, "{} bytes", answers.len());
}

#[test]
fn what_brings_no_byte_has_a_bound() {
    // Rustls makes no records without a byte in them, so this begins just below the bound.
    let [client, mut server] = connected();
    server.channel.fruitless_bytes = FRUITLESS_BYTES_MAX;
    (&client.socket).write_all(&[23, 3, 3, 0, 99, 1]).unwrap();
    let error = server.look().unwrap_err();
    assert!(error.to_string().contains("nothing in them"), "{error}");
}

#[test]
fn what_came_together_with_the_last_of_the_keys_is_there_before_the_socket_is_looked_at() {
    let [(mut client, to_server), (mut server, mut to_client)] = shaken();
    client.writer().write_all(b"at once").unwrap();
    client.write_tls(&mut &to_server).unwrap();
    server.read_tls(&mut to_client).unwrap();
    server.process_new_packets().unwrap();
    to_client.set_nonblocking(true).unwrap();
    let mut server = End { channel: Channel::new(server).unwrap(), socket: to_client };
    assert!(server.channel.has_arrived());
    assert_eq!(server.get().unwrap(), b"at once");
    assert!(!server.channel.has_arrived() && !server.socket().is_drained());
}

#[test]
fn a_peer_that_has_gone_is_an_error_and_no_signal() {
    for [client, mut server] in pairs() {
        drop(client);
        let error = server.put(b"anybody").unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{error}");
    }
}

#[test]
fn a_stream_over_it_waits_and_ends() {
    let [(client, to_server), (server, to_client)] = shaken();
    let mut client = Channel::new(client).unwrap();
    let bytes = numbered(2_000_000);
    let writes = {
        let bytes = bytes.clone();
        std::thread::spawn(move || {
            let mut server = Channel::new(server).unwrap();
            server.over(&to_client).write_all(&bytes).unwrap();
            server.close();
            server.over(&to_client).flush().unwrap();
        })
    };
    let mut found = Vec::new();
    client.over(&to_server).read_to_end(&mut found).unwrap();
    writes.join().unwrap();
    assert!(found == bytes);
}

#[test]
fn who_has_not_the_same_key_does_not_come_in() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    file("keys.psk", "# keys\nme:00112233\r\nyou:445566\n");
    let credentials = Credentials::in_directory(directory.path());
    let server = ServerTls::of(&credentials, true).unwrap();
    let same = file("same", "me:00112233\nyou:445566\n");
    let client = |path: &Path, user: Option<&str>| ClientTls::Keys(path.into(), user.map(str::to_owned));
    for user in ["me", "you"] {
        let [mut client, mut server] =
            meet(client(&same, Some(user)).begin("").unwrap(), server.begin().unwrap()).map(Result::unwrap);
        client.put(b"it is me").unwrap();
        assert_eq!(server.get().unwrap(), b"it is me");
    }
    for (name, text) in [("other", "me:00112234\n"), ("nobody", "them:00112233\n")] {
        let [client, server] = meet(client(&file(name, text), None).begin("").unwrap(), server.begin().unwrap());
        assert!(server.is_err(), "{name}");
        // The client of TLS 1.3 is told after its own part.
        assert!(client.is_err() || client.unwrap().get().is_err(), "{name}");
    }
    // Neither do those who have certificates only.
    let pki = tempfile::tempdir().unwrap();
    certificates(pki.path());
    let certified = ClientTls::Certificates(Credentials::in_directory(pki.path()));
    assert!(meet(certified.begin("localhost").unwrap(), server.begin().unwrap()).into_iter().all(|end| end.is_err()));
    // What is wrong with a file is said, and no key.
    for (text, why) in
        [("", "no key"), ("me:123", "line 1"), ("me:12\nyou:4x", "line 2"), (":12", "line 1"), ("x", "line 1")]
    {
        let said = client(&file("bad", text), None).begin("").unwrap_err().to_string();
        assert!(said.contains(why) && !said.contains("123") && !said.contains("4x"), "{said}");
    }
    assert!(client(&same, None).begin("").unwrap_err().to_string().contains("name a user"));
    assert!(client(&same, Some("them")).begin("").unwrap_err().to_string().contains("no TLS key of 'them'"));
}
