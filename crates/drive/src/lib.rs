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
//!
//! ```no_run
//! # use {block as ringdisk_block, image as ringdisk_image};
//! use ringdisk_drive::{DiskOptions, open_disk};
//! use ringdisk_image::BackingPolicy;
//!
//! let opened = open_disk(&DiskOptions::of_file("disk.qcow2"), BackingPolicy::SameDir, &[])?;
//! println!("{} bytes, in {}", opened.disk.info().size_bytes, opened.layers().join(" over "));
//! opened.close()?;
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

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
