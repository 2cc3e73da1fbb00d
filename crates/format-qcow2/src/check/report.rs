//! What a check tells: findings and progress on the way, counts at the end.

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// What may cost data.
    pub corruptions: u64,
    /// Clusters that are counted more often than they are referred to.
    pub leaks: u64,
    /// What could not be checked.
    pub check_errors: u64,
    /// Guest clusters of the disk.
    pub total_clusters: u64,
    /// Guest clusters that have host clusters.
    pub allocated_clusters: u64,
    /// Those that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Those that are compressed.
    pub compressed_clusters: u64,
    /// The end of the last host cluster in use.
    pub image_end_offset: u64,
    /// What a repair has set right of what may cost data.
    pub corruptions_fixed: u64,
    /// Leaked clusters that a repair has freed.
    pub leaks_fixed: u64,
}

/// Told while a check goes on.
#[derive(Debug)]
pub enum CheckEvent {
    /// Something is wrong.
    Finding(String),
    /// Steps done, and in all.
    Progress(u64, u64),
}

/// Told of events; returns false to stop the check.
pub type CheckWatch<'a> = dyn FnMut(CheckEvent) -> bool + 'a;
