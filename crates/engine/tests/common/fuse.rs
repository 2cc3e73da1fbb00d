//! A file system of one file whose reads can be held up: how a test stalls one request and not its neighbours. It has no
//! locks.
//!
//! Speaks just enough of the FUSE protocol (`linux/fuse.h`, version 7.31) over `/dev/fuse`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

pub(crate) const FILE_BYTES: u64 = 1 << 20;
/// Reads from here on stall until [`StallingFile::release`].
pub(crate) const STALL_FROM: u64 = 512 << 10;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const BATCH_FORGET: u32 = 42;

struct Stalled {
    /// Offset and size by request.
    reads: HashMap<u64, (u64, u32)>,
    /// Reads from here on stall.
    from: u64,
}

struct Server {
    device: File,
    bytes: Vec<u8>,
    /// The kernel keeps locks by itself.
    locks: bool,
    stalled: Mutex<Stalled>,
    changed: Condvar,
}

/// What the file holds at an offset.
pub(crate) fn content(offset: u64) -> u8 {
    (offset / 512 % 251) as u8 + 1
}

/// The mounted file system.
pub(crate) struct StallingFile {
    dir: tempfile::TempDir,
    server: Arc<Server>,
}

impl StallingFile {
    /// Mounts it; `None` where this process may not.
    pub(crate) fn mount() -> Option<Self> {
        Self::mount_of((0..FILE_BYTES).map(content).collect(), STALL_FROM)
    }

    /// As [`StallingFile::mount`], with locks.
    pub(crate) fn mount_with_locks() -> Option<Self> {
        Self::mount_as((0..FILE_BYTES).map(content).collect(), STALL_FROM, true)
    }

    /// As [`StallingFile::mount`], of a file of these bytes whose reads stall from this offset on.
    pub(crate) fn mount_of(bytes: Vec<u8>, from: u64) -> Option<Self> {
        Self::mount_as(bytes, from, false)
    }

    fn mount_as(bytes: Vec<u8>, from: u64, locks: bool) -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let dir = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", device.as_raw_fd());
        let target = format!("{}\0", dir.path().display());
        // SAFETY: all strings end with a NUL.
        let mounted = unsafe {
            let (source, kind) = (c"stalling".as_ptr(), c"fuse".as_ptr());
            libc::mount(source, target.as_ptr().cast(), kind, libc::MS_NODEV, options.as_ptr().cast())
        };
        if mounted != 0 {
            return None;
        }
        let stalled = Mutex::new(Stalled { reads: HashMap::new(), from });
        let server = Arc::new(Server { device, bytes, locks, stalled, changed: Condvar::new() });
        let theirs = Arc::clone(&server);
        std::thread::spawn(move || theirs.serve());
        Some(Self { dir, server })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("file")
    }

    pub(crate) fn mappable(&self) -> PathBuf {
        self.dir.path().join("mappable")
    }

    /// Waits until `count` reads are held up.
    pub(crate) fn wait_for_stalled(&self, count: usize) {
        let stalled = self.server.stalled.lock().unwrap();
        drop(self.server.changed.wait_while(stalled, |stalled| stalled.reads.len() < count).unwrap());
    }

    /// Holds up every read from now on.
    pub(crate) fn hold(&self) {
        self.server.stalled.lock().unwrap().from = 0;
    }

    /// Lets every read go, now and from now on.
    pub(crate) fn release(&self) {
        self.server.stalled.lock().unwrap().from = u64::MAX;
        self.let_go();
    }

    /// Lets the reads go that are held up now.
    pub(crate) fn let_go(&self) {
        let mut stalled = self.server.stalled.lock().unwrap();
        for (unique, (offset, size)) in stalled.reads.drain() {
            self.server.answer_read(unique, offset, size);
        }
    }
}

