//! A server that fails, is slow, and whose connections are cut anywhere: what is acknowledged stays, and what fails says so.

use block::{File, FileOp, FileQueue, IoResult, PastEnd, block_on};
use memory::{AlignedBuf, BufferAccount, IoBuf};
use ringdisk_file_nbd::{NbdUri, open};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::Dice;

const PATIENCE: Duration = Duration::from_secs(60);
const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;

/// A server, killed with this.
struct Peer(Child);

impl Peer {
    fn start(socket: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("nbdkit");
        command.args(["-f", "--exit-with-parent", "-U"]).arg(socket).args(arguments);
        Self::wait(command, socket)
    }

    /// qemu-nbd: nbdkit 1.32 aborts by itself when a connection is cut at some moments.
    fn qemu(socket: &Path, image: &Path) -> Self {
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-e", "40", "-f", "raw", "-k"]).arg(socket).arg(image);
        Self::wait(command, socket)
    }

    fn wait(mut command: Command, socket: &Path) -> Self {
        let mut child = command.stdin(Stdio::null()).spawn().expect("the server starts");
        let deadline = Instant::now() + PATIENCE;
        while !listens(socket) {
            assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline, "the server does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child)
    }
}

/// Whether somebody listens at a socket. A server would count a connection that asks.
fn listens(socket: &Path) -> bool {
    // __SO_ACCEPTCON, among the flags.
    let line_of = |line: &str| line.ends_with(socket.to_str().unwrap()) && line.contains(" 00010000 ");
    std::fs::read_to_string("/proc/net/unix").unwrap().lines().any(line_of)
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("rd-").tempdir().unwrap()
}

fn opened(socket: &Path, more: &str) -> Arc<dyn File> {
    let uri = NbdUri::parse(&format!("nbd+unix:///?socket={}{more}", socket.display())).unwrap();
    open(&uri, false, &BufferAccount::UNLIMITED).unwrap()
}

fn read(queue: &Rc<dyn FileQueue>, block: u64) -> IoResult<Vec<u8>> {
    let data = IoBuf::zeroed(BLOCK).whole();
    let offset = block * BLOCK as u64;
    block_on(queue.start(FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Fails }))?;
    Ok(data.to_vec())
}

fn write(queue: &Rc<dyn FileQueue>, block: u64, mark: u8) -> IoResult {
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(&[mark; BLOCK])).whole();
    block_on(queue.start(FileOp::Write { offset: block * BLOCK as u64, data, fua: false }))
}

/// Random requests. A write that failed may have happened or not; whatever was acknowledged is there. Returns how many
/// requests failed.
fn work(file: &Arc<dyn File>, blocks: std::ops::Range<u64>, requests: usize, seed: u64) -> usize {
    let (queue, mut dice) = (file.open_blocking().unwrap(), Dice::new(seed));
    // What each block may hold: the last write that ended well, and those that have failed since.
    let mut may_hold = vec![vec![0_u8]; (blocks.end - blocks.start) as usize];
    let mut failed = 0;
    for number in 0..requests {
        let index = dice.index(may_hold.len());
        let block = blocks.start + index as u64;
        let mark = (number % 250 + 1) as u8;
        match dice.below(8) {
            0..=3 => match write(&queue, block, mark) {
                Ok(()) => may_hold[index] = vec![mark],
                Err(_) => {
                    may_hold[index].push(mark);
                    failed += 1;
                }
            },
            4 => failed += usize::from(block_on(queue.start(FileOp::Flush)).is_err()),
            _ => match read(&queue, block) {
                Ok(bytes) => {
                    assert!(
                        may_hold[index].contains(&bytes[0]),
                        "block {block}: {} of {:?}",
                        bytes[0],
                        may_hold[index]
                    );
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} is torn");
                }
                Err(_) => failed += 1,
            },
        }
    }
    failed
}

