//! An NBD client that takes so little time that no server has to wait for it: it sends requests, counts replies, and looks at
//! no data. It knows one connection, and what a benchmark needs of the protocol.

use anyhow::{Context, Result, anyhow, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const GREETING_BYTES: usize = 18;
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
/// Fixed newstyle, and no zeros behind the answer.
const CLIENT_FLAGS: u32 = 3;
const EXPORT_NAME: u32 = 1;
/// The disk's size and flags.
const EXPORT_BYTES: usize = 10;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REQUEST_BYTES: usize = 28;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REPLY_BYTES: usize = 16;
const READ: u16 = 0;
const WRITE: u16 = 1;
/// More than a Unix socket holds.
const RECEIVE_BYTES: usize = 256 << 10;
/// A server that is silent for so long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) writes: bool,
    pub(super) is_random: bool,
    pub(super) length_bytes: usize,
    pub(super) depth: usize,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    pub(super) requests: u64,
    pub(super) seconds: f64,
    pub(super) cpu_seconds: f64,
}

/// Loads the disk at a Unix socket that a client gets who names none, from a thread on `core`.
pub(super) fn run(socket: &Path, core: &str, load: Load, seconds: f64) -> Result<Counted> {
    let core = core.parse()?;
    let work = || -> Result<Counted> {
        let mut cores = CpuSet::new();
        cores.set(core);
        sched_setaffinity(None, &cores).context("cannot choose the client's core")?;
        Client::connect(socket, load)?.run(Duration::from_secs_f64(seconds))
    };
    std::thread::scope(|scope| scope.spawn(work).join()).map_err(|_| anyhow!("the client died"))?
}

struct Client {
    stream: UnixStream,
    load: Load,
    blocks: u64,
    next: u64,
    cookie: u64,
    /// Requests to be sent; for writes, one with its data.
    out: Vec<u8>,
    replies: Replies,
}

impl Client {
    fn connect(socket: &Path, load: Load) -> Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; GREETING_BYTES])?;
        let option = [&CLIENT_FLAGS.to_be_bytes()[..], OPTION_MAGIC, &EXPORT_NAME.to_be_bytes(), &[0; 4]];
        stream.write_all(&option.concat())?;
        let mut export = [0; EXPORT_BYTES];
        stream.read_exact(&mut export)?;
        let size_bytes = export.iter().take(8).fold(0, |size, byte| size << 8 | u64::from(*byte));
        let blocks = size_bytes / load.length_bytes as u64;
        ensure!(blocks > 0, "the disk is shorter than a request");
        let data = if load.writes { load.length_bytes } else { 0 };
        // No zeros: a server may look for them.
        let out = vec![0x5a; if load.writes { REQUEST_BYTES + data } else { 0 }];
        let replies = Replies { data_bytes: load.length_bytes - data, ..Replies::default() };
        Ok(Self { stream, load, blocks, next: 1, cookie: 0, out, replies })
    }

    fn run(mut self, time: Duration) -> Result<Counted> {
        let (began, cpu_before) = (Instant::now(), thread_seconds());
        let (mut in_flight, mut requests) = (0, 0_u64);
        let mut buffer = vec![0; RECEIVE_BYTES];
        while in_flight > 0 || began.elapsed() < time {
            if began.elapsed() < time {
                self.send(self.load.depth - in_flight)?;
                in_flight = self.load.depth;
            }
            let count = self.stream.read(&mut buffer).context("the server is silent")?;
            ensure!(count > 0, "the server has closed the connection");
            let ended = self.replies.take(&buffer[..count])?;
            ensure!(ended <= in_flight, "there are more replies than requests");
            in_flight -= ended;
            requests += ended as u64;
        }
        let (seconds, cpu_seconds) = (began.elapsed().as_secs_f64(), thread_seconds() - cpu_before);
        Ok(Counted { requests, seconds, cpu_seconds })
    }

    /// Sends `count` requests: reads with one call, writes with one for each.
    fn send(&mut self, count: usize) -> Result<()> {
        if !self.load.writes {
            self.out.clear();
        }
        for _ in 0..count {
            let head = self.next_head();
            if self.load.writes {
                self.out[..REQUEST_BYTES].copy_from_slice(&head);
                self.stream.write_all(&self.out)?;
            } else {
                self.out.extend_from_slice(&head);
            }
        }
        if !self.load.writes {
            self.stream.write_all(&self.out)?;
        }
        Ok(())
    }

    fn next_head(&mut self) -> Vec<u8> {
        let block = match self.load.is_random {
            true => {
                self.next = self.next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (self.next >> 33) % self.blocks
            }
            false => {
                self.next = (self.next + 1) % self.blocks;
                self.next
            }
        };
        self.cookie += 1;
        let command = if self.load.writes { WRITE } else { READ };
        let (offset, length_bytes) = (block * self.load.length_bytes as u64, self.load.length_bytes as u32);
        let (magic, flags) = (REQUEST_MAGIC.to_be_bytes(), 0_u16.to_be_bytes());
        let [cookie, offset] = [self.cookie, offset].map(u64::to_be_bytes);
        [&magic[..], &flags, &command.to_be_bytes(), &cookie, &offset, &length_bytes.to_be_bytes()].concat()
    }
}

