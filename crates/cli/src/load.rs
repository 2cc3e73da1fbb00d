//! What load generators run on: threads, and the driver on a server's socket.

use anyhow::Context;
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use jobs::bench::{BenchSpec, Hooks};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// What fits into a socket's address (unix(7)).
const SOCKET_PATH_MAX_BYTES: usize = 107;
const PAGE_BYTES: usize = 4096;

/// Shared memory that a run needs for its buffers.
pub(crate) fn buffers_bytes(spec: &BenchSpec) -> usize {
    let buffer = (spec.block_bytes as usize).next_multiple_of(PAGE_BYTES);
    buffer.saturating_mul(spec.queue_depth as usize).saturating_mul(spec.queues as usize)
}

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

/// Buffers that the server shares, and what the driver counts.
pub(crate) fn driver_hooks(driver: &Arc<Driver>) -> Hooks<'static> {
    let (allocating, counting) = (Arc::clone(driver), Arc::clone(driver));
    Hooks {
        alloc: Some(Arc::new(move |length_bytes| allocating.alloc(length_bytes))),
        counters: Some(Arc::new(move || {
            let counters = counting.counters();
            vec![("kicks", counters.kicks), ("wakeups", counters.wakeups)]
        })),
        ..Hooks::default()
    }
}

/// Threads for load generators.
pub(crate) fn reactors(name: &str, count: usize) -> anyhow::Result<Vec<ReactorThread>> {
    let config = |index| ReactorConfig { name: format!("{name}-{index}"), ..ReactorConfig::default() };
    (0..count).map(|index| Ok(Reactor::spawn(config(index))?)).collect()
}
