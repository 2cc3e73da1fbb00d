//! TLS for NBD, on both sides.
//!
//! * [`Credentials`]: certificates in a directory, in the layout of QEMU's `tls-creds-x509`.
//! * [`shake_hands`]: agrees on keys, on a thread that may wait.
//! * [`Channel`]: what follows, without a thread: plain bytes in and out, for whoever has the socket.
//! * [`Socket`] and [`Timed`]: the socket, for one that does not wait, and for a peer that has a time limit.
//! * [`in_words`]: why a handshake or a connection failed, for a person.
//! * [`widen`]: room in the Unix sockets of connections, with TLS or without.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod channel;
mod credentials;
mod in_words;
mod room;
mod socket;
mod timed;

pub use channel::{Arrival, Channel, Over, copy_to, shake_hands};
pub use credentials::Credentials;
pub use in_words::in_words;
pub use room::widen;
pub use rustls::{ClientConfig, Connection, ServerConfig, ServerConnection};
pub use socket::Socket;
pub use timed::Timed;
