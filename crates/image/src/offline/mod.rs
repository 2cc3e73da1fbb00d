//! Work on images that nobody serves: create, inspect, check, edit.

pub(crate) mod edit;
pub(crate) mod formats;
pub(crate) mod inspect;
pub(crate) mod overwrite;
pub(crate) mod vm_state;
