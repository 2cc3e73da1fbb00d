//! Fuzzers for the parsers of images, rings and messages. They are above all rooms, and nothing depends on them.
//!
//! For images, an input is not an image but a recipe: the golden image to start from, the fields of tables to change,
//! and the requests to make. So nearly every input gets past the magic, and its bytes matter. The checks, whatever the
//! image says: no panic, no hang, no write to a file that was opened for reading, and no guest data in a table.
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
