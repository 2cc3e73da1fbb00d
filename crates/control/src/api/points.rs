//! Bitmaps, internal snapshots and backups of running disks.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// The dirty bitmaps of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Bitmaps {
    /// The bitmaps of all layers, the top layer's first.
    pub bitmaps: Vec<DirtyBitmap>,
}

/// A dirty bitmap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DirtyBitmap {
    /// Its name.
    pub name: String,
    /// The layer that it belongs to.
    pub file: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// Whether it records writes while its layer is the top.
    pub recording: bool,
    /// Whether it is inconsistent, because its user did not end cleanly. It can then only be removed.
    pub inconsistent: bool,
    /// Whether it is kept in the file. One of a raw image is in memory, and gone when the disk is closed.
    pub persistent: bool,
    /// Bytes of the disk that it calls dirty; none if it is inconsistent.
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
    /// The action.
    pub action: BitmapVerb,
    /// For `add`: bytes of the disk for each bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<u64>,
    /// For `merge`: the bitmap whose bits are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// An action on a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BitmapVerb {
    /// Adds it, enabled and empty.
    Add,
    /// Removes it.
    Remove,
    /// Starts to record writes.
    Enable,
    /// Stops recording writes.
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
    /// The size of the disk at that moment, in bytes.
    pub disk_bytes: u64,
    /// The length of the machine's state in it, in bytes.
    #[serde(default)]
    pub vm_state_bytes: u64,
}

/// A snapshot to take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// Its name.
    pub name: String,
    /// The state of a machine to keep with it: both are kept, or neither.
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

/// The part of the disk that a backup copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackupMode {
    /// All that the guest sees.
    Full,
    /// The data of the top layer.
    Top,
    /// The data that a bitmap calls dirty.
    Incremental,
}

/// How a disk is backed up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupDisk {
    /// The image to copy to: a path, or another name that a drive takes as its file. A new file has the name with `.part`
    /// behind it until the backup is whole.
    pub target: String,
    /// Its format; qcow2 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// What is copied. Without a bitmap, the default is full. With one, it is what was written since the last backup with
    /// that bitmap, and the new target rests on that backup; the first such backup is full. With `base` or `existing`, it
    /// is incremental.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<BackupMode>,
    /// The bitmap that says what has changed. It is cleared on success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// Whether the target exists and is overwritten. Otherwise it is made, also in a cluster (`rbd:POOL/IMAGE`); the disk of
    /// an NBD server must be empty at its beginning then.
    #[serde(default)]
    pub existing: bool,
    /// The earlier backup that a new target rests on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// The directory of the fleece; by default beside the disk's image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub fleece_directory: Option<PathBuf>,
    /// The largest size of the fleece, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece_quota_bytes: Option<u64>,
    /// The most bytes that are copied in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}
