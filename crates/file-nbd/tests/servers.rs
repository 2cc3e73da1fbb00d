//! Disks of other people's NBD servers, nbdkit and qemu-nbd, as files.

use block::{File, FileOp, FileQueue, IoErrorKind, IoResult, PastEnd, block_on};
use memory::{AlignedBuf, BufferAccount, BufferBudget, IoBuf};
use ringdisk_file_nbd::{NbdUri, open};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::Dice;

const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: u64 = 1 << 20;

/// A server, killed with this.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(program: &str, arguments: &[&str], socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{program}: {error}"));
        let deadline = Instant::now() + PATIENCE;
        while !listens(socket) {
            assert!(child.try_wait().unwrap().is_none(), "{program} {arguments:?} has ended");
            assert!(Instant::now() < deadline, "{program} does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { child, socket: socket.to_owned() }
    }

    fn nbdkit(socket: &Path, arguments: &[&str]) -> Self {
        let first = ["-f", "--exit-with-parent", "-U", socket.to_str().unwrap()];
        Self::start("nbdkit", &[&first[..], arguments].concat(), socket)
    }

    fn qemu(socket: &Path, format: &str, image: &Path) -> Self {
        let place = ["-t", "-e", "4", "--discard=unmap", "-k", socket.to_str().unwrap(), "-f", format];
        Self::start("qemu-nbd", &[&place[..], &[image.to_str().unwrap()]].concat(), socket)
    }

    fn uri(&self, more: &str) -> NbdUri {
        NbdUri::parse(&format!("nbd+unix:///?socket={}{more}", self.socket.display())).unwrap()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Whether somebody listens at a socket. A server would count a connection that asks.
fn listens(socket: &Path) -> bool {
    // __SO_ACCEPTCON, among the flags.
    let line_of = |line: &str| line.ends_with(socket.to_str().unwrap()) && line.contains(" 00010000 ");
    std::fs::read_to_string("/proc/net/unix").unwrap().lines().any(line_of)
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("rd-").tempdir().unwrap()
}

fn run(queue: &Rc<dyn FileQueue>, op: FileOp) -> IoResult {
    block_on(queue.start(op))
}

fn read(queue: &Rc<dyn FileQueue>, offset: u64, length: usize) -> Vec<u8> {
    let data = IoBuf::zeroed(length).whole();
    run(queue, FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Fails }).unwrap();
    data.to_vec()
}

fn write(queue: &Rc<dyn FileQueue>, offset: u64, bytes: &[u8], fua: bool) -> IoResult {
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(bytes)).whole();
    run(queue, FileOp::Write { offset, data, fua })
}

/// Random requests; what is read must be what a model says.
fn compare_with_the_model(file: &Arc<dyn File>, requests: usize, seed: u64) {
    assert_eq!(file.length_bytes().unwrap(), SIZE);
    let (queue, mut dice) = (file.open_blocking().unwrap(), Dice::new(seed));
    let mut model = vec![0; SIZE as usize];
    for number in 0..requests {
        let offset = dice.below(SIZE);
        let length = 1 + dice.below((SIZE - offset).min(100_000));
        let range = offset as usize..(offset + length) as usize;
        match dice.below(8) {
            0..=2 => {
                let mut bytes = vec![0; length as usize];
                testkit::fill_seeded(number as u64 + 1, &mut bytes);
                write(&queue, offset, &bytes, dice.below(4) == 0).unwrap();
                model[range].copy_from_slice(&bytes);
            }
            3 => {
                let may_unmap = dice.below(2) == 0;
                run(&queue, FileOp::WriteZeroes { offset, length, may_unmap }).unwrap();
                model[range].fill(0);
            }
            4 => run(&queue, FileOp::Flush).unwrap(),
            5 => {
                let (is_hole, length) = file.hole_at(offset, length).unwrap();
                assert!(length > 0);
                let zeros = model[offset as usize..(offset + length) as usize].iter().all(|byte| *byte == 0);
                assert!(zeros || !is_hole, "a hole at {offset} with data in it");
            }
            _ => assert!(read(&queue, offset, length as usize) == model[range], "request {number}, seed {seed}"),
        }
    }
    assert!(read(&queue, 0, SIZE as usize) == model, "all of it, seed {seed}");
    // Behind the end.
    let data = IoBuf::zeroed(1024).whole();
    data.fill(9);
    run(&queue, FileOp::Read { offset: SIZE - 512, data: data.clone(), past_end: PastEnd::Zeros }).unwrap();
    assert_eq!(data.to_vec()[512..], [0; 512]);
    assert_eq!(write(&queue, SIZE - 1, &[1, 2], false).unwrap_err().kind(), IoErrorKind::OutOfRange);
}

