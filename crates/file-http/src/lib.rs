//! A file on a web server, read in parts: `https://HOST/PATH`. All code that reads files can read it, with any image
//! format: on the path of a request it stands in the place of the engine's files, below `image`.
//!
//! The file is pinned when it is opened: its entity tag, or its length and date. If the file changes at its server,
//! every read fails from then on. Reads never mix two versions.
//!
//! * [`open`]: asks the server, or the cache, and gives the file.
//! * [`HttpUrl`]: where the file is, and how it is read.
//! * `remote`: parts of the file from its server, retried until a time limit; `client`: one request; `answer`: the
//!   server's headers; `secrets`: the user's credentials.
//! * `blocks`: blocks in memory, blocks being fetched, and read-ahead; `cache`: blocks on the local disk.
//!
//! ```no_run
//! # use {block as ringdisk_block, memory as ringdisk_memory};
//! use ringdisk_block::File;
//! use ringdisk_file_http::{HttpUrl, open};
//! use ringdisk_memory::BufferAccount;
//!
//! let file = open(&HttpUrl::parse("https://images.example/base.qcow2")?, true, &BufferAccount::UNLIMITED)?;
//! println!("{} bytes", file.length_bytes()?);
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod answer;
mod blocks;
mod cache;
mod client;
mod file;
mod remote;
mod runtime;
mod secrets;
mod url;

pub use file::{open, open_anew};
pub use url::HttpUrl;
