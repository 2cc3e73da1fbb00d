//! What goes over the wire, as JSON. Requests with fields that are not listed here are refused.

mod points;

use crate::options::Options;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

pub use points::{
    BackupDisk, BackupMode, BitmapChange, BitmapVerb, Bitmaps, ChangeBitmaps, CreateSnapshot, DirtyBitmap,
    InternalSnapshot, InternalSnapshots, VmState,
};

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

/// A disk that was served before and could not be opened.
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

/// How layers are taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CommitDisk {
    /// So many layers, from the top down; 1 where not given.
    #[serde(default = "one")]
    pub layers: usize,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// It is to be done in so many milliseconds, however fast guests write: they are slowed down where that is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
    /// No request of a guest is to take longer because of it than so many milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<u64>,
}

/// How a disk is copied to another image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MirrorDisk {
    /// The file of the new image. It must not exist, unless `existing` says so.
    #[schema(value_type = String)]
    pub target: PathBuf,
    /// Its format, `raw` or `qcow2`; that of the disk's top layer where not given. An image that exists needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The image exists, as large as the disk, and is written over.
    #[serde(default)]
    pub existing: bool,
    /// Only the top layer is copied: the new image rests on the same layers.
    #[serde(default)]
    pub top: bool,
    /// The new image stays a copy. Otherwise the disk goes over to it.
    #[serde(default)]
    pub keep: bool,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// It is to be done in so many milliseconds, however fast guests write: they are slowed down where that is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
    /// No request of a guest is to take longer because of it than so many milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<u64>,
}

fn one() -> usize {
    1
}

/// How the contents of lower layers are pulled up into the top layer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamDisk {
    /// The layer that stays below the top; none where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// What the top layer of a disk is to rest on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RebaseDisk {
    /// The image.
    #[schema(value_type = String)]
    pub base: PathBuf,
    /// Its format; guessed where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// A limit for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitJob {
    /// The most bytes that it moves in a second while guests go on; 0 lifts the limit.
    pub bytes_per_second: u64,
}

/// All exports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Exports {
    /// In the order in which they were added.
    pub exports: Vec<Export>,
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

/// All jobs that run, and the last that have ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Jobs {
    /// In the order in which they were started.
    pub jobs: Vec<Job>,
}

/// Long work on a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// What names it in calls.
    pub id: u64,
    /// What it does.
    pub kind: JobKind,
    /// The disk.
    pub disk: String,
    /// Whether it goes on.
    pub state: JobState,
    /// Why it failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Bytes that it has dealt with. Rises only.
    pub done_bytes: u64,
    /// Bytes to deal with. Rises only.
    pub total_bytes: u64,
    /// How it comes to its end, where it copies what guests write to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<Rounds>,
}

/// How a copy of what guests write to comes to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rounds {
    /// Passes over what was left, the one of now included.
    pub rounds: u64,
    /// What is left of this pass.
    pub left_bytes: u64,
    /// The longest time that a guest's request took longer because of the job.
    pub longest_stall_us: u64,
    /// How long guests' requests were made to wait so that the copy gets ahead, all together.
    pub throttled_us: u64,
    /// It takes longer than it was to.
    pub late: bool,
}

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum JobKind {
    /// Copies the top layer into the layer below, and takes it off.
    Commit,
    /// Copies what lower layers hold into the top layer, which then rests on others, or on none.
    Stream,
    /// Copies a disk to another image, which may take its place.
    Mirror,
    /// Copies the disk as it was at one moment to another image.
    Backup,
    /// One that this version of the interface has no name for.
    Other,
}

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum JobState {
    /// It goes on.
    Running,
    /// It waits until it is resumed.
    Paused,
    /// It has done all that it was to do.
    Done,
    /// It could not go on. The disk keeps its layers.
    Failed,
    /// Somebody stopped it. The disk keeps its layers.
    Cancelled,
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

/// Figures of the whole daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// Disk by disk.
    pub disks: Vec<DiskStats>,
    /// Reactor by reactor.
    pub reactors: Vec<ReactorStats>,
}

