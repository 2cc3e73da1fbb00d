//! Compressed images at servers: they are decompressed beside the reactor, within the budget of their disk.
#![allow(clippy::unwrap_used, missing_docs)]

use block::{Disk, DiskIo, File, FileIo, FileQueue, ReactorCtx, Result, Task, Work, run_and_wait};
use engine::{Reactor, ReactorConfig};
use image::{FileName, Format, ImageOptions, Opener, Role};
use memory::{AlignedBuf, BufferAccount, BufferBudget};
use ringdisk_drive::EngineOpener;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::ThreadId;
use std::time::Duration;
use testkit::WebServer;

type Threads = Arc<Mutex<HashSet<ThreadId>>>;

/// A file that tells where its queues' computations run.
#[derive(Debug)]
struct Watched(Arc<dyn File>, Threads);

impl File for Watched {
    fn info(&self) -> &block::FileInfo {
        self.0.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.0.length_bytes()
    }

    fn buffers(&self) -> &BufferAccount {
        self.0.buffers()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(WatchedQueue(self.0.open_queue(ctx)?, Arc::clone(&self.1))))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        self.0.open_blocking()
    }
}

struct WatchedQueue(Rc<dyn FileQueue>, Threads);

impl FileQueue for WatchedQueue {
    fn push(&self, io: FileIo) {
        self.0.push(io);
    }

    fn run_aside(&self, work: Work) {
        let threads = Arc::clone(&self.1);
        self.0.run_aside(Box::new(move || {
            threads.lock().unwrap().insert(std::thread::current().id());
            work();
        }));
    }
}

struct WatchingOpener(EngineOpener, Threads);

impl Opener for WatchingOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        Ok(Arc::new(Watched(self.0.open(name, role)?, Arc::clone(&self.1))))
    }
}

fn compressed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/images/zlib.qcow2")
}

/// Reads all of a disk in many requests at once; returns its bytes and the reactor's thread.
fn read_all(disk: Arc<dyn Disk>) -> (Vec<u8>, ThreadId) {
    const PIECE: u64 = 4096;
    let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
    let (count, (sender, results)) = (disk.info().size_bytes / PIECE, mpsc::channel());
    let read = move |ctx: &Rc<dyn ReactorCtx>| {
        let io = DiskIo::open(&*disk, ctx).unwrap();
        for index in 0..count {
            let (io, sender) = (Rc::clone(&io), sender.clone());
            ctx.spawn(Task::new(async move {
                let mut buf = AlignedBuf::zeroed(PIECE as usize);
                io.read(index * PIECE, &mut buf, PIECE as usize).await.unwrap();
                sender.send((index, buf.to_vec())).unwrap();
            }));
        }
        std::thread::current().id()
    };
    let thread = run_and_wait(&*reactor.handle(), read).unwrap();
    let mut pieces: Vec<(u64, Vec<u8>)> = results.iter().take(count as usize).collect();
    pieces.sort_unstable();
    reactor.stop().unwrap();
    (pieces.into_iter().flat_map(|(_, bytes)| bytes).collect(), thread)
}

/// Checks that the image at `name` is what the file holds, and where and within which memory it is decompressed.
fn check(name: &str) {
    let open = |name: FileName, opener: &dyn Opener| {
        let options = ImageOptions::new(name).with(|options| {
            options.format = Some(Format::Qcow2);
            options.read_only = true;
        });
        Arc::new(image::open(&options, opener).unwrap())
    };
    let local = open(compressed().as_path().into(), &EngineOpener::default());
    let (expected, _) = read_all(Arc::clone(&local) as Arc<dyn Disk>);
    let (budget, threads) = (BufferBudget::new(1 << 20), Threads::default());
    let opener = WatchingOpener(EngineOpener::default().with_buffers(budget.account()), Arc::clone(&threads));
    let remote = open(FileName::parse(name).unwrap(), &opener);
    let (bytes, reactor) = read_all(Arc::clone(&remote) as Arc<dyn Disk>);
    assert!(bytes == expected, "{name}: other bytes");
    let threads = threads.lock().unwrap();
    assert!(!threads.is_empty() && !threads.contains(&reactor), "{name}: the reactor decompresses");
    let stats = budget.stats();
    assert!(stats.peak_bytes > 0 && stats.peak_bytes <= 1 << 20, "{name}: {stats:?}");
}

#[test]
fn a_compressed_image_on_a_web_server_is_decompressed_beside_the_reactor() {
    let server = WebServer::start(&std::fs::read(compressed()).unwrap());
    check(&server.url("/image"));
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_compressed_image_at_an_nbd_server_is_decompressed_beside_the_reactor() {
    if Command::new("qemu-nbd").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "qemu-nbd is missing");
        eprintln!("SKIPPED: qemu-nbd is missing");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd");
    let mut command = Command::new("qemu-nbd");
    command.args(["-r", "-f", "raw", "-t", "-e", "8", "-k"]).arg(&socket).arg(compressed());
    let _server = Server(command.spawn().unwrap());
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    check(&format!("nbd+unix:///?socket={}", socket.display()));
}
