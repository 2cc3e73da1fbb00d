//! The control interface of a daemon: HTTP and JSON over a Unix socket, the client for it, and the state directory.
//!
//! People and programs that manage disks in use call this interface. No guest request passes through: calls go to the
//! [`daemon::Daemon`], which works beside the reactors.
//!
//! * [`Manager`]: a daemon with a record of what it serves. The record outlives the process if there is a state directory.
//! * [`Config`]: the configuration file.
//! * [`ControlServer`]: the socket, on a thread of its own. Its OpenAPI description is at `/v1/openapi.json`.
//! * [`Client`]: calls a server, for `ringdisk ctl` and for programs.
//! * [`api`]: the types that go over the wire.
//!
//! ```no_run
//! use ringdisk_control::{Client, api};
//! use std::path::Path;
//!
//! let client = Client::new(Path::new("/run/ringdisk/control"))?;
//! let all: api::Disks = client.get("/v1/disks")?;
//! for disk in &all.disks {
//!     println!("{}: {} bytes", disk.name, disk.size_bytes);
//! }
//! # Ok::<(), ringdisk_control::CallError>(())
//! ```

#![forbid(unsafe_code)]

pub mod api;
mod backups;
mod client;
mod config;
mod events;
mod failure;
mod from_json;
mod live_jobs;
mod manager;
mod metrics;
mod mirror;
mod options;
mod record;
mod routes;
mod server;
mod storage_calls;

pub use client::{CallError, Client, path_segment};
pub use config::{Config, Settings};
pub use manager::{Configured, Manager};
pub use options::Options;
pub use routes::openapi;
pub use server::ControlServer;
