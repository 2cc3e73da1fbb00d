//! The types that go over the wire, as JSON. Requests with fields that are not listed here are refused.

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

/// The program that answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Version {
    /// Name and version of the program.
    pub program: String,
    /// The version of the interface.
    pub api: u32,
    /// The process id of the daemon.
    pub pid: u32,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// An error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ErrorDetail {
    /// For programs: stable from one version to the next.
    pub kind: ErrorKind,
    /// A text for people.
    pub message: String,
    /// The part of the request that is wrong, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

/// Kinds of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request does not match the description, or an option is unknown or invalid.
    BadRequest,
    /// There is no such path, disk, export or job.
    NotFound,
    /// It is in use.
    InUse,
    /// A policy forbids it.
    Denied,
    /// The request is valid, but not supported.
    Unsupported,
    /// The image is damaged.
    BadImage,
    /// The host's storage or kernel failed.
    Io,
    /// It was cancelled.
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
    /// Disks of the state directory that could not be opened, new drives that the last reload could not open, and disks
    /// that are served without one of their exports.
    pub failed: Vec<FailedDisk>,
}

/// A disk that could not be opened, or that is served without one of its exports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FailedDisk {
    /// The disk.
    pub name: String,
    /// The reason.
    pub error: String,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Its name or number in calls.
    pub name: String,
    /// The file of its top layer, or what replaces a file.
    pub file: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Whether nobody can write to it.
    pub read_only: bool,
    /// The serial number that guests read.
    pub serial: String,
    /// Whether completed writes may be lost until they are flushed.
    pub volatile_cache: bool,
    /// The unit that guests address, in bytes.
    pub logical_block_bytes: u32,
    /// One line for each layer, the top first: format, file, engine.
    pub layers: Vec<String>,
    /// The options that it was added with; `file` is its current top layer.
    pub options: Options,
    /// Its exports.
    pub exports: Vec<Export>,
    /// Requests that wait because the storage failed them (`on-error=hold`, `on-no-space=hold`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
}

/// Requests that wait until they are tried again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Held {
    /// Their number.
    pub requests: u64,
    /// The storage's error for the last of them.
    pub error: String,
}

/// A disk to add.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDisk {
    /// The options of a drive, as `--drive` takes them: `{"file": "/images/a.qcow2", "cache": "none"}`.
    pub options: Options,
    /// Whether to serve it, too, at `socket` or beside its image.
    #[serde(default = "yes")]
    pub export: bool,
    /// A new qcow2 layer that is put on top before the disk is served: no guest writes to the layers below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub overlay: Option<PathBuf>,
    /// Layers below its file that were its top before, the next one first: what is above can be taken back into them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former_tops: Vec<FormerTop>,
    /// Files that it may rest on, wherever they lie, beside those that the daemon was started with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub bases: Vec<PathBuf>,
}

/// A layer of a disk that was its top before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormerTop {
    /// Its file.
    #[schema(value_type = String)]
    pub file: PathBuf,
    /// The format of that file; guessed if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

fn yes() -> bool {
    true
}

/// Options to change while the disk runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeDisk {
    /// Options and their new values: `cache`, `engine`, `throttling.iops-total` and others that can change in a running
    /// disk.
    #[schema(value_type = std::collections::BTreeMap<String, serde_json::Value>)]
    pub options: Options,
}

/// How a disk's files are reopened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reopen {
    /// Whether to give up data that can no longer be written to the old files.
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
    /// The disks, and their new top layers.
    pub overlays: Vec<Overlay>,
}

/// A new layer for one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// The disk.
    pub disk: String,
    /// The file of the new top layer: a path, or a name such as `rbd:POOL/IMAGE` or `nbd://HOST/EXPORT`. It must not exist;
    /// the disk of an NBD server must be empty at its beginning.
    #[schema(value_type = String)]
    pub overlay: PathBuf,
}

/// All exports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Exports {
    /// In the order in which they were added.
    pub exports: Vec<Export>,
    /// Exports of the record that could not begin. They are tried again at the next start; those of the configuration file
    /// at each reload, too.
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

/// An export of a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Its name or number in calls.
    pub id: u64,
    /// The disk.
    pub disk: String,
    /// The vhost-user socket; for NBD clients the Unix socket, or `ADDRESS:PORT`.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Whether its guests cannot write.
    pub read_only: bool,
    /// Number of queues on offer; for NBD clients, connections at once at this address.
    pub queues: u16,
    /// Largest ring that a guest may set up; for NBD clients, requests of a connection at once.
    pub queue_size: u16,
    /// Whether a guest's monitor or an NBD client is connected.
    #[serde(default)]
    pub connected: bool,
    /// For how long its guest has waited until what a former process wrote is durable, in microseconds. The guest is in
    /// write-through, and no request of it is taken before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_flush_us: Option<u64>,
    /// The counters of all its queues together.
    pub counters: Counters,
    /// Its properties for NBD clients, if it is an NBD export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<NbdExport>,
}

