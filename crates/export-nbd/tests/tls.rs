//! Clients under TLS, good and hostile. Their bytes are encrypted and decrypted on the reactor.

mod common;

use common::{PATIENCE, Served, self_signed};
use nbd_tls::{Connection, shake_hands};
use nbd_wire::Reader;
use nbd_wire::numbers::{answer, chunk, command, option};
use nbd_wire::option::{ANSWER_HEADER_BYTES, AnswerHeader, InfoRequest, put_option};
use nbd_wire::reply::{ReplyHead, Style};
use nbd_wire::request::Request;
use ringdisk_export_nbd::{Credentials, Limits, ServerOptions, Tls};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const SIZE: u64 = 64 << 20;

struct Place {
    credentials: Credentials,
    served: Served,
    #[expect(dead_code, reason = "it is there as long as the credentials")]
    pki: tempfile::TempDir,
}

/// A server with TLS, which it may require.
fn serve(is_required: bool, change: impl FnOnce(&mut Limits)) -> Place {
    serve_with(is_required, "", change)
}

/// The same, with more options of the drive.
fn serve_with(is_required: bool, drive: &str, change: impl FnOnce(&mut Limits)) -> Place {
    let pki = tempfile::tempdir().unwrap();
    self_signed(pki.path());
    let credentials = Credentials::in_directory(pki.path());
    let tls = Tls::new(&credentials, is_required, false).unwrap();
    let options = ServerOptions::default().with(|options| {
        change(&mut options.limits);
        options.tls = Some(tls);
    });
    let prepare = |directory: &std::path::Path| {
        let file = directory.join("disk.raw");
        std::fs::File::create(&file).unwrap().set_len(SIZE).unwrap();
        vec![format!("file={},format=raw,name=disk{drive}", file.display())]
    };
    Place { credentials, served: Served::start(prepare, options), pki }
}

/// A client's end of TLS on a socket that waits.
struct Secure {
    session: Connection,
    socket: UnixStream,
    cookie: u64,
}

impl Read for Secure {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            self.session.read_tls(&mut self.socket)?;
            self.session.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}

impl Write for Secure {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.session.writer().write(bytes)?;
        self.flush()?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            self.session.write_tls(&mut self.socket)?;
        }
        Ok(())
    }
}

fn answer_to(stream: &mut impl Read) -> u32 {
    loop {
        let mut head = [0; ANSWER_HEADER_BYTES];
        stream.read_exact(&mut head).unwrap();
        let head = AnswerHeader::read(&mut Reader::new(&head)).unwrap();
        stream.read_exact(&mut vec![0; head.length_bytes as usize]).unwrap();
        if head.kind == answer::ACK || head.is_error() {
            return head.kind;
        }
    }
}

fn ask(stream: &mut (impl Read + Write), option: u32, data: &[u8]) -> u32 {
    let mut bytes = Vec::new();
    put_option(&mut bytes, option, data);
    stream.write_all(&bytes).unwrap();
    answer_to(stream)
}

impl Secure {
    /// Up to the end of the handshake of TLS.
    fn begin(place: &Place) -> Self {
        let mut socket = common::greet(place.served.connect());
        assert_eq!(ask(&mut socket, option::STARTTLS, &[]), answer::ACK);
        let mut session = place.credentials.connect("localhost").unwrap();
        shake_hands(&mut session, &mut socket).unwrap();
        Self { session, socket, cookie: 0 }
    }

    /// With a disk.
    fn connect(place: &Place) -> Self {
        let mut client = Self::begin(place);
        assert_eq!(ask(&mut client, option::STRUCTURED_REPLY, &[]), answer::ACK);
        let go = InfoRequest { name: b"disk", wanted: vec![] }.to_bytes();
        assert_eq!(ask(&mut client, option::GO, &go), answer::ACK);
        client
    }

    fn request(&mut self, command: u16, offset: u64, length_bytes: u64) -> Vec<u8> {
        self.cookie += 1;
        let mut bytes = Vec::new();
        Request { flags: 0, command, cookie: self.cookie, offset, length_bytes }.put(&mut bytes, false);
        bytes
    }

    fn send(&mut self, command: u16, offset: u64, length_bytes: u64, payload: &[u8]) {
        let head = self.request(command, offset, length_bytes);
        self.write_all(&[&head, payload].concat()).unwrap();
    }

