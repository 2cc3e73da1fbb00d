//! Fuzzers for what parses images, rings and messages: outside all rooms, above all of them, linked by nobody.
//!
//! For images, an input is not an image but a recipe: which golden image to start from, which fields of which tables to change, and
//! what to ask of the result. So nearly every input gets past the magic, and a byte of it means something. What must hold
//! whatever the image says: no panic, nothing stuck, a file that was opened only to be read is not written, and no byte
//! that a guest writes lands in a table.
//!
//! [`Target::run`] takes one input; libFuzzer (feature `libfuzzer`) or the plain loop in `src/bin/fuzz.rs` makes them.

#![forbid(unsafe_code)]

mod chains;
mod control_socket;
mod device;
mod disk;
mod golden;
mod messages;
mod mutate;
mod nbd;
mod scratch;
mod snapshot;
mod target;

pub use target::Target;
