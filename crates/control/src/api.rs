//! What goes over the wire, as JSON. Requests with fields that are not listed here are refused.

mod events;
mod jobs;
mod points;
mod stats;

use crate::options::Options;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

pub use events::{Event, EventKind};
pub use jobs::{
    CommitDisk, CompactDisk, Job, JobKind, JobState, Jobs, LimitJob, MirrorDisk, RebaseDisk, Rounds, StreamDisk,
};
pub use points::{
    BackupDisk, BackupMode, BitmapChange, BitmapVerb, Bitmaps, ChangeBitmaps, CreateSnapshot, DirtyBitmap,
    InternalSnapshot, InternalSnapshots, VmState,
};
pub use stats::{DiskStats, Histogram, OperationLatency, PartLatency, ReactorStats, Stats, TableStats};

/// The version of the interface, which is also the first part of each path.
pub const VERSION: u32 = 1;

/// Which program answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Version {
    /// Name and version of the program.
    pub program: String,
    /// The version of the interface.
    pub api: u32,
    /// The process.
    pub pid: u32,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ErrorDetail {
    /// For programs: it does not change from one version to the next.
    pub kind: ErrorKind,
    /// For people.
    pub message: String,
    /// The part of the request that is wrong, where that can be said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

/// Kinds of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request is not of the form that the description asks for, or an option is unknown or impossible.
    BadRequest,
    /// There is no such path, disk, export or job.
    NotFound,
    /// Somebody else uses it.
    InUse,
    /// A policy forbids it.
    Denied,
    /// Valid, but not served.
    Unsupported,
    /// The image is damaged.
    BadImage,
    /// The host's storage or kernel failed.
    Io,
    /// Somebody stopped it.
    Cancelled,
    /// A fault of this program.
    Internal,
}

/// All disks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Disks {
    /// In the order in which they were added.
    pub disks: Vec<Disk>,
    /// Disks of the state directory that could not be opened.
    pub failed: Vec<FailedDisk>,
}

/// A disk that was served before and could not be opened, or that is served without one of its exports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FailedDisk {
    /// The disk.
    pub name: String,
    /// Why.
    pub error: String,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// What names it in calls.
    pub name: String,
    /// The file of its top layer, or what stands for it.
    pub file: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Nobody writes it.
    pub read_only: bool,
    /// What guests read as its serial number.
    pub serial: String,
    /// Completed writes may be lost until they are flushed.
    pub volatile_cache: bool,
    /// The unit that guests address.
    pub logical_block_bytes: u32,
    /// One line a layer, the top first: format, file, engine.
    pub layers: Vec<String>,
    /// The options that it was added with; `file` follows its top layer.
    #[schema(value_type = std::collections::BTreeMap<String, serde_json::Value>)]
    pub options: Options,
    /// Where guests reach it.
    pub exports: Vec<Export>,
    /// Requests that wait because the storage failed them (`on-error=hold`, `on-no-space=hold`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
}

/// Requests that wait until they are tried again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Held {
    /// How many.
    pub requests: u64,
    /// What the storage said to the last of them.
    pub error: String,
}

/// A disk to be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDisk {
    /// The options of a drive, as `--drive` takes them: `{"file": "/images/a.qcow2", "cache": "none"}`.
    #[schema(value_type = std::collections::BTreeMap<String, serde_json::Value>)]
    pub options: Options,
    /// Also serve it, at `socket`, or beside its image.
    #[serde(default = "yes")]
    pub export: bool,
    /// A new qcow2 layer that is put on top before it is served: no guest writes to what lies below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub overlay: Option<PathBuf>,
}

fn yes() -> bool {
    true
}

/// Options to be changed while the disk runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeDisk {
    /// Options and their new values.
    #[schema(value_type = std::collections::BTreeMap<String, serde_json::Value>)]
    pub options: Options,
}

/// How a disk's files are opened anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reopen {
    /// What cannot be written to the old files any more is given up.
    #[serde(default)]
    pub force: bool,
}

/// A disk's new size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// Size in bytes, a multiple of 512.
    pub size_bytes: u64,
}

/// New layers for disks, all put on at the same moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Which disks, and their new tops.
    pub overlays: Vec<Overlay>,
}

/// A new layer for one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// The disk.
    pub disk: String,
    /// The file that becomes the new top. It must not exist.
    #[schema(value_type = String)]
    pub overlay: PathBuf,
}

