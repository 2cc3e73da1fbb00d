//! Opening and making files, and which engine serves them.

mod host_file;
pub(crate) mod inherited;
#[allow(clippy::module_inception, reason = "the folder is about this file")]
pub(crate) mod open;
mod probe;