/// Figures of one disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskStats {
    /// The disk.
    pub disk: String,
    /// What the queues of all its exports have done.
    pub counters: Counters,
    /// Microseconds that its requests have waited for its limits, all together.
    pub throttled_us: u64,
    /// A guest is connected at one of its exports.
    #[serde(default)]
    pub connected: bool,
    /// How long the oldest request in flight has been so, in microseconds; nothing where none is in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_request_us: Option<u64>,
    /// How long requests take, by what they do. What no guest has asked for is left out.
    #[serde(default)]
    pub latency: Vec<OperationLatency>,
    /// The tables in memory of an image that has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<TableStats>,
}

/// How long the requests of one kind take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OperationLatency {
    /// `read`, `write`, `flush`, `discard`, `write-zeroes` or `secure-erase`.
    pub operation: String,
    /// Bytes of data that were read or written.
    pub bytes: u64,
    /// From the request's way out of the ring until its end is published and the guest told.
    pub whole: Histogram,
    /// What that time was spent on. The sums of all parts are the sum of the whole.
    pub parts: Vec<PartLatency>,
}

/// What requests spend on one part of their way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PartLatency {
    /// `queue`, `throttle`, `metadata`, `copy-on-write`, `engine`, `flush` or `notify`.
    pub part: String,
    /// Of the requests that spent any time on it.
    pub time: Histogram,
}

/// How long something took.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    /// How often.
    pub count: u64,
    /// All together, in microseconds.
    pub sum_us: u64,
    /// How many took up to 1 microsecond, up to 2, up to 4 and so on, and longer than the bucket before. The last of 28
    /// buckets has no bound. Empty ones at the end are left out.
    pub buckets: Vec<u64>,
}

impl Histogram {
    /// What was added since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let old = before.buckets.iter().copied().chain(std::iter::repeat(0));
        Self {
            count: self.count.saturating_sub(before.count),
            sum_us: self.sum_us.saturating_sub(before.sum_us),
            buckets: self.buckets.iter().zip(old).map(|(now, old)| now.saturating_sub(old)).collect(),
        }
    }

    /// The average, in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_us as f64 / self.count as f64 }
    }

    /// The time that a share (0 to 1) of all does not exceed, in microseconds: within its bucket, as if that were evenly
    /// filled.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> f64 {
        let wanted = share * self.buckets.iter().sum::<u64>() as f64;
        let (mut below, mut lower_us, mut upper_us) = (0.0, 0.0, 1.0);
        for count in &self.buckets {
            let count = *count as f64;
            if count > 0.0 && below + count >= wanted {
                return lower_us + (upper_us - lower_us) * (wanted - below) / count;
            }
            below += count;
            lower_us = upper_us;
            upper_us *= 2.0;
        }
        0.0
    }
}

/// The tables of an image that are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TableStats {
    /// Lookups that found their table in memory.
    pub hits: u64,
    /// Lookups that had to read it.
    pub misses: u64,
    /// Tables that made room for others.
    pub evictions: u64,
    /// Memory in use.
    pub used_bytes: u64,
    /// Memory that may be used.
    pub limit_bytes: u64,
}

/// Figures of one reactor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReactorStats {
    /// Its thread's name.
    pub name: String,
    /// Turns of its loop.
    pub turns: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// System calls made to submit requests or to fetch completions.
    pub system_calls: u64,
    /// Calls that workers made for it.
    pub worker_calls: u64,
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// One more than the last event's.
    pub number: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// What happened.
    pub kind: EventKind,
    /// The disk that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The export or job that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// More, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum EventKind {
    /// A disk was added.
    DiskAdded,
    /// A disk was removed.
    DiskRemoved,
    /// A disk has a new size.
    DiskResized,
    /// A disk's options were changed.
    DiskChanged,
    /// Requests of a disk wait, because the storage failed them.
    DiskHeld,
    /// Requests that waited are tried again.
    DiskResumed,
    /// A disk has other layers.
    LayersChanged,
    /// A disk is served at one more socket.
    ExportAdded,
    /// A disk is no longer served at a socket.
    ExportRemoved,
    /// A job was started.
    JobStarted,
    /// A job slows guests down, or takes longer than it was to.
    JobBehind,
    /// A job has ended.
    JobEnded,
    /// The daemon ends.
    ShuttingDown,
    /// Events were left out, because they were not fetched fast enough.
    EventsLost,
}
