//! An image of a Ceph cluster as a file: `rbd:POOL/IMAGE`. Whatever works on a file works on it, with raw or any other
//! format in it.
//!
//! Ceph's own library, librbd, does the work. It is loaded when it is first needed. Requests have memory of their own, which
//! librbd keeps until it is done with it; so whoever waits may go at any time.
//!
//! * [`open`], [`create`], [`remove`]: an image by its name.
//! * [`RbdName`]: what a user calls an image, in QEMU's words.
//! * `ffi`: the calls of librbd, and the only module with `unsafe`; `cluster`: connections, which images share; `lock`: who
//!   may write an image; `calls`: answers that are waited for; `closing`: images that are closed aside; `extents`: where an
//!   image has data.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod calls;
mod closing;
mod cluster;
mod extents;
#[allow(unsafe_code)]
mod ffi;
mod file;
mod lock;
mod name;

pub use closing::wait_for_closes;
pub use cluster::{create, remove};
pub use ffi::load_from;
pub use file::{RbdOptions, open};
pub use name::RbdName;
