//! The calls of a daemon that work on its disks: what changes them, copies them, or serves them to NBD clients.

mod backup;
mod change;
mod commit;
mod edit;
mod ending;
mod jobs;
pub(crate) mod mirror;
mod nbd;
mod reopen;
