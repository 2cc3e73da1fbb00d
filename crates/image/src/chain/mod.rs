//! An open chain of layers, and the queues that serve it: lookups, splitting, and copy-on-write. Queues go over to
//! another chain at a barrier.

pub(crate) mod both_sides;
pub(crate) mod closed_edit;
pub(crate) mod compressed_writer;
pub(crate) mod copy_offload;
mod copy_up;
pub(crate) mod exchange;
pub(crate) mod extents;
pub(crate) mod give_up;
mod guessed_raw;
pub(crate) mod image;
pub(crate) mod in_place;
pub(crate) mod job_calls;
pub(crate) mod layer;
pub(crate) mod layers;
mod lower_map;
pub(crate) mod mapping;
pub(crate) mod memory_bitmap;
mod pieces;
pub(crate) mod place;
pub(crate) mod queue;
mod slow_path;
pub(crate) mod table_cache;
mod timings;
