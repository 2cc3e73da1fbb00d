//! An open file, shared by all reactors: its kind, the abilities of its file system, and the ranges of it that are
//! being changed.

pub(crate) mod alignment;
pub(crate) mod device_facts;
pub(crate) mod extent_preload;
pub(crate) mod fs_hints;
pub(crate) mod holes;
pub(crate) mod image_lock;
pub(crate) mod in_place;
pub(crate) mod lock_holders;
pub(crate) mod mapped;
pub(crate) mod open_file;
pub(crate) mod rmw_lock;
pub(crate) mod storage;
pub(crate) mod write_behind;
