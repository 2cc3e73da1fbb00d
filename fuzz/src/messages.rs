//! A vhost-user server with a peer that sends anything: the protocol's messages in any order, right, nearly right or
//! noise, with descriptors of any kind, and memory that shrinks.
//!
//! The checks: no panic, and the next peer is served.

use arbitrary::{Result, Unstructured};
use block::{Disk, ReactorHandle};
use engine::{Reactor, ReactorConfig, ReactorThread};
use export_vhost_user::{Export, ExportOptions};
use image::NullDisk;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const STEPS_MAX: usize = 24;
const MEMORY_BYTES: u64 = 256 << 10;
/// The peer's own address of its memory.
const USER_BASE: u64 = 0x7000_0000_0000;
/// Long enough for a loaded host.
const PATIENCE: Duration = Duration::from_secs(60);
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
const GET_FEATURES: u32 = 1;
const KINDS_MAX: u32 = 45;

/// The server for all inputs: if one of them breaks it, the next one fails.
struct Server {
    socket: PathBuf,
    _export: Export,
    _reactor: ReactorThread,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start() -> Option<Self> {
        let directory = tempfile::tempdir().ok()?;
        let socket = directory.path().join("disk.sock");
        let reactor = Reactor::spawn(ReactorConfig::default()).ok()?;
        let handles: Vec<Arc<dyn ReactorHandle>> = vec![reactor.handle()];
        let disk: Arc<dyn Disk> = Arc::new(NullDisk::new(1 << 20, String::new()));
        let mut options = ExportOptions::default();
        (options.max_queues, options.packed) = (2, true);
        let export = Export::listen(&socket, disk, handles, options).ok()?;
        Some(Self { socket, _export: export, _reactor: reactor, _directory: directory })
    }
}

/// The peer, and the objects whose descriptors it passes.
struct Peer {
    stream: UnixStream,
    memory: OwnedFd,
    event: OwnedFd,
    other_end: UnixStream,
}

impl Peer {
    fn connect(server: &Server) -> Option<Self> {
        let stream = UnixStream::connect(&server.socket).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        // Bytes that the server does not take in time are not sent.
        stream.set_write_timeout(Some(Duration::from_millis(100))).ok()?;
        let memory = memfd_create(c"fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
        ftruncate(&memory, MEMORY_BYTES).ok()?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let (other_end, _) = UnixStream::pair().ok()?;
        Some(Self { stream, memory, event, other_end })
    }

    /// Ignores errors: a server may have ended the session.
    fn send(&self, kind: u32, flags: u32, payload: &[u8], fds: &[Passed]) {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        self.send_as(kind, flags, length, payload, fds);
    }

    fn send_as(&self, kind: u32, flags: u32, length: u32, payload: &[u8], fds: &[Passed]) {
        let mut bytes: Vec<u8> = [kind, flags, length].iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend_from_slice(payload);
        let fds: Vec<_> = fds.iter().map(|fd| self.fd(*fd)).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return;
        }
        let _ = sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    fn fd(&self, passed: Passed) -> std::os::fd::BorrowedFd<'_> {
        match passed {
            Passed::Memory => self.memory.as_fd(),
            Passed::Event => self.event.as_fd(),
            Passed::Socket => self.other_end.as_fd(),
        }
    }
}

const FDS_MAX: usize = 3;

#[derive(Clone, Copy)]
enum Passed {
    Memory,
    Event,
    Socket,
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Joins two halves of eight bytes.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Sends the messages of a monitor up to the start of its ring.
fn begin(u: &mut Unstructured<'_>, peer: &Peer) -> Result<()> {
    let features = 1 << 32 | 1 << 30 | u.int_in_range(0..=1u64)? << 34 | u.int_in_range(0..=1u64)? << 29;
    let flags = VERSION;
    peer.send(3, flags, &[], &[]);
    peer.send(16, flags, &words(&[1 | 1 << 3 | 1 << 9]), &[]);
    peer.send(2, flags, &words(&[features]), &[]);
    peer.send(5, flags, &words(&[1, 0, MEMORY_BYTES, USER_BASE, 0]), &[Passed::Memory]);
    peer.send(8, flags, &words(&[pair(0, 1 << u.int_in_range(0..=8)?)]), &[]);
    let at = |offset| USER_BASE + offset;
    peer.send(9, flags, &words(&[0, at(0), at(0x8000), at(0x4000), 0]), &[]);
    peer.send(10, flags, &words(&[0]), &[]);
    peer.send(13, flags, &words(&[0]), &[Passed::Event]);
    peer.send(12, flags, &words(&[0]), &[Passed::Event]);
    peer.send(18, flags, &words(&[pair(0, 1)]), &[]);
    Ok(())
}

fn number(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=9)? {
        0 => u.arbitrary()?,
        1 => u64::MAX - u.int_in_range(0..=0x2000)?,
        2 => USER_BASE + u.int_in_range(0..=MEMORY_BYTES + 0x1000)?,
        3 => MEMORY_BYTES,
        4 => pair(u.int_in_range(0..=3)?, u.arbitrary()?),
        5 => 1 << u.int_in_range(0..=63)?,
        6 => pair(u.int_in_range(0..=3)?, u.int_in_range(0..=1024)?),
        7 => u.int_in_range(0..=0x1ff)?,
        _ => u.int_in_range(0..=2)?,
    })
}

