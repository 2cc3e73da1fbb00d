//! The disk of an NBD server as a file: `nbd://HOST:PORT/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`. Whatever works on a file
//! works on it, with raw or any other format in it.
//!
//! One thread has the connection. Everybody else sends it calls, with copies of their data, and awaits the answer; a reactor
//! never waits for the network.
//!
//! * [`open`]: connects, and gives the file.
//! * [`NbdUri`]: where the server is, and what the disk is called there.
//! * `handshake`: what is agreed on; `calls`: what is asked of the connection's thread; `link`: that thread, which connects
//!   again when the server has gone; `replies`: bytes that arrive; `unflushed`: what is written once more after that.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod calls;
mod file;
mod handshake;
mod lane;
mod link;
mod replies;
mod unflushed;
mod uri;

pub use file::open;
pub use uri::NbdUri;
