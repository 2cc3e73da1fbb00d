//! Options of a guest: its kind, its disks, and its work.

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

/// The guest's work on its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestWork {
    /// Makes file systems and fills them, and checks everything. Measures the disks before, if asked to.
    Fill {
        /// The length of each of the four measurements, in seconds; zero for no measurements.
        measure_seconds: u32,
        /// The part of the disk that is measured, in MiB.
        measure_mib: u32,
        /// The MiB that each of the four writers of fio writes and verifies.
        fio_mib: u32,
    },
    /// Checks the files that a guest with [`GuestWork::Fill`] left on the disks.
    CheckAgain,
    /// Checks the kernel's view of the disks, and events of one disk: its cache is switched, data are discarded, its
    /// driver is unbound and bound under load, it grows under load.
    ///
    /// The steps "written DISK", "discarded DISK" and "resize DISK" tell the host the guest's progress. After the last
    /// one, the host has to make the disk larger. Then come events of the whole machine, under QEMU only. With toggles,
    /// suspends or resets, a file system is left there.
    Inspect {
        /// The number of times that the driver is unbound and bound.
        rebinds: u32,
        /// The number of times that the disk's cache is switched during writes and flushes.
        toggles: u32,
        /// The number of times that the machine sleeps (S3) and wakes up during writes.
        suspends: u32,
        /// The number of times that the host resets the machine during writes: at each step "reset DISK", see
        /// [`crate::Monitor`]. Files written before must then be whole.
        resets: u32,
    },
    /// Makes a file system on each disk, with a tree of `mib` MiB in it: large files and small ones.
    MakeTree {
        /// The size of the tree.
        mib: u32,
    },
    /// Copies that tree within its file system, and compares the two. The fact `copy-ms` is the time of the copy until
    /// it was durable, on the guest's clock.
    CopyTree,
    /// Makes a file system with files, and writes and verifies others until the host makes the disk larger. Then all
    /// files are checked, also after a remount. The step "DISK is at work" says that the first files are written, and
    /// the fact `passes` counts the passes over the others.
    WorkUntilGrown {
        /// The MiB that each of the four writers of fio writes and verifies in each pass.
        fio_mib: u32,
    },
    /// Overwrites the disk and reads the data back, with checks, until the host has made it large enough. A step "DISK
    /// has N sectors" reports each size that the guest's kernel sees.
    Grow {
        /// The size at which the guest ends.
        until_bytes: u64,
    },
    /// Measures each disk in turn with fio, and overwrites it.
    Measure {
        /// The workloads to measure.
        jobs: Vec<MeasureJob>,
        /// The length of each measurement, in seconds.
        seconds: u32,
        /// The part of the disk that is used, in MiB.
        mib: u32,
    },
}

/// A workload for fio.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasureJob {
    /// The kind, in fio's words: `randwrite`. Also its name in the report.
    pub rw: String,
    /// The size of a request.
    pub block_kib: u32,
    /// Requests in flight.
    pub depth: u32,
}

impl MeasureJob {
    /// Returns the workloads that are also measured on a host.
    #[must_use]
    pub fn usual() -> Vec<Self> {
        let job = |rw: &str, block_kib, depth| Self { rw: rw.to_owned(), block_kib, depth };
        vec![job("randread", 4, 32), job("randwrite", 4, 32), job("read", 128, 16), job("write", 128, 16)]
    }
}

/// A disk of an NBD server of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdDisk {
    /// The port at 127.0.0.1.
    pub port: u16,
    /// The name of the disk at the server: a word of letters and digits.
    pub export: String,
}

/// The options of a guest.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GuestOptions {
    /// The kind of guest.
    pub kind: GuestKind,
    /// A vhost-user socket for each disk; the first is the guest's `vda`.
    pub sockets: Vec<PathBuf>,
    /// Another disk, `nbd0`, through the NBD client of the guest's kernel (User Mode Linux only).
    pub nbd: Option<NbdDisk>,
    /// The guest's work.
    pub work: GuestWork,
    /// The number of disks, counted from the last, that are only measured, if the work measures at all.
    pub only_measured: usize,
    /// Memory of the guest.
    pub memory_mib: u32,
    /// CPUs of the guest (User Mode Linux has one).
    pub cpus: u32,
    /// Queues of each disk (User Mode Linux uses one).
    pub queues: u32,
    /// Whether QEMU asks for packed rings: disks whose server offers them get them. User Mode Linux takes them whenever
    /// they are offered.
    pub packed: bool,
    /// Whether QEMU offers EVENT_IDX to the guest, if the server does. User Mode Linux takes it whenever it is offered.
    pub event_idx: bool,
    /// The number of disks, counted from the last, that QEMU offers without EVENT_IDX all the same.
    pub without_event_idx: usize,
    /// Whether QEMU may use KVM if it is available. Otherwise it emulates.
    pub kvm: bool,
    /// How long QEMU waits before it connects again to a socket whose server is gone; `None` for no new connection.
    /// This needs QEMU 9.2; User Mode Linux cannot do it.
    pub reconnect_ms: Option<u32>,
    /// The path of the socket for [`crate::Monitor`].
    pub monitor: Option<PathBuf>,
    /// The guest is killed if it has not ended after this time.
    pub time_limit: Duration,
    /// A file for the guest's whole output.
    pub log: Option<PathBuf>,
    /// Set by any thread to kill the guest.
    pub stop: Arc<AtomicBool>,
}

impl GuestOptions {
    /// Makes options of a guest that fills the disks on `sockets` and measures nothing.
    pub fn new(kind: GuestKind, sockets: Vec<PathBuf>) -> Self {
        let (cpus, queues, time_limit) = match kind {
            GuestKind::Uml => (1, 1, Duration::from_secs(300)),
            GuestKind::Qemu => (4, 4, Duration::from_secs(600)),
        };
        let work = GuestWork::Fill { measure_seconds: 0, measure_mib: 0, fio_mib: 16 };
        let stop = Arc::default();
        let (memory_mib, packed, kvm, reconnect_ms, log) = (512, false, false, None, None);
        let (only_measured, monitor, event_idx, nbd) = (0, None, true, None);
        Self {
            kind,
            sockets,
            nbd,
            work,
            only_measured,
            memory_mib,
            cpus,
            queues,
            packed,
            event_idx,
            without_event_idx: 0,
            kvm,
            reconnect_ms,
            monitor,
            time_limit,
            log,
            stop,
        }
    }
}
