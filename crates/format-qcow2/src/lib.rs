//! qcow2: *where* a guest range lies, how new space is prepared and committed, and metadata that survive a power cut.
//!
//! Stands between `image`, which walks chains and moves payload, and `block`'s [`MetaIo`](block::MetaIo), through which
//! the tables are read and written. Payload never passes through here.
//!
//! * Reads and overwrites ask [`Qcow2::lookup_plain`] and [`Qcow2::begin_overwrite`], which answer for most, then
//!   [`Qcow2::lookup`] and [`Qcow2::lookup_overwrite`]: no lock, no wait, no allocation.
//! * A write that needs space is two-step: [`Qcow2::prepare_write`], data written by the caller,
//!   [`Qcow2::commit_write`]. A dropped [`Allocation`] gives its space back.
//! * Compressed clusters likewise: [`Qcow2::prepare_compressed`], [`Qcow2::commit_compressed`].
//! * Each of these notes what changes in the image's persistent bitmaps; [`Qcow2::close`] writes those back.
//! * [`Qcow2::flush`] makes everything durable, in the order that keeps the image valid at every moment. Nothing is
//!   synced in between.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod allocator;
mod bitmap;
mod check;
mod compare;
mod compress;
mod create;
mod dirty;
mod dirty_bits;
mod edit;
mod entry;
#[cfg(test)]
mod fixture;
mod flush;
mod free_runs;
mod geometry;
mod guard;
mod header;
mod header_edit;
mod image;
mod load;
mod lookup;
mod packing;
mod part_write;
mod preallocate;
mod reap;
mod rebuild;
mod refcount;
mod references;
mod repair;
mod repair_at_open;
mod snapshot;
mod state;
mod subclusters;
mod tables;
mod tail;
mod tracking;
mod write;
mod zero;

pub use bitmap::{Bitmap, BitmapBits, bitmaps, read_bitmap};
pub use check::{CheckEvent, CheckReport, CheckWatch, check};
pub use compress::Compressor;
pub use create::{CreateOptions, create};
pub use edit::EditWatch;
pub use edit::amend::{AmendOptions, amend};
pub use edit::bitmaps::{BitmapAction, edit_bitmaps};
pub use edit::resize::{GrowBy, ResizeOptions, resize};
pub use edit::snapshots::{NewSnapshot, apply_snapshot, create_snapshot, delete_snapshot};
pub use flush::Barrier;
pub use header::{Compression, Header, probe};
pub use header_edit::{Backing, set_backing};
pub use image::{OpenOptions, Overwrite, Qcow2};
pub use lookup::Plain;
pub use packing::{PackedAllocation, PackedCluster};
pub use preallocate::{Preallocation, preallocate};
pub use repair::{Repair, repair};
pub use snapshot::{Snapshot, SnapshotName, snapshots};
pub use write::{Allocation, Fill, Prepared};
pub use zero::ZeroOutcome;
