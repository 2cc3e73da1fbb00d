//! Requests: an action on a file with the memory that it moves, and the meaning of the kernel's results for it.

pub(crate) mod carry_out;
pub(crate) mod group_commit;
pub(crate) mod progress;
pub(crate) mod queue_file;
pub(crate) mod segments;
pub(crate) mod slab;
