//! The Linux AIO engine.

pub(crate) mod context;
