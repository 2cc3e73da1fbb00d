//! User Mode Linux: the host's files are its root, so the host's programs work inside.

use super::script::{self, Places};
use super::{GuestOptions, console, tools};
use anyhow::{Context, Result, ensure};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "user-mode-linux";
const MODULES: &str = "/usr/lib/uml/modules";
/// The kernel's command line ends words at blanks and the device's name at a colon.
const FORBIDDEN: [char; 4] = [' ', '\t', ':', ','];

pub(super) fn check_tools() -> Result<()> {
    tools::find("linux.uml", PACKAGE)?;
    ensure!(
        tools::find_module(Path::new(MODULES), "virtio_blk").is_some(),
        "no virtio_blk module below {MODULES}; it is in the Debian package {PACKAGE}"
    );
    Ok(())
}

/// The process that is the guest; `directory` is empty and lives as long as it.
pub(super) fn command(options: &GuestOptions, directory: &Path) -> Result<Command> {
    ensure!(
        !directory.to_string_lossy().contains(FORBIDDEN),
        "User Mode Linux cannot work in {}: set TMPDIR to a path without blanks, commas and colons",
        directory.display()
    );
    let scratch = directory.join("scratch");
    std::fs::create_dir(&scratch)?;
    let modules = format!("{MODULES}/$release/kernel/drivers/block/virtio_blk.ko*");
    let places = Places { scratch: &scratch.to_string_lossy(), modules: &modules };
    let init = directory.join("init");
    std::fs::write(&init, script::init(options, &tools::guest_tools()?, &places))?;
    std::fs::set_permissions(&init, std::fs::Permissions::from_mode(0o755))?;

    let mut command = console::command(&tools::find("linux.uml", PACKAGE)?);
    command
        .arg(format!("mem={}M", options.memory_mib))
        .args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", "con=null", "con0=null,fd:1"])
        .args(script::QUIET_WATCHDOGS)
        .arg(format!("init={}", init.display()))
        .arg(format!("uml_dir={}", directory.display()))
        .arg("umid=guest");
    for (number, socket) in options.sockets.iter().enumerate() {
        let link = directory.join(format!("disk{number}"));
        let socket = std::path::absolute(socket)?;
        std::os::unix::fs::symlink(&socket, &link).context("cannot link the disk's socket")?;
        command.arg(format!("virtio_uml.device={}:2", link.display()));
    }
    command.env("TMPDIR", memory_directory(options.memory_mib, directory));
    Ok(command)
}

/// Where its memory goes: a file that is deleted at once. Shared memory is best, but small in some containers.
fn memory_directory(memory_mib: u32, otherwise: &Path) -> PathBuf {
    let shared = Path::new("/dev/shm");
    let free_mib =
        rustix::fs::statvfs(shared).map_or(0, |status| status.f_bavail.saturating_mul(status.f_frsize) >> 20);
    if free_mib > u64::from(memory_mib) + 64 { shared.to_path_buf() } else { otherwise.to_path_buf() }
}
