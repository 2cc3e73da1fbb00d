//! Locks and atomics for data that queues on several threads share. They are the standard library's or, with the
//! feature `explore`, shuttle's, which runs the production code through one seeded schedule after another.
//!
//! Shuttle's types work only inside its executions, so a build with `explore` serves the exploring tests alone. Shuttle
//! does not model weak memory: the code that uses an ordering argues for it.

#[cfg(feature = "explore")]
pub use shuttle::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence},
};
#[cfg(not(feature = "explore"))]
pub use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence},
};
pub use std::sync::{PoisonError, atomic::Ordering};
