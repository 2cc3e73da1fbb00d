//! Clients that break the protocol, stop in the middle or never read, beside one that works.

mod common;

use common::{Client, PATIENCE, Served, answers, ask, greet, self_signed};
use nbd_wire::numbers::{answer, chunk, command, command_flag, option};
use nbd_wire::option::{InfoRequest, put_option};
use nbd_wire::reply::Style;
use nbd_wire::request::Request;
use ringdisk_export_nbd::{Credentials, Limits, PayloadMemory, ServerOptions, Tls};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SIZE: u64 = 64 << 20;

fn options(change: impl FnOnce(&mut Limits)) -> ServerOptions {
    ServerOptions::default().with(|options| change(&mut options.limits))
}

/// Whether the server has closed the connection, whatever it still sent.
fn is_disconnected(stream: &mut UnixStream) -> bool {
    let mut sink = vec![0; 1 << 16];
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        match stream.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            // A socket with a time limit is not read on by itself after a signal.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
    false
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs `attack` while another client writes and reads what it wrote.
fn beside_a_good_client(served: &Served, attack: impl FnOnce()) {
    /// Set also if the attack panics, so that the client ends and the test fails at once.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let good = scope.spawn(|| {
            let mut client = Client::connect(served, Style::Structured, &[]);
            let mut rounds = 0_u64;
            while !over.load(Ordering::SeqCst) || rounds < 10 {
                let (offset, mark) = (rounds % 64 * 4096, (rounds % 250) as u8 + 1);
                client.send(command::WRITE, 0, offset, 4096, &[mark; 4096]);
                assert_eq!(client.reply().0, chunk::NONE);
                client.send(command::READ, 0, offset, 4096, &[]);
                let (kind, _, payload) = client.reply();
                assert_eq!((kind, &payload[8..]), (chunk::OFFSET_DATA, &[mark; 4096][..]));
                rounds += 1;
            }
        });
        let is_over = Over(&over);
        attack();
        drop(is_over);
        good.join().unwrap();
    });
}

#[test]
fn a_hint_to_read_all_of_a_large_disk_ahead_is_taken_in_part() {
    let mut served = Served::raw(1 << 43, ServerOptions::default());
    beside_a_good_client(&served, || {
        let mut client = Client::connect(&served, Style::Extended, &[]);
        let hints: Vec<u64> = (0..64).map(|_| client.send(command::CACHE, 0, 0, 1 << 43, &[])).collect();
        let mut told: Vec<u64> = hints
            .iter()
            .map(|_| client.reply())
            .map(|(kind, cookie, _)| {
                assert_eq!(kind, chunk::NONE);
                cookie
            })
            .collect();
        told.sort_unstable();
        assert_eq!(told, hints);
        // One that leaves meanwhile keeps nothing going.
        client.send(command::CACHE, 0, 0, 1 << 43, &[]);
    });
    served.stop();
}

#[test]
fn clients_that_break_the_protocol_are_disconnected_and_others_go_on() {
    let mut served = Served::raw(SIZE, ServerOptions::default());
    beside_a_good_client(&served, || {
        // Flags that were not offered.
        let mut stream = served.connect();
        stream.write_all(&u32::MAX.to_be_bytes()).unwrap();
        assert!(is_disconnected(&mut stream));
        // An option of gigabytes, and one without its magic number.
        let giant = [&0x4948_4156_454f_5054_u64.to_be_bytes()[..], &7_u32.to_be_bytes(), &u32::MAX.to_be_bytes()];
        for bytes in [giant.concat(), vec![0xff; 64]] {
            let mut stream = greet(served.connect());
            stream.write_all(&bytes).unwrap();
            assert!(is_disconnected(&mut stream));
        }
        // Requests without their magic number, and with a payload of gigabytes.
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            let mut client = Client::connect(&served, style, &[]);
            client.stream.write_all(&[0x25; 64]).unwrap();
            assert!(is_disconnected(&mut client.stream), "{style:?}");
            let mut client = Client::connect(&served, style, &[]);
            let flags = if style == Style::Extended { command_flag::PAYLOAD_LEN } else { 0 };
            client.send(command::WRITE, flags, 0, 0xffff_fe00, &[]);
            assert!(is_disconnected(&mut client.stream), "{style:?}");
        }
    });
    served.stop();
}

#[test]
fn options_that_make_no_sense_are_answered_and_the_handshake_goes_on() {
    let mut served = Served::raw(SIZE, ServerOptions::default());
    let mut stream = greet(served.connect());
    for (option, data, expected) in [
        (77, vec![], answer::ERR_UNSUP),
        (option::LIST, vec![1], answer::ERR_INVALID),
        (option::GO, vec![0, 0, 0, 200, 1], answer::ERR_INVALID),
        (option::GO, InfoRequest { name: b"nobody", wanted: vec![] }.to_bytes(), answer::ERR_UNKNOWN),
        (option::SET_META_CONTEXT, vec![0; 8], answer::ERR_INVALID),
        (option::INFO, vec![7; 20_000], answer::ERR_TOO_BIG),
        (option::STARTTLS, vec![], answer::ERR_POLICY),
    ] {
        assert_eq!(ask(&mut stream, option, &data).last().unwrap().0, expected, "{option}");
    }
    assert_eq!(ask(&mut stream, option::LIST, &[]).len(), 2);
    assert_eq!(ask(&mut stream, option::ABORT, &[]).len(), 1);
    assert!(is_disconnected(&mut stream));
    served.stop();
}