/// The replies of a connection, as they arrive.
#[derive(Default)]
struct Replies {
    /// What follows the head of a reply.
    data_bytes: usize,
    head: Vec<u8>,
    left_bytes: usize,
}

impl Replies {
    /// Takes bytes that have arrived; returns how many replies end in them.
    fn take(&mut self, mut bytes: &[u8]) -> Result<usize> {
        let mut ended = 0;
        while !bytes.is_empty() {
            if self.left_bytes > 0 {
                let skipped = self.left_bytes.min(bytes.len());
                (self.left_bytes, bytes) = (self.left_bytes - skipped, &bytes[skipped..]);
                ended += usize::from(self.left_bytes == 0);
                continue;
            }
            let missing = (REPLY_BYTES - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if self.head.len() == REPLY_BYTES {
                let (magic, error) = (&self.head[..4], &self.head[4..8]);
                ensure!(magic == REPLY_MAGIC.to_be_bytes() && error == [0; 4], "the server has failed a request");
                self.head.clear();
                self.left_bytes = self.data_bytes;
                ended += usize::from(self.data_bytes == 0);
            }
        }
        Ok(ended)
    }
}

/// The CPU time of this thread so far.
fn thread_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Serves one client, a few bytes at a time. Returns the offsets that it asked for.
    fn serve(listener: &UnixListener, size_bytes: u64) -> Vec<u64> {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        let mut option = [0; 20];
        stream.read_exact(&mut option).unwrap();
        assert_eq!(option, *b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0");
        stream.write_all(&[&size_bytes.to_be_bytes()[..], &[0, 1]].concat()).unwrap();
        let (mut head, mut offsets) = ([0; REQUEST_BYTES], Vec::new());
        while stream.read_exact(&mut head).is_ok() {
            let length = u32::from_be_bytes(head[24..].try_into().unwrap()) as usize;
            let is_write = u16::from_be_bytes(head[6..8].try_into().unwrap()) == WRITE;
            stream.read_exact(&mut vec![0; if is_write { length } else { 0 }]).unwrap();
            let data = vec![1; if is_write { 0 } else { length }];
            let reply = [&REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &head[8..16], &data].concat();
            reply.chunks(100).for_each(|part| stream.write_all(part).unwrap());
            offsets.push(u64::from_be_bytes(head[16..24].try_into().unwrap()));
        }
        offsets
    }

    #[test]
    fn each_request_is_inside_the_disk_and_is_counted_when_its_reply_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        for (index, (writes, is_random)) in [(false, true), (false, false), (true, false)].into_iter().enumerate() {
            let socket = directory.path().join(index.to_string());
            let listener = UnixListener::bind(&socket).unwrap();
            let served = std::thread::spawn(move || serve(&listener, 1 << 20));
            let load = Load { writes, is_random, length_bytes: 4096, depth: 8 };
            let counted = run(&socket, "0", load, 0.02).unwrap();
            let offsets = served.join().unwrap();
            assert_eq!(counted.requests, offsets.len() as u64);
            assert!(counted.requests >= 8 && counted.seconds > 0.0 && counted.cpu_seconds > 0.0, "{counted:?}");
            assert!(offsets.iter().all(|offset| *offset < 1 << 20 && offset % 4096 == 0));
        }
    }

    #[test]
    fn a_failed_request_is_no_reply() {
        let mut replies = Replies::default();
        let failed = [&REPLY_MAGIC.to_be_bytes()[..], &[0, 0, 0, 5], &[0; 8]].concat();
        assert_eq!(replies.take(&failed[..7]).unwrap(), 0);
        assert!(replies.take(&failed[7..]).unwrap_err().to_string().contains("failed a request"));
    }
}
