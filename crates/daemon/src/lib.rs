//! What ringdisk serves: disks, their exports, and the reactors' threads that they live on.
//!
//! A request never passes through here: the daemon opens images with the engines that their users chose, hands each
//! disk with some reactors to an export, and takes all of it down again in the right order. With the program and the
//! tests it is the only room that names a concrete engine.
//!
//! * [`DriveOptions`]: what a user says about one drive, and the errors that help to say it right.
//! * [`EngineOpener`]: how images get their files: an engine, a cache mode, and QEMU's locks.
//! * [`Daemon`]: reactors, disks and exports; disks come and go while it runs.
//! * [`attach_flags`], [`Pidfile`], [`notify`]: what a program that serves tells the world.

#![forbid(unsafe_code)]

mod attach;
mod daemon;
mod drive;
mod keyval;
mod notify;
mod opener;
mod pidfile;
mod size;

pub use self::daemon::{Daemon, DaemonConfig, DiskId, DiskStatus};
pub use attach::{Attachment, absolute, attach_flags, qemu as qemu_flags, quote};
pub use drive::{DriveFormat, DriveOptions, ParsedDrive};
pub use keyval::{KeyValue, asks_for_help, escape, parse as parse_key_values, parse_options, unknown};
pub use notify::notify;
pub use opener::{EngineOpener, OpenedDisk, open_drive};
pub use pidfile::Pidfile;
pub use size::{human_size, parse_integer, parse_size};
