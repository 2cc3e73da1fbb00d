//! The guest's side: a virtio-blk driver over vhost-user, which is itself a [`block::Disk`].
//!
//! It takes the place of a monitor and its guest at the socket. [`Driver::connect`] speaks vhost-user with any server,
//! shares memory with it, and starts its rings. Each [`block::Disk::open_queue`] gives one ring to a reactor's thread.
//! The load generator, `ringdisk try` and the image commands (`vhost-user:SOCKET`) reach servers through it, Ringdisk's
//! own and others. Another [`Transport`] leads to other devices.
//!
//! Memory from [`Driver::alloc`] is shared with the device, so operations on it are not copied.
//!
//! Two paths lead from a queue to its ring, see [`DriverPath`]. On both, a flush covers all requests that ended before
//! it, durable writes are durable, and what does not fit into the ring waits in its place.
//!
//! ```no_run
//! # use {block as ringdisk_block, engine as ringdisk_engine};
//! use ringdisk_block::{Disk, DiskIo, ReactorCtx, Task, run_and_wait};
//! use ringdisk_driver::{Driver, DriverOptions, DriverPath};
//! use ringdisk_engine::{Reactor, ReactorConfig};
//! use std::sync::mpsc::channel;
//!
//! let options = DriverOptions::default().with(|options| options.path = DriverPath::Request);
//! let driver = std::sync::Arc::new(Driver::connect("/run/disk.sock", options)?);
//! println!("{} bytes, at most {} pieces a request", driver.info().size_bytes, driver.facts().max_segments);
//!
//! // A thread whose tasks read the disk.
//! let reactor = Reactor::spawn(ReactorConfig::default())?;
//! let (sender, found) = channel();
//! let disk = std::sync::Arc::clone(&driver);
//! run_and_wait(reactor.handle().as_ref(), move |ctx| {
//!     let io = DiskIo::open(disk.as_ref(), ctx)?;
//!     ctx.spawn(Task::new(async move {
//!         let mut block = memory::AlignedBuf::zeroed(4096);
//!         let read = io.read(0, &mut block, 4096).await;
//!         let _ = sender.send(read.map(|()| block));
//!     }));
//!     Ok::<(), ringdisk_block::Error>(())
//! })??;
//! let first_block = found.recv().expect("the task ends")?;
//! assert_eq!(first_block.len(), 4096);
//! reactor.stop()?;
//! driver.disconnect()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod cache;
mod control;
mod dma;
mod driver;
mod facts;
mod inner;
mod issue;
mod layout;
mod news;
mod options;
mod questions;
mod queue;
mod queue_fds;
mod ring;
mod rules;
mod scheduler;
mod session;
mod transport;
mod vhost_user;
mod watch;

pub use driver::{Counters, Driver};
pub use facts::DeviceFacts;
pub use options::{DriverOptions, DriverPath};
pub use queue_fds::QueueEvents;
pub use transport::{Link, QueueSetup, SharedMemory, Transport};

#[cfg(test)]
extern crate self as ringdisk_driver;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
#[cfg(test)]
mod no_memory_tests;
