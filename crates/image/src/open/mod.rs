//! Opening images: which files an image may name, and the layers of a chain.

pub(crate) mod gate;
pub(crate) mod kept;
pub(crate) mod layer;
pub(crate) mod layers;
pub(crate) mod temporary;
pub(crate) mod temporary_files;
