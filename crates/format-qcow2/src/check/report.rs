//! The output of a check: findings and progress during the check, counts at its end.

/// The counts of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// Errors that may cost data.
    pub corruptions: u64,
    /// Clusters whose refcount is higher than their references.
    pub leaks: u64,
    /// Errors that kept parts from being checked.
    pub check_errors: u64,
    /// Guest clusters of the disk.
    pub total_clusters: u64,
    /// Guest clusters that have host clusters.
    pub allocated_clusters: u64,
    /// Allocated clusters that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Compressed clusters.
    pub compressed_clusters: u64,
    /// The end of the last host cluster in use.
    pub image_end_offset: u64,
    /// Errors that may cost data and that a repair has corrected.
    pub corruptions_fixed: u64,
    /// Leaked clusters that a repair has freed.
    pub leaks_fixed: u64,
}

/// An event of a running check.
#[derive(Debug)]
pub enum CheckEvent {
    /// An error, described.
    Finding(String),
    /// The steps done, and their total.
    Progress(u64, u64),
}

/// A callback for events; it returns false to stop the check.
pub type CheckWatch<'a> = dyn FnMut(CheckEvent) -> bool + 'a;
