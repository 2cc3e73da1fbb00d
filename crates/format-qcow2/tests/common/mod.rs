//! What the tests share: a guest that writes through the format, and qemu-img as judge.
#![allow(dead_code, clippy::unwrap_used)]

use block::{Extent, File, FileOp, Fill, IoResult, Mapped, MetaIo, PastEnd, block_on};
use memory::{IoBuf, Window};
use ringdisk_format_qcow2::{
    Allocation, CreateOptions, OpenOptions, Overwrite, PackedCluster, Plain, Prepared, Qcow2, create,
};
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use testkit::{SimFile, SimFileOptions, SimStorage};

pub(crate) const NAME: &str = "disk.qcow2";
/// The external data file of images that have one.
pub(crate) const DATA: &str = "disk.data";

/// A raw layer below, in memory; shorter than the disk in some tests.
pub(crate) type Base = Arc<Vec<u8>>;

/// Writes and reads as `image` does, for one queue.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) qcow2: Arc<Qcow2>,
    pub(crate) io: MetaIo,
    pub(crate) base: Base,
}

pub(crate) fn open_options(read_only: bool) -> OpenOptions {
    OpenOptions::new(NAME, read_only)
}

pub(crate) fn blocking(file: &SimFile) -> MetaIo {
    let io = MetaIo::new(file.open_blocking().unwrap());
    match file.storage().file(DATA) {
        Some(data) => io.with_data(data.open_blocking().unwrap()),
        None => io,
    }
}

/// The same files once more.
pub(crate) fn copy(storage: &SimStorage) -> SimStorage {
    let copy = SimStorage::new(5);
    for name in [NAME, DATA] {
        if let Some(file) = storage.file(name) {
            let options = SimFileOptions { can_discard: file.info().can_discard, ..SimFileOptions::default() };
            copy.create_with(name, &storage.bytes(name), options);
        }
    }
    copy
}

/// A new image on simulated storage.
pub(crate) fn created(options: &CreateOptions, file_options: SimFileOptions) -> (SimStorage, Arc<SimFile>) {
    let storage = SimStorage::new(7);
    let file = storage.create(NAME, 0, file_options.clone());
    if options.data_file.is_some() {
        storage.create_with(DATA, &vec![0; options.size_bytes as usize], file_options);
    }
    block_on(create(&blocking(&file), options)).unwrap();
    (storage, file)
}

/// Opens an image for tests that need no concurrency.
pub(crate) fn open(file: &SimFile, base: Base) -> Guest {
    let file = file.storage().file(NAME).unwrap();
    let io = blocking(&file);
    let qcow2 = block_on(Qcow2::open(&io, file.info(), open_options(false))).unwrap();
    Guest { qcow2: Arc::new(qcow2), io, base }
}

/// As `open`, of bytes.
pub(crate) fn open_bytes(bytes: &[u8], base: Base) -> (SimStorage, Guest) {
    let storage = SimStorage::new(3);
    let file = storage.create_with(NAME, bytes, SimFileOptions::default());
    let guest = open(&file, base);
    (storage, guest)
}

impl Guest {
    /// The same image through another queue.
    pub(crate) fn through(&self, io: MetaIo) -> Self {
        Self { io, ..self.clone() }
    }

    /// As queues ask: the short way first.
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Option<Mapped> {
        let extent = match self.qcow2.lookup_plain(offset, length_bytes) {
            Some(Plain::Data(offset)) => Extent::Data { file: 0, offset },
            Some(Plain::Unallocated) => Extent::Backing,
            None => return self.qcow2.lookup(offset, length_bytes),
        };
        Some(Mapped { extent, length_bytes })
    }

    /// As queues ask: the short way first.
    pub(crate) fn lookup_overwrite(&self, offset: u64, length_bytes: u64) -> Overwrite {
        match self.qcow2.begin_overwrite(offset, length_bytes) {
            Some(offset) => Overwrite::InPlace { offset, length_bytes },
            None => self.qcow2.lookup_overwrite(offset, length_bytes),
        }
    }

