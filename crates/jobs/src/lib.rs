//! Long work on images, with progress and cancel.
//!
//! No guest's request passes through here: jobs stand beside the path, above [`image`]. A job is a function that is
//! called on a thread of its own. It moves bytes on the reactors that its caller gives it.
//!
//! * [`map`]: the ranges of a disk that hold data, and their places.
//! * [`compare`]: whether two disks hold the same data.
//! * [`check`]: whether an image's tables agree.
//! * [`convert`]: copies disks into another image. [`measure`]: how large that image would become.
//! * [`commit`]: writes an overlay's data into a layer below. [`rebase`]: gives an overlay another backing file.
//! * [`create`]: makes images. [`resize`]: changes an image's size. [`edit`]: internal snapshots. [`amend`]: changes an
//!   image's options.
//!
//! ```no_run
//! # use {block as ringdisk_block, image as ringdisk_image};
//! use ringdisk_block::Result;
//! use ringdisk_image::Image;
//! use ringdisk_jobs::Control;
//! use std::sync::atomic::AtomicBool;
//!
//! fn allocated_bytes(image: &Image, cancel: &AtomicBool) -> Result<u64> {
//!     let mut show = |progress: ringdisk_jobs::Progress| eprintln!("{} bytes", progress.done_bytes);
//!     let mut control = Control::new(cancel, &mut show);
//!     let mut allocated = 0;
//!     ringdisk_jobs::map(image, &mut control, |run| {
//!         allocated += if run.takes_read() { run.length_bytes } else { 0 };
//!         Ok(())
//!     })?;
//!     Ok(allocated)
//! }
//! ```

#![forbid(unsafe_code)]

mod check;
mod closed;
mod commit;
mod compare;
mod control;
mod convert;
mod convert_options;
mod convert_plan;
mod dd;
mod disk;
mod edit;
mod failure;
mod kept_snapshots;
mod map;
mod measure;
mod pack;
mod pipeline;
mod rate;
mod rebase;
mod replay;
mod runs;
mod shared_opener;
mod sources;
mod zeros;

pub use check::check;
pub use commit::{CommitOptions, commit};
pub use compare::{CompareError, Comparison, Difference, Stage, compare};
pub use control::{Control, Progress};
pub use convert::{Converted, convert};
pub use convert_options::ConvertOptions;
pub use dd::dd;
pub use disk::JobDisk;
pub use edit::{amend, create, edit, resize};
pub use map::map;
pub use measure::measure;
pub use rebase::{RebaseOptions, rebase};
pub use replay::replay;
pub use sources::{Salvage, Unreadable};