#[test]
fn errors_of_a_server_are_reported_and_change_nothing_else() {
    let directory = directory();
    let (socket, trigger) = (directory.path().join("nbd"), directory.path().join("fails"));
    std::fs::write(&trigger, "").unwrap();
    let file_word = format!("error-file={}", trigger.display());
    let rates = ["error-pread-rate=20%", "error-pwrite-rate=20%", "error=EIO"];
    let _server = Peer::start(&socket, &[&["--filter=error", "memory", "1M", &file_word][..], &rates].concat());
    let file = opened(&socket, "");
    let failed = work(&file, 0..BLOCKS, 400, 1);
    assert!(failed > 20, "{failed} of 400 requests failed");
    std::fs::remove_file(&trigger).unwrap();
    // The server is used as before, and keeps what it acknowledges.
    assert_eq!(work(&file, BLOCKS..2 * BLOCKS, 400, 2), 0);
}

#[test]
fn a_server_without_space_says_so() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let _server =
        Peer::start(&socket, &["--filter=error", "memory", "1M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"]);
    let file = opened(&socket, "");
    let failed = write(&file.open_blocking().unwrap(), 0, 1).unwrap_err();
    assert_eq!(failed.kind(), block::IoErrorKind::NoSpace);
}

#[test]
fn slow_requests_do_not_hold_up_others() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let words = ["--filter=delay", "memory", "1M", "rdelay=20ms", "wdelay=5ms"];
    let _server = Peer::start(&socket, &words);
    let file = opened(&socket, "");
    std::thread::scope(|scope| {
        for part in 0..6_u64 {
            let file = &file;
            scope.spawn(move || assert_eq!(work(file, part * 16..(part + 1) * 16, 40, part), 0));
        }
    });
}

/// Stands between a client and a server, and cuts connections after any number of bytes.
struct Cutter {
    socket: PathBuf,
    cuts: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
}

impl Cutter {
    fn start(server: &Path, socket: &Path, seed: u64) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let (cuts, ends) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (server, counted, ended) = (server.to_owned(), Arc::clone(&cuts), Arc::clone(&ends));
        std::thread::spawn(move || {
            let mut dice = Dice::new(seed);
            for client in listener.incoming().map_while(Result::ok) {
                let upstream = UnixStream::connect(&server).unwrap();
                // Enough for the handshake, so that it goes on at all.
                let limit = if ended.load(Ordering::SeqCst) { u64::MAX } else { 4000 + dice.below(200_000) };
                let left = Arc::new(AtomicU64::new(limit));
                for (from, to) in [(&client, &upstream), (&upstream, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (left, counted) = (Arc::clone(&left), Arc::clone(&counted));
                    std::thread::spawn(move || carry(from, to, &left, &counted));
                }
            }
        });
        Self { socket: socket.to_owned(), cuts, ends }
    }
}

fn carry(mut from: UnixStream, mut to: UnixStream, left: &AtomicU64, cuts: &AtomicU64) {
    let mut bytes = [0; 3000];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let before =
            left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(count as u64)));
        let may = usize::try_from(before.unwrap()).unwrap_or(usize::MAX).min(count);
        if to.write_all(&bytes[..may]).is_err() {
            break;
        }
        if may < count {
            cuts.fetch_add(1, Ordering::SeqCst);
            break;
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}

#[test]
fn connections_that_are_cut_anywhere_cost_no_request() {
    for (connections, seed) in [(1, 11), (4, 12)] {
        let directory = directory();
        let (server, socket) = (directory.path().join("server"), directory.path().join("nbd"));
        let image = directory.path().join("disk.raw");
        std::fs::File::create(&image).unwrap().set_len(2 << 20).unwrap();
        let _server = Peer::qemu(&server, &image);
        let cutter = Cutter::start(&server, &socket, seed);
        let file = opened(&cutter.socket, &format!("&reconnect-s=60&connections={connections}"));
        std::thread::scope(|scope| {
            for part in 0..4_u64 {
                let file = &file;
                scope.spawn(move || assert_eq!(work(file, part * BLOCKS..(part + 1) * BLOCKS, 150, seed + part), 0));
            }
        });
        assert!(cutter.cuts.load(Ordering::SeqCst) > 3, "{} cuts", cutter.cuts.load(Ordering::SeqCst));
        cutter.ends.store(true, Ordering::SeqCst);
    }
}

/// Passes connections on, and cuts the one that is asked for.
struct Between {
    socket: PathBuf,
    made: Arc<std::sync::Mutex<Vec<UnixStream>>>,
}