#[test]
fn random_requests_end_as_the_model_says_on_every_server() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let image = directory.path().join("disk.qcow2");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").status().unwrap();
    assert!(made.success());
    let size = "1M";
    // Hardly any: each request waits for those before it. And enough for several short pieces.
    let (little, shared) = (BufferBudget::new(64 << 10).account(), BufferBudget::new(1 << 20));
    let accounts = [(); 8].map(|()| shared.account());
    for (seed, arguments) in [
        vec!["memory", size],
        // Whole blocks only.
        vec!["--filter=blocksize-policy", "memory", size, "blocksize-minimum=4096", "blocksize-error-policy=error"],
        // Neither zeroes nor discards nor structured replies.
        vec!["--no-sr", "--filter=nozero", "memory", size, "zeromode=none"],
    ]
    .into_iter()
    .enumerate()
    {
        let server = Server::nbdkit(&socket, &arguments);
        for room in [&little, &accounts[0]] {
            compare_with_the_model(&open(&server.uri(""), false, room).unwrap(), 300, seed as u64);
            // The model begins with zeros.
            let zeroes = FileOp::WriteZeroes { offset: 0, length: SIZE, may_unmap: true };
            run(&open(&server.uri(""), false, room).unwrap().open_blocking().unwrap(), zeroes).unwrap();
        }
    }
    let server = Server::qemu(&socket, "qcow2", &image);
    compare_with_the_model(&open(&server.uri(""), false, &BufferAccount::UNLIMITED).unwrap(), 300, 9);
}

#[test]
fn a_server_that_is_killed_and_comes_back_has_all_that_was_acknowledged() {
    let directory = directory();
    let (socket, image) = (directory.path().join("nbd"), directory.path().join("disk.qcow2"));
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("64M").status().unwrap();
    assert!(made.success());
    let mut server = Some(Server::qemu(&socket, "qcow2", &image));
    let file = open(&server.as_ref().unwrap().uri("&reconnect-s=60"), false, &BufferAccount::UNLIMITED).unwrap();
    let queue = file.open_blocking().unwrap();
    let mut model = vec![0_u8; 64 << 16];
    for round in 0..4_u8 {
        for block in 0..64_usize {
            let mark = (usize::from(round) * 64 + block) as u8 ^ 0x80;
            let offset = (block * 37 % 64) << 16;
            // What qcow2 maps lies in the server's memory until a flush.
            write(&queue, offset as u64, &[mark; 4096], false).unwrap();
            model[offset..offset + 4096].fill(mark);
            if block == 20 + usize::from(round) {
                server.take().unwrap().kill();
                let (socket, image) = (socket.clone(), image.clone());
                server = Some(std::thread::spawn(move || Server::qemu(&socket, "qcow2", &image)).join().unwrap());
            }
            if block == 50 {
                run(&queue, FileOp::Flush).unwrap();
            }
        }
        assert!(read(&queue, 0, model.len()) == model, "after round {round}");
    }
    run(&queue, FileOp::Flush).unwrap();
    // What was flushed outlives a kill without any help of ours.
    drop((queue, file));
    server.take().unwrap().kill();
    let server = Server::qemu(&socket, "qcow2", &image);
    let file = open(&server.uri(""), true, &BufferAccount::UNLIMITED).unwrap();
    assert!(read(&file.open_blocking().unwrap(), 0, model.len()) == model);
}

/// Clients that are connected to the server at a Unix socket.
fn connections(socket: &Path) -> usize {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let is_connected = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(5) == Some(&"03") && words.get(7) == socket.to_str().as_ref()
    };
    sockets.lines().filter(is_connected).count()
}

