//! The bottom of the path: engines that move bytes between memory and the host's files, and the reactor that drives
//! them.
//!
//! A [`Reactor`] is one thread. It owns one instance of each engine in use (io_uring, Linux AIO, a pool of threads). In
//! each turn it polls its pollers, runs its tasks, submits what they pushed in one call for each engine, and routes the
//! completions back. [`open`] returns a file whose queues ([`block::FileQueue`]) push to the engine that its options,
//! or the kernel's abilities, choose.
//!
//! Folders, from the ground up; each uses only those before it:
//!
//! * `base`: one system call, the interfaces of Linux AIO, options, counters.
//! * `file`: an open file, shared by all reactors.
//! * `request`: an action on a file with its memory, and what its results mean.
//! * `route`: the only place that decides who carries a request out.
//! * `workers`, `aio`, `uring`: the engines.
//! * `queue`: turns a file's operations into requests.
//! * `open`: opens and creates files.
//! * `reactor`: the thread that drives it all.
//!
//! A queue promises more than the kernel does: any alignment works, short transfers are resumed, and no memory is freed
//! that the kernel may still write to.
//!
//! ```
//! # use block as ringdisk_block;
//! use ringdisk_block::{FileOp, run_and_wait};
//! use ringdisk_engine::{OpenOptions, Reactor, ReactorConfig};
//!
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk.raw");
//! ringdisk_engine::create(&path, 0)?;
//! let file = ringdisk_engine::open(&path, &OpenOptions::default())?;
//!
//! let reactor = Reactor::spawn(ReactorConfig::default())?;
//! let (sender, done) = std::sync::mpsc::channel();
//! let growing = file.clone();
//! run_and_wait(reactor.handle().as_ref(), move |ctx| {
//!     let queue = growing.open_queue(ctx)?;
//!     ctx.spawn(ringdisk_block::Task::new(async move {
//!         let grown = queue.start(FileOp::SetLength { length: 1 << 20 }).await;
//!         let _ = sender.send(grown.is_ok());
//!     }));
//!     Ok::<(), ringdisk_block::Error>(())
//! })??;
//! assert!(done.recv()?);
//! assert_eq!(file.length_bytes()?, 1 << 20);
//! reactor.stop()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod aio;
mod base;
mod file;
mod open;
mod queue;
mod reactor;
mod request;
mod route;
mod uring;
mod workers;

pub use base::options::{CacheMode, EngineKind, OpenOptions};
pub use base::stats::ReactorStats;
pub use file::fs_hints::{disable_copy_on_write, disable_copy_on_write_of, set_extent_size_hint};
pub use open::inherited::{duplicate_inherited, open_inherited};
pub use open::opening::{create, forget_cached, open, open_as, open_fd, sync_directory_of};
pub use reactor::{Reactor, ReactorConfig, ReactorThread};
