//! The measured files. They are made before a run and removed after it.

use super::cells::{CHAIN_LAYERS, Cell, Storage};
use super::qcow2_file::{self, CLUSTER_BYTES, Image};
use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Size of an image that is filled while it is measured: large enough that most writes find an empty cluster, and not
/// larger than what qemu-storage-daemon's cache of tables covers by default.
const EMPTY_BYTES: u64 = 256 << 30;

/// The measured files of a run.
pub(super) struct Files {
    tmpfs: PathBuf,
    disk: PathBuf,
    size_bytes: u64,
}

impl Files {
    pub(super) fn create(directory: Option<&Path>, size_mib: u64, cells: &[Cell]) -> Result<Self> {
        let name = format!("ringdisk-bench-{}", std::process::id());
        let disk = directory.map_or_else(workspace::target, Path::to_path_buf).join(&name);
        let files = Self { tmpfs: Path::new("/dev/shm").join(name), disk, size_bytes: size_mib << 20 };
        for storage in Storage::ALL {
            let wanted = |cell: &Cell| cell.storage == storage || cell.storage.reference() == Some(storage);
            if cells.iter().any(wanted) {
                files.make(storage)?;
            }
        }
        Ok(files)
    }

    /// Returns the directory in memory.
    pub(super) fn tmpfs(&self) -> Result<&Path> {
        std::fs::create_dir_all(&self.tmpfs)?;
        Ok(&self.tmpfs)
    }

    /// Returns the file that a server of `storage` opens.
    pub(super) fn path(&self, storage: Storage) -> PathBuf {
        let directory = if storage.is_tmpfs() { &self.tmpfs } else { &self.disk };
        directory.join(match storage {
            Storage::Qcow2Empty => "empty.qcow2".to_owned(),
            Storage::Qcow2Overlay => "overlay.qcow2".to_owned(),
            Storage::ChainSpread | Storage::ChainBase => layer_name(storage, CHAIN_LAYERS - 1),
            Storage::Qcow2Tmpfs | Storage::Qcow2Direct => "disk.qcow2".to_owned(),
            _ => "disk.raw".to_owned(),
        })
    }

    /// Returns the raw file beside it, which fio measures.
    pub(super) fn raw(&self, storage: Storage) -> PathBuf {
        self.path(storage).with_file_name("disk.raw")
    }

    fn make(&self, storage: Storage) -> Result<()> {
        if matches!(storage, Storage::Null | Storage::Qcow2Empty) {
            return self.tmpfs().map(|_| ());
        }
        let raw = self.raw(storage);
        if let Some(directory) = raw.parent() {
            std::fs::create_dir_all(directory)?;
        }
        if storage.is_chain() {
            return self.make_chain(storage);
        }
        if !raw.exists() {
            println!("making {} MiB of {storage}", self.size_bytes >> 20);
            write_noise(&raw, self.size_bytes)?;
        }
        if storage.is_qcow2() && !storage.is_fresh() {
            let convert = Program::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]);
            convert.args([raw, self.path(storage)]).output_text()?;
        }
        if !storage.is_tmpfs() {
            Program::new("sync").output_text()?;
        }
        Ok(())
    }

    fn make_chain(&self, storage: Storage) -> Result<()> {
        println!("making a chain of {CHAIN_LAYERS}, {} MiB, {storage}", self.size_bytes >> 20);
        let mut noise = Noise::default();
        for layer in 0..CHAIN_LAYERS {
            let in_use = |cluster: u64| match storage {
                Storage::ChainSpread => cluster % CHAIN_LAYERS == layer,
                _ => layer == 0,
            };
            let backing = layer.checked_sub(1).map(|below| layer_name(storage, below));
            let mut data = |bytes: &mut [u8]| noise.fill(bytes);
            let image = Image {
                size_bytes: self.size_bytes,
                backing: backing.as_deref(),
                in_use: &in_use,
                data: Some(&mut data),
            };
            qcow2_file::write(&self.path(storage).with_file_name(layer_name(storage, layer)), image)?;
        }
        Ok(())
    }

    /// Makes images that measuring fills anew.
    pub(super) fn renew(&self, storage: Storage) -> Result<()> {
        let create = Program::new("qemu-img").args(["create", "-q", "-f", "qcow2"]);
        let path = self.path(storage);
        match storage {
            Storage::Qcow2Empty => create.args([path]).args([EMPTY_BYTES.to_string()]).output_text()?,
            Storage::Qcow2Overlay => create.args(["-F", "raw", "-b", "disk.raw"]).args([path]).output_text()?,
            _ => return Ok(()),
        };
        Ok(())
    }

    /// Returns the most requests that a measurement may make. If it fills an image, writes reach half of the clusters;
    /// further writes would find too few empty clusters.
    pub(super) fn request_limit(&self, storage: Storage) -> Option<u64> {
        (storage == Storage::Qcow2Overlay).then_some(self.size_bytes / CLUSTER_BYTES / 2)
    }

    /// Reads the whole file, so that it is in the page cache.
    pub(super) fn warm(&self, storage: Storage) -> Result<()> {
        let mut file = std::fs::File::open(self.path(storage))?;
        std::io::copy(&mut file, &mut std::io::sink())?;
        Ok(())
    }

    /// Returns the file system of the files, for the page.
    pub(super) fn file_system(&self) -> String {
        let stat = Program::new("stat").args(["--file-system", "--format=%T"]).args([&self.disk]);
        stat.output_text().map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
    }

    pub(super) fn size_mib(&self) -> u64 {
        self.size_bytes >> 20
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.tmpfs);
        let _ = std::fs::remove_dir_all(&self.disk);
    }
}

fn layer_name(storage: Storage, layer: u64) -> String {
    format!("{storage}-{layer}.qcow2")
}

/// Bytes that are neither zero nor all the same, so that no tool leaves holes.
struct Noise(u64);

impl Default for Noise {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Noise {
    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_le_bytes());
        }
    }
}

pub(super) fn write_noise(path: &Path, size_bytes: u64) -> Result<()> {
    let mut file = std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let mut noise = Noise::default();
    let mut block = vec![0_u8; 1 << 20];
    for _ in 0..size_bytes >> 20 {
        noise.fill(&mut block);
        file.write_all(&block)?;
    }
    Ok(())
}