fn wait_for_connections(socket: &Path, expected: usize) {
    let deadline = Instant::now() + PATIENCE;
    while connections(socket) != expected {
        assert!(Instant::now() < deadline, "{} connections, not {expected}", connections(socket));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn queues_have_connections_of_their_own_and_a_flush_of_one_covers_all_over_a_kill() {
    const PART: u64 = 4 << 20;
    let directory = directory();
    let (socket, image) = (directory.path().join("nbd"), directory.path().join("disk.qcow2"));
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("16M").status().unwrap();
    assert!(made.success());
    let server = Server::qemu(&socket, "qcow2", &image);
    let file = open(&server.uri("&reconnect-s=60&connections=3"), false, &BufferAccount::UNLIMITED).unwrap();
    let together = std::sync::Barrier::new(5);
    std::thread::scope(|scope| {
        for part in 0..4_u64 {
            let (file, together) = (&file, &together);
            scope.spawn(move || {
                let queue = file.open_blocking().unwrap();
                for round in 0..3_u8 {
                    together.wait();
                    for block in 0..64_u64 {
                        let mark = (block as u8).wrapping_mul(7) ^ (round << 5) ^ part as u8 | 1;
                        write(&queue, part * PART + block * 65536, &[mark; 4096], false).unwrap();
                    }
                    for block in 0..64_u64 {
                        let mark = (block as u8).wrapping_mul(7) ^ (round << 5) ^ part as u8 | 1;
                        assert!(read(&queue, part * PART + block * 65536, 4096) == [mark; 4096], "{part}, {block}");
                    }
                }
                together.wait();
            });
        }
        // Four queues, and three connections at most.
        together.wait();
        wait_for_connections(&socket, 3);
        together.wait();
        server.kill();
        let (socket, image) = (socket.clone(), image.clone());
        let server = std::thread::spawn(move || Server::qemu(&socket, "qcow2", &image)).join().unwrap();
        together.wait();
        together.wait();
        wait_for_connections(&server.socket, 3);
        run(&file.open_blocking().unwrap(), FileOp::Flush).unwrap();
        server.kill();
    });
    drop(file);
    let server = Server::qemu(&socket, "qcow2", &image);
    let file = open(&server.uri(""), true, &BufferAccount::UNLIMITED).unwrap();
    let queue = file.open_blocking().unwrap();
    for (part, block) in (0..4_u64).flat_map(|part| (0..64_u64).map(move |block| (part, block))) {
        let mark = (block as u8).wrapping_mul(7) ^ (2 << 5) ^ part as u8 | 1;
        assert!(read(&queue, part * PART + block * 65536, 4096) == [mark; 4096], "{part}, {block}");
    }
}

#[test]
fn a_server_that_is_full_or_allows_one_connection_is_used_with_that() {
    let directory = directory();
    let (socket, image) = (directory.path().join("nbd"), directory.path().join("disk.raw"));
    std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
    // It says that it takes several, and lets no second in before the first has gone.
    let place = ["-t", "-e", "2", "-k", socket.to_str().unwrap(), "-f", "raw", image.to_str().unwrap()];
    let server = Server::start("qemu-nbd", &place, &socket);
    let others = open(&server.uri(""), false, &BufferAccount::UNLIMITED).unwrap();
    let file = open(&server.uri(""), false, &BufferAccount::UNLIMITED).unwrap();
    let queues = [(); 3].map(|()| file.open_blocking().unwrap());
    for (queue, mark) in queues.iter().zip(1..) {
        write(queue, u64::from(mark) * 512, &[mark; 512], false).unwrap();
        run(queue, FileOp::Flush).unwrap();
        assert_eq!(read(&queues[0], u64::from(mark) * 512, 512), [mark; 512]);
    }
    drop((queues, file, others, server));
    let server = Server::nbdkit(
        &socket,
        &["--filter=noparallel", "--filter=multi-conn", "memory", "1M", "multi-conn-mode=disable"],
    );
    let file = open(&server.uri(""), false, &BufferAccount::UNLIMITED).unwrap();
    let queues = [(); 3].map(|()| file.open_blocking().unwrap());
    for queue in &queues {
        write(queue, 0, &[5; 512], false).unwrap();
        assert_eq!(read(queue, 0, 512), [5; 512]);
    }
    assert_eq!(connections(&socket), 1);
}

#[test]
fn a_server_that_stays_away_fails_requests_when_the_time_is_over() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let server = Server::nbdkit(&socket, &["memory", "1M"]);
    let uri = server.uri("&reconnect-s=1");
    let file = open(&uri, false, &BufferAccount::UNLIMITED).unwrap();
    let queue = file.open_blocking().unwrap();
    write(&queue, 0, &[1; 512], false).unwrap();
    server.kill();
    let began = Instant::now();
    assert!(write(&queue, 0, &[2; 512], false).is_err());
    assert!(began.elapsed() < PATIENCE);
    assert!(run(&queue, FileOp::Flush).is_err());
    // It is waited for all the same: a server with the same disk is used, and gets what was not flushed.
    let _server = Server::nbdkit(&socket, &["memory", "1M"]);
    let deadline = Instant::now() + PATIENCE;
    while run(&queue, FileOp::Flush).is_err() {
        assert!(Instant::now() < deadline, "never connected again");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(read(&queue, 0, 512), [1; 512]);
}

#[test]
fn what_cannot_be_opened_says_why() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let nobody = NbdUri::parse(&format!("nbd+unix:///?socket={}", socket.display())).unwrap();
    assert!(open(&nobody, true, &BufferAccount::UNLIMITED).unwrap_err().to_string().contains("cannot connect"));
    let server = Server::nbdkit(&socket, &["-r", "memory", "1M"]);
    assert!(open(&server.uri(""), false, &BufferAccount::UNLIMITED).unwrap_err().to_string().contains("read-only"));
    assert_eq!(open(&server.uri(""), true, &BufferAccount::UNLIMITED).unwrap().length_bytes().unwrap(), SIZE);
    drop(server);
    let server = Server::nbdkit(&socket, &["--oldstyle", "memory", "1M"]);
    assert!(
        open(&server.uri(""), true, &BufferAccount::UNLIMITED).unwrap_err().to_string().contains("old NBD handshake")
    );
    drop(server);
    // Whatever is no NBD server.
    let _ = std::fs::remove_file(&socket);
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let talks = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"SSH-2.0-OpenSSH_9.2 Debian").unwrap();
    });
    assert!(open(&nobody, true, &BufferAccount::UNLIMITED).unwrap_err().to_string().contains("no NBD server"));
    talks.join().unwrap();
}

