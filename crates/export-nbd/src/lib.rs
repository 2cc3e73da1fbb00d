//! The NBD front end: serves [`block::Disk`]s to NBD clients, over a Unix or a TCP socket.
//!
//! A request enters here: `socket -> header -> I/O buffer -> disk queue`, and leaves here: `completion -> reply -> socket`.
//! Payload goes from the socket into the buffer that the disk's queue gets, and back the same way. Only the first bytes of a
//! written payload, which arrive together with headers, are copied once.
//!
//! * [`NbdServer`]: a listening socket, its exports and its connections. A thread accepts; each connection lives on a reactor.
//! * [`NbdExport`]: a disk, with the name and the description that clients see.
//! * `users`: the connections of an export, which can be removed, and their counters.
//! * [`Limits`]: bounds the memory that clients can make the server hold. [`PayloadMemory`]: a part of it that servers share.
//! * [`Tls`]: a thread for each client up to the end of its TLS handshake; `under_tls`: its bytes from then on, on its reactor.
//! * [`Handshake`]: the negotiation with a client, without a socket.
//! * `connection`: one client on one reactor; `requests`: its requests in flight; `output`: its replies; `status`:
//!   answers queries for block status and bitmaps, on a thread of the connection's own.
//!
//! The layouts of messages are in `nbd-wire`.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_block::{Disk, ReactorHandle, Result};
//! use ringdisk_export_nbd::{NbdExport, NbdListener, NbdServer, ServerOptions};
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! fn serve(listener: UnixListener, disk: Arc<dyn Disk>, reactors: Vec<Arc<dyn ReactorHandle>>) -> Result<NbdServer> {
//!     let export = NbdExport::new("backup", disk);
//!     NbdServer::start(NbdListener::Unix(listener), vec![export], reactors, ServerOptions::default())
//! }
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod connection;
mod context;
mod export;
mod handshake;
mod input;
mod limits;
mod link;
mod mailbox;
mod output;
mod requests;
mod server;
mod status;
mod tls;
mod transmission;
mod under_tls;
mod users;

pub use block::meter::{QueueLatency, RingStats};
pub use export::{BITMAPS_MAX, NbdBitmap, NbdExport};
pub use handshake::{Handshake, Negotiated, Step};
pub use limits::{Limits, PayloadMemory};
pub use nbd_tls::Credentials;
pub use server::{NbdListener, NbdServer, ServerOptions};
pub use tls::Tls;
