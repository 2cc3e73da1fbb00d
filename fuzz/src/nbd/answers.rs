//! An NBD client, from a file's operations to its socket, with a server that answers anything, in any order and division.
//!
//! The checks: no panic; each operation ends; a read returns the bytes that the server sent for it.

use arbitrary::{Result, Unstructured};
use block::{FileOp, FileQueue, IoResult, PastEnd};
use file_nbd::{NbdUri, open};
use memory::{AlignedBuf, BufferAccount, IoBuf, Window};
use nbd_wire::Reader;
use nbd_wire::numbers::{answer, chunk, command, export, handshake, option};
use nbd_wire::option::{GREETING_BYTES, Info, OPTION_HEADER_BYTES, OptionHeader, put_answer, put_greeting};
use nbd_wire::reply::{Chunk, Extent, Style, put_error, put_status, simple};
use nbd_wire::request::Request;
use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::SimReactor;

const SIZE_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 512;
const OPS_MAX: usize = 8;
const BYTES_MAX: u64 = 16 << 10;
const ALLOCATION: u32 = 7;
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the byte that the server has at an offset. Never zero, which stands for holes.
fn mark(offset: u64) -> u8 {
    (offset.wrapping_mul(37) >> 3) as u8 | 1
}

/// The actions of a server, decided before it runs.
#[derive(Debug)]
struct Plan {
    style: Style,
    flags: u16,
    /// Noise in place of the server's part of the handshake, from some byte on.
    noise: Option<(usize, Vec<u8>)>,
    acts: Vec<Act>,
    /// Replies wait for this many requests.
    waits_for: usize,
    piece_bytes: usize,
}

#[derive(Debug, Clone)]
enum Act {
    Right,
    /// The data in several parts, some as holes.
    Parts(Vec<(u8, bool)>),
    Fails(u32),
    /// A reply with another cookie.
    Strange(u64),
    /// Data at a wrong offset, and of a wrong length: the differences, in bytes.
    Moved(i16, i16),
    /// Data without some of the last bytes, and as many others twice, maybe as a hole.
    Twice(u16, bool),
    /// A reply without an end.
    Endless,
    Noise(Vec<u8>),
    Leaves,
}

impl Plan {
    fn of(u: &mut Unstructured<'_>) -> Result<Self> {
        let style = *u.choose(&[Style::Simple, Style::Structured, Style::Extended])?;
        let flags = export::HAS_FLAGS | export::SEND_FLUSH | export::SEND_WRITE_ZEROES | export::SEND_FUA;
        let noise = match u.ratio(1u8, 8)? {
            true => Some((u.int_in_range(0..=200)?, u.arbitrary::<Vec<u8>>()?)),
            false => None,
        };
        let acts = (0..u.int_in_range(1..=OPS_MAX)?).map(|_| Act::of(u)).collect::<Result<_>>()?;
        let (waits_for, piece_bytes) = (u.int_in_range(1..=4)?, u.int_in_range(1..=5000)?);
        Ok(Self { style, flags, noise, acts, waits_for, piece_bytes })
    }
}

impl Act {
    fn of(u: &mut Unstructured<'_>) -> Result<Self> {
        Ok(match u.int_in_range(0..=17)? {
            0 => Self::Fails(u.arbitrary()?),
            1 => Self::Strange(u.int_in_range(0..=20)?),
            2 => Self::Moved(u.int_in_range(-1024..=1024)?, u.int_in_range(-1024..=1024)?),
            3 => Self::Endless,
            4 => Self::Noise(u.arbitrary()?),
            5 => Self::Leaves,
            6..=9 => Self::Parts(u.arbitrary()?),
            10..=11 => Self::Twice(u.int_in_range(1..=BYTES_MAX as u16)?, u.arbitrary()?),
            _ => Self::Right,
        })
    }