    pub(crate) async fn read(&self, offset: u64, length: usize) -> IoResult<Vec<u8>> {
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            let (at, left) = (offset + bytes.len() as u64, length - bytes.len());
            let mapped = match self.lookup(at, left as u64) {
                Some(mapped) => mapped,
                None => self.qcow2.resolve(&self.io, at, left as u64).await?,
            };
            let part = mapped.length_bytes as usize;
            assert!(part > 0 && part <= left);
            match mapped.extent {
                Extent::Zero => bytes.resize(bytes.len() + part, 0),
                Extent::Backing => bytes.extend(base_bytes(&self.base, at, part)),
                Extent::Data { offset, .. } => {
                    let data = self.io.data().map_or(self.io.clone(), |data| MetaIo::new(Rc::clone(data)));
                    bytes.extend_from_slice(&data.read(offset, part, PastEnd::Zeros).await?);
                }
                Extent::Compressed(extent) => {
                    let cluster = self.qcow2.read_compressed(&self.io, extent).await?;
                    let skip = extent.skip_bytes as usize;
                    bytes.extend_from_slice(&cluster[skip..skip + part]);
                }
            }
        }
        Ok(bytes)
    }

    pub(crate) async fn write(&self, offset: u64, data: &[u8]) -> IoResult {
        let mut done = 0;
        while done < data.len() {
            let (at, rest) = (offset + done as u64, &data[done..]);
            let place = match self.lookup_overwrite(at, rest.len() as u64) {
                Overwrite::InPlace { offset, length_bytes } => Prepared::InPlace { offset, length_bytes },
                Overwrite::Slow => self.qcow2.prepare_write(&self.io, at, rest.len() as u64).await?,
            };
            done += match place {
                Prepared::InPlace { offset, length_bytes } => {
                    self.put(offset, &rest[..length_bytes as usize]).await?;
                    length_bytes as usize
                }
                Prepared::New(allocation) => {
                    let taken = self.fill(&allocation, at, rest).await?;
                    self.qcow2.commit_write(&self.io, allocation).await?;
                    taken
                }
            };
        }
        Ok(())
    }

    /// Writes an allocation's data and its fillings; returns how much of the data.
    pub(crate) async fn fill(&self, allocation: &Allocation, at: u64, rest: &[u8]) -> IoResult<usize> {
        let end = allocation.guest_offset + allocation.length_bytes;
        let taken = rest.len().min((end - at) as usize);
        let head = (at - allocation.guest_offset) as usize;
        let tail_at = at + taken as u64;
        self.padding(allocation.head, allocation.guest_offset, head, allocation.file_offset).await?;
        let tail_to = allocation.file_offset + head as u64 + taken as u64;
        self.padding(allocation.tail, tail_at, (end - tail_at) as usize, tail_to).await?;
        self.put(allocation.file_offset + head as u64, &rest[..taken]).await?;
        Ok(taken)
    }

    async fn padding(&self, fill: Fill, guest: u64, length: usize, to: u64) -> IoResult {
        match fill {
            _ if length == 0 => Ok(()),
            Fill::None => Ok(()),
            Fill::Zero => self.put(to, &vec![0; length]).await,
            Fill::Copy => {
                let inside = length.min(self.qcow2.size_bytes().saturating_sub(guest) as usize);
                let mut bytes = self.read(guest, inside).await?;
                bytes.resize(length, 0);
                self.put(to, &bytes).await
            }
        }
    }

    /// A write that is durable once it has ended: by itself where that is enough, or by a flush.
    pub(crate) async fn write_durably(&self, offset: u64, data: &[u8]) -> IoResult {
        match self.lookup_overwrite(offset, data.len() as u64) {
            Overwrite::InPlace { offset, length_bytes }
                if length_bytes == data.len() as u64 && self.qcow2.is_mapping_durable() =>
            {
                self.put_as(offset, data, true).await
            }
            _ => {
                self.write(offset, data).await?;
                self.flush().await
            }
        }
    }

    async fn put(&self, offset: u64, bytes: &[u8]) -> IoResult {
        self.put_as(offset, bytes, false).await
    }

    async fn put_as(&self, offset: u64, bytes: &[u8], fua: bool) -> IoResult {
        let data: Window = IoBuf::zeroed(bytes.len()).whole();
        data.copy_from_slice(0, bytes);
        self.io.data().unwrap_or(self.io.queue()).start(FileOp::Write { offset, data, fua }).await
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, length: u64, may_unmap: bool) -> IoResult {
        let outcome = self.qcow2.write_zeroes(&self.io, offset, length, may_unmap).await?;
        for range in outcome.by_writing {
            self.write(range.start, &vec![0; (range.end - range.start) as usize]).await?;
        }
        Ok(())
    }

    pub(crate) async fn discard(&self, offset: u64, length: u64) -> IoResult {
        self.qcow2.discard(&self.io, offset, length).await
    }

    pub(crate) async fn flush(&self) -> IoResult {
        self.qcow2.flush(&self.io).await
    }

    pub(crate) async fn close(&self) -> IoResult {
        self.qcow2.close(&self.io).await
    }

    pub(crate) async fn read_all(&self) -> IoResult<Vec<u8>> {
        self.read(0, self.qcow2.size_bytes() as usize).await
    }
}

