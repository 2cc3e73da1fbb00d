//! For tests only: stand-ins for the storage below a disk and for the guest above it.
//!
//! * [`SimStorage`], [`SimFile`], [`SimReactor`]: storage with a volatile cache, seeded completion order, [`Fault`]s
//!   and power cuts, at one moment or at every write and flush of a [`Recording`].
//! * [`ModelDisk`]: the data that a guest may read, now and after a power cut.
//! * [`Harness`] and [`conformance`]: the suite that every `Disk` must pass, on simulated or real reactors.
//! * [`Workload`]: seeded requests over several queues, checked against the model as they complete.
//! * [`PowerCutTest`], [`FaultTest`]: a workload with a power cut at every event, or with a fault in every operation.
//! * [`qcow2_check`]: an independent checker of qcow2 images.
//! * [`SectorHistory`], [`HistoryLoad`]: checks what each read of a sector returns while several queues work.
//! * [`WebServer`]: a server of one file, with faults. [`RbdStandIn`]: images without a real cluster, with faults.
//!   [`CephNode`]: a real cluster on one machine. [`UnmappableDirectory`]: a file system that maps no files.
//! * [`keep_log`]: the log of a test's process, for tests of what is logged.
//! * `schedules` and `histories` (with the feature `explore`): the order in which shuttle runs threads, and the values
//!   that a reader may see.

#![forbid(unsafe_code)]

pub mod conformance;
mod dice;
#[cfg(feature = "explore")]
pub mod histories;
#[cfg(feature = "explore")]
pub mod schedules;

mod ceph;
mod crash;
mod harness;
mod history;
mod history_load;
mod kept_log;
mod librbd;
mod model;
mod qcow2_check;
mod qemu_nbd;
mod request;
mod sim;
mod skips;
mod unmappable;
mod web_server;
mod workload;

pub use ceph::CephNode;
pub use crash::{CheckStorage, FaultTest, OpenDisk, OpenedDisk, PowerCutTest, Session, Summary};
pub use dice::{Dice, fill_seeded, mix};
pub use harness::{Harness, QueueId, SimHarness, ThreadHarness, Turn};
pub use history::{BegunWrite, Moment, SectorHistory, bytes_of};
pub use history_load::{HistoryLoad, RunningLoad};
pub use kept_log::{keep_log, kept_lines};
pub use librbd::RbdStandIn;
pub use model::{ModelDisk, stamped};
pub use qcow2_check::{Qcow2Report, qcow2_check};
pub use qemu_nbd::marked_as_qemu_sees;
pub use request::{Reply, Request};
pub use sim::{
    Fault, FaultAction, OpKind, Recording, Replay, SimFile, SimFileOptions, SimHandle, SimReactor, SimStorage,
};
pub use skips::skipped;
pub use unmappable::UnmappableDirectory;
pub use web_server::{Behaviour, Connection, WebServer, Wrap};
pub use workload::{GuestEvent, Story, Workload};
