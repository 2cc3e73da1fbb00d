//! What ringdisk serves: disks, their exports, and the reactors' threads that they live on.
//!
//! No request passes through here. The daemon opens disks by their drive options, hands each with some reactors to an
//! export, and takes all of it down again in the right order.
//!
//! * [`Daemon`]: reactors, disks and exports; disks come and go while it runs.
//! * [`attach_flags`], [`Pidfile`], [`notify`]: what a program that serves tells the world.

#![forbid(unsafe_code)]

mod attach;
mod daemon;
mod notify;
mod pidfile;
mod status;
mod table;

pub use self::daemon::{Daemon, DaemonConfig};
pub use attach::{Attachment, absolute, attach_flags, qemu as qemu_flags, quote};
pub use notify::notify;
pub use pidfile::Pidfile;
pub use status::{DiskStatus, ExportId, ExportStatus, NodeId};
