//! The queue of one file on one thread: turns operations into requests and gives them to the file's engine.

pub(crate) mod blocking;
mod bounce;
mod durable;
pub(crate) mod engines;
pub(crate) mod host_queue;
mod lane;
mod zeroes;
