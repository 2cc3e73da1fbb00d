//! The reactor: one thread that in each turn polls, runs tasks, submits once for each engine, and harvests.

mod alarm;
mod config;
mod event_loop;
mod fd_watch;
mod pollers;
mod pool_trim;
mod shared;
mod thread;

pub use config::ReactorConfig;
pub use thread::{Reactor, ReactorThread};
