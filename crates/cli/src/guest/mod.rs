//! Real Linux guests that use our disks: booted, given work, watched on their console, and asked for a report.
//!
//! Two kinds, neither needs KVM. User Mode Linux ([`GuestKind::Uml`]) is a Linux kernel that runs as a process and boots in
//! a second; it has one CPU, and so uses one queue. QEMU ([`GuestKind::Qemu`]) boots a Debian kernel with an initramfs
//! that is put together here, with as many CPUs and queues as asked for.
//!
//! Both run the same script (`script`): make ext4 on each disk, write files, read them back with checksums, let `fio`
//! write and verify in parallel, trim, mount again, and power off. What they print is read line by line; a guest that says
//! nothing more before its time is up is killed.

mod check;
mod console;
mod initramfs;
mod qemu;
mod report;
mod script;
mod tools;
mod uml;

pub(crate) use check::{ImageFormat, verify_image};
pub(crate) use report::GuestReport;

use anyhow::{Context, Result, ensure};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Which guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GuestKind {
    /// User Mode Linux: a kernel as a process, one CPU.
    Uml,
    /// QEMU with a Debian kernel.
    Qemu,
}

/// What the guest does with its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GuestWork {
    /// Makes file systems and fills them, with everything checked; before that, measures the disks if asked to.
    Fill {
        /// How long each of the four measurements takes; none where zero.
        measure_seconds: u32,
        /// How much of the disk is measured.
        measure_mib: u32,
        /// What each of four writers of fio writes and verifies.
        fio_mib: u32,
    },
    /// Checks what a guest that filled the disks before has left there.
    CheckAgain,
}

/// A guest to run.
#[derive(Debug, Clone)]
pub(crate) struct GuestOptions {
    /// Which.
    pub(crate) kind: GuestKind,
    /// A vhost-user socket for each disk; the first is the guest's `vda`.
    pub(crate) sockets: Vec<PathBuf>,
    /// What to do.
    pub(crate) work: GuestWork,
    /// Memory of the guest.
    pub(crate) memory_mib: u32,
    /// CPUs of the guest (User Mode Linux has one).
    pub(crate) cpus: u32,
    /// Queues of each disk (User Mode Linux uses one).
    pub(crate) queues: u32,
    /// Whether QEMU may use KVM where it is there; otherwise it translates.
    pub(crate) kvm: bool,
    /// When the guest is given up and killed.
    pub(crate) time_limit: Duration,
    /// Where to keep all that the guest printed.
    pub(crate) log: Option<PathBuf>,
    /// Set by somebody else to have the guest killed.
    pub(crate) stop: Arc<AtomicBool>,
}

impl GuestOptions {
    /// A guest that fills the disks on `sockets` and measures nothing.
    pub(crate) fn new(kind: GuestKind, sockets: Vec<PathBuf>) -> Self {
        let (cpus, queues, time_limit) = match kind {
            GuestKind::Uml => (1, 1, Duration::from_secs(300)),
            GuestKind::Qemu => (4, 4, Duration::from_secs(600)),
        };
        let work = GuestWork::Fill { measure_seconds: 0, measure_mib: 0, fio_mib: 16 };
        let stop = Arc::default();
        Self { kind, sockets, work, memory_mib: 512, cpus, queues, kvm: false, time_limit, log: None, stop }
    }
}

/// Fails with the missing package's name where the guest cannot be run on this machine.
pub(crate) fn check_tools(kind: GuestKind) -> Result<()> {
    tools::guest_tools()?;
    match kind {
        GuestKind::Uml => uml::check_tools(),
        GuestKind::Qemu => qemu::check_tools(),
    }
}

/// Boots the guest and returns its report once it has powered itself off. `progress` is told of each step in it.
pub(crate) fn run(options: &GuestOptions, progress: &mut dyn FnMut(&str)) -> Result<GuestReport> {
    check_tools(options.kind)?;
    for socket in &options.sockets {
        let there = std::fs::metadata(socket).is_ok_and(|metadata| metadata.file_type().is_socket());
        ensure!(there, "there is no socket {}: is the disk served?", socket.display());
    }
    let directory = tempfile::Builder::new().prefix("ringdisk-guest-").tempdir();
    let directory = directory.context("cannot make a temporary directory for the guest")?;
    let (command, prepare) = match options.kind {
        GuestKind::Uml => uml::command(options, directory.path())?,
        GuestKind::Qemu => (qemu::command(options, directory.path())?, (|| Ok(())) as console::Prepare),
    };
    console::run(command, prepare, options, progress)
}
