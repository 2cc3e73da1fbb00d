//! The status of a daemon's disks, exports and jobs.

use super::attach::Attachment;
use super::nbd_options::NbdAddress;
use block::DiskInfo;
use export_vhost_user::RingStats;
use image::{CopyRounds, HeldRequests, TableCacheStats};
use std::fmt;
use std::time::Duration;

/// Names a disk of a daemon, even after it is gone: no number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u64);

/// Names an export of a daemon, even after it is gone: no number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExportId(pub(crate) u64);

/// Names a job of a daemon, even after it is forgotten: no number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub(crate) u64);

impl NodeId {
    /// Returns the number alone, as it is shown.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ExportId {
    /// Returns the number alone, as it is shown.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl JobId {
    /// Returns the number alone, as it is shown.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The status of a disk.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DiskStatus {
    /// The number that names it in calls.
    pub id: NodeId,
    /// The name that it was given, or `disk0`, `disk1`...
    pub name: String,
    /// The file's name, or a substitute for one.
    pub file: String,
    /// Size, flags, serial.
    pub info: DiskInfo,
    /// One line for each layer: format, file, engine and why.
    pub layers: Vec<String>,
    /// Figures of the tables in memory, if the image has any.
    pub tables: Option<TableCacheStats>,
    /// How long its requests have waited for its limits, in total.
    pub throttled: Duration,
    /// Requests that wait because the storage failed them.
    pub held: Option<HeldRequests>,
    /// What the rings of its removed exports have counted.
    pub past: RingStats,
}

/// The status of an export.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExportStatus {
    /// The number that names it in calls.
    pub id: ExportId,
    /// The disk that it serves.
    pub node: NodeId,
    /// Its guests cannot write, because of the disk or of the export.
    pub read_only: bool,
    /// A guest's monitor, or an NBD client, is connected.
    pub connected: bool,
    /// What a monitor must know. For an NBD export: its address, the most connections there, and the most requests of
    /// each.
    pub attachment: Attachment,
    /// Counters of each of its rings; for an NBD export, one for all connections together.
    pub rings: Vec<RingStats>,
    /// How NBD clients see it, if it is for them.
    pub nbd: Option<NbdStatus>,
}

/// A disk as NBD clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdStatus {
    /// The server's address.
    pub address: NbdAddress,
    /// The URI that clients name.
    pub uri: String,
    /// The export's name.
    pub name: String,
    /// What clients are told about it.
    pub description: String,
    /// Bitmaps that they can ask for.
    pub bitmaps: Vec<String>,
    /// They may or must use TLS.
    pub has_tls: bool,
    /// Connections of clients that have chosen it.
    pub connections: usize,
}

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobKind {
    /// It copies what the top layer of a disk holds into the layer below, and takes the top layer off.
    TakeOverlayBack,
    /// It copies what lower layers hold into the top layer, which then rests on other layers or on none.
    MoveOnto,
    /// It gives the top layer another backing file, and what the guest sees stays the same.
    Rebase,
    /// It copies a disk to another image, which may take its place.
    Mirror,
    /// It copies a disk as it was at one moment to another image.
    Backup,
    /// It makes the file of the top layer only as long as is needed.
    Compact,
}

impl fmt::Display for JobKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TakeOverlayBack => f.write_str("taking its overlay back"),
            Self::MoveOnto | Self::Rebase => f.write_str("changing what its top layer rests on"),
            Self::Mirror => f.write_str("copying it to another image"),
            Self::Backup => f.write_str("its backup"),
            Self::Compact => f.write_str("making its file shorter"),
        }
    }
}

/// The state of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobState {
    /// It is at work.
    Running,
    /// It waits until it is resumed.
    Paused,
    /// It was asked to stop, and has not ended. If it is nearly done, it may still finish.
    Cancelling,
    /// It has done all its work.
    Done,
    /// It failed with this message. The disk keeps its layers.
    Failed(String),
    /// It was cancelled. The disk keeps its layers.
    Cancelled,
}

/// The status of a job.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JobStatus {
    /// The number that names it in calls.
    pub id: JobId,
    /// What it does.
    pub kind: JobKind,
    /// The disk that it works on, which may be gone when the job has ended.
    pub node: NodeId,
    /// That disk's name.
    pub disk: String,
    /// Whether it runs, or how it ended.
    pub state: JobState,
    /// Bytes that it has dealt with. Never falls.
    pub done_bytes: u64,
    /// Bytes to deal with: the disk's, plus those that guests write meanwhile. Never falls. A job that is done has
    /// dealt with all.
    pub total_bytes: u64,
    /// How long the rest takes at the rate of the last seconds; `None` if it is not known.
    pub time_left: Option<Duration>,
    /// The rounds in which a copy of a disk in use comes to its end.
    pub rounds: CopyRounds,
    /// The result of a job that is done, if it has more to say.
    pub outcome: Option<String>,
}
