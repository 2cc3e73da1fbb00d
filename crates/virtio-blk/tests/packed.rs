//! The tests of the other files, over packed rings.
#![allow(clippy::duplicate_mod)] // Each file brings its own `model`.

#[path = "queue.rs"]
mod queue;
#[path = "statuses.rs"]
mod statuses;
