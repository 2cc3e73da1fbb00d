//! The reactor: one thread that polls, runs tasks, submits once an engine and turn, and harvests.

mod alarm;
mod event_loop;
mod fd_watch;
mod pollers;
mod pool_trim;

pub use event_loop::{Reactor, ReactorConfig, ReactorThread};
