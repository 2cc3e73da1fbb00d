//! What the daemon tells about itself and its disks, and what it is told: statuses, places, options.

pub(crate) mod attach;
pub(crate) mod caller;
pub(crate) mod file_identity;
pub(crate) mod host_memory;
pub(crate) mod nbd_options;
pub(crate) mod passed;
pub(crate) mod place;
pub(crate) mod status;
