//! The tests of `export.rs`, over packed rings.

#[path = "export.rs"]
mod export;
