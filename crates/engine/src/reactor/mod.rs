//! The reactor: one thread that polls, runs tasks, submits once an engine and turn, and harvests.

mod alarm;
mod fd_watch;
mod pollers;
mod pool_trim;
#[allow(clippy::module_inception, reason = "the folder is about this file")]
mod reactor;

pub use reactor::{Reactor, ReactorConfig, ReactorThread};
