//! The ground of this crate: one system call, the interfaces of Linux AIO, options, counters, wake-ups.

pub(crate) mod aio_abi;
pub(crate) mod call;
pub(crate) mod harvest;
pub(crate) mod io_submit;
pub(crate) mod options;
pub(crate) mod pace;
pub(crate) mod stats;
pub(crate) mod wakeup;
