//! Scratch overlays: a disk's writes go to two files, an index and dense data, which are thrown away or kept.
//!
//! On the path of a request this stands below `image`, as the other formats do: it says where a range of the disk lies, or
//! that the layer below has it. Payload never passes through here; the data file is an ordinary file of the engine's.
//!
//! * The unit is a page of 4 KiB. The index has a word for each page of the disk: below, zero, or its place in the data.
//! * The index is mapped into memory and read without a lock ([`memory::MappedWords`]). Parts of it that nothing was
//!   written to take no space.
//! * Both files are dense: their space is reserved before it is used ([`Space`]), so a full disk is the error of the one
//!   request that needed more.
//! * A kept overlay has its index in memory, and writes what has changed of it to the index file when its guest flushes.
//! * Pages that are zeroed or discarded are used again, once no request can be on its way to them any more.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod free_pages;
mod header;
mod index;
mod index_memory;
mod kept;
mod layout;
mod link;
mod load;
mod scratch;
mod space;
mod state;
mod write;
mod zero;

pub use header::{Header, MAGIC};
pub use index_memory::limit_index_memory;
pub use layout::{MAX_DISK_BYTES, PAGE_BYTES};
pub use link::Staged;
pub use load::create_kept;
pub use scratch::Scratch;
pub use space::{HostSpace, Space};
pub use write::{Allocation, Prepared};
