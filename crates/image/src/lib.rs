//! Images as disks: opens them through the policy gate, walks their chains, splits requests into extents, pushes these
//! to the files, and copies on write.
//!
//! On the path of a request, this lies between the front end's queue and the engine. [`Image`] is a [`block::Disk`].
//! Its queue resolves a guest range through the layers, in a loop. It pushes each extent to the file that holds it,
//! from guest memory, without a copy. Some requests have to wait: for a table to be read, or a cluster to be allocated,
//! copied or decompressed. They go on as a task on the same reactor.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_block::{Disk, Result};
//! use ringdisk_image::{ImageOptions, Opener};
//!
//! /// `opener` gives the files; `ringdisk-drive` has one for the host's files.
//! fn size_of(path: &str, opener: &dyn Opener) -> Result<u64> {
//!     let options = ImageOptions::new(path).with(|options| options.read_only = true);
//!     let image = ringdisk_image::open(&options, opener)?;
//!     Ok(image.info().size_bytes)
//! }
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod chain;
mod file_name;
mod filters;
mod guess;
mod nbd_place;
mod null;
mod offline;
mod online;
mod open;

pub use block::Run;
pub use chain::closed_edit::{ClosedEdit, StateSource};
pub use chain::compressed_writer::CompressedWriter;
pub use chain::copy_offload::CopyOffload;
pub use chain::image::Image;
#[doc(hidden)]
pub use chain::job_calls::overlap_calls_for_test;
pub use chain::table_cache::TableCacheStats;
pub use file_name::{FileName, options_without_secrets, shown, without_secrets};
pub use filters::delay::{Delay, DelayOptions};
pub use filters::error::{ErrorOptions, Errors, RequestKind};
pub use filters::hold::{ErrorPolicy, GivingUp, HeldRequests, Hold, HoldControl, HoldListener};
pub use filters::log::{LogEntry, LogReader, LoggedKind, LoggedRequest, WriteLog};
pub use filters::throttle::{LiftedLimits, Rate, Rates, Throttle, ThrottleGroup, ThrottleLimits, ThrottleMember};
pub use filters::{Filter, FilterDisk};
pub use format_qcow2::{Backing, Bitmap, BitmapAction, CheckEvent, CheckReport, Compressor, PackedCluster, Repair};
pub use format_qcow2::{GrowBy, Measure, NewSnapshot, Snapshot, SnapshotName};
pub use format_qcow2::{escaped_byte, name_text, os_name};
pub use format_scratch::limit_index_memory;
pub use format_scratch::{Header as ScratchHeader, HostSpace, Space};
pub use guess::{Format, guess_format};
pub use null::NullDisk;
pub use offline::edit::{Amend, EditWatch};
pub use offline::formats::{CreateOptions, Edit, create, create_watched, create_with_data};
pub use offline::formats::{bitmaps, check, edit, edit_bitmaps, look_before_writing, read_bitmap, set_backing};
pub use offline::inspect::{Description, inspect, inspect_encrypted};
pub use offline::overwrite::open_to_overwrite;
pub use offline::vm_state::read_vm_state;
pub use online::commit_layer::{LayerGoes, commit_layer, commit_layer_async};
pub use online::compact::{Compacted, compact, compact_async};
pub use online::copy_out::{Copied, CopyOut};
pub use online::edit::OnlineBitmap;
pub use online::mirror::{MirrorEnd, MirrorScope, MirrorTarget, mirror, mirror_async};
pub use online::move_onto::{NewBelow, OpenedBase, move_onto, move_onto_async, move_onto_or_stay};
pub use online::overlay::{OpenedOverlay, put_overlay, put_overlay_async};
pub use online::point_in_time::PointInTime;
pub use online::take_back::{take_back, take_back_async, take_back_then};
pub use online::watch::{Aim, CopyRounds, CopyWatch};
pub use online::writable::{LayerOpeners, open_below_for_writing};
pub use open::gate::{BackingPolicy, Opener, Role, backing_path, pass_gate, path_with_protocol};
pub use open::layer::MAX_LAYERS;
pub use open::layers::{ImageOptions, open};
pub use open::temporary_files::{ScratchFiles, TemporaryFiles};
