//! Runs over the driver: in buffers that the server shares, with the driver's counters.

use crate::spec::Hooks;
use driver::Driver;
use std::sync::Arc;

/// Makes hooks for a run on `driver`. Buffers come from memory that the driver shares with the server, so that nothing
/// is copied. The run reports how often the driver kicked the server and was woken by it, and how many requests went
/// through the rings.
pub fn driver_hooks(driver: &Arc<Driver>) -> Hooks<'static> {
    let (allocating, counting) = (Arc::clone(driver), Arc::clone(driver));
    Hooks {
        alloc: Some(Arc::new(move |length_bytes| allocating.alloc(length_bytes))),
        counters: Some(Arc::new(move || {
            let counters = counting.counters();
            vec![("kicks", counters.kicks), ("wakeups", counters.wakeups), ("ring_requests", counters.requests)]
        })),
        ..Hooks::default()
    }
}
