//! A directory whose files cannot be mapped, as on some network file systems: a FUSE file system in memory, with direct
//! I/O.
//!
//! Speaks just enough of the FUSE protocol (`linux/fuse.h`, version 7.31) over `/dev/fuse`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const UNLINK: u32 = 10;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;
const RELEASEDIR: u32 = 29;
const CREATE: u32 = 35;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;

/// `struct fuse_in_header`.
const HEADER_BYTES: usize = 40;
const WRITE_MAX_BYTES: u32 = 1 << 17;
/// The reply to `OPEN`: a handle, and the flag `FOPEN_DIRECT_IO`. Files with it are refused a shared mapping (ENODEV).
const DIRECT_IO: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

const ENOENT: i32 = 2;
const ENODEV: i32 = 19;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;

/// The mounted file system. Its files are gone with it.
pub struct UnmappableDirectory {
    path: PathBuf,
    files: Arc<Mutex<Files>>,
}

#[derive(Default)]
struct Files {
    names: HashMap<Vec<u8>, u64>,
    /// By number. The directory is 1. A file without a name stays until the end: somebody may have it open.
    bytes: HashMap<u64, Vec<u8>>,
}

struct Server {
    device: File,
    reserves_space: bool,
    files: Arc<Mutex<Files>>,
}

impl UnmappableDirectory {
    /// Mounts it over the directory `path`; `None` where this process may not. `fallocate` either reserves space there or
    /// is not supported.
    #[must_use]
    pub fn mount(path: &Path, reserves_space: bool) -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let mut command = Command::new("mount");
        // The descriptor is the command's standard input.
        command.args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=40000,user_id=0,group_id=0", "unmappable"]).arg(path);
        let mounted = command.stdin(Stdio::from(device.try_clone().ok()?)).output().ok()?;
        if !mounted.status.success() {
            return None;
        }
        let files = Arc::<Mutex<Files>>::default();
        let server = Server { device, reserves_space, files: Arc::clone(&files) };
        std::thread::spawn(move || server.serve());
        Some(Self { path: path.to_owned(), files })
    }

    /// How many files have names.
    #[must_use]
    pub fn names(&self) -> usize {
        self.files.lock().expect("the server does not panic").names.len()
    }
}

