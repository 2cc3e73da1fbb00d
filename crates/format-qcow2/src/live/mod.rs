//! An open image: where a range lies, how space is prepared and committed, and how metadata become durable.
//!
//! Queues use `image`. `lookup` answers without a lock. `write`, `part_write`, `zero` and `packing` change the mapping
//! under the mutex of `state`; `allocator` finds space for them; `flush` makes everything durable in order.

mod allocator;
mod bitmap_bits;
mod bitmap_storing;
mod bitmap_tracking;
pub(crate) mod compaction;
pub(crate) mod compress;
mod deferred_free;
mod empty_clusters;
mod flush;
pub(crate) mod flush_queue;
mod free_runs;
pub(crate) mod image;
mod lazy_refcounts;
mod load;
pub(crate) mod lookup;
mod metadata_map;
mod open;
mod overlap_guard;
pub(crate) mod packing;
mod part_write;
pub(crate) mod refcounts;
mod state;
mod still_entries;
mod subclusters;
pub(crate) mod write;
pub(crate) mod zero;
