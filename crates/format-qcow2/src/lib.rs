//! qcow2: *where* a guest range lies, how new space is prepared and committed, and metadata that survive a power cut.
//!
//! Stands between `image`, which walks chains and moves payload, and `block`'s [`MetaIo`](block::MetaIo), through which
//! the tables are read and written. Payload never passes through here.
//!
//! * Reads and overwrites ask [`Qcow2::lookup_plain`] and [`Qcow2::begin_overwrite`], which suffice for most. Others
//!   ask [`Qcow2::lookup`] and [`Qcow2::lookup_overwrite`]. All of them take no lock, do not wait and do not allocate.
//! * A write that needs space is two-step: [`Qcow2::prepare_write`], data written by the caller,
//!   [`Qcow2::commit_write`]. A dropped [`Allocation`] gives its space back.
//! * Compressed clusters are written in the same two steps: [`Qcow2::prepare_compressed`],
//!   [`Qcow2::commit_compressed`].
//! * Each write is noted in the image's persistent bitmaps; [`Qcow2::close`] writes the bitmaps back.
//! * [`Qcow2::flush`] makes everything durable, in the order that keeps the image valid at every moment. Nothing is
//!   synced between flushes.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod check;
mod edit;
#[cfg(test)]
mod fixture;
mod layout;
mod live;

pub use check::repair::{Repair, repair};
pub use check::report::{CheckEvent, CheckReport, CheckWatch};
pub use check::walk::check;
pub use edit::EditWatch;
pub use edit::amend::{AmendOptions, amend};
pub use edit::bitmaps::{BitmapAction, edit_bitmaps, edit_bitmaps_just_closed};
pub use edit::compact::shorten_just_closed;
pub use edit::create::{CreateOptions, create};
pub use edit::header_edit::{Backing, set_backing};
pub use edit::look_first::look_before_writing;
pub use edit::measure::Measure;
pub use edit::preallocate::{Preallocation, preallocate};
pub use edit::resize::{GrowBy, ResizeOptions, resize, resize_looked_at};
pub use edit::snapshots::{
    NewSnapshot, SnapshotChange, apply_snapshot, change_snapshots_beside_readers, create_snapshot,
    create_snapshot_with_state, delete_snapshot,
};
pub use edit::vm_state::VmState;
pub use layout::bitmap::{Bitmap, BitmapBits, bitmaps, read_bitmap};
pub use layout::file_text::{escaped_byte, name_text, os_name};
pub use layout::header::{Compression, Encryption, Header, probe};
pub use layout::luks::{Luks, LuksSlot, describe};
pub use layout::snapshot::{Snapshot, SnapshotName, snapshots};
pub use live::compaction::{Compaction, CompactionStep};
pub use live::compress::Compressor;
pub use live::flush_queue::Barrier;
pub use live::image::{OpenOptions, Overwrite, Qcow2};
pub use live::lookup::Plain;
pub use live::packing::{PackedAllocation, PackedCluster};
pub use live::write::{Allocation, Prepared};
pub use live::zero::ZeroOutcome;
