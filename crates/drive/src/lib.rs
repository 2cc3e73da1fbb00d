//! Drives: a user's options of a disk, and the opener that turns them into a disk.
//!
//! No request passes through here. Commands and the daemon parse options with this crate, and open images with it. It
//! names the concrete engines, so that `image` need not know them.
//!
//! * [`DriveOptions`]: `file=disk.qcow2,cache=none,queues=4`, in two parts: [`DiskOptions`] describe the disk,
//!   [`ExportOptions`] how guests reach it. Errors list the valid keys or values.
//! * [`RunningChange`]: which options can change while guests use a disk.
//! * [`PassedDescriptors`]: images and sockets that a service manager opened, by its names.
//! * [`FilterOptions`]: `filter=delay:ms=5`, which may be repeated: filters of requests above the image.
//! * [`ImageName`]: an image as users of the image tool name it.
//! * [`open_disk`]: opens the disk that options describe. [`EngineOpener`]: opens images' files with an engine, a cache
//!   mode and QEMU's locks, or from a vhost-user server.
//! * [`parse_key_values`], [`parse_size`] and others: parsers of values, for all commands.
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

mod choices;
mod file_part;
mod filters;
mod help;
mod image_name;
mod keyval;
mod making;
mod opener;
mod options;
mod passed;
mod paths;
mod running;
mod shown;
mod size;
mod temporary;
mod throttling;
mod vhost_user;

pub use choices::switch as parse_switch;
pub use file_part::{FilePart, PartOpener};
pub use filters::{FilterOptions, Filtered};
pub use help::drive_keys;
pub use image_name::ImageName;
pub use keyval::{
    KeyValue, asks_for_help, escape, parse as parse_key_values, parse_options,
    parse_with_repeats as parse_key_values_with, unknown,
};
pub use making::{check_room, make_file, unmake_file};
pub use memory::Placement;
pub use opener::{EngineOpener, LOCK_TIMEOUT_S, OpenedDisk, kept_overlay, open_again, open_disk, open_disk_with};
pub use options::{
    DiskOptions, DriveFormat, DriveOptions, ExportOptions, LOCK_TIMEOUT_MAX_S, ParsedDrive, parse_socket_group,
    parse_socket_mode, socket_beside,
};
pub use passed::PassedDescriptors;
pub use paths::{absolute, with_whole_path};
pub use running::{RunningChange, THROTTLING};
pub use shown::{SHOWN_KEYS, ShownOptions};
pub use size::{human_size, is_size_out_of_range, parse_integer, parse_size};
pub use throttling::ThrottleOptions;
