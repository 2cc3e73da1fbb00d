//! One module a command.

pub(crate) mod bench;
pub(crate) mod create;
pub(crate) mod info;
pub(crate) mod serve;
pub(crate) mod try_it;
