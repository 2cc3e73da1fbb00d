//! Disk images for programs that embed them.
//!
//! A [`Disk`] is an open image: raw, or qcow2 with all layers below it. Its operations run on the disk's own thread, at
//! the speed of the host's storage. Each returns an [`Operation`], which is a future for any executor.
//! [`Operation::wait`] waits for it without an executor.
//!
//! ```
//! # fn main() -> ringdisk_disk::Result<()> {
//! # let directory = std::env::temp_dir().join(format!("ringdisk-disk-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&directory).unwrap();
//! # let path = directory.join("disk.raw");
//! # std::fs::write(&path, [0; 65536]).unwrap();
//! use ringdisk_disk::Options;
//!
//! let disk = Options::path(&path).format("raw")?.open()?;
//! disk.write(4096, &[7; 512][..]).wait()?;
//! disk.flush().wait()?;
//! let bytes = disk.read(4096, 1024).wait()?;
//! assert_eq!((bytes[0], bytes[512]), (7, 0));
//! disk.close()?;
//! # std::fs::remove_dir_all(&directory).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! The same in an async function:
//!
//! ```
//! use ringdisk_disk::{Disk, Result};
//!
//! async fn copy_first_sector(disk: &Disk) -> Result<()> {
//!     let sector = disk.read(0, 512).await?;
//!     disk.write(512, sector).await?;
//!     disk.flush().await
//! }
//! # fn is_send(future: impl Send) { drop(future) }
//! # fn check(disk: &Disk) { is_send(copy_first_sector(disk)) }
//! ```
//!
//! An operation begins when it is called, not when it is first polled, and owns the memory that it reads or writes. So
//! a future may be dropped at any time: the operation still ends normally, and nothing is corrupted.
//!
//! [`Disk::map`] opens a range for access without operations: to look at bytes where they lie, or to prepare new bytes
//! that the disk then takes over.
//!
//! An image may name files (its backing file, for instance) only in its own directory, unless
//! [`Options::allow_backing`] or [`Options::also_allow`] allow others.

#![forbid(unsafe_code)]

mod buffer;
mod disk;
mod map;
mod operation;
mod options;

pub use block::{Error, ErrorKind, Result};
pub use buffer::Buffer;
pub use disk::Disk;
pub use image::BackingPolicy;
pub use map::{Access, Map};
pub use memory::{BufferAccount, BufferBudget};
pub use operation::Operation;
pub use options::Options;
