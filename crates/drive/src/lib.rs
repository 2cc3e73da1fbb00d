//! Drives: what a user says about a disk, and the opener that makes a disk of it.
//!
//! No request passes through here. Commands and the daemon read options with this crate, and open images with it. It
//! names the concrete engines, so that `image` need not know them.
//!
//! * [`DriveOptions`]: `file=disk.qcow2,cache=none,queues=4`, in two parts: [`DiskOptions`] say what the disk is,
//!   [`ExportOptions`] how guests reach it. Errors list what would have been right.
//! * [`FilterOptions`]: `filter=delay:ms=5`, as often as one likes: what happens to requests above the image.
//! * [`open_disk`]: the disk that the options describe. [`EngineOpener`]: how images get their files, with an engine, a
//!   cache mode and QEMU's locks.
//! * [`parse_key_values`], [`parse_size`] and their like: how values are written, for all commands.

#![forbid(unsafe_code)]

mod filters;
mod keyval;
mod opener;
mod options;
mod size;

pub use filters::FilterOptions;
pub use keyval::{KeyValue, asks_for_help, escape, parse as parse_key_values, parse_options, unknown};
pub use opener::{EngineOpener, OpenedDisk, open_disk, open_disk_with};
pub use options::{DiskOptions, DriveFormat, DriveOptions, ExportOptions, ParsedDrive, socket_beside};
pub use size::{human_size, parse_integer, parse_size};
