//! The bytes of an image: the header and its extensions, table entries, refcounts, and records of snapshots and
//! bitmaps. Also the sizes that follow from the header. Nothing here knows of an open image.

pub(crate) mod bitmap;
pub(crate) mod entry;
pub(crate) mod extended_entry;
pub(crate) mod extensions;
pub(crate) mod file_text;
pub(crate) mod geometry;
pub(crate) mod header;
pub(crate) mod luks;
pub(crate) mod refcount_entry;
pub(crate) mod snapshot;
