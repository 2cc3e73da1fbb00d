//! What a daemon tells about its disks and exports.

use crate::attach::Attachment;
use block::DiskInfo;
use export_vhost_user::RingStats;
use image::TableCacheStats;
use std::fmt;

/// Names a disk of a daemon, also after it is gone: no number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u64);

/// Names an export of a daemon, also after it is gone: no number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExportId(pub(crate) u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a disk is and how it is doing.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DiskStatus {
    /// The number that names it in calls.
    pub id: NodeId,
    /// The name that it was given, or `disk0`, `disk1`...
    pub name: String,
    /// The file's name, or what stands for it.
    pub file: String,
    /// Size, flags, serial.
    pub info: DiskInfo,
    /// One line a layer: format, file, engine and why.
    pub layers: Vec<String>,
    /// The tables in memory of an image that has some.
    pub tables: Option<TableCacheStats>,
}

/// Where a disk is served and how that is going.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExportStatus {
    /// The number that names it in calls.
    pub id: ExportId,
    /// The disk that it serves.
    pub node: NodeId,
    /// Its guests cannot write, because of the disk or of the export.
    pub read_only: bool,
    /// What a monitor has to know.
    pub attachment: Attachment,
    /// Counters of each of its rings.
    pub rings: Vec<RingStats>,
}
