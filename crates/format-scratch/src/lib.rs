//! Scratch overlays: a disk's writes go to two files, an index and dense data, which are temporary or kept.
//!
//! On the path of a request, this is below `image`, as the other formats are. It answers where a range of the disk
//! lies, or that the layer below has it. Payload never passes through here; the engine opens the data file like any
//! other.
//!
//! * The unit is a page of 4 KiB. The index has a word for each page of the disk: below, zero, or the page's place in
//!   the data.
//! * The index is mapped into memory and read without a lock ([`memory::MappedWords`]). Parts of it without written
//!   pages take no space.
//! * Both files are dense. Their space is reserved before it is used ([`Space`]), so a full disk fails only the request
//!   that needs more.
//! * A kept overlay has its index in memory. A flush by its guest writes the changed pages to the index file.
//! * Zeroed or discarded pages are reused when no request can be on its way to them.

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
mod unwritten;
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
