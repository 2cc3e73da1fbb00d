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
    /// are discarded, its driver goes and comes under load, it grows under load.
    ///
    /// The steps "written DISK", "discarded DISK" and "resize DISK" tell the host where it is; after the last one the host
    /// has to make the disk larger. What happens to the whole machine follows, under QEMU only. A file system is left there
    /// if anything happens to one.
    Inspect {
        /// How often the driver goes and comes.
        rebinds: u32,
        /// How often its cache is switched while data are written and flushed.
        toggles: u32,
        /// How often the machine sleeps (S3) and wakes up while data are written.
        suspends: u32,
        /// How often the host resets the machine while data are written: each time that a step "reset DISK" asks for it, see
        /// [`crate::Monitor`]. Files that were there before must be whole after it.
        resets: u32,
    },
    /// Makes a file system on each disk, with a tree of so many MiB in it: large files and small ones.
    MakeTree {
        /// How large the tree is.
        mib: u32,
    },
    /// Copies that tree within its file system, from the disk to the disk, and compares the two. The fact `copy-ms` says how
    /// long the copy took, until it was durable, on the guest's clock.
    CopyTree,
    /// Measures each disk in turn with fio, and overwrites it.
    Measure {
        /// What to measure.
        jobs: Vec<MeasureJob>,
        /// For how long each.
        seconds: u32,
        /// How much of the disk.
        mib: u32,
    },
}

/// A workload of fio's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasureJob {
    /// As fio calls it: `randwrite`. Its name in the report, too.
    pub rw: String,
    /// The size of a request.
    pub block_kib: u32,
    /// Requests in flight.
    pub depth: u32,
}

impl MeasureJob {
    /// The workloads that are measured beside a host's.
    #[must_use]
    pub fn usual() -> Vec<Self> {
        let job = |rw: &str, block_kib, depth| Self { rw: rw.to_owned(), block_kib, depth };
        vec![job("randread", 4, 32), job("randwrite", 4, 32), job("read", 128, 16), job("write", 128, 16)]
    }
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
    /// How many of the last disks are only measured, where the work measures at all.
    pub only_measured: usize,
    /// Memory of the guest.
    pub memory_mib: u32,
    /// CPUs of the guest (User Mode Linux has one).
    pub cpus: u32,
    /// Queues of each disk (User Mode Linux uses one).
    pub queues: u32,
    /// Whether QEMU asks for packed rings (User Mode Linux takes them wherever they are offered).
    pub packed: bool,
    /// Whether QEMU offers the guest EVENT_IDX, where the server does (User Mode Linux takes it wherever it is offered).
    pub event_idx: bool,
    /// Whether QEMU may use KVM where it is there; otherwise it translates.
    pub kvm: bool,
    /// How long QEMU waits before it connects again to a socket whose server has gone; without it, it does not. It takes
    /// QEMU 9.2, and User Mode Linux cannot do it.
    pub reconnect_ms: Option<u32>,
    /// Where QEMU makes a socket for [`crate::Monitor`].
    pub monitor: Option<PathBuf>,
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
        let (only_measured, monitor, event_idx) = (0, None, true);
        Self {
            kind,
            sockets,
            work,
            only_measured,
            memory_mib,
            cpus,
            queues,
            packed,
            event_idx,
            kvm,
            reconnect_ms,
            monitor,
            time_limit,
            log,
            stop,
        }
    }
}
