//! An initramfs: a cpio archive in the kernel's "newc" format (Documentation/driver-api/early-userspace/buffer-format).

use anyhow::{Context, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const TRAILER: &str = "TRAILER!!!";

/// An archive that is built in memory. Paths are relative to the guest's root.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    names: HashSet<PathBuf>,
}

impl Archive {
    /// Adds a directory and its parents.
    pub(crate) fn directory(&mut self, path: &Path) {
        if path.as_os_str().is_empty() || !self.names.insert(path.to_path_buf()) {
            return;
        }
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
        self.entry(&path.to_string_lossy(), DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file and its directories. The first file of a name stays.
    pub(crate) fn file(&mut self, path: &Path, mode: u32, contents: &[u8]) {
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
        if self.names.insert(path.to_path_buf()) {
            self.entry(&path.to_string_lossy(), REGULAR | mode, (0, 0), contents);
        }
    }

    /// Adds a program or library of the host.
    pub(crate) fn copy(&mut self, from: &Path, to: &Path) -> Result<()> {
        let contents = std::fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.file(to, 0o755, &contents);
        Ok(())
    }

    /// Adds `/dev/console`, without which the first process has no outputs.
    pub(crate) fn console(&mut self) {
        self.entry("dev/console", CHARACTER_DEVICE | 0o600, (5, 1), &[]);
    }

    /// Returns the whole archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), contents: &[u8]) {
        let inode = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        let size = u32::try_from(contents.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        // Inode, mode, user, group, links, time, size, device, device of a special file, size of the name, checksum.
        let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Returns a program's shared libraries, including its interpreter; none if it is linked statically.
pub(crate) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd, of the Debian package libc-bin")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // "name => /path (address)" or "/path (address)".
    let paths = text.lines().filter_map(|line| {
        let line = line.trim();
        let path = line.split_once("=> ").map_or(line, |(_, path)| path);
        path.starts_with('/').then(|| PathBuf::from(path.split(" (").next().unwrap_or(path)))
    });
    Ok(paths.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_what_cpio_reads() {
        let mut archive = Archive::default();
        archive.file(Path::new("a/b/c"), 0o755, b"hello");
        archive.file(Path::new("a/b/c"), 0o755, b"again");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let order: Vec<_> = ["\0a\0", "a/b\0", "a/b/c\0", TRAILER].iter().map(|name| text.find(name)).collect();
        assert!(text.starts_with("070701"), "{text}");
        assert!(order[1] < order[2] && order[2] < order[3], "directories come before what is in them: {order:?}");
        assert!(text.contains("hello") && !text.contains("again"));
        let file = text.find("a/b/c\0").unwrap() - 110;
        assert_eq!(&text[file..file + 22], "07070100000003000081ED");
        assert_eq!(&text[file + 54..file + 62], "00000005", "its length");
    }
}
