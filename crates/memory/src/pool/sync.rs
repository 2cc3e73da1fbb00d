//! The atomics and the cell of the lock-free part: the standard library's or, in this crate's own unit tests, loom's.
//!
//! So the model checker explores the production type itself in an ordinary `cargo test`. Everything else is tested from
//! outside (`tests/pool.rs`), where the crate is compiled as users get it.

#[cfg(test)]
pub(super) use explored::{AtomicU32, AtomicU64, UnsafeCell};
#[cfg(not(test))]
pub(super) use plain::{AtomicU32, AtomicU64, UnsafeCell};
pub(super) use std::sync::atomic::Ordering;

#[cfg(not(test))]
mod plain {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

    /// `std::cell::UnsafeCell` with loom's interface, which knows when an access begins and ends.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline]
        pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
            access(self.0.get())
        }
    }
}

#[cfg(test)]
mod explored {
    use super::Ordering;
    use loom::sync::atomic;
    pub(crate) use loom::{cell::UnsafeCell, sync::atomic::AtomicU32};

    /// Loom 0.7 remembers only the last access to a variable. When two threads load it, and then one of them changes
    /// it, loom no longer knows that the other thread's load could have come later, and skips those schedules. So a
    /// load is here a read-modify-write that changes nothing, which loom does not overlook. This hides outdated values
    /// of a head: a pop that misses a magazine, or a compare-and-swap that fails. (Variables that are also stored to
    /// must not be loaded so: loom does not keep such an operation in one piece.)
    pub(crate) struct AtomicU64(atomic::AtomicU64);

    impl AtomicU64 {
        pub(crate) fn new(value: u64) -> Self {
            Self(atomic::AtomicU64::new(value))
        }

        pub(crate) fn load(&self, order: Ordering) -> u64 {
            self.0.fetch_or(0, order)
        }

        pub(crate) fn compare_exchange_weak(
            &self,
            old: u64,
            new: u64,
            yes: Ordering,
            no: Ordering,
        ) -> Result<u64, u64> {
            self.0.compare_exchange_weak(old, new, yes, no)
        }
    }
}
