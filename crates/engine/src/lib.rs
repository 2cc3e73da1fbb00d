//! The bottom of the path: engines that move bytes between memory and the host's files, and the reactor that drives
//! them.
//!
//! A [`Reactor`] is one thread. It owns one instance of each engine in use (io_uring, Linux AIO, a pool of threads),
//! looks at its pollers, runs its tasks, submits what they pushed in one call an engine and turn, and routes the
//! completions back. [`open`] gives a file whose queues ([`block::FileQueue`]) push to the engine that its options, or
//! the kernel's abilities, chose.
//!
//! What a queue promises above what the kernel does: any alignment works, short transfers are resumed, nothing that the
//! kernel may still write to is ever freed.

mod aio;
mod aio_abi;
mod alarm;
mod align;
mod blocking;
mod engines;
mod fd_watch;
mod file;
mod fixed_buffers;
mod given;
mod group;
mod group_sync;
mod host_file;
mod inflight;
mod inherited;
mod inline;
mod job_queue;
mod layout;
mod lock;
mod nowait;
mod open;
mod options;
mod poll;
mod probe;
mod queue;
mod reactor;
mod ring_entry;
mod ring_setup;
mod stats;
mod storage;
mod sys;
mod tables;
mod target;
mod threads;
mod together;
mod tracking;
mod upkeep;
mod uring;
mod wakeup;
mod worker_pool;
mod zeroes;

pub use inherited::open_inherited;
pub use layout::{disable_copy_on_write, set_extent_size_hint};
pub use open::{create, forget_cached, open, open_fd};
pub use options::{CacheMode, EngineKind, OpenOptions};
pub use reactor::{Reactor, ReactorConfig, ReactorThread};
pub use stats::ReactorStats;