impl Drop for UnmappableDirectory {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-i", "-l"]).arg(&self.path).status();
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The name at the end of a request, without its NUL.
fn name_at(bytes: &[u8], at: usize) -> Vec<u8> {
    bytes[at..].split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

impl Files {
    /// `struct fuse_attr`.
    fn attributes(&self, node: u64) -> Vec<u8> {
        let length = self.bytes.get(&node).map_or(0, |bytes| bytes.len() as u64);
        let mode = if node == 1 { 0o040_777_u32 } else { 0o100_600 };
        let mut out = words(&[node, length, length.div_ceil(512), 0, 0, 0]);
        out.extend([0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].iter().flat_map(|word| word.to_le_bytes()));
        out
    }

    /// `struct fuse_entry_out`. The kernel asks again each time.
    fn entry(&self, node: u64) -> Vec<u8> {
        [words(&[node, 1, 0, 0, 0]), self.attributes(node)].concat()
    }

    fn make(&mut self, name: Vec<u8>) -> u64 {
        let node = self.bytes.len() as u64 + 2;
        self.bytes.insert(node, Vec::new());
        self.names.insert(name, node);
        node
    }

    fn file(&mut self, node: u64) -> &mut Vec<u8> {
        self.bytes.entry(node).or_default()
    }

    fn extend(&mut self, node: u64, length: u64) {
        let file = self.file(node);
        file.resize(file.len().max(length as usize), 0);
    }
}

impl Server {
    fn serve(mut self) {
        let mut buffer = vec![0; 1 << 20];
        loop {
            match self.device.read(&mut buffer) {
                Ok(length) => self.request(&buffer[..length]),
                Err(error) if error.raw_os_error() == Some(ENODEV) => return,
                // A request that was interrupted meanwhile (ENOENT), and signals.
                Err(error) if error.kind() == ErrorKind::Interrupted || error.raw_os_error() == Some(ENOENT) => {}
                Err(error) => panic!("/dev/fuse: {error}"),
            }
        }
    }

    fn request(&mut self, bytes: &[u8]) {
        let (opcode, unique) = (u32_at(bytes, 4), u64_at(bytes, 8));
        if [FORGET, BATCH_FORGET].contains(&opcode) {
            return;
        }
        let (error, body) =
            self.answer(opcode, u64_at(bytes, 16), bytes).map_or_else(|error| (error, Vec::new()), |body| (0, body));
        let mut out = (16 + body.len() as u32).to_le_bytes().to_vec();
        out.extend((-error).to_le_bytes());
        out.extend(unique.to_le_bytes());
        out.extend(body);
        // Fails when the request was interrupted or the file system is gone.
        let _ = self.device.write(&out);
    }

    fn answer(&self, opcode: u32, node: u64, bytes: &[u8]) -> Result<Vec<u8>, i32> {
        let mut files = self.files.lock().expect("nobody panics with it");
        let attributes = |files: &Files| [words(&[0, 0]), files.attributes(node)].concat();
        match opcode {
            INIT => {
                // Asynchronous reads, large writes and direct I/O.
                let head = [7, 31, 0, 1 | 1 << 5 | 1 << 15, 64 << 16 | 64, WRITE_MAX_BYTES, 1];
                let mut out: Vec<u8> = head.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
                out.resize(64, 0);
                Ok(out)
            }
            LOOKUP => {
                let found = files.names.get(&name_at(bytes, HEADER_BYTES)).copied();
                found.map(|node| files.entry(node)).ok_or(ENOENT)
            }
            CREATE => {
                let node = files.make(name_at(bytes, HEADER_BYTES + 16));
                Ok([files.entry(node), DIRECT_IO.to_vec()].concat())
            }
            UNLINK => files.names.remove(&name_at(bytes, HEADER_BYTES)).map(|_| Vec::new()).ok_or(ENOENT),
            GETATTR => Ok(attributes(&files)),
            SETATTR => {
                // FATTR_SIZE.
                if u32_at(bytes, HEADER_BYTES) & 1 << 3 != 0 {
                    files.file(node).resize(u64_at(bytes, HEADER_BYTES + 16) as usize, 0);
                }
                Ok(attributes(&files))
            }
            OPEN => Ok(DIRECT_IO.to_vec()),
            READ => {
                let file = files.file(node);
                let at = |offset: u64| (offset as usize).min(file.len());
                let (offset, size) = (u64_at(bytes, HEADER_BYTES + 8), u32_at(bytes, HEADER_BYTES + 16));
                Ok(file[at(offset)..at(offset + u64::from(size))].to_vec())
            }
            WRITE => {
                let (offset, size) = (u64_at(bytes, HEADER_BYTES + 8), u32_at(bytes, HEADER_BYTES + 16));
                files.extend(node, offset + u64::from(size));
                let (at, length) = (offset as usize, size as usize);
                files.file(node)[at..at + length].copy_from_slice(&bytes[HEADER_BYTES + 40..][..length]);
                Ok(words(&[size.into()]))
            }
            FALLOCATE if self.reserves_space => {
                let [offset, length, mode] = [8, 16, 24].map(|at| u64_at(bytes, HEADER_BYTES + at));
                if mode as u32 != 0 {
                    return Err(EOPNOTSUPP);
                }
                files.extend(node, offset + length);
                Ok(Vec::new())
            }
            STATFS => {
                Ok([words(&[1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096 | 255 << 32, 4096]), vec![0; 24]]
                    .concat())
            }
            OPENDIR => Ok(vec![0; 16]),
            READDIR | RELEASEDIR | RELEASE | FSYNC | FLUSH => Ok(Vec::new()),
            _ => Err(ENOSYS),
        }
    }
}
