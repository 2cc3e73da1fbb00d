//! TLS for NBD, on both sides.
//!
//! * [`Credentials`]: certificates in a directory, in the layout of QEMU's `tls-creds-x509`.
//! * [`relay`]: a thread between a TLS connection and a socket, so that the code behind the socket knows nothing of TLS.
//! * [`in_words`]: why a handshake or a connection failed, for a person.
//! * [`widen`]: room in the Unix sockets of connections, with TLS or without.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod credentials;
mod in_words;
mod relay;
mod room;
mod timed;

pub use credentials::Credentials;
pub use in_words::in_words;
pub use relay::{relay, shake_hands};
pub use room::widen;
pub use rustls::{ClientConfig, Connection, ServerConfig, ServerConnection};
pub use timed::Timed;
