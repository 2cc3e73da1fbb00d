//! The client's side of a measurement: threads for the load generator, and the driver on a server's socket.

use anyhow::Context;
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use std::path::Path;
use tempfile::TempDir;

/// What fits into a socket's address (unix(7)).
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// The driver on a server's socket.
pub(crate) fn connect(socket: &Path, queues: u16, memory_bytes: usize) -> anyhow::Result<Driver> {
    Ok(Driver::connect(socket, DriverOptions { queues, memory_bytes, ..DriverOptions::default() })?)
}

/// A temporary directory.
pub(crate) fn temporary_directory(parent: &Path) -> anyhow::Result<TempDir> {
    let made = tempfile::Builder::new().prefix("ringdisk-").tempdir_in(parent);
    made.with_context(|| format!("cannot make a temporary directory in '{}'", parent.display()))
}

/// Whether the name of a socket in `directory` is too long for its address.
pub(crate) fn is_too_long_for_sockets(directory: &Path) -> bool {
    directory.join("disk.sock").as_os_str().len() > SOCKET_PATH_MAX_BYTES
}

/// A temporary directory in which a socket can lie.
pub(crate) fn socket_directory() -> anyhow::Result<TempDir> {
    let directory = temporary_directory(&std::env::temp_dir())?;
    if is_too_long_for_sockets(directory.path()) { temporary_directory(Path::new("/tmp")) } else { Ok(directory) }
}

/// Threads for load generators.
pub(crate) fn reactors(name: &str, count: usize) -> anyhow::Result<Vec<ReactorThread>> {
    let config = |index| ReactorConfig { name: format!("{name}-{index}"), ..ReactorConfig::default() };
    (0..count).map(|index| Ok(Reactor::spawn(config(index))?)).collect()
}
