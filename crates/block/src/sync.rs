//! Locks and atomics of what queues on several threads share: the standard library's, or with the feature `explore`
//! those of shuttle, which runs the production code through one seeded schedule after another.
//!
//! Shuttle's work only inside its executions, so a build with `explore` is for the exploring tests alone. Shuttle knows
//! no weak memory: the orders are argued where they are used.

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