/// A disk as NBD clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NbdExport {
    /// The URI for clients.
    pub uri: String,
    /// The export's name.
    pub name: String,
    /// The description that clients see.
    pub description: String,
    /// Persistent bitmaps that clients can ask for.
    pub bitmaps: Vec<String>,
    /// Whether clients may or must use TLS.
    pub tls: bool,
    /// The number of clients that have chosen it.
    pub connections: u64,
}

/// Counters of queues since the export was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// Requests taken.
    pub requests: u64,
    /// Turns in which requests were taken.
    pub batches: u64,
    /// Notifications sent to the guest.
    pub notifications: u64,
    /// Batches of completions for which the guest wanted no notification.
    pub notifications_avoided: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Times that a queue stopped because the guest broke its rules.
    pub faults: u64,
    /// Requests that the storage failed for a reason other than missing space.
    #[serde(default)]
    pub io_errors: u64,
    /// Requests for which the storage had no space.
    #[serde(default)]
    pub no_space: u64,
}

impl Counters {
    /// The sum of both.
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

/// An export to add.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddExport {
    /// The disk.
    pub disk: String,
    /// The socket's path, or `fd:NAME` for one that a service manager passed to the daemon under this name. By default, a
    /// vhost-user socket lies beside the image. NBD exports may have `nbd.listen` instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// The socket's permissions, in octal: `0600` if not given, `0660` if it has a group of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket_mode: Option<String>,
    /// The socket's group: its name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket_group: Option<String>,
    /// Whether guests cannot write.
    #[serde(default)]
    pub read_only: bool,
    /// Number of queues on offer; by default one for each CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Largest ring that a guest may set up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_size: Option<u16>,
    /// Whether the guest's memory is registered with io_uring, which pins it.
    #[serde(default)]
    pub fixed_buffers: bool,
    /// What the guest's memory may lie in.
    #[serde(default, skip_serializing_if = "GuestMemory::is_default")]
    pub guest_memory: GuestMemory,
    /// The most bytes of memory that the guest's monitor may share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_memory_max: Option<u64>,
    /// What its guest sees, where that differs from what the disk's options say: `{"write-cache": "off"}`. The keys are
    /// those of a drive that describe the guest's disk.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    #[schema(value_type = std::collections::BTreeMap<String, serde_json::Value>)]
    pub shown: Options,
    /// Serves it to NBD clients instead of a guest's monitor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<AddNbd>,
}

/// What a guest's memory may lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GuestMemory {
    /// Memory: a memfd, tmpfs, huge pages.
    #[default]
    Ram,
    /// The same, and it is never swapped out once it was touched.
    Locked,
    /// Any file, also on a disk.
    Any,
}

impl GuestMemory {
    /// All of them by name.
    pub const NAMES: [(&str, Self); 3] = [("ram", Self::Ram), ("locked", Self::Locked), ("any", Self::Any)];

    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How a disk is served to NBD clients. Several disks can share one address, under different names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddNbd {
    /// `ADDRESS:PORT`, unless it is a Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// The name for clients; by default the disk's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The description that clients see.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Persistent bitmaps that clients can ask for (`qemu:dirty-bitmap:NAME`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<String>,
    /// Connections at once at this address; 16 by default. Others wait.
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
    /// A directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`, or only a `keys.psk`.
    #[schema(value_type = String)]
    pub credentials: PathBuf,
    /// Whether clients must use it; otherwise it is optional.
    #[serde(default = "yes")]
    pub required: bool,
    /// Whether clients need a certificate of the same authority.
    #[serde(default = "yes")]
    pub verify_peer: bool,
}

/// The changes by a reload of the configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reloaded {
    /// Disks that were added.
    pub added: Vec<String>,
    /// Disks that were removed, because the file no longer gives them.
    pub removed: Vec<String>,
    /// Disks that were changed while their guests went on.
    pub changed: Vec<String>,
    /// Disks that were closed and opened with new options. Their guests were disconnected.
    pub reopened: Vec<String>,
    /// Disks that do not match the file, and why.
    pub failed: Vec<FailedDisk>,
    /// Other notes.
    pub notes: Vec<String>,
}
