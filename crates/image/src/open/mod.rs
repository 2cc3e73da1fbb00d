//! Opening images: what a file's format is, which files an image may name, and the layers of a chain.

pub(crate) mod file_name;
pub(crate) mod gate;
pub(crate) mod guess;
pub(crate) mod layers;
pub(crate) mod temporary;