    /// Puts a reply to `request`.
    fn put(&self, out: &mut Vec<u8>, style: Style, request: &Request) {
        let extended = style == Style::Extended;
        let Request { cookie, offset, length_bytes, .. } = *request;
        let none = Chunk { flags: chunk::DONE, kind: chunk::NONE, cookie, offset, length_bytes: 0 };
        let reads = request.command == command::READ;
        match self {
            Self::Leaves => {}
            Self::Noise(bytes) => out.extend_from_slice(bytes),
            Self::Fails(error) if style == Style::Simple => out.extend_from_slice(simple(cookie, *error).as_bytes()),
            Self::Fails(error) => put_error(out, extended, cookie, offset, *error, "no"),
            Self::Strange(cookie) => Self::Right.put(out, style, &Request { cookie: *cookie, ..*request }),
            _ if style == Style::Simple => {
                out.extend_from_slice(simple(cookie, 0).as_bytes());
                if reads {
                    out.extend((offset..offset + length_bytes).map(mark));
                }
            }
            _ if request.command == command::BLOCK_STATUS => {
                let extents = [Extent { length_bytes, flags: 0 }];
                put_status(out, extended, Chunk { kind: chunk::BLOCK_STATUS, ..none }, ALLOCATION, &extents);
            }
            Self::Moved(by, wrong) if reads => {
                let offset = offset.wrapping_add_signed((*by).into());
                data(out, extended, cookie, offset, length_bytes.saturating_add_signed((*wrong).into()).max(1), true);
            }
            Self::Parts(parts) if reads => {
                let mut at = offset;
                for (length, is_hole) in parts {
                    let length = (u64::from(*length) * 8).min((offset + length_bytes).saturating_sub(at));
                    if length > 0 {
                        part(out, extended, cookie, at, length, *is_hole);
                    }
                    at += length;
                }
                let left = offset + length_bytes - at;
                if left > 0 {
                    part(out, extended, cookie, at, left, false);
                }
                out.extend_from_slice(none.head(extended).as_bytes());
            }
            Self::Twice(again, is_hole) if reads => {
                // So the lengths add up to that of the read.
                let again = u64::from(*again).min(length_bytes / 2);
                let first = length_bytes - again;
                part(out, extended, cookie, offset, first, false);
                part(out, extended, cookie, offset + first - again, again, *is_hole);
                out.extend_from_slice(none.head(extended).as_bytes());
            }
            Self::Endless if reads => part(out, extended, cookie, offset, length_bytes, false),
            Self::Endless => {}
            _ if reads => data(out, extended, cookie, offset, length_bytes, true),
            _ => out.extend_from_slice(none.head(extended).as_bytes()),
        }
    }
}

