//! TLS for NBD, on both sides. On the path of a request, a session lies between the socket and the server `export-nbd` or
//! the client `file-nbd`.
//!
//! * [`Credentials`]: certificates in a directory, in the layout of QEMU's `tls-creds-x509`.
//! * [`SharedKeys`]: keys that both sides have, in a file as in QEMU's `tls-creds-psk`. Their sessions come from
//!   GnuTLS, which is loaded when the first one is made (`ffi`).
//! * [`ServerTls`], [`ClientTls`], [`Handshake`]: certificates or keys, and a session until its handshake is over.
//! * [`shake_hands`]: runs the handshake, on a thread that may wait.
//! * [`Channel`]: a session after its handshake, without a thread: plain bytes in and out, for the owner of the socket.
//! * [`Socket`] and [`Timed`]: a socket without a copy of its descriptor, and a socket with a time limit.
//! * [`in_words`]: why a handshake or a connection failed, for a person.
//! * [`widen`]: larger send buffers for Unix sockets, with TLS or without.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_nbd_tls::{Channel, ClientTls, Credentials};
//! use std::error::Error;
//! use std::net::TcpStream;
//!
//! /// Begins a session on a socket whose server has agreed to it.
//! fn begin(socket: &mut TcpStream) -> Result<Channel, Box<dyn Error>> {
//!     let tls = ClientTls::Certificates(Credentials::in_directory("/etc/pki/nbd"));
//!     Ok(tls.begin("server.example")?.run(socket)?)
//! }
//! ```

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
