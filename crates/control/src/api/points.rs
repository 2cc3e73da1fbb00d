//! Bitmaps, internal snapshots and backups of running disks.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// The persistent dirty bitmaps of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Bitmaps {
    /// Of all its layers, the top layer's first.
    pub bitmaps: Vec<DirtyBitmap>,
}

/// A persistent dirty bitmap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DirtyBitmap {
    /// Its name.
    pub name: String,
    /// The layer that it belongs to.
    pub file: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// Writes are noted in it, while its layer is the top.
    pub recording: bool,
    /// Whoever used it did not come to an end: it can only be removed.
    pub inconsistent: bool,
    /// Bytes of the disk that it calls dirty; none where it is inconsistent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
}

/// Changes to bitmaps: all of them, in order, or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeBitmaps {
    /// The changes.
    pub actions: Vec<BitmapChange>,
}

/// A change to one bitmap of the top layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapChange {
    /// The bitmap.
    pub bitmap: String,
    /// What is done to it.
    pub action: BitmapVerb,
    /// For `add`: bytes of the disk for each bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<u64>,
    /// For `merge`: the bitmap whose bits are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// What is done to a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BitmapVerb {
    /// Makes it, enabled and empty.
    Add,
    /// Removes it.
    Remove,
    /// Notes writes from now on.
    Enable,
    /// Notes writes no more.
    Disable,
    /// Clears its bits.
    Clear,
    /// Adds the bits of another one.
    Merge,
}

/// The internal snapshots of a disk's top layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InternalSnapshots {
    /// In the order of the image.
    pub snapshots: Vec<InternalSnapshot>,
}

/// An internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InternalSnapshot {
    /// Its number, as text.
    pub id: String,
    /// Its name.
    pub name: String,
    /// When it was taken: seconds since 1970.
    pub date_seconds: u32,
    /// Bytes of the disk then.
    pub disk_bytes: u64,
    /// Bytes of the machine's state that it keeps.
    #[serde(default)]
    pub vm_state_bytes: u64,
}

/// A snapshot to be taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// Its name.
    pub name: String,
    /// The state of a machine that it keeps, too: all of both, or nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_state: Option<VmState>,
}

/// The state of a machine, in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmState {
    /// The file, which the daemon must be able to read. It begins with the state.
    #[schema(value_type = String)]
    pub file: PathBuf,
    /// Bytes of the state.
    pub length_bytes: u64,
}

/// What a backup copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackupMode {
    /// All that the guest sees.
    Full,
    /// What the top layer holds.
    Top,
    /// What a bitmap calls dirty.
    Incremental,
}

/// How a disk is backed up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupDisk {
    /// The image to copy to: a path, or another name that a drive takes as its file.
    pub target: String,
    /// Its format; qcow2 where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// What is copied; incremental with a bitmap and full without one where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<BackupMode>,
    /// The bitmap that says what has changed, and that is cleared on success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// The target is there, and is overwritten.
    #[serde(default)]
    pub existing: bool,
    /// The earlier backup that a new target rests on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// Where the fleece lies; beside the disk's image where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub fleece_directory: Option<PathBuf>,
    /// How large the fleece may become.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece_quota_bytes: Option<u64>,
    /// The most bytes that are copied in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}