fn data(out: &mut Vec<u8>, extended: bool, cookie: u64, offset: u64, length: u64, done: bool) {
    let flags = if done { chunk::DONE } else { 0 };
    let head = Chunk { flags, kind: chunk::OFFSET_DATA, cookie, offset, length_bytes: length + 8 };
    out.extend_from_slice(head.head(extended).as_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    out.extend((0..length).map(|index| mark(offset.wrapping_add(index))));
}

fn part(out: &mut Vec<u8>, extended: bool, cookie: u64, offset: u64, length: u64, is_hole: bool) {
    if !is_hole {
        return data(out, extended, cookie, offset, length, false);
    }
    let head = Chunk { flags: 0, kind: chunk::OFFSET_HOLE, cookie, offset, length_bytes: 12 };
    out.extend_from_slice(head.head(extended).as_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    out.extend_from_slice(&(length as u32).to_be_bytes());
}

/// The server's stream, which may be noise from some byte on.
struct Noisy<'a> {
    stream: UnixStream,
    plan: &'a Plan,
    said: usize,
}

impl Noisy<'_> {
    fn say(&mut self, bytes: &[u8]) -> Option<()> {
        let Some((from, noise)) = &self.plan.noise else { return self.stream.write_all(bytes).ok() };
        let right = from.saturating_sub(self.said).min(bytes.len());
        self.said += bytes.len();
        self.stream.write_all(&bytes[..right]).ok()?;
        if right < bytes.len() {
            self.stream.write_all(noise).ok()?;
            return None;
        }
        Some(())
    }

    fn exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    fn shake_hands(&mut self) -> Option<()> {
        let mut out = Vec::with_capacity(GREETING_BYTES);
        put_greeting(&mut out, handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.say(&out)?;
        self.exactly(4)?;
        loop {
            let head = self.exactly(OPTION_HEADER_BYTES)?;
            let OptionHeader { option, length_bytes } = OptionHeader::read(&mut Reader::new(&head)).ok()??;
            self.exactly(length_bytes as usize)?;
            let is_known = match option {
                option::STRUCTURED_REPLY | option::SET_META_CONTEXT => self.plan.style != Style::Simple,
                option::EXTENDED_HEADERS => self.plan.style == Style::Extended,
                option => option == option::GO,
            };
            let mut out = Vec::new();
            if option == option::GO {
                let sizes = Info::BlockSize { minimum: BLOCK_BYTES as u32, preferred: 4096, maximum: 1 << 20 };
                let disk = Info::Export { size_bytes: SIZE_BYTES, flags: self.plan.flags };
                [sizes, disk].iter().for_each(|info| put_answer(&mut out, option, answer::INFO, &info.to_bytes()));
            }
            if option == option::SET_META_CONTEXT && is_known {
                let context = [&ALLOCATION.to_be_bytes()[..], b"base:allocation"].concat();
                put_answer(&mut out, option, answer::META_CONTEXT, &context);
            }
            put_answer(&mut out, option, if is_known { answer::ACK } else { answer::ERR_UNSUP }, &[]);
            self.say(&out)?;
            if option == option::GO {
                return Some(());
            }
        }
    }

    fn request(&mut self) -> Option<Request> {
        let extended = self.plan.style == Style::Extended;
        let head = self.exactly(Request::header_bytes(extended))?;
        let request = Request::read(&mut Reader::new(&head), extended).ok()??;
        if request.command == command::WRITE {
            self.exactly(request.length_bytes as usize)?;
        }
        (request.command != command::DISC).then_some(request)
    }

    /// Serves until its actions are used up, then leaves.
    fn serve(&mut self) -> Option<()> {
        self.shake_hands()?;
        let mut acts = self.plan.acts.iter();
        let (mut waiting, mut silence) = (Vec::new(), PATIENCE);
        loop {
            // Requests without a successor are answered as well. A client that still waits after an answer got a wrong
            // one.
            let patience = if waiting.is_empty() { silence } else { Duration::from_millis(1) };
            self.stream.set_read_timeout(Some(patience)).ok()?;
            let mut peek = [0];
            let has_more = rustix::net::recv(&self.stream, &mut peek[..], rustix::net::RecvFlags::PEEK);
            self.stream.set_read_timeout(Some(PATIENCE)).ok()?;
            match has_more {
                Ok((0, _)) => return None,
                Ok(_) => waiting.push(self.request()?),
                Err(_) if waiting.is_empty() => return None,
                Err(_) => {}
            }
            if has_more.is_err() || waiting.len() >= self.plan.waits_for {
                let mut out = Vec::new();
                silence = Duration::from_millis(10);
                // Answers the last request first.
                for request in waiting.drain(..).rev() {
                    let act = acts.next().unwrap_or(&Act::Leaves);
                    act.put(&mut out, self.plan.style, &request);
                    if matches!(act, Act::Leaves) {
                        let _ = self.stream.write_all(&out);
                        return None;
                    }
                }
                out.chunks(self.plan.piece_bytes).try_for_each(|piece| self.stream.write_all(piece)).ok()?;
            }
        }
    }
}

/// An operation, and its result.
struct Running {
    offset: u64,
    data: Option<Window>,
    result: Rc<RefCell<Option<IoResult>>>,
}

fn start(u: &mut Unstructured<'_>, queue: &Rc<dyn FileQueue>, reactor: &Rc<SimReactor>) -> Result<Running> {
    let offset = u.int_in_range(0..=(SIZE_BYTES - BYTES_MAX) / BLOCK_BYTES)? * BLOCK_BYTES;
    let length = u.int_in_range(1..=BYTES_MAX / BLOCK_BYTES)? * BLOCK_BYTES;
    let mut data = None;
    let op = match u.int_in_range(0..=7)? {
        0 => FileOp::Flush,
        1 => FileOp::WriteZeroes { offset, length, may_unmap: u.arbitrary()? },
        2 => {
            let written: Vec<u8> = (offset..offset + length).map(mark).collect();
            let window = IoBuf::from_aligned(AlignedBuf::copy_of(&written)).whole();
            FileOp::Write { offset, data: window, fua: u.arbitrary()? }
        }
        _ => {
            let window = IoBuf::zeroed(length as usize).whole();
            // No byte of this is one of the server's.
            window.fill(2);
            data = Some(window.clone());
            FileOp::Read { offset, data: window, past_end: PastEnd::Fails }
        }
    };
    let result = Rc::new(RefCell::new(None));
    let (future, told) = (queue.start(op), Rc::clone(&result));
    reactor.ctx().spawn(block::Task::new(async move {
        let ended = future.await;
        *told.borrow_mut() = Some(ended);
    }));
    Ok(Running { offset, data, result })
}

/// Checks that all operations end, and that reads have the sent bytes if the replies say where those belong.
fn check(running: &[Running], reactor: &Rc<SimReactor>, has_holes: bool, says_what: bool) {
    let until = Instant::now() + PATIENCE;
    while running.iter().any(|op| op.result.borrow().is_none()) {
        if !reactor.step() {
            assert!(Instant::now() < until, "an operation does not end");
            std::thread::sleep(Duration::from_micros(20));
        }
    }
    for op in running.iter().filter(|_| says_what) {
        if let (Some(data), Some(Ok(()))) = (&op.data, &*op.result.borrow()) {
            for (index, byte) in data.to_vec().into_iter().enumerate() {
                let expected = mark(op.offset + index as u64);
                assert!(
                    byte == expected || byte == 0 && has_holes,
                    "byte {index} of a read at {} is {byte}",
                    op.offset
                );
            }
        }
    }
}

pub(crate) fn answers(u: &mut Unstructured<'_>) -> Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let plan = Plan::of(u)?;
    let name = format!("rd-fuzz-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let socket = std::env::temp_dir().join(name);
    let Ok(listener) = UnixListener::bind(&socket) else { return Ok(()) };
    let Ok(uri) = NbdUri::parse(&format!("nbd+unix:///?socket={}&reconnect-s=0&connections=1", socket.display()))
    else {
        return Ok(());
    };
    let has_holes = plan.acts.iter().any(|act| matches!(act, Act::Parts(_)));
    // A simple reply has no offset: with the cookie of another read, its data are taken for that one's.
    let says_what = plan.style != Style::Simple || !plan.acts.iter().any(|act| matches!(act, Act::Strange(_)));
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Ok((stream, _)) = listener.accept() {
                let mut server = Noisy { stream, plan: &plan, said: 0 };
                // Nobody else can connect.
                drop(listener);
                server.serve();
            }
        });
        let Ok(file) = open(&uri, false, &BufferAccount::UNLIMITED) else { return Ok(()) };
        let reactor = SimReactor::new(1);
        let Ok(queue) = file.open_queue(&reactor.ctx()) else { return Ok(()) };
        let running = (0..u.int_in_range(1..=OPS_MAX)?).map(|_| start(u, &queue, &reactor)).collect::<Result<Vec<_>>>();
        running.map(|running| check(&running, &reactor, has_holes, says_what))
    });
    let _ = std::fs::remove_file(&socket);
    ended
}
