//! An image of a Ceph cluster as a file: `rbd:POOL/IMAGE`. All code that uses files can use it, with raw or any other
//! format: on the path of a request it stands in the place of the engine's files, below `image`.
//!
//! Ceph's own library, librbd, does the work. It is loaded when it is first needed. Requests have memory of their own,
//! which librbd keeps until it is done with it. So the caller may stop waiting at any time.
//!
//! * [`open`], [`create`], [`remove`]: an image by its name.
//! * [`RbdName`]: the name of an image, in QEMU's syntax.
//! * `ffi`: the calls of librbd, and the only module with `unsafe`; `cluster`: connections, which images share; `lock`:
//!   who may write an image; `calls`: calls that wait for an answer; `closing`: closes images on a thread; `extents`:
//!   where an image has data.
//!
//! ```no_run
//! # use block as ringdisk_block;
//! use ringdisk_block::File;
//! use ringdisk_file_rbd::{RbdName, RbdOptions, open};
//!
//! let options = RbdOptions::default().with(|options| options.read_only = true);
//! let file = open(&RbdName::parse("rbd:pool/image")?, &options)?;
//! println!("{} bytes", file.length_bytes()?);
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

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
