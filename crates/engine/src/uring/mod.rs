//! The io_uring engine.

mod entry;
mod fixed_buffers;
pub(crate) mod registration;
pub(crate) mod ring;
pub(crate) mod setup;