impl Drop for StallingFile {
    fn drop(&mut self) {
        self.release();
        let target = format!("{}\0", Path::new(self.dir.path()).display());
        // SAFETY: the string ends with a NUL.
        unsafe { libc::umount2(target.as_ptr().cast(), libc::MNT_DETACH) };
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The file under a name by which it is read through the page cache, so that it can be mapped.
const MAPPABLE: u64 = 3;

/// `struct fuse_attr` of the directory (1) or the file (2, 3).
fn attributes(node: u64, length_bytes: u64) -> Vec<u8> {
    let (size, mode) = if node == 1 { (0, 0o040_755_u32) } else { (length_bytes, 0o100_644) };
    let mut out = Vec::new();
    for word in [node, size, size / 512, 0, 0, 0] {
        out.extend(word.to_le_bytes());
    }
    for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        out.extend(word.to_le_bytes());
    }
    out
}

impl Server {
    fn answer(&self, unique: u64, error: i32, body: &[u8]) {
        let mut out = Vec::new();
        out.extend((16 + body.len() as u32).to_le_bytes());
        out.extend(error.to_le_bytes());
        out.extend(unique.to_le_bytes());
        out.extend(body);
        // Fails when the request was interrupted or the file system is gone.
        let _ = (&self.device).write(&out);
    }

    fn answer_read(&self, unique: u64, offset: u64, size: u32) {
        let at = |offset: u64| (offset as usize).min(self.bytes.len());
        self.answer(unique, 0, &self.bytes[at(offset)..at(offset + u64::from(size))]);
    }

    fn serve(&self) {
        let mut buf = vec![0; 1 << 20];
        loop {
            match (&self.device).read(&mut buf) {
                Ok(length) => self.request(&buf[..length]),
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => panic!("/dev/fuse: {error}"),
            }
        }
    }

    fn request(&self, bytes: &[u8]) {
        let (opcode, unique, node) = (u32_at(bytes, 4), u64_at(bytes, 8), u64_at(bytes, 16));
        let valid = 3600_u64.to_le_bytes();
        match opcode {
            INIT => {
                // Asynchronous reads and direct I/O; locks, if asked for here, are not known; 1024 requests at once.
                let flags = 1 | u32::from(!self.locks) << 1 | 1 << 15;
                let mut out = Vec::new();
                for word in [7_u32, 31, 0, flags, 1024 << 16 | 1024, 1 << 17, 1] {
                    out.extend(word.to_le_bytes());
                }
                out.resize(64, 0);
                self.answer(unique, 0, &out);
            }
            LOOKUP if [&b"file\0"[..], b"mappable\0"].contains(&&bytes[40..]) => {
                let node = if &bytes[40..] == b"file\0" { 2 } else { MAPPABLE };
                let mut out = Vec::new();
                for word in [node, 1, 3600, 3600, 0] {
                    out.extend(word.to_le_bytes());
                }
                out.extend(attributes(node, self.bytes.len() as u64));
                self.answer(unique, 0, &out);
            }
            LOOKUP => self.answer(unique, -libc::ENOENT, &[]),
            GETATTR => {
                self.answer(unique, 0, &[&valid[..], &[0; 8], &attributes(node, self.bytes.len() as u64)].concat())
            }
            OPEN => {
                // FOPEN_DIRECT_IO: each read comes here.
                let flags = u32::from(node != MAPPABLE);
                self.answer(unique, 0, &[&[0; 8][..], &flags.to_le_bytes(), &[0; 4]].concat());
            }
            READ => self.read(unique, u64_at(bytes, 48), u32_at(bytes, 56)),
            FORGET | BATCH_FORGET => {}
            RELEASE | FLUSH => self.answer(unique, 0, &[]),
            _ => self.answer(unique, -libc::ENOSYS, &[]),
        }
    }

    fn read(&self, unique: u64, offset: u64, size: u32) {
        let mut stalled = self.stalled.lock().unwrap();
        if offset < stalled.from {
            drop(stalled);
            return self.answer_read(unique, offset, size);
        }
        stalled.reads.insert(unique, (offset, size));
        self.changed.notify_all();
    }
}
