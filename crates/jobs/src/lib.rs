//! Long work on images with progress and cancel, and the load generator.
//!
//! * [`bench`]: workloads on any disk, measured and verified.

#![forbid(unsafe_code)]

pub mod bench;
