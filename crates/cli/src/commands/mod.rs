//! One module a command.

pub(crate) mod amend;
pub(crate) mod bench;
pub(crate) mod bitmap;
pub(crate) mod check;
pub(crate) mod commit;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod dd;
pub(crate) mod img_compat;
pub(crate) mod info;
mod info_file;
pub(crate) mod map;
pub(crate) mod measure;
mod new_image;
mod own_backing;
pub(crate) mod rebase;
pub(crate) mod resize;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod try_it;
