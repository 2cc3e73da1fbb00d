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
        Self::fresh("ext4", device, at)
    }

    /// A new file system of the kind that `name` names.
    pub(crate) fn fresh(name: &str, device: &LoopDevice, at: &Path) -> Option<Self> {
        let ends_well = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        let block = match name {
            "ext4" => ["-b", "4096"].as_slice(),
            _ => &[],
        };
        let made = ends_well(Command::new(format!("mkfs.{name}")).arg("-q").args(block).arg(device.path()));
        let mounted = made && ends_well(Command::new("mount").args(["-t", name]).arg(device.path()).arg(at));
        mounted.then(|| Self(at.to_owned()))
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
