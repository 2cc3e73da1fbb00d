//! The guest side: a virtio-blk driver over vhost-user, itself a Disk.
//!
//! It stands above the socket where a monitor and its guest would: [`Driver::connect`] speaks vhost-user with any
//! server, shares memory with it and starts its rings; each [`block::Disk::open_queue`] gives one ring to a reactor's
//! thread. The load generator and `ringdisk try` reach servers through it, Ringdisk's own and others alike.
//!
//! Memory from [`Driver::alloc`] is shared with the device, so operations on it are not copied.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_block::Disk;
//! use ringdisk_driver::{Driver, DriverOptions};
//! use std::path::Path;
//!
//! let options = DriverOptions::default().with(|options| options.queues = 4);
//! let driver = Driver::connect(Path::new("/run/disk.sock"), options)?;
//! println!("{} bytes", driver.info().size_bytes);
//! driver.disconnect()?;
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

#![forbid(unsafe_code)]

mod dma;
mod driver;
mod issue;
mod layout;
mod news;
mod options;
mod queue;
mod ring;
mod session;
mod watch;

pub use driver::{Counters, Driver};
pub use options::DriverOptions;
