//! An open image: where a range lies, how space is prepared and committed, and how metadata become durable.
//!
//! `image` is what queues ask. `lookup` answers without a lock. `write`, `part_write`, `zero` and `packing` change the
//! mapping under the mutex of `state`; `allocator` finds them space; `flush` makes it all durable in order.

mod allocator;
mod bitmap_tracking;
pub(crate) mod compress;
mod deferred_free;
mod dirty;
mod dirty_bits;
pub(crate) mod flush;
mod free_runs;
pub(crate) mod image;
mod in_flight_ops;
mod load;
pub(crate) mod lookup;
mod metadata_map;
mod overlap_guard;
pub(crate) mod packing;
mod part_write;
pub(crate) mod refcounts;
mod state;
mod subclusters;
pub(crate) mod write;
pub(crate) mod zero;
