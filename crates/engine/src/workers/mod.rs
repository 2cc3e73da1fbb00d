//! A reactor's worker threads: an engine of their own, which also carries out requests that the other engines would
//! have to wait for.

pub(crate) mod batch;
mod computations;
pub(crate) mod job;
mod job_list;
pub(crate) mod job_queue;
mod mailbox;
pub(crate) mod pool;
pub(crate) mod thread_pool;

/// The types of the mailbox's lock and flag. In the model test, loom's types replace them.
mod parts {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};
}

#[cfg(test)]
mod mailbox_model_tests;