    fn reply(&mut self) -> (u16, u64, Vec<u8>) {
        let mut bytes = Vec::new();
        let head = loop {
            if let Some(head) = ReplyHead::read(&mut Reader::new(&bytes), Style::Structured).unwrap() {
                break head;
            }
            let mut byte = [0];
            self.read_exact(&mut byte).unwrap();
            bytes.push(byte[0]);
        };
        let ReplyHead::Chunk(chunk) = head else { panic!("a simple reply") };
        let mut payload = vec![0; chunk.length_bytes as usize];
        self.read_exact(&mut payload).unwrap();
        (chunk.kind, chunk.cookie, payload)
    }

    fn writes(&mut self, offset: u64, data: &[u8]) {
        self.send(command::WRITE, offset, data.len() as u64, data);
        assert_eq!(self.reply().0, chunk::NONE);
    }

    fn reads(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.send(command::READ, offset, length as u64, &[]);
        let (kind, _, payload) = self.reply();
        assert_eq!((kind, &payload[..8]), (chunk::OFFSET_DATA, &offset.to_be_bytes()[..]));
        payload[8..].to_vec()
    }

    /// How the stream ends: without an error if TLS says so.
    fn end(&mut self) -> io::Result<usize> {
        self.read_to_end(&mut Vec::new())
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn numbered(length: usize, first: usize) -> Vec<u8> {
    (first..first + length).map(|index| ((index * 7) >> 3) as u8).collect()
}

#[test]
fn data_of_all_lengths_are_written_and_read_and_both_sides_say_goodbye() {
    let mut place = serve(true, |_| {});
    let mut client = Secure::connect(&place);
    for (index, length) in
        [512, 4096, 16_384 - 512, 16_384, 65_536, 100 * 512, 3 << 20, 32 << 20].into_iter().enumerate()
    {
        let (offset, data) = (512 * (index as u64 + 1), numbered(length, index));
        client.writes(offset, &data);
        assert!(client.reads(offset, length) == data, "{length} bytes");
    }
    // Requests that came before the goodbye have their replies, and then the end is said.
    for index in 0..100 {
        let read = client.request(command::READ, 512 * index, 40_960);
        client.session.writer().write_all(&read).unwrap();
    }
    let goodbye = client.request(command::DISC, 0, 0);
    client.write_all(&goodbye).unwrap();
    (0..100).for_each(|_| assert_eq!(client.reply().0, chunk::OFFSET_DATA));
    assert_eq!(client.end().unwrap(), 0);
    wait_for("the end of the connection", || place.served.server().connections() == 0);
    place.served.stop();
}

#[test]
fn keys_change_under_requests() {
    let mut place = serve(true, |_| {});
    let mut client = Secure::connect(&place);
    for round in 0..40_u64 {
        client.session.refresh_traffic_keys().unwrap();
        // The answer goes ahead of a reply that is longer than what is encrypted at once.
        let length = if round % 2 == 0 { 40_960 } else { 1 << 20 };
        let data = numbered(length, round as usize);
        client.writes(round * 512, &data);
        client.session.refresh_traffic_keys().unwrap();
        assert!(client.reads(round * 512, length) == data);
    }
    place.served.stop();
}

#[test]
fn a_client_that_reads_nothing_keeps_its_own_room_and_gets_all_when_it_does() {
    const READS: u64 = 300;
    let mut place = serve(true, |limits| limits.connection_bytes = 4 << 20);
    let data = numbered(SIZE as usize >> 2, 5);
    Secure::connect(&place).writes(0, &data);
    let mut greedy = Secure::connect(&place);
    for index in 0..READS {
        let read = greedy.request(command::READ, index * 4096, 256 << 10);
        greedy.session.writer().write_all(&read).unwrap();
    }
    greedy.flush().unwrap();
    // Another one is served meanwhile.
    let mut good = Secure::connect(&place);
    for round in 0..50 {
        good.writes(32 << 20, &[round; 4096]);
        assert_eq!(good.reads(32 << 20, 4096), [round; 4096]);
    }
    let mut told: Vec<(u64, Vec<u8>)> = Vec::new();
    for _ in 0..READS {
        let (_, cookie, found) = greedy.reply();
        told.push((cookie, found));
    }
    told.sort_unstable_by_key(|(cookie, _)| *cookie);
    for (index, (_, found)) in told.iter().enumerate() {
        let start = index * 4096;
        assert!(found[8..] == data[start..start + (256 << 10)], "at {start}");
    }
    place.served.stop();
}

#[test]
fn a_write_that_was_cut_off_within_its_payload_does_not_count() {
    let mut place = serve(true, |_| {});
    let mut good = Secure::connect(&place);
    good.writes(0, &[1; 65_536]);
    for says_so in [false, true] {
        let mut client = Secure::connect(&place);
        client.send(command::WRITE, 0, 65_536, &[2; 60_000]);
        if says_so {
            client.session.send_close_notify();
            client.flush().unwrap();
        }
        client.socket.shutdown(Shutdown::Write).unwrap();
        assert!(client.end().is_err() || says_so, "a cut is not answered as an end");
    }
    wait_for("the end of both", || place.served.server().connections() == 1);
    assert_eq!(good.reads(0, 65_536), [1; 65_536]);
    place.served.stop();
}

#[test]
fn bytes_that_are_no_records_end_their_own_connection() {
    let mut place = serve(true, |_| {});
    let mut good = Secure::connect(&place);
    for bytes in [&[0xff; 4096][..], &[23, 3, 3, 0, 32][..], &[0; 70_000], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut clients = [Secure::begin(&place), Secure::connect(&place)];
        for client in &mut clients {
            let _ = client.socket.write_all(bytes);
            let _ = client.socket.write_all(&[7; 40]);
            assert!(client.end().is_err());
        }
        good.writes(0, &[3; 512]);
    }
    wait_for("the end of the others", || place.served.server().connections() == 1);
    place.served.stop();
}

#[test]
fn a_server_that_stops_waits_for_nobody_in_a_handshake_and_says_goodbye_to_the_others() {
    let mut place = serve(true, |limits| limits.handshake = Duration::from_secs(36_000));
    let (silent, mut asks) = (place.served.connect(), common::greet(place.served.connect()));
    assert_eq!(ask(&mut asks, option::STARTTLS, &[]), answer::ACK);
    let chooses = Secure::begin(&place);
    let mut works = Secure::connect(&place);
    works.writes(0, &[1; 4096]);
    place.served.stop();
    assert!(matches!(works.end(), Ok(0)), "the end is said");
    for mut socket in [silent, asks, chooses.socket] {
        socket.read_to_end(&mut Vec::new()).unwrap();
    }
}

#[test]
fn before_tls_nobody_learns_of_exports_and_nothing_that_is_sent_in_plain_counts() {
    let mut place = serve(true, |_| {});
    let go = InfoRequest { name: b"disk", wanted: vec![] }.to_bytes();
    let mut plain = common::greet(place.served.connect());
    for (option, data) in [
        (option::LIST, &[][..]),
        (option::INFO, &go),
        (option::GO, &go),
        (option::STRUCTURED_REPLY, &[]),
        (option::LIST_META_CONTEXT, &[0; 8]),
    ] {
        assert_eq!(ask(&mut plain, option, data), answer::ERR_TLS_REQD, "{option}");
    }
    let mut named = Vec::new();
    put_option(&mut named, option::EXPORT_NAME, b"disk");
    plain.write_all(&named).unwrap();
    assert_eq!(plain.read_to_end(&mut Vec::new()).unwrap(), 0);
    // Somebody on the way puts options behind the one for TLS.
    let mut injected = common::greet(place.served.connect());
    let mut options = Vec::new();
    put_option(&mut options, option::STARTTLS, &[]);
    put_option(&mut options, option::GO, &go);
    injected.write_all(&options).unwrap();
    assert_eq!(answer_to(&mut injected), answer::ACK);
    let mut session = place.credentials.connect("localhost").unwrap();
    assert!(shake_hands(&mut session, &mut injected).is_err());
    let mut rest = Vec::new();
    let _ = injected.read_to_end(&mut rest);
    let magic = nbd_wire::numbers::OPTION_REPLY_MAGIC.to_be_bytes();
    assert!(!rest.windows(magic.len()).any(|bytes| bytes == magic), "{rest:?}");
    place.served.stop();
}

/// A turn encrypts less than that.
#[test]
fn a_server_that_stops_sends_all_that_the_socket_takes_of_a_reply() {
    const LENGTH: usize = 256 << 10;
    let mut place = serve_with(true, ",filter=delay:ms=1000", |_| {});
    let mut client = Secure::connect(&place);
    client.send(command::READ, 0, LENGTH as u64, &[]);
    // It is behind the end of the disk. Its reply says that the other one was taken, too.
    client.send(command::READ, SIZE, 512, &[]);
    assert_eq!(client.reply().0, chunk::ERROR);
    place.served.stop();
    let (kind, _, payload) = client.reply();
    assert_eq!((kind, payload.len()), (chunk::OFFSET_DATA, 8 + LENGTH));
    assert!(matches!(client.end(), Ok(0)), "the end is said");
}

#[test]
fn where_tls_is_allowed_both_kinds_of_clients_are_served_however_their_first_option_is_divided() {
    let mut place = serve(false, |_| {});
    let mut secure = Secure::connect(&place);
    secure.writes(0, &[9; 4096]);
    for cut in [1, 15, 16, 17, 20] {
        let mut plain = common::greet(place.served.connect());
        let mut go = Vec::new();
        put_option(&mut go, option::GO, &InfoRequest { name: b"disk", wanted: vec![] }.to_bytes());
        plain.write_all(&go[..cut]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        plain.write_all(&go[cut..]).unwrap();
        assert_eq!(answer_to(&mut plain), answer::ACK);
        let mut read = Vec::new();
        Request { flags: 0, command: command::READ, cookie: 1, offset: 0, length_bytes: 4096 }.put(&mut read, false);
        plain.write_all(&read).unwrap();
        let mut reply = [0; 16 + 4096];
        plain.read_exact(&mut reply).unwrap();
        assert_eq!(reply[16..], [9; 4096]);
    }
    // TLS begins once.
    assert_eq!(ask(&mut Secure::begin(&place), option::STARTTLS, &[]), answer::ERR_INVALID);
    place.served.stop();
}

#[test]
fn clients_that_are_gone_before_their_replies_or_the_goodbye_leave_nothing_behind() {
    let mut place = serve(true, |_| {});
    for round in 0..24_usize {
        let mut client = Secure::connect(&place);
        if round % 2 == 0 {
            for index in 0..round as u64 {
                client.send(command::READ, index * 4096, 256 << 10, &[]);
            }
        }
        if round % 3 > 0 {
            client.send(command::DISC, 0, 0, &[]);
        }
        drop(client);
    }
    wait_for("the end of all connections", || place.served.server().connections() == 0);
    // The reactor is there for others.
    Secure::connect(&place).writes(0, &[1; 4096]);
    place.served.stop();
}

#[test]
fn other_programs_use_a_disk_with_a_key_that_they_share() {
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.psk");
    std::fs::write(&keys, "alice:00112233445566778899aabbccddeeff\nqemu:ffeeddccbbaa99887766554433221100\n").unwrap();
    let other = directory.path().join("other.psk");
    std::fs::write(&other, "alice:00112233445566778899aabbccddee00\n").unwrap();
    let tls = Tls::new(&Credentials::in_directory(directory.path()), true, true).unwrap();
    let mut served = Served::raw(4 << 20, ServerOptions::default().with(|options| options.tls = Some(tls)));
    let bytes = numbered(4 << 20, 3);
    let source = directory.path().join("source.raw");
    std::fs::write(&source, &bytes).unwrap();
    let uri = |user: &str, keys: &std::path::Path| {
        format!("nbds+unix://{user}@/disk?socket={}&tls-psk-file={}", served.socket.display(), keys.display())
    };
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    assert!(common::tool("nbdinfo", &[&uri("alice", &keys)]).contains("with TLS"));
    common::tool("nbdcopy", &[&path(&source), &uri("alice", &keys)]);
    let object = format!("tls-creds-psk,id=tls,endpoint=client,dir={}", directory.path().display());
    let options = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export=disk,file.tls-creds=tls",
        served.socket.display()
    );
    let copy = directory.path().join("copy.raw");
    let convert = ["convert", "--object", &object, "--image-opts", &options, "-O", "raw", &path(&copy)];
    common::tool("qemu-img", &convert);
    assert!(std::fs::read(&copy).unwrap() == bytes);
    for (user, keys) in [("alice", &other), ("bob", &keys)] {
        assert!(!common::try_tool("nbdinfo", &[&uri(user, keys)]).status.success(), "{user}");
    }
    served.stop();
}
