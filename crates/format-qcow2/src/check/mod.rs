//! Checks and repairs images: for `check -r`, and before a dirty image is written to.
//!
//! All references are counted anew from the tables and compared with the refcounts. This needs only `layout`: nothing
//! here uses what an open image keeps in memory.

mod compare;
mod count;
mod flags;
mod rebuild;
mod references;
pub(crate) mod repair;
pub(crate) mod repair_at_open;
pub(crate) mod report;
pub(crate) mod walk;
