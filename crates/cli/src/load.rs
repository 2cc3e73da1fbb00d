//! What load generators run on: threads, and the driver on a server's socket.

use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use jobs::bench::{BenchSpec, Hooks};
use std::path::Path;
use std::sync::Arc;

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
