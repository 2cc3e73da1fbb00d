//! The tests of the other files, over packed rings: `common::small` chooses them here.
#![allow(clippy::duplicate_mod)] // Each file brings its own `common`.

#[path = "driver.rs"]
mod driver;
#[path = "flush.rs"]
mod flush;
#[path = "full_ring.rs"]
mod full_ring;
#[path = "hold.rs"]
mod hold;
#[path = "merge.rs"]
mod merge;
