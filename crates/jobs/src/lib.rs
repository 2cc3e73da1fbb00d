//! Long work on images with progress and cancel, and the load generator.
//!
//! * [`map`]: what lies where in a disk.
//! * [`compare`]: whether two disks hold the same.
//! * [`check`]: whether an image's tables agree.
//! * [`convert`]: copying a disk into another image, and [`measure`]: how large that would become.
//! * [`resize_raw`]: more or less room.
//! * [`mod@bench`]: workloads on any disk, measured and verified.
//!
//! Jobs are called on a thread of their own; what moves bytes runs on the reactors that they are given.

#![forbid(unsafe_code)]

pub mod bench;
mod check;
mod compare;
mod control;
mod convert;
mod disk_tasks;
mod map;
mod measure;
mod pipeline;
mod resize;
mod zeros;

pub use check::check;
pub use compare::{CompareError, Comparison, Difference, Stage, compare};
pub use control::{Control, Progress};
pub use convert::{ConvertOptions, convert};
pub use map::map;
pub use measure::{Measure, Target, measure, measure_size};
pub use resize::resize_raw;
