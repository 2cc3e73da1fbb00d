//! Which guest is run, on which disks, and what it does there.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A kind of guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestKind {
    /// User Mode Linux: a kernel as a process, one CPU.
    Uml,
    /// QEMU with a Debian kernel.
    Qemu,
}

/// What the guest does with its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestWork {
    /// Makes file systems and fills them, with everything checked; before that, measures the disks if asked to.
    Fill {
        /// How long each of the four measurements takes. With zero nothing is measured.
        measure_seconds: u32,
        /// How much of the disk is measured.
        measure_mib: u32,
        /// How much each of the four writers of fio writes and verifies.
        fio_mib: u32,
    },
    /// Checks what a guest that filled the disks before has left there.
    CheckAgain,
    /// Looks at what the guest's kernel knows of the disks, and tries what can happen to one: its cache is switched, data
    /// are discarded, its driver goes and comes under load, it grows. Only under User Mode Linux.
    ///
    /// The steps "written DISK", "discarded DISK" and "resize DISK" tell the host where it is; after the last one the host
    /// has to make the disk larger.
    Inspect,
}

/// A guest to run, on which disks and for what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GuestOptions {
    /// The kind of guest.
    pub kind: GuestKind,
    /// A vhost-user socket for each disk; the first is the guest's `vda`.
    pub sockets: Vec<PathBuf>,
    /// What to do.
    pub work: GuestWork,
    /// Memory of the guest.
    pub memory_mib: u32,
    /// CPUs of the guest (User Mode Linux has one).
    pub cpus: u32,
    /// Queues of each disk (User Mode Linux uses one).
    pub queues: u32,
    /// Whether QEMU asks for packed rings (User Mode Linux takes them wherever they are offered).
    pub packed: bool,
    /// Whether QEMU may use KVM where it is there; otherwise it translates.
    pub kvm: bool,
    /// How long QEMU waits before it connects again to a socket whose server has gone; without it, it does not. It takes
    /// QEMU 9.2, and User Mode Linux cannot do it.
    pub reconnect_ms: Option<u32>,
    /// The guest is killed if it has not ended by then.
    pub time_limit: Duration,
    /// A file for all that the guest prints.
    pub log: Option<PathBuf>,
    /// Set it from any thread to have the guest killed.
    pub stop: Arc<AtomicBool>,
}

impl GuestOptions {
    /// A guest that fills the disks on `sockets` and measures nothing.
    pub fn new(kind: GuestKind, sockets: Vec<PathBuf>) -> Self {
        let (cpus, queues, time_limit) = match kind {
            GuestKind::Uml => (1, 1, Duration::from_secs(300)),
            GuestKind::Qemu => (4, 4, Duration::from_secs(600)),
        };
        let work = GuestWork::Fill { measure_seconds: 0, measure_mib: 0, fio_mib: 16 };
        let stop = Arc::default();
        let (memory_mib, packed, kvm, reconnect_ms, log) = (512, false, false, None, None);
        Self { kind, sockets, work, memory_mib, cpus, queues, packed, kvm, reconnect_ms, time_limit, log, stop }
    }
}