#[test]
fn a_flood_that_is_never_read_keeps_only_its_own_room() {
    let mut served = Served::raw(SIZE, options(|limits| limits.connection_bytes = 4 << 20));
    beside_a_good_client(&served, || {
        // Reads of all there is, and no look at a reply.
        let client = Client::connect(&served, Style::Structured, &[]);
        let mut reader = client.stream.try_clone().unwrap();
        client.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut requests = Vec::new();
        for cookie in 0..1000_u64 {
            let request = Request { flags: 0, command: command::READ, cookie, offset: 0, length_bytes: 1 << 20 };
            request.put(&mut requests, false);
        }
        let mut stream = client.stream;
        let mut sent = 0;
        while let Ok(count @ 1..) = stream.write(&requests[sent..]) {
            sent += count;
        }
        // Options without end, and no look at an answer either.
        let mut options = greet(served.connect());
        options.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut lists = Vec::new();
        (0..200_000).for_each(|_| put_option(&mut lists, option::LIST, &[]));
        assert!(options.write_all(&lists).is_err(), "the server took all options without sending an answer");
        // The first replies are there all the same.
        let mut head = [0; 28];
        reader.read_exact(&mut head).unwrap();
    });
    served.stop();
}

#[test]
fn answers_about_holes_that_are_never_read_keep_only_their_own_room() {
    const CONNECTION_BYTES: usize = 1 << 20;
    let memory = PayloadMemory::new(256 << 20);
    let counted = options(|limits| limits.connection_bytes = CONNECTION_BYTES);
    let mut served = Served::raw(SIZE, counted.with(|options| options.payload = Some(memory.clone())));
    // Data and holes in turn: an answer tells as much as it can hold.
    let file = std::fs::OpenOptions::new().write(true).open(served.directory.path().join("disk.raw")).unwrap();
    (0..SIZE / 8192).for_each(|number| file.write_all_at(&[1; 4096], number * 8192).unwrap());
    let client = Client::connect(&served, Style::Structured, &["base:allocation"]);
    client.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut requests = Vec::new();
    for cookie in 0..100_000_u64 {
        let length_bytes = SIZE;
        let request = Request { flags: 0, command: command::BLOCK_STATUS, cookie, offset: 0, length_bytes };
        request.put(&mut requests, false);
    }
    let mut stream = client.stream;
    let mut sent = 0;
    while let Ok(count @ 1..) = stream.write(&requests[sent..]) {
        sent += count;
    }
    assert!(sent < requests.len(), "the server took all questions");
    // What waits to be read counts, and no more is answered.
    wait_for("answers", || memory.used_bytes() > CONNECTION_BYTES / 2);
    assert!(memory.used_bytes() <= CONNECTION_BYTES, "{}", memory.used_bytes());
    // When it leaves, all of it is free.
    drop(stream);
    wait_for("the end", || memory.used_bytes() == 0);
    served.stop();
}

#[test]
fn half_messages_hold_up_nobody_and_do_not_keep_a_server_from_its_end() {
    let mut served = Served::raw(SIZE, ServerOptions::default());
    let mut halves = Vec::new();
    beside_a_good_client(&served, || {
        for length in [0, 1, 10, 17] {
            let mut stream = greet(served.connect());
            stream
                .write_all(&[0x49, 0x48, 0x41, 0x56, 0x45, 0x4f, 0x50, 0x54, 0, 0, 0, 7, 0, 0, 0, 6, 0][..length])
                .unwrap();
            halves.push(stream);
        }
        for (length, payload) in [(1 << 20, 0), (1 << 20, 1), (1 << 20, 700_000), (4096, 4095)] {
            let mut client = Client::connect(&served, Style::Structured, &[]);
            client.send(command::WRITE, 0, 0, length, &vec![9; payload]);
            halves.push(client.stream);
        }
    });
    let began = Instant::now();
    served.stop();
    assert!(began.elapsed() < PATIENCE);
    assert!(halves.iter_mut().all(is_disconnected));
}

#[test]
fn a_client_that_chooses_no_export_loses_its_place() {
    let mut served = Served::raw(
        SIZE,
        options(|limits| {
            limits.handshake = Duration::from_millis(200);
            limits.connections = 2;
        }),
    );
    let (mut one, mut other) = (greet(served.connect()), served.connect());
    // The third waits until one of them has gone.
    let mut client = Client::connect(&served, Style::Simple, &[]);
    assert!(is_disconnected(&mut one) && is_disconnected(&mut other));
    client.send(command::FLUSH, 0, 0, 0, &[]);
    assert_eq!(client.reply().0, 0);
    std::thread::sleep(Duration::from_millis(300));
    client.send(command::FLUSH, 0, 0, 0, &[]);
    assert_eq!(client.reply().0, 0, "the time is over when an export is chosen");
    drop(client);
    wait_for("the end of all connections", || served.server().connections() == 0);
    served.stop();
}

