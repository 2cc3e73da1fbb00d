//! What is done to images that nobody serves: create, look at, check, edit.

pub(crate) mod edit;
pub(crate) mod formats;
pub(crate) mod inspect;
pub(crate) mod vm_state;
