//! An NBD server, from its socket to its disk, with a client that has chosen an export and then asks for anything.
//!
//! The checks: no panic; the next client is served; a client that keeps to the protocol gets one reply to each request,
//! and reads the data that were written.

use super::peer::{Chosen, Told, choose, hear, replies};
use arbitrary::{Result, Unstructured};
use block::{
    Completion, Disk, DiskInfo, DiskQueue, IoError, IoErrorKind, IoResult, Op, ReactorCtx, ReactorHandle, SECTOR_BYTES,
    Tag,
};
use engine::{Reactor, ReactorConfig, ReactorThread};
use export_nbd::{NbdExport, NbdListener, NbdServer, ServerOptions};
use image::NullDisk;
use nbd_wire::numbers::{command, command_flag};
use nbd_wire::reply::Style;
use nbd_wire::request::Request;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

const SIZE_BYTES: u64 = 256 << 10;
const REQUESTS_MAX: usize = 32;
/// The longest payload that is really sent.
const PAYLOAD_BYTES_MAX: u64 = 48 << 10;
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

fn range(offset: u64, length: u64) -> std::ops::Range<usize> {
    offset as usize..(offset + length) as usize
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

/// A client's messages, and the expected results.
struct Talk {
    bytes: Vec<u8>,
    asked: Vec<Request>,
    payloads: BTreeMap<u64, Vec<u8>>,
    /// The messages keep to the protocol.
    is_right: bool,
}

fn offset(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=7)? {
        0 => u.arbitrary()?,
        1 => SIZE_BYTES - u.int_in_range(0..=SECTOR_BYTES)?,
        2 => u.int_in_range(0..=SIZE_BYTES)?,
        _ => u.int_in_range(0..=SIZE_BYTES / SECTOR_BYTES - 1)? * SECTOR_BYTES,
    })
}

fn length(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=9)? {
        0 => u.arbitrary()?,
        1 => u.int_in_range(0..=SIZE_BYTES)?,
        2 => u.int_in_range(0..=PAYLOAD_BYTES_MAX)?,
        _ => u.int_in_range(0..=PAYLOAD_BYTES_MAX / SECTOR_BYTES)? * SECTOR_BYTES,
    })
}

impl Talk {
    fn plan(u: &mut Unstructured<'_>, extended: bool) -> Result<Self> {
        let mut talk = Self { bytes: Vec::new(), asked: Vec::new(), payloads: BTreeMap::new(), is_right: true };
        for cookie in 0..u.int_in_range(1..=REQUESTS_MAX)? as u64 {
            talk.ask(u, extended, cookie)?;
        }
        if u.ratio(1u8, 4)? {
            // Some byte is changed, or the end is not sent.
            talk.is_right = false;
            let at = u.choose_index(talk.bytes.len())?;
            match u.arbitrary()? {
                true => talk.bytes[at] = u.arbitrary()?,
                false => talk.bytes.truncate(at),
            }
        }
        let goodbye = Request { flags: 0, command: command::DISC, cookie: u64::MAX, offset: 0, length_bytes: 0 };
        goodbye.put(&mut talk.bytes, extended);
        Ok(talk)
    }

    fn ask(&mut self, u: &mut Unstructured<'_>, extended: bool, cookie: u64) -> Result<()> {
        use command::{BLOCK_STATUS, CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
        let command = match u.ratio(1u8, 24)? {
            true => u.arbitrary()?,
            false => *u.choose(&[READ, WRITE, READ, WRITE, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS])?,
        };
        let flags = match u.int_in_range(0..=11)? {
            0 => u.arbitrary()?,
            1..=3 => *u.choose(&[DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE])?,
            _ => 0,
        };
        let (offset, mut length_bytes) = (offset(u)?, length(u)?);
        if !extended {
            length_bytes &= u64::from(u32::MAX);
        }
        let request = Request { flags, command, cookie, offset, length_bytes };
        request.put(&mut self.bytes, extended);
        let has_payload = command == WRITE || extended && flags & PAYLOAD_LEN != 0;
        if has_payload && length_bytes <= PAYLOAD_BYTES_MAX {
            let payload = vec![u.arbitrary()?; length_bytes as usize];
            self.bytes.extend_from_slice(&payload);
            self.payloads.insert(cookie, payload);
        }
        // The bytes that follow are not understood, or none follow.
        self.is_right &= !(has_payload && length_bytes > PAYLOAD_BYTES_MAX) && command != command::DISC;
        self.asked.push(request);
        Ok(())
    }

    /// Carries out the requests that the server says it has carried out, in order.
    fn check(&self, told: &BTreeMap<u64, Told>, found: &[u8]) {
        let mut bytes = vec![0; SIZE_BYTES as usize];
        for request in &self.asked {
            let Request { command, cookie, offset, length_bytes, flags } = *request;
            let Some(told) = told.get(&cookie) else { panic!("{request:?} has no reply") };
            assert!(told.is_done, "the reply to {request:?} does not end");
            let is_inside = offset.checked_add(length_bytes).is_some_and(|end| end <= SIZE_BYTES);
            if told.error != 0 {
                let is_whole = (offset | length_bytes) % SECTOR_BYTES == 0;
                let is_plain = matches!(command, command::READ | command::WRITE | command::TRIM | command::CACHE);
                let must = is_plain && flags == 0 && is_inside && is_whole && length_bytes <= PAYLOAD_BYTES_MAX;
                assert!(!must, "{request:?} fails with {}", told.error);
                continue;
            }
            assert!(is_inside || command == command::FLUSH, "{request:?} outside succeeds");
            match command {
                command::READ => {
                    assert_eq!(told.data.len() as u64, length_bytes, "{request:?}");
                    assert!(length_bytes == 0 || told.data == bytes[range(offset, length_bytes)], "{request:?}");
                }
                command::WRITE if length_bytes > 0 => {
                    bytes[range(offset, length_bytes)].copy_from_slice(&self.payloads[&cookie]);
                }
                command::WRITE_ZEROES if length_bytes > 0 => bytes[range(offset, length_bytes)].fill(0),
                command::TRIM => {
                    let start = offset.next_multiple_of(SECTOR_BYTES);
                    let end = (offset + length_bytes) / SECTOR_BYTES * SECTOR_BYTES;
                    if start < end {
                        bytes[range(start, end - start)].fill(0);
                    }
                }
                _ => {}
            }
        }
        assert_eq!(told.len(), self.asked.len(), "a reply to nothing");
        assert!(bytes == found, "the disk has other bytes than were written");
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
