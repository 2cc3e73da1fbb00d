//! Checking an image, and repairing it: by `check -r`, and before an image that was left dirty is written to.
//!
//! All references are counted anew from the tables and compared with the refcounts. Needs only `layout`: nothing here
//! trusts what an open image keeps in memory.

mod compare;
mod flags;
mod rebuild;
mod references;
pub(crate) mod repair;
pub(crate) mod repair_at_open;
pub(crate) mod report;
pub(crate) mod walk;