impl Between {
    fn start(server: &Path, socket: &Path) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let made = Arc::<std::sync::Mutex<Vec<UnixStream>>>::default();
        let (server, all) = (server.to_owned(), Arc::clone(&made));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let upstream = UnixStream::connect(&server).unwrap();
                all.lock().unwrap().push(client.try_clone().unwrap());
                for (from, to) in [(&client, &upstream), (&upstream, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (left, cuts) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
                    std::thread::spawn(move || carry(from, to, &left, &cuts));
                }
            }
        });
        Self { socket: socket.to_owned(), made }
    }

    fn cut(&self, index: usize) {
        self.made.lock().unwrap()[index].shutdown(std::net::Shutdown::Both).unwrap();
    }
}

#[test]
fn what_goes_over_a_healthy_connection_is_not_sent_again_when_another_is_cut() {
    let directory = directory();
    let (server, socket) = (directory.path().join("server"), directory.path().join("nbd"));
    let log = directory.path().join("log");
    let log_word = format!("logfile={}", log.display());
    let words = ["--filter=log", "--filter=delay", "memory", "1M", "wdelay=400ms", &log_word];
    let _server = Peer::start(&server, &words);
    let between = Between::start(&server, &socket);
    let file = opened(&between.socket, "&reconnect-s=60");
    let (_first, second) = (file.open_blocking().unwrap(), file.open_blocking().unwrap());
    let writes = |block: u64| {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let place = format!("offset={:#x} ", block * BLOCK as u64);
        let is_it = |line: &&str| line.contains(" Write ") && line.contains(&place);
        text.lines().filter(is_it).map(str::to_owned).collect::<Vec<_>>()
    };
    // The second queue has a connection of its own, sooner or later.
    let deadline = Instant::now() + PATIENCE;
    let mut block = 1;
    while !{
        write(&second, block, 1).unwrap();
        writes(block).iter().any(|line| line.contains("connection=2"))
    } {
        block += 1;
        assert!(Instant::now() < deadline, "it stays with one connection");
    }
    let block = block + 1;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while writes(block).is_empty() {
                assert!(Instant::now() < deadline, "the write does not arrive");
                std::thread::sleep(Duration::from_millis(2));
            }
            between.cut(0);
        });
        // Durable: it is not among what is written again because nothing flushed it.
        let data = IoBuf::from_aligned(AlignedBuf::copy_of(&[7; BLOCK])).whole();
        block_on(second.start(FileOp::Write { offset: block * BLOCK as u64, data, fua: true })).unwrap();
    });
    // What is sent again has arrived before this is answered.
    block_on(second.start(FileOp::Flush)).unwrap();
    assert_eq!(writes(block).len(), 1, "{:?}", writes(block));
    assert_eq!(read(&second, block).unwrap(), [7; BLOCK]);
}

#[test]
fn a_durable_write_is_not_undone_by_what_is_written_again() {
    let directory = directory();
    let (server, socket) = (directory.path().join("server"), directory.path().join("nbd"));
    let image = directory.path().join("disk.raw");
    std::fs::File::create(&image).unwrap().set_len(2 << 20).unwrap();
    let _server = Peer::qemu(&server, &image);
    let between = Between::start(&server, &socket);
    let file = opened(&between.socket, "&reconnect-s=60&connections=1");
    let queue = file.open_blocking().unwrap();
    let all = IoBuf::from_aligned(AlignedBuf::copy_of(&[1; 3 * BLOCK])).whole();
    block_on(queue.start(FileOp::Write { offset: 4 * BLOCK as u64, data: all, fua: false })).unwrap();
    block_on(queue.start(FileOp::WriteZeroes { offset: 8 * BLOCK as u64, length: 3 * BLOCK as u64, may_unmap: true }))
        .unwrap();
    for block in [5, 9] {
        let data = IoBuf::from_aligned(AlignedBuf::copy_of(&[2; BLOCK])).whole();
        block_on(queue.start(FileOp::Write { offset: block * BLOCK as u64, data, fua: true })).unwrap();
    }
    between.cut(0);
    block_on(queue.start(FileOp::Flush)).unwrap();
    let marks: Vec<u8> = [4, 5, 6, 8, 9, 10].into_iter().map(|block| read(&queue, block).unwrap()[0]).collect();
    assert_eq!(marks, [1, 2, 1, 0, 2, 0]);
}
