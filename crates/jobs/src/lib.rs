//! Long work on images with progress and cancel, and the load generator.
//!
//! * [`map`]: what lies where in a disk.
//! * [`compare`]: whether two disks hold the same.
//! * [`bench`]: workloads on any disk, measured and verified.
//!
//! Jobs are called on a thread of their own; what moves bytes runs on the reactors that they are given.

#![forbid(unsafe_code)]

pub mod bench;
mod compare;
mod control;
mod disk_tasks;
mod map;
mod pipeline;
mod zeros;

pub use compare::{Comparison, Difference, compare};
pub use control::{Control, Progress};
pub use map::map;
