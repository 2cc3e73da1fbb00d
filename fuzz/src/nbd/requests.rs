//! An NBD server, from its socket to its disk, with a client that has chosen an export and then asks for anything.
//!
//! The checks: no panic; the next client is served; a client that keeps to the protocol gets one reply to each request,
//! and reads the data that were written.

use super::peer::{Chosen, choose, hear, replies};
use super::talk::{SIZE_BYTES, Talk, range};
use arbitrary::{Result, Unstructured};
use block::{
    Completion, Disk, DiskInfo, DiskQueue, IoError, IoErrorKind, IoResult, Op, ReactorCtx, ReactorHandle, SECTOR_BYTES,
    Tag,
};
use engine::{Reactor, ReactorConfig, ReactorThread};
use export_nbd::{NbdExport, NbdListener, NbdServer, ServerOptions};
use image::NullDisk;
use nbd_wire::reply::Style;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A disk of bytes. It carries out requests in order, and completes them in another order.
struct Bytes(Arc<Mutex<Vec<u8>>>);

struct BytesQueue {
    bytes: Arc<Mutex<Vec<u8>>>,
    ready: Vec<Completion>,
}

fn lock(bytes: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk for Bytes {
    fn info(&self) -> DiskInfo {
        NullDisk::new(SIZE_BYTES, String::new()).info()
    }

    fn open_queue(&self, _ctx: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(BytesQueue { bytes: Arc::clone(&self.0), ready: Vec::new() }))
    }
}

impl BytesQueue {
    fn carry_out(&self, op: &Op) -> IoResult {
        let Some((offset, length)) = op.range() else { return Ok(()) };
        assert!(offset.checked_add(length).is_some_and(|end| end <= SIZE_BYTES), "{op:?} is outside");
        assert!(offset % SECTOR_BYTES == 0 && length % SECTOR_BYTES == 0, "{op:?} is no whole block");
        let mut bytes = lock(&self.bytes);
        let part = &mut bytes[range(offset, length)];
        match op {
            Op::Read { data, .. } => drop(data.copy_from_slice(0, part)),
            Op::Write { data, .. } => drop(data.copy_to_slice(0, part)),
            Op::Discard { .. } | Op::WriteZeroes { .. } => part.fill(0),
            _ => return Err(IoError::new(IoErrorKind::Unsupported)),
        }
        Ok(())
    }
}

impl DiskQueue for BytesQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let result = self.carry_out(&op);
        self.ready.push(Completion { tag, result });
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let count = self.ready.len();
        done.extend(self.ready.drain(..).rev());
        count
    }

    fn in_flight(&self) -> usize {
        self.ready.len()
    }
}

/// The server for all inputs: if one of them breaks it, the next one fails.
struct Serving {
    socket: PathBuf,
    bytes: Arc<Mutex<Vec<u8>>>,
    server: NbdServer,
    _reactor: ReactorThread,
    _directory: tempfile::TempDir,
}

impl Serving {
    fn start() -> Option<Self> {
        let directory = tempfile::tempdir().ok()?;
        let socket = directory.path().join("nbd");
        let listener = NbdListener::Unix(UnixListener::bind(&socket).ok()?);
        let reactor = Reactor::spawn(ReactorConfig::default()).ok()?;
        let bytes = Arc::new(Mutex::new(vec![0; SIZE_BYTES as usize]));
        let disk: Arc<dyn Disk> = Arc::new(Bytes(Arc::clone(&bytes)));
        let handles: Vec<Arc<dyn ReactorHandle>> = vec![reactor.handle()];
        // Small limits, so that clients must wait for room.
        let options = ServerOptions::default().with(|options| {
            let limits = &mut options.limits;
            (limits.requests, limits.payload_bytes, limits.connection_bytes) = (8, 128 << 10, 96 << 10);
            // A machine that does something else meanwhile is no fault of the server.
            limits.handshake = PATIENCE * 60;
        });
        let server = NbdServer::start(listener, vec![NbdExport::new("", disk)], handles, options).ok()?;
        Some(Self { socket, bytes, server, _reactor: reactor, _directory: directory })
    }

    /// Waits until the last client and its requests have gone.
    fn is_empty(&self) -> bool {
        let until = Instant::now() + PATIENCE;
        while self.server.connections() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.server.connections() == 0
    }
}

pub(crate) fn requests(u: &mut Unstructured<'_>) -> Result<()> {
    static SERVER: OnceLock<Option<Serving>> = OnceLock::new();
    let Some(serving) = SERVER.get_or_init(Serving::start) else { return Ok(()) };
    let style = *u.choose(&[Style::Simple, Style::Structured, Style::Extended])?;
    let talk = Talk::plan(u, style == Style::Extended)?;
    lock(&serving.bytes).fill(0);
    let Ok(mut stream) = UnixStream::connect(&serving.socket) else { panic!("nobody listens any more") };
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let Chosen = choose(&mut stream, style).unwrap_or_else(|error| panic!("the next client is not served: {error}"));
    let heard = std::thread::scope(|scope| {
        scope.spawn(|| {
            // A server that has left takes no bytes.
            let _ = (&stream).write_all(&talk.bytes);
            let _ = stream.shutdown(Shutdown::Write);
        });
        hear(&stream)
    });
    drop(stream);
    assert!(serving.is_empty(), "a client that has gone is still there");
    if talk.is_right {
        talk.check(&replies(&heard, style, &talk.asked), &lock(&serving.bytes));
    }
    Ok(())
}
