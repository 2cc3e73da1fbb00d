//! Block devices, and file systems on them, for tests that run as root.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device over a file, detached on drop.
pub(crate) struct LoopDevice(PathBuf);

impl LoopDevice {
    pub(crate) fn over(path: &Path, sector_bytes: u32) -> Option<Self> {
        Self::attach(path, &["--sector-size", &sector_bytes.to_string()])
    }

    pub(crate) fn read_only(path: &Path) -> Option<Self> {
        Self::attach(path, &["--read-only"])
    }

    fn attach(path: &Path, options: &[&str]) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).args(options).arg(path).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(Self(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

/// A mounted file system, unmounted on drop.
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn ext4(device: &LoopDevice, at: &Path) -> Option<Self> {
        let run = |program: &str, words: &[&str], path: &Path| {
            let mut command = Command::new(program);
            command.args(words).arg(path);
            if program == "mount" {
                command.arg(at);
            }
            command.output().ok().filter(|output| output.status.success())
        };
        run("mkfs.ext4", &["-q", "-b", "4096"], device.path())?;
        run("mount", &["-t", "ext4"], device.path())?;
        Some(Self(at.to_owned()))
    }
}

impl Mounted {
    /// What is there already, to be read.
    pub(crate) fn read_only(device: &LoopDevice, at: &Path) -> Option<Self> {
        let output = Command::new("mount").args(["-o", "ro,noload"]).arg(device.path()).arg(at).output();
        output.ok().filter(|output| output.status.success()).map(|_| Self(at.to_owned()))
    }

    pub(crate) fn tmpfs(at: &Path, size_bytes: u64) -> Option<Self> {
        let options = format!("size={size_bytes}");
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(at).output();
        output.ok().filter(|output| output.status.success()).map(|_| Self(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
