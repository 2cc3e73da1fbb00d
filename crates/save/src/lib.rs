//! Saves a running machine, and restores it: what the machine's memory and devices were, and what its disks held, as one
//! pair.
//!
//! The machine is a QEMU that is reached over QMP. Its disks are those of a daemon with a control interface. A save leaves a
//! directory with the machine's state ([`StateFile`]) and a record of the disks that belong to it ([`Record`]). The record
//! is replaced in one step. So there is an old pair or a new one at any moment, whatever is interrupted.
//!
//! * The disks are frozen by a new layer on each of them; the guest goes on above it. What a record names never changes while
//!   the record stands.
//! * What a guest wrote since the last save is taken back into its image while the machine waits, unless it is kept. From
//!   the moment that the record names both, the layer and its image show the same, however far that has come.

#![forbid(unsafe_code)]

mod disks;
mod files;
mod into_image;
mod machine;
#[cfg(test)]
mod power_cut;
mod progress;
mod qmp;
mod record;
mod restore;
mod save;
mod state_file;

pub use machine::Machine;
pub use progress::{Moment, Step};
pub use qmp::Qmp;
pub use record::{Record, SavedDisk};
pub use restore::{Restore, find, run};
pub use save::{SaveOptions, Saved, save};
pub use state_file::StateFile;
