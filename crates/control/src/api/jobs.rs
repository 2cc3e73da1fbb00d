//! Long work on disks: how it is asked for, and what is told of it.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

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
    /// What it has come to, where there is more to say than that it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Bytes that it has dealt with. Rises only.
    pub done_bytes: u64,
    /// Bytes to deal with. Rises only.
    pub total_bytes: u64,
    /// Seconds until it is done, if it goes on as in the last ten. Not there where nobody can say: it has just begun, hangs, is
    /// paused, or has ended. What guests write meanwhile is not foreseen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
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
    /// Moves what lies at the end of the top layer's file down, and makes the file shorter.
    Compact,
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