/// All exports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Exports {
    /// In the order in which they were added.
    pub exports: Vec<Export>,
    /// Exports of the state directory that could not begin. They are tried again at the next start.
    pub failed: Vec<FailedExport>,
}

/// An export that was there before, and without which its disk is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FailedExport {
    /// Its number, by which it is taken off the record.
    pub id: u64,
    /// The disk.
    pub disk: String,
    /// Why.
    pub error: String,
}

/// Where a disk is served.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// What names it in calls.
    pub id: u64,
    /// The disk.
    pub disk: String,
    /// The vhost-user socket; for NBD clients the Unix socket, or `ADDRESS:PORT`.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Its guests cannot write.
    pub read_only: bool,
    /// Queues on offer; for NBD clients, connections at once at this address.
    pub queues: u16,
    /// Largest ring that a guest may set up; for NBD clients, requests of a connection at once.
    pub queue_size: u16,
    /// A guest's monitor, or an NBD client, is connected.
    #[serde(default)]
    pub connected: bool,
    /// What its queues have done, together.
    pub counters: Counters,
    /// How NBD clients see it, if it is for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<NbdExport>,
}

/// A disk as NBD clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NbdExport {
    /// What clients name.
    pub uri: String,
    /// The export's name.
    pub name: String,
    /// What clients are told about it.
    pub description: String,
    /// Persistent bitmaps that they can ask for.
    pub bitmaps: Vec<String>,
    /// They may or must use TLS.
    pub tls: bool,
    /// Clients that have chosen it.
    pub connections: u64,
}

/// What queues have done since the export was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// Requests taken.
    pub requests: u64,
    /// Turns in which requests were taken.
    pub batches: u64,
    /// Notifications sent to the guest.
    pub notifications: u64,
    /// Batches of completions that the guest did not want to be told of.
    pub notifications_avoided: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Times that a queue stopped because the guest broke its rules.
    pub faults: u64,
    /// Requests that the storage failed, not for want of space.
    #[serde(default)]
    pub io_errors: u64,
    /// Requests for which the storage had no space.
    #[serde(default)]
    pub no_space: u64,
}

impl Counters {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.wrapping_add(other.requests),
            batches: self.batches.wrapping_add(other.batches),
            notifications: self.notifications.wrapping_add(other.notifications),
            notifications_avoided: self.notifications_avoided.wrapping_add(other.notifications_avoided),
            failed: self.failed.wrapping_add(other.failed),
            faults: self.faults.wrapping_add(other.faults),
            io_errors: self.io_errors.wrapping_add(other.io_errors),
            no_space: self.no_space.wrapping_add(other.no_space),
        }
    }
}

/// An export to be added.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddExport {
    /// The disk.
    pub disk: String,
    /// The socket. A vhost-user socket lies beside the image where not given; for NBD clients it may be `nbd.listen` instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// Guests cannot write.
    #[serde(default)]
    pub read_only: bool,
    /// Queues on offer; one a CPU where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Largest ring that a guest may set up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_size: Option<u16>,
    /// The guest's memory is registered with io_uring, which pins it.
    #[serde(default)]
    pub fixed_buffers: bool,
    /// Serve it to NBD clients, and not to a guest's monitor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<AddNbd>,
}

/// How a disk is served to NBD clients. Several disks can be at one address, under names of their own.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddNbd {
    /// `ADDRESS:PORT`, where it is no Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// What clients call it; the disk's name where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What clients are told about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Persistent bitmaps that clients can ask for (`qemu:dirty-bitmap:NAME`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<String>,
    /// Connections at once at this address; 16 where not given. Others wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u16>,
    /// TLS, with certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<AddTls>,
}

/// How NBD clients use TLS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddTls {
    /// A directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`.
    #[schema(value_type = String)]
    pub credentials: PathBuf,
    /// Clients must use it; otherwise they may.
    #[serde(default = "yes")]
    pub required: bool,
    /// Clients need a certificate of the same authority.
    #[serde(default = "yes")]
    pub verify_peer: bool,
}

/// What reading the configuration file again has changed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reloaded {
    /// Disks that are served from here on.
    pub added: Vec<String>,
    /// Disks that the file no longer gives.
    pub removed: Vec<String>,
    /// Disks that were changed while their guests went on.
    pub changed: Vec<String>,
    /// Disks that were closed and opened with new options. Their guests were disconnected.
    pub reopened: Vec<String>,
    /// Disks that are not as the file says, and why.
    pub failed: Vec<FailedDisk>,
    /// What else is to be known.
    pub notes: Vec<String>,
}
