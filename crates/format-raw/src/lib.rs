//! Raw images: guest byte `n` is file byte `n`. The smallest format, and the yardstick for the others.
//!
//! On the path of a request, this is below `image`, which asks a format where a range of the disk lies. Payload never
//! passes through here.
//!
//! ```
//! # use block as ringdisk_block;
//! use ringdisk_block::{Extent, Mapped};
//! use ringdisk_format_raw::Raw;
//!
//! let raw = Raw::new(1000);
//! assert_eq!(raw.size_bytes(), 1024, "a disk is a whole number of sectors");
//! let mapped = Mapped { extent: Extent::Data { file: 0, offset: 0 }, length_bytes: 512 };
//! assert_eq!(raw.lookup(0, 1024), mapped, "the sector in which the file ends is a part of its own");
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod offline;
mod raw;

pub use offline::{NewSpace, create, resize};
pub use raw::Raw;
