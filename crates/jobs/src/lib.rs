//! Long work on images, with progress and cancel.
//!
//! * [`map`]: what lies where in a disk.
//! * [`compare`]: whether two disks hold the same.
//! * [`check`]: whether an image's tables agree.
//! * [`convert`]: copying disks into another image, and [`measure`]: how large that would become.
//! * [`commit`]: what an overlay holds into a layer below, and [`rebase`]: another backing file.
//! * [`create`]: new images; [`resize_raw`], [`resize_qcow2`]: more or less room; [`edit`]: internal snapshots; [`amend`]:
//!   other options.
//!
//! Jobs are called on a thread of their own; what moves bytes runs on the reactors that they are given.

#![forbid(unsafe_code)]

mod check;
mod closed;
mod commit;
mod compare;
mod control;
mod convert;
mod convert_plan;
mod dd;
mod edit;
mod kept_snapshots;
mod map;
mod measure;
mod pack;
mod pipeline;
mod rate;
mod rebase;
mod resize;
mod runs;
mod shared_opener;
mod sources;
mod zeros;

pub use check::check;
pub use commit::{CommitOptions, commit};
pub use compare::{CompareError, Comparison, Difference, Stage, compare};
pub use control::{Control, Progress};
pub use convert::{ConvertOptions, Converted, convert};
pub use dd::dd;
pub use edit::{amend, create, edit, resize_qcow2};
pub use map::map;
pub use measure::{Measure, Target, measure, measure_size};
pub use rebase::{RebaseOptions, rebase};
pub use resize::resize_raw;
pub use sources::{Salvage, Unreadable};
