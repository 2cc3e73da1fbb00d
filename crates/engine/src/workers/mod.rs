//! A reactor's worker threads: an engine of their own, and where the other engines send what they cannot do without
//! waiting.

pub(crate) mod batch;
mod computations;
pub(crate) mod job;
mod job_list;
pub(crate) mod job_queue;
mod mailbox;
pub(crate) mod pool;
pub(crate) mod thread_pool;

/// The lock and the flag of the mailbox, which loom's take the place of when it is explored.
mod parts {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};
}

#[cfg(test)]
mod mailbox_model_tests;
