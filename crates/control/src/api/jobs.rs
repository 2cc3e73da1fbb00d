//! Long work on disks: the requests, and the state of jobs.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// Which layers are committed into the layer below them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CommitDisk {
    /// The number of layers, from `top` down; 1 by default. Not with `base`.
    #[serde(default = "one")]
    pub layers: usize,
    /// The uppermost layer that goes; the disk's top by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub top: Option<PathBuf>,
    /// The layer that takes their data; all layers between it and `top` go, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// The time limit in milliseconds, however fast guests write: they are slowed down if necessary. For the disk's top.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
    /// The longest delay of a guest's request because of the job, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<u64>,
}

/// How a disk is copied to another image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MirrorDisk {
    /// The file of the new image: a path, or a name such as `rbd:POOL/IMAGE` or `nbd://HOST/EXPORT`. It must not exist,
    /// unless `existing` says so. The disk of an NBD server must be empty at its beginning then. A new file has the
    /// name with `.part` behind it until it holds everything.
    #[schema(value_type = String)]
    pub target: PathBuf,
    /// Its format, `raw` or `qcow2`; by default that of the disk's top layer. An existing image needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Whether the image exists, as large as the disk, and is overwritten.
    #[serde(default)]
    pub existing: bool,
    /// Whether only the top layer is copied: the new image rests on the same layers.
    #[serde(default)]
    pub top: bool,
    /// Whether the new image stays a copy. Otherwise the disk moves to it.
    #[serde(default)]
    pub keep: bool,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// The time limit in milliseconds, however fast guests write: they are slowed down if necessary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
    /// The longest delay of a guest's request because of the job, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<u64>,
}

impl Default for CommitDisk {
    fn default() -> Self {
        Self { layers: one(), top: None, base: None, bytes_per_second: None, within_ms: None, stall_ms: None }
    }
}

fn one() -> usize {
    1
}

/// How the data of lower layers are copied into the top layer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamDisk {
    /// The layer that stays below the top; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// The new backing file of a disk's top layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RebaseDisk {
    /// The image.
    #[schema(value_type = String)]
    pub base: PathBuf,
    /// Its format; guessed by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The most bytes that are moved in a second while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// How a disk's file is made shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CompactDisk {
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

/// All running jobs, and the last that have ended.
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
    /// Its number in calls.
    pub id: u64,
    /// Its kind.
    pub kind: JobKind,
    /// The disk.
    pub disk: String,
    /// Its state.
    pub state: JobState,
    /// Why it failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Its result, if it has one. While it runs, also what somebody has to put right before it goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Bytes that are done. Never falls.
    pub done_bytes: u64,
    /// Bytes in total. Never falls.
    pub total_bytes: u64,
    /// Seconds until it is done, at the rate of the last ten seconds. Absent if it has just begun, makes no progress, is
    /// paused, or has ended. What guests will write meanwhile is not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// The progress of its passes, if it copies a disk that guests write to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<Rounds>,
}

/// The passes of a copy of a disk that guests write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rounds {
    /// The number of passes, the current one included.
    pub rounds: u64,
    /// Bytes that are left of this pass.
    pub left_bytes: u64,
    /// The longest delay of a guest's request because of the job, in microseconds.
    pub longest_stall_us: u64,
    /// How long guests' requests had to wait so that the copy gets ahead: the sum, in microseconds.
    pub throttled_us: u64,
    /// Whether it takes longer than it should.
    pub late: bool,
}

/// The kind of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum JobKind {
    /// Copies layers into the layer below them, and takes them off.
    Commit,
    /// Copies the data of lower layers into the top layer, which then rests on others, or on none.
    Stream,
    /// Gives the top layer another backing file, and copies what the guest would else see changed.
    Rebase,
    /// Copies a disk to another image, which may take its place.
    Mirror,
    /// Copies the disk as it was at one moment to another image.
    Backup,
    /// Moves clusters from the end of the top layer's file into holes, and makes the file shorter.
    Compact,
    /// A kind that this version of the interface does not know.
    Other,
}

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum JobState {
    /// It runs.
    Running,
    /// It waits until it is resumed.
    Paused,
    /// It was asked to stop, and has not ended. If it is nearly done, it may still finish.
    Cancelling,
    /// It has finished.
    Done,
    /// It failed. The disk keeps its layers.
    Failed,
    /// It was cancelled. The disk keeps its layers.
    Cancelled,
}

impl JobState {
    /// Whether the job has not ended.
    #[must_use]
    pub fn is_under_way(self) -> bool {
        matches!(self, Self::Running | Self::Paused | Self::Cancelling)
    }
}
