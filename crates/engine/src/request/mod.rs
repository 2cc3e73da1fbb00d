//! Requests: an action on a file with the memory that it moves, and what a result of the kernel means for it.

pub(crate) mod carry_out;
pub(crate) mod group_commit;
pub(crate) mod queue_file;
#[allow(clippy::module_inception, reason = "the folder is about this file")]
pub(crate) mod request;
pub(crate) mod segments;
pub(crate) mod slab;