/// Returns the number of words in a valid message of this kind.
fn usual_words(kind: u32) -> usize {
    match kind {
        1 | 3 | 4 | 15 | 17 | 34 | 36 | 40 => 0,
        5 | 9 | 37 | 38 => 5,
        24 | 25 => 3,
        6 | 31 | 32 => 2,
        _ => 1,
    }
}

fn usual_fds(kind: u32) -> &'static [Passed] {
    match kind {
        5 | 6 | 32 | 37 => &[Passed::Memory],
        12..=14 => &[Passed::Event],
        21 | 33 => &[Passed::Socket],
        _ => &[],
    }
}

fn act(u: &mut Unstructured<'_>, peer: &mut Peer) -> Result<()> {
    match u.int_in_range(0..=15)? {
        0 => drop(ftruncate(&peer.memory, u.int_in_range(0..=MEMORY_BYTES)?)),
        1 => drop(rustix::io::write(&peer.event, &1_u64.to_ne_bytes())),
        2 => drop(peer.stream.write_all(&u.arbitrary::<[u8; 7]>()?)),
        _ => {
            let kind = if u.ratio(1u8, 32)? { u.arbitrary()? } else { u.int_in_range(0..=KINDS_MAX)? };
            let count = if u.ratio(1u8, 8)? { u.int_in_range(0..=12)? } else { usual_words(kind) };
            let payload = (0..count).map(|_| number(u)).collect::<Result<Vec<_>>>()?;
            let any = [Passed::Memory, Passed::Event, Passed::Socket];
            let fds = match u.ratio(1u8, 8)? {
                true => {
                    (0..u.int_in_range(0..=FDS_MAX)?).map(|_| u.choose(&any).copied()).collect::<Result<Vec<_>>>()?
                }
                false => usual_fds(kind).to_vec(),
            };
            let reply = if u.arbitrary()? { NEED_REPLY } else { 0 };
            let flags = if u.ratio(1u8, 16)? { u.arbitrary()? } else { VERSION | reply };
            let payload = words(&payload);
            match u.ratio(1u8, 16)? {
                true => peer.send_as(kind, flags, u.int_in_range(0..=0x2000)?, &payload, &fds),
                false => peer.send(kind, flags, &payload, &fds),
            }
        }
    }
    Ok(())
}

pub(crate) fn messages(u: &mut Unstructured<'_>) -> Result<()> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let Some(server) = SERVER.get_or_init(Server::start) else { return Ok(()) };
    let Some(mut peer) = Peer::connect(server) else { return Ok(()) };
    let said = talk(u, &mut peer);
    drop(peer);
    assert_serves(server);
    said
}

fn talk(u: &mut Unstructured<'_>, peer: &mut Peer) -> Result<()> {
    if u.ratio(3u8, 4)? {
        begin(u, peer)?;
    }
    for _ in 0..u.int_in_range(1..=STEPS_MAX)? {
        act(u, peer)?;
    }
    Ok(())
}

/// Checks that a new peer can ask for the device's features.
fn assert_serves(server: &Server) {
    let Some(mut peer) = Peer::connect(server) else { panic!("nobody listens any more") };
    peer.send(GET_FEATURES, VERSION, &[], &[]);
    let mut answer = [0; 20];
    let read = peer.stream.read_exact(&mut answer);
    assert!(read.is_ok() && answer[0] == GET_FEATURES as u8, "the next peer is not served: {read:?}, {answer:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_beginning_is_taken() {
        let server = Server::start().expect("a server");
        let mut peer = Peer::connect(&server).expect("a peer");
        begin(&mut Unstructured::new(&[]), &peer).expect("an input");
        peer.send(GET_FEATURES, VERSION, &[], &[]);
        let mut answer = [0; 20];
        peer.stream.read_exact(&mut answer).expect("the session goes on");
        assert_eq!(answer[0], GET_FEATURES as u8);
    }
}
