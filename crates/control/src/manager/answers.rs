//! Puts what the daemon says of its disks and jobs into the interface's words.

use crate::api::{Counters, Disk, Export, Held, Job, JobKind, JobState, Rounds};
use crate::record::Record;
use daemon::{DiskStatus, ExportStatus, JobStatus};
use std::time::Duration;

pub(super) fn to_disk(status: DiskStatus, record: &Record, exports: &[Export]) -> Disk {
    let options = record.disk(&status.name).map(|disk| disk.options.clone()).unwrap_or_default();
    Disk {
        exports: exports.iter().filter(|export| export.disk == status.name).cloned().collect(),
        name: status.name,
        file: status.file,
        size_bytes: status.info.size_bytes,
        read_only: status.info.read_only,
        serial: status.info.serial,
        volatile_cache: status.info.volatile_cache,
        logical_block_bytes: status.info.logical_block_bytes,
        layers: status.layers,
        held: status.held.map(|held| Held { requests: held.requests as u64, error: held.error.to_string() }),
        options,
    }
}

pub(super) fn counters_of(export: &ExportStatus) -> Counters {
    export.rings.iter().map(to_counters).fold(Counters::default(), Counters::plus)
}

pub(super) fn to_counters(ring: &daemon::RingStats) -> Counters {
    Counters {
        requests: ring.requests,
        batches: ring.batches,
        notifications: ring.notifications,
        notifications_avoided: ring.notifications_avoided,
        failed: ring.failed,
        faults: ring.faults,
        io_errors: ring.io_errors,
        no_space: ring.no_space,
    }
}

/// Returns `None` for a job that makes no passes.
fn rounds_of(rounds: &image::CopyRounds) -> Option<Rounds> {
    let micros = |duration: std::time::Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    (rounds.rounds > 0).then(|| Rounds {
        rounds: rounds.rounds,
        left_bytes: rounds.left_bytes,
        longest_stall_us: micros(rounds.longest_stall),
        throttled_us: micros(rounds.throttled),
        late: rounds.is_late,
    })
}

/// Rounds up, because a job that goes on needs at least a second.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0)).max(1)
}

pub(super) fn to_job(status: JobStatus) -> Job {
    let (state, error) = match status.state {
        daemon::JobState::Running => (JobState::Running, None),
        daemon::JobState::Paused => (JobState::Paused, None),
        daemon::JobState::Cancelling => (JobState::Cancelling, None),
        daemon::JobState::Done => (JobState::Done, None),
        daemon::JobState::Cancelled => (JobState::Cancelled, None),
        daemon::JobState::Failed(error) => (JobState::Failed, Some(error)),
        _ => (JobState::Running, None),
    };
    let kind = match status.kind {
        daemon::JobKind::TakeOverlayBack => JobKind::Commit,
        daemon::JobKind::MoveOnto => JobKind::Stream,
        daemon::JobKind::Rebase => JobKind::Rebase,
        daemon::JobKind::Compact => JobKind::Compact,
        daemon::JobKind::Mirror => JobKind::Mirror,
        daemon::JobKind::Backup => JobKind::Backup,
        _ => JobKind::Other,
    };
    Job {
        id: status.id.number(),
        kind,
        disk: status.disk,
        state,
        error,
        done_bytes: status.done_bytes,
        eta_s: status.time_left.map(whole_seconds),
        total_bytes: status.total_bytes,
        rounds: rounds_of(&status.rounds),
        outcome: status.outcome,
    }
}
