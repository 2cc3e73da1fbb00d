//! TLS for NBD, on both sides.
//!
//! * [`Credentials`]: certificates in a directory, in the layout of QEMU's `tls-creds-x509`.
//! * [`SharedKeys`]: keys that both sides have, in a file as QEMU's `tls-creds-psk` has it. The sessions are those of GnuTLS,
//!   which is loaded when the first is made (`ffi`).
//! * [`ServerTls`], [`ClientTls`], [`Handshake`]: either of the two, and a session up to its keys.
//! * [`shake_hands`]: agrees on keys, on a thread that may wait.
//! * [`Channel`]: what follows, without a thread: plain bytes in and out, for whoever has the socket.
//! * [`Socket`] and [`Timed`]: the socket, for one that does not wait, and for a peer that has a time limit.
//! * [`in_words`]: why a handshake or a connection failed, for a person.
//! * [`widen`]: room in the Unix sockets of connections, with TLS or without.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod channel;
mod credentials;
#[allow(unsafe_code)]
mod ffi;
mod in_words;
mod keys;
mod room;
mod session;
mod shared;
mod sides;
mod socket;
mod timed;

pub use channel::{Arrival, Channel, Over, copy_to, shake_hands};
pub use credentials::Credentials;
pub use in_words::in_words;
pub use keys::SharedKeys;
pub use room::widen;
pub use rustls::{ClientConfig, Connection, ServerConfig, ServerConnection};
pub use sides::{ClientTls, Handshake, ServerTls};
pub use socket::Socket;
pub use timed::Timed;
