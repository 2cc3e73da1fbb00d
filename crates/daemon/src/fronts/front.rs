//! What serves a disk: a vhost-user socket, or an export at an NBD server.

use super::servers::NbdFront;
use crate::state::status::NbdStatus;
use export_nbd::NbdExport;
use export_vhost_user::{Export, QueueLatency, RingStats, Surrender};

/// A front end of a disk.
pub(crate) enum Front {
    VhostUser(Export),
    Nbd(Box<NbdFront>),
}

/// Makes [`Front::stop`] wait no longer.
pub(crate) enum FrontSurrender {
    VhostUser(Surrender),
    Nbd(NbdExport),
}

impl Front {
    /// Ends the front end: waits for its guests' requests in flight, then disconnects them.
    pub(crate) fn stop(self) {
        match self {
            Self::VhostUser(export) => export.stop(),
            Self::Nbd(front) => front.stop(),
        }
    }

    /// As [`Front::stop`]. Returns the figures at its end.
    pub(crate) fn stop_counted(self) -> (Vec<RingStats>, QueueLatency) {
        match self {
            Self::VhostUser(export) => export.stop_counted(),
            Self::Nbd(front) => {
                let export = front.export.clone();
                front.stop();
                (vec![export.stats()], export.latency())
            }
        }
    }

    pub(crate) fn surrender(&self) -> FrontSurrender {
        match self {
            Self::VhostUser(export) => FrontSurrender::VhostUser(export.surrender()),
            Self::Nbd(front) => FrontSurrender::Nbd(front.export.clone()),
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_connected(),
            Self::Nbd(front) => front.export.connections() > 0,
        }
    }

    pub(crate) fn rings(&self) -> Vec<RingStats> {
        match self {
            Self::VhostUser(export) => export.stats(),
            Self::Nbd(front) => vec![front.export.stats()],
        }
    }

    /// Returns the bytes of the logical blocks that its guest sees.
    pub(crate) fn block_bytes(&self) -> u32 {
        match self {
            Self::VhostUser(export) => export.block_bytes(),
            // As the disk's own.
            Self::Nbd(_) => 0,
        }
    }

    pub(crate) fn ask_for_oldest(&self) {
        match self {
            Self::VhostUser(export) => export.ask_for_oldest(),
            Self::Nbd(front) => front.export.ask_for_oldest(),
        }
    }

    pub(crate) fn latency(&self) -> QueueLatency {
        match self {
            Self::VhostUser(export) => export.latency(),
            Self::Nbd(front) => front.export.latency(),
        }
    }

    pub(crate) fn nbd(&self) -> Option<NbdStatus> {
        match self {
            Self::VhostUser(_) => None,
            Self::Nbd(front) => Some(front.status()),
        }
    }
}

impl FrontSurrender {
    /// Returns how many requests have ended.
    pub(crate) fn ended(&self) -> u64 {
        let latency = match self {
            Self::VhostUser(surrender) => surrender.latency(),
            Self::Nbd(export) => export.latency(),
        };
        latency.kinds.iter().map(|kind| kind.whole.count()).fold(0, u64::wrapping_add)
    }

    pub(crate) fn give_up(&self) {
        match self {
            Self::VhostUser(surrender) => surrender.give_up(),
            Self::Nbd(export) => export.give_up(),
        }
    }
}
