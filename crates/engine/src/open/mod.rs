//! Opening and making files, and which engine serves them.

mod host_file;
pub(crate) mod inherited;
pub(crate) mod opening;
mod probe;