#[test]
fn a_disk_of_a_server_that_shares_a_key_is_used_under_tls() {
    let directory = directory();
    let (socket, keys) = (directory.path().join("nbd"), directory.path().join("keys.psk"));
    let other = directory.path().join("other.psk");
    std::fs::write(&keys, "alice:00112233445566778899aabbccddeeff\n").unwrap();
    std::fs::write(&other, "alice:00112233445566778899aabbccddee00\n").unwrap();
    let place = format!("--tls-psk={}", keys.display());
    let _server = Server::nbdkit(&socket, &["--tls=require", &place, "memory", "1M"]);
    let named = |user: &str, keys: &Path| {
        let uri = format!("nbds+unix://{user}/?socket={}&tls-psk-file={}", socket.display(), keys.display());
        open(&NbdUri::parse(&uri).unwrap(), false, &BufferAccount::UNLIMITED)
    };
    for user in ["alice@", ""] {
        let queue = named(user, &keys).unwrap().open_blocking().unwrap();
        let data = IoBuf::from_aligned(AlignedBuf::copy_of(&[7; 65_536])).whole();
        block_on(queue.start(FileOp::Write { offset: 4096, data, fua: false })).unwrap();
        let found = IoBuf::zeroed(65_536).whole();
        block_on(queue.start(FileOp::Read { offset: 4096, data: found.clone(), past_end: PastEnd::Fails })).unwrap();
        assert_eq!(found.to_vec(), [7; 65_536]);
    }
    for (user, keys, why) in [("alice@", &other, "TLS"), ("bob@", &keys, "no TLS key of 'bob'")] {
        let said = named(user, keys).map(drop).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
}
