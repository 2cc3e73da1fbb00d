//! QEMU with a Debian kernel and an initramfs of the host's programs.

use crate::console;
use crate::initramfs::Archive;
use crate::options::{GuestOptions, GuestWork};
use crate::script::{self, Places};
use crate::tools::{self, GuestTools};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";

/// Modules that a Debian kernel may have, in the order of their dependencies. Built-in ones are not found, and are left
/// out.
const MODULES: [&str; 12] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "crc16",
    "crc32c_generic",
    "libcrc32c",
    "mbcache",
    "jbd2",
    "ext4",
];

pub(crate) fn check_tools() -> Result<()> {
    tools::find(PROGRAM, PACKAGE)?;
    tools::debian_kernel()?;
    Ok(())
}

/// Returns the guest's process. `directory` is empty and lives as long as the guest.
pub(crate) fn command(options: &GuestOptions, directory: &Path) -> Result<Command> {
    ensure!(options.nbd.is_none(), "only User Mode Linux gets disks of NBD servers");
    let kernel = tools::debian_kernel()?;
    let initramfs = directory.join("initramfs");
    build_initramfs(options, &kernel.modules, &initramfs)?;

    let memory = options.memory_mib;
    let mut command = console::command(&tools::find(PROGRAM, PACKAGE)?);
    command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
    // Only a machine that its host resets may boot again. For any other guest, a reboot is a failure.
    if !matches!(options.work, GuestWork::Inspect { resets: 1.., .. }) {
        command.arg("-no-reboot");
    }
    if let Some(monitor) = &options.monitor {
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", comma_doubled(&std::path::absolute(monitor)?))]);
    }
    if options.kvm {
        command.args(["-accel", "kvm"]);
    }
    command
        .args(["-accel", "tcg", "-machine", "q35,memory-backend=memory"])
        .args(["-smp", &options.cpus.to_string(), "-m", &format!("{memory}M")])
        .args(["-object", &format!("memory-backend-memfd,id=memory,size={memory}M,share=on")])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        .args(["-kernel".as_ref(), kernel.image.as_os_str(), "-initrd".as_ref(), initramfs.as_os_str()])
        .args(["-append", &format!("console=ttyS0 quiet panic=-1 {}", script::QUIET_WATCHDOGS.join(" "))]);
    for (number, socket) in options.sockets.iter().enumerate() {
        let socket = comma_doubled(&std::path::absolute(socket)?);
        let (queues, packed) = (options.queues, if options.packed { "on" } else { "off" });
        let with_event_idx = options.sockets.len().saturating_sub(options.without_event_idx);
        let event_idx = if options.event_idx && number < with_event_idx { "on" } else { "off" };
        let reconnect = options.reconnect_ms.map(|ms| format!(",reconnect-ms={ms}")).unwrap_or_default();
        command.args(["-chardev", &format!("socket,id=disk{number},path={socket}{reconnect}")]).arg("-device").arg(
            format!(
                "vhost-user-blk-pci,chardev=disk{number},num-queues={queues},packed={packed},event_idx={event_idx}"
            ),
        );
    }
    Ok(command)
}

/// Doubles commas, as QEMU's options need it.
fn comma_doubled(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

fn build_initramfs(options: &GuestOptions, modules: &Path, output: &Path) -> Result<()> {
    let host = tools::guest_tools()?;
    let guest = GuestTools {
        busybox: "/bin/busybox".into(),
        mke2fs: "/sbin/mke2fs".into(),
        fio: "/bin/fio".into(),
        nbd_client: None,
    };
    let mut archive = Archive::default();
    for directory in ["proc", "sys", "dev", "scratch", "modules", "bin", "sbin", "etc", "tmp"] {
        archive.directory(Path::new(directory));
    }
    archive.console();
    let places = Places { scratch: "/scratch", modules: "/modules/*" };
    archive.file(Path::new("init"), 0o755, script::init(options, &guest, &places).as_bytes());
    for (number, module) in MODULES.iter().enumerate() {
        if let Some(path) = tools::find_module(modules, module) {
            let compressed = if path.extension().is_some_and(|extension| extension == "xz") { ".xz" } else { "" };
            archive.copy(&path, &PathBuf::from(format!("modules/{number:02}-{module}.ko{compressed}")))?;
        }
    }
    if matches!(options.work, GuestWork::Inspect { .. }) {
        let perl = Path::new("/usr/bin/perl");
        archive.copy(perl, perl.strip_prefix("/")?)?;
        for library in crate::initramfs::libraries(perl)? {
            archive.copy(&library, library.strip_prefix("/")?)?;
        }
    }
    for (from, to) in [(&host.busybox, &guest.busybox), (&host.mke2fs, &guest.mke2fs), (&host.fio, &guest.fio)] {
        archive.copy(from, to.strip_prefix("/")?)?;
        for library in crate::initramfs::libraries(from)? {
            archive.copy(&library, library.strip_prefix("/")?)?;
        }
    }
    std::fs::write(output, archive.finish()).with_context(|| format!("cannot write {}", output.display()))
}
