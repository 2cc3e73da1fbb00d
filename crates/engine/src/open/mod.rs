//! Opening and making files, and which engine serves them.

mod host_file;
#[cfg(test)]
mod in_place_tests;
pub(crate) mod inherited;
pub(crate) mod opening;
mod probe;
