//! What is known of an open file, and what it takes to move bytes to and from it.

pub(crate) mod mapped;
