//! A reactor's worker threads: an engine of their own, and where the other engines send what they cannot do without
//! waiting.

pub(crate) mod batch;
pub(crate) mod job;
pub(crate) mod job_queue;
pub(crate) mod pool;
#[allow(clippy::module_inception, reason = "the folder is about this file")]
pub(crate) mod workers;
