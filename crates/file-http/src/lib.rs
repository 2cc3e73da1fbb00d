//! A file on a web server, read in parts: `https://HOST/PATH`. Whatever reads a file reads it, with any format in it.
//!
//! The file is pinned when it is opened: its entity tag, or its length and date. A file that changes at its server is an
//! error from then on, never a mix of two.
//!
//! * [`open`]: asks the server, or the cache, and gives the file.
//! * [`HttpUrl`]: where the file is, and how it is read.
//! * `remote`: parts of the file from its server, asked for again until a time limit; `client`: one request; `answer`: what
//!   the server's headers say; `secrets`: how a user is made known to it.
//! * `blocks`: blocks in memory, those on their way, and read-ahead; `cache`: blocks on the local disk.

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

pub use file::open;
pub use url::HttpUrl;
