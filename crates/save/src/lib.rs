//! Saves and restores a running machine: the state of its memory and devices, and the contents of its disks, as one
//! pair.
//!
//! The machine is a QEMU that is reached over QMP. Its disks are those of a daemon with a control interface. A save
//! leaves a directory with the machine's state ([`StateFile`]) and a record of the disks that belong to it
//! ([`Record`]). The record is replaced in one step. So at any moment there is an old pair or a new one, even if
//! something is interrupted.
//!
//! * A new layer on each disk freezes it; the guest writes to that layer. Files that a record names never change while
//!   the record is valid.
//! * The guest's writes since the last save are taken back into the image while the machine waits, unless the user
//!   keeps the layers. Once the record names both, the layer and its image show the same contents, however far the
//!   taking back has come.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_save::{Machine, SaveOptions, save};
//! use std::path::Path;
//! use std::sync::atomic::AtomicBool;
//!
//! let machine = Machine::read(Path::new("machine.toml"))?;
//! let saved = save(&machine, &SaveOptions::new(false), &AtomicBool::new(false), &mut |_| ())?;
//! println!("the machine was saved in {:?}", saved.total);
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

#![forbid(unsafe_code)]

#[cfg(test)]
mod broken_off;
mod disks;
mod files;
mod machine;
mod own_layers;
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
pub use restore::{Restore, find, run, serve};
pub use save::{SaveOptions, Saved, save};
pub use state_file::StateFile;
