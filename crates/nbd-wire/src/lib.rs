//! The bytes of the NBD protocol, and its URIs: layouts only, no sockets and no state. The server `export-nbd` and the
//! client `file-nbd` share it, and `image`, which compares names of disks.
//!
//! Numbers and layouts are those of the protocol's own document (`doc/proto.md` of the project NetworkBlockDevice/nbd),
//! with structured replies, extended headers and metadata contexts. All integers are big-endian.
//!
//! * [`numbers`]: magic numbers, options, commands, flags, error numbers.
//! * [`Reader`]: reads a peer's bytes, and checks each length.
//! * [`option`]: options of the handshake and their replies.
//! * [`request`]: commands of the transmission phase.
//! * [`reply`]: replies of the transmission phase.
//! * [`Uri`]: the name of a disk, and the [`Server`] that has it.
//!
//! ```
//! use ringdisk_nbd_wire::{Reader, WireError, numbers::command, request::Request};
//!
//! let read = Request { flags: 0, command: command::READ, cookie: 7, offset: 4096, length_bytes: 512 };
//! let mut bytes = Vec::new();
//! read.put(&mut bytes, false);
//! assert_eq!(Request::read(&mut Reader::new(&bytes[..20]), false)?, None, "the rest has not arrived");
//! assert_eq!(Request::read(&mut Reader::new(&bytes), false)?, Some(read));
//! # Ok::<(), WireError>(())
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod error;
pub mod numbers;
pub mod option;
mod reader;
pub mod reply;
pub mod request;
mod uri;

pub use error::WireError;
pub use reader::Reader;
pub use uri::{Server, Uri};