#[test]
fn extended_headers_carry_64_bits() {
    let mut served = Served::raw(8 << 30, ServerOptions::default());
    let mut client = Client::connect(&served, Style::Extended, &["base:allocation"]);
    let far = 5_u64 << 30;
    client.send(command::WRITE, command_flag::PAYLOAD_LEN, far, 4096, &[3; 4096]);
    assert_eq!(client.reply().0, chunk::NONE);
    client.send(command::BLOCK_STATUS, 0, 0, 8 << 30, &[]);
    let (kind, _, payload) = client.reply();
    assert_eq!(kind, chunk::BLOCK_STATUS_EXT);
    let (context, extents) = nbd_wire::reply::read_status(&payload, true).unwrap();
    let told: Vec<_> = extents.iter().map(|extent| (extent.length_bytes, extent.flags)).collect();
    assert_eq!(context, 1);
    assert_eq!(told.first(), Some(&(far, 3)), "{told:?}");
    assert_eq!(told.iter().map(|(length, _)| length).sum::<u64>(), 8 << 30);
    // Zeros of more than 32 bits in one request.
    client.send(command::WRITE_ZEROES, 0, 0, 6 << 30, &[]);
    assert_eq!(client.reply().0, chunk::NONE);
    client.send(command::READ, 0, far, 4096, &[]);
    let (kind, cookie, payload) = client.reply();
    assert_eq!((kind, cookie), (chunk::OFFSET_DATA, 4));
    assert_eq!(payload, [&far.to_be_bytes()[..], &[0; 4096]].concat());
    // QEMU writes without the flag.
    client.send(command::WRITE, 0, 0, 512, &[4; 512]);
    assert_eq!(client.reply().0, chunk::NONE);
    // A payload that nobody wants is read over, and the next request is understood.
    client.send(command::FLUSH, command_flag::PAYLOAD_LEN, 0, 1000, &[1; 1000]);
    assert_eq!(client.reply().0, chunk::ERROR);
    client.send(command::FLUSH, 0, 0, 0, &[]);
    assert_eq!(client.reply().0, chunk::NONE);
    served.stop();
}

#[test]
fn answers_stop_at_the_name_of_an_export_of_the_old_way() {
    let mut served = Served::raw(SIZE, ServerOptions::default());
    let mut stream = greet(served.connect());
    let mut bytes = Vec::new();
    put_option(&mut bytes, option::STRUCTURED_REPLY, &[]);
    put_option(&mut bytes, option::EXPORT_NAME, b"disk");
    Request { flags: 0, command: command::DISC, cookie: 0, offset: 0, length_bytes: 0 }.put(&mut bytes, false);
    stream.write_all(&bytes).unwrap();
    assert_eq!(answers(&mut stream)[0].0, answer::ACK);
    let told = common::read_exactly(&mut stream, 10);
    assert_eq!(told[..8], SIZE.to_be_bytes());
    assert!(is_disconnected(&mut stream));
    served.stop();
}

/// Asks for TLS on a new connection.
fn ask_for_tls(served: &Served) -> std::io::Result<UnixStream> {
    let mut stream = served.connect();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    stream.write_all(&[0, 0, 0, 3])?;
    let mut message = Vec::new();
    put_option(&mut message, option::STARTTLS, &[]);
    stream.write_all(&message)?;
    stream.read_exact(&mut [0; 20])?;
    Ok(stream)
}

#[test]
fn clients_that_drip_before_and_in_a_tls_handshake_keep_a_good_one_out_for_no_longer_than_the_limit() {
    let pki = tempfile::tempdir().unwrap();
    self_signed(pki.path());
    let credentials = Credentials::in_directory(pki.path());
    let with_tls = options(|limits| {
        limits.handshake = Duration::from_millis(400);
        limits.connections = 3;
    });
    let tls = Tls::new(&credentials, true, false).unwrap();
    let mut served = Served::raw(SIZE, with_tls.with(|options| options.tls = Some(tls)));
    let drips = |mut stream: UnixStream, bytes: &[u8]| {
        for byte in bytes.iter().cycle() {
            if stream.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    std::thread::scope(|scope| {
        for index in 0..12 {
            let served = &served;
            scope.spawn(move || match index % 2 {
                0 => drips(served.connect(), &[0, 0, 0, 3]),
                // The head of a record that never is whole.
                _ => {
                    let _ = ask_for_tls(served).map(|stream| drips(stream, &[22, 3, 1, 64, 0, 1, 0, 63, 0]));
                }
            });
        }
        wait_for("a crowd", || served.server().connections() == 3);
        let is_in = || {
            let Ok(mut stream) = ask_for_tls(&served) else { return false };
            let mut session = credentials.connect("localhost").unwrap();
            nbd_tls::shake_hands(&mut session, &mut stream).is_ok()
        };
        wait_for("a good client", is_in);
    });
    wait_for("an empty room", || served.server().connections() == 0);
    served.stop();
}
