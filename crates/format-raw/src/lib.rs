//! Raw images: guest byte `n` is file byte `n`. The smallest format, and the yardstick for the others.
//!
//! On the path of a request, this is below `image`, which asks a format where a range of the disk lies. Payload never
//! passes through here.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod offline;
mod raw;

pub use offline::{NewSpace, create, resize};
pub use raw::Raw;
