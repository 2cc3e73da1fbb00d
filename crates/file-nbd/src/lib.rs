//! The disk of an NBD server as a file: `nbd://HOST:PORT/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`. All code that uses
//! files can use it, with raw or any other format: on the path of a request it stands in the place of the engine's files,
//! below `image`.
//!
//! One thread owns the connections. All others send it calls, with copies of data to be written, and await the answer;
//! a reactor never waits for the network.
//!
//! * [`open`]: connects, and gives the file.
//! * [`NbdUri`]: the place of the server, and the name of the disk there.
//! * `handshake`: the negotiation; `calls`: calls to the connections' thread; `link`: that thread, which connects again
//!   when the server has gone; `replies`: bytes that arrive; `unflushed`: writes that are repeated after a new
//!   connection.
//!
//! ```no_run
//! # use {block as ringdisk_block, memory as ringdisk_memory};
//! use ringdisk_block::File;
//! use ringdisk_file_nbd::{NbdUri, open};
//! use ringdisk_memory::BufferAccount;
//!
//! let file = open(&NbdUri::parse("nbd://server/backup")?, true, &BufferAccount::UNLIMITED)?;
//! println!("{} bytes", file.length_bytes()?);
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod calls;
mod file;
mod filled;
mod handshake;
mod lane;
mod link;
mod replies;
mod stream;
mod unflushed;
mod uri;

pub use file::open;
pub use uri::NbdUri;
