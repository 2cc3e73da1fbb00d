//! Disks, their exports, jobs on disks, and the reactors' threads that they live on.
//!
//! No request passes through here. The daemon opens disks by their drive options, hands them with reactors to exports,
//! and takes all of it down again in the right order.
//!
//! * [`Daemon`]: reactors, disks, exports and jobs; all but reactors come and go while it runs.
//! * [`attach_flags`], [`Pidfile`], [`notify()`]: how a serving program tells others about itself.
//!
//! ```no_run
//! # use {block as ringdisk_block, drive as ringdisk_drive};
//! use ringdisk_daemon::{Daemon, DaemonConfig};
//! use ringdisk_drive::DriveOptions;
//!
//! let daemon = Daemon::start(DaemonConfig::default())?;
//! daemon.add(&DriveOptions::of_file("disk.qcow2"))?;
//! // Guests connect at disk.qcow2.sock until the shutdown.
//! daemon.shutdown()?;
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

#![forbid(unsafe_code)]

mod calls;
mod daemon;
mod fronts;
mod hang;
mod jobs;
mod notify;
mod pidfile;
mod state;
mod table;

pub use self::daemon::{Daemon, DaemonConfig, GIVE_UP_AFTER};
pub use block::Part;
pub use calls::mirror::{MirrorOptions, MirrorSwitch};
pub use engine::sync_directory_of;
pub use export_vhost_user::{KindLatency, LatencyHistogram, QueueLatency, RingStats};
pub use jobs::backup::{BackupMode, BackupOptions, BackupRecord, LastBackup, WholeBackup};
pub use jobs::commit::{CommitOptions, CommitRecord};
pub use jobs::fleece::FleeceRecord;
pub use jobs::layers::{BaseRecord, TakenOff};
pub use jobs::made::{name_until_whole, refuse_part};
pub use notify::{notify, watchdog_interval};
pub use pidfile::Pidfile;
pub use state::attach::{Attachment, attach_flags, quote};
pub use state::file_identity::FileIdentity;
pub use state::nbd_options::{NbdAddress, NbdOptions, NbdTls, SocketAccess};
pub use state::status::{DiskStatus, ExportId, ExportStatus, JobId, JobKind, JobState, JobStatus, NbdStatus, NodeId};
