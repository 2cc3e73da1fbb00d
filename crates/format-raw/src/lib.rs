//! Raw images: guest byte `n` is file byte `n`. It is the simplest format, and the others are measured against it.
//!
//! On the path of a request it stands below `image`, which asks a format where a range of the disk lies. Payload never passes
//! through here.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod offline;
mod raw;

pub use offline::{NewSpace, create, resize};
pub use raw::Raw;
