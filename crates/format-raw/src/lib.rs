//! Raw images: guest byte `n` is file byte `n`. The smallest format, and the measure for the others.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod raw;

pub use raw::Raw;