pub(crate) fn base_bytes(base: &[u8], offset: u64, length: usize) -> Vec<u8> {
    let start = (offset as usize).min(base.len());
    let end = (start + length).min(base.len());
    let mut bytes = base[start..end].to_vec();
    bytes.resize(length, 0);
    bytes
}

/// Whether a tool is there. Without it a test is skipped, said aloud; in CI it is an error.
pub(crate) fn has_tool(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        assert!(std::env::var_os("CI").is_none(), "'{tool}' is missing; install the package qemu-utils");
        eprintln!("SKIPPED: '{tool}' is missing (Debian: qemu-utils)");
    }
    found
}

/// Runs a tool that must succeed; returns what it printed.
pub(crate) fn run(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new(tool).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{tool} {arguments:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// What qemu-img makes of an image: it must check clean, and this is its content.
pub(crate) fn judged_by_qemu(directory: &Path, image: &[u8]) -> Vec<u8> {
    let path = directory.join("judged.qcow2");
    let raw = directory.join("judged.raw");
    std::fs::write(&path, image).unwrap();
    let (path, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
    run("qemu-img", &["check", "-f", "qcow2", path]);
    run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", path, raw]);
    std::fs::read(raw).unwrap()
}

impl Guest {
    /// Writes whole clusters compressed, as `image` does; those that do not shrink stay as they are.
    pub(crate) async fn write_compressed(&self, offset: u64, data: &[u8]) -> IoResult {
        let cluster = 1usize << self.qcow2.header().cluster_bits;
        let mut compressor = self.qcow2.compressor().unwrap();
        let (mut clusters, mut packed) = (Vec::new(), Vec::new());
        for (index, plain) in data.chunks(cluster).enumerate() {
            let guest_offset = offset + (index * cluster) as u64;
            let whole = [plain, &vec![0; cluster - plain.len()]].concat();
            let mut output = vec![0; cluster];
            match compressor.compress(&whole, &mut output) {
                Some(length) => {
                    clusters.push(PackedCluster { guest_offset, length_bytes: length as u32 });
                    packed.push(output[..length].to_vec());
                }
                None => self.write(guest_offset, plain).await?,
            }
        }
        if clusters.is_empty() {
            return Ok(());
        }
        let allocation = self.qcow2.prepare_compressed(&self.io, &clusters).await?;
        for (offset, bytes) in allocation.file_offsets.iter().zip(&packed) {
            self.put(*offset, bytes).await?;
        }
        self.qcow2.commit_compressed(&self.io, allocation).await
    }
}
