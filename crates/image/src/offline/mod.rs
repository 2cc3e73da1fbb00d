//! Work on image files that nobody serves: creating, editing, checking, describing them.

pub(crate) mod bitmaps;
pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod edit;
pub(crate) mod grow;
pub(crate) mod inspect;
pub(crate) mod set_backing;
