//! Events.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// The number of the event: one more than the last.
    pub number: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// The kind of the event.
    pub kind: EventKind,
    /// The disk that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The export or job that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// A text for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The kind of the event.
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
    /// Requests that waited are retried.
    DiskResumed,
    /// A disk has other layers.
    LayersChanged,
    /// A disk is served at one more socket.
    ExportAdded,
    /// A disk is no longer served at a socket.
    ExportRemoved,
    /// A job was started.
    JobStarted,
    /// A job slows guests down, or takes longer than it should.
    JobBehind,
    /// A job has ended.
    JobEnded,
    /// The daemon ends.
    ShuttingDown,
    /// Events were dropped, because they were not fetched fast enough.
    EventsLost,
}
