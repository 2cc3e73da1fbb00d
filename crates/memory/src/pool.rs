//! Pools of request contexts. A context is the memory that a request needs while it is in flight; the next request uses
//! it again.
//!
//! Each thread has its own list of idle contexts. Taking one is a pop and putting one back is a push, without atomics
//! or allocation. When a list runs empty or overflows, the thread trades a whole batch with the other threads through a
//! lock-free stack. So a thread that only frees feeds a thread that only takes.
//!
//! A context is created only if the thread's list and the stack are both empty. The lists of other threads may hold
//! idle contexts at that moment. So that the total stays near the peak, the length of a list follows the load. All
//! lists together get a twentieth of the peak in flight, but at least eight contexts for each thread. A reactor, which
//! alternates between freeing and taking, gets a longer list, so that its turns need no trade.
//!
//! Contexts are `Send`, since any thread may use them next. Values that belong to one thread (a task, a request that
//! names its queue) are put into contexts that are only memory. A [`Room`] is for one type of value ([`Placed`],
//! [`PoolRc`]), and the chunks of [`PooledFuture`] are for futures of any type.
//!
//! When the load falls, contexts beyond the peak of the last two [`DECAY_PERIOD`]s go back to the allocator. Threads
//! that trade do this in passing. A reactor that is about to sleep calls [`Pool::maintain`].
//!
//! ```
//! #[derive(Default)]
//! struct Request {
//!     iovecs: Vec<(usize, usize)>,
//! }
//!
//! impl ringdisk_memory::PoolContext for Request {
//!     fn create() -> Self {
//!         Self { iovecs: Vec::with_capacity(128) }
//!     }
//!     fn reset(&mut self) {
//!         self.iovecs.clear();
//!     }
//! }
//! ringdisk_memory::pooled!(Request);
//!
//! let mut request = ringdisk_memory::PoolBox::<Request>::take();
//! request.iovecs.push((0, 512));
//! drop(request); // Back to this thread's list, its capacity kept.
//! assert!(ringdisk_memory::PoolBox::<Request>::take().iovecs.is_empty());
//! ```

mod depot;
mod future;
mod list;
mod magazine;
#[cfg(test)]
mod model;
mod other_source;
mod pages;
mod registry;
mod room;
mod stack;
mod sync;

pub use depot::PoolStats;
pub use future::PooledFuture;
pub(crate) use pages::PooledPages;
pub use registry::{maintain_pools, pools, trim_pools};
pub use room::{HasRoom, Placed, PoolRc, Room};

use depot::Depot;
use list::List;
use magazine::{Magazine, Node};
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::LocalKey;
use std::time::{Duration, Instant};

/// A peak is remembered for one to two of these periods.
pub const DECAY_PERIOD: Duration = Duration::from_secs(5);

/// The most batches in the stack. Further ones are freed.
const SLOTS: u16 = 2048;
/// Trades of one thread between two looks at the clock.
const TRADES_A_LOOK: u32 = 64;
/// Batches freed at such a look. A reactor with requests to serve must not free thousands at once.
const BATCHES_FREED_A_LOOK: usize = 2;

/// A type of contexts that a pool may hold.
pub trait PoolContext: Send + Sized + 'static {
    /// About how much memory one context holds. A sleeping thread wakes up to give memory back only if there is much.
    const HELD_BYTES: usize = size_of::<Self>();

    /// Makes a context. Allocate here all that requests will need.
    fn create() -> Self;

    /// Makes a used context ready for the next request, and keeps its memory. Must not panic.
    fn reset(&mut self) {}
}

/// A [`PoolContext`] that has a pool: implemented by [`pooled!`](crate::pooled).
pub trait Pooled: PoolContext {
    /// Returns the pool of this type.
    fn pool() -> &'static Pool<Self>;

    /// Returns the calling thread's list of this type.
    fn list() -> &'static LocalKey<ThreadList<Self>>;
}

/// Gives a [`PoolContext`] its pool, named as given or after the type.
#[macro_export]
macro_rules! pooled {
    ($context:ty) => {
        $crate::pooled!($context, ::std::any::type_name::<$context>());
    };
    ($context:ty, $name:expr) => {
        impl $crate::Pooled for $context {
            fn pool() -> &'static $crate::Pool<Self> {
                static POOL: ::std::sync::LazyLock<$crate::Pool<$context>> =
                    ::std::sync::LazyLock::new(|| $crate::Pool::new($name));
                &POOL
            }

            #[inline]
            fn list() -> &'static ::std::thread::LocalKey<$crate::ThreadList<Self>> {
                ::std::thread_local! {
                    static LIST: $crate::ThreadList<$context> = const { $crate::ThreadList::new() };
                }
                &LIST
            }
        }
    };
}

/// All contexts of one type.
pub struct Pool<T> {
    name: &'static str,
    depot: Depot<T>,
    /// Idle contexts of builds without the pool.
    others: Mutex<Magazine<T>>,
    started: Instant,
    /// When the current decay period ends, in milliseconds since `started`.
    period_end_ms: AtomicU64,
}

impl<T: Pooled> Pool<T> {
    /// Makes an empty pool, listed by [`pools`]. For [`pooled!`](crate::pooled).
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let (stats, maintain, trim) = (|| T::pool().stats(), || T::pool().give_back(), || T::pool().trim());
        registry::add(registry::Entry { name, stats, maintain, trim });
        let period_end_ms = AtomicU64::new(DECAY_PERIOD.as_millis() as u64);
        let others = Mutex::new(Magazine::new());
        Self { name, depot: Depot::new(SLOTS), others, started: Instant::now(), period_end_ms }
    }

    /// Returns the name of the pool's contexts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns a copy of its counters.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.depot.stats()
    }

    /// Gives back contexts that the recent load did not need, from the stack and from the calling thread's list. Cheap
    /// while no [`DECAY_PERIOD`] ends; call it when a thread has time. Returns whether more will be surplus after the
    /// next two periods if the load stays as it is. If so, a thread should call this again before it sleeps for long.
    pub fn maintain(&self) -> bool {
        if self.period_is_over() {
            self.end_period();
        }
        self.settle();
        self.free_surplus(usize::MAX);
        self.depot.coming_surplus() > 0
    }

    /// Calls [`Pool::maintain`], and returns how many bytes will have to be given back later.
    fn give_back(&self) -> u64 {
        self.maintain();
        self.depot.coming_surplus().saturating_mul(T::HELD_BYTES as u64)
    }

    fn trim(&self) {
        self.end_period();
        self.end_period();
        self.free_surplus(usize::MAX);
    }

    /// Ends the decay period at once. [`Pool::maintain`] does so when its time is over.
    pub fn end_period(&self) {
        // The new period starts with the contexts that are in flight now.
        self.settle();
        self.depot.end_period();
    }

    fn settle(&self) {
        let freed = T::list().try_with(|list| list.0.borrow_mut().settle(&self.depot));
        self.free(freed.unwrap_or_default());
    }

    /// Frees every context that waits in the stack, needed or not.
    pub fn clear(&self) {
        while let Some(magazine) = self.depot.take_any() {
            self.free(magazine);
        }
    }

    fn period_is_over(&self) -> bool {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let end_ms = self.period_end_ms.load(Ordering::Relaxed);
        let next_ms = now_ms + DECAY_PERIOD.as_millis() as u64;
        // Several threads may notice; one of them ends the period.
        now_ms >= end_ms
            && self.period_end_ms.compare_exchange(end_ms, next_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn free_surplus(&self, batches: usize) {
        for _ in 0..batches {
            let Some(magazine) = self.depot.take_surplus() else { break };
            self.free(magazine);
        }
    }

    fn free(&self, contexts: Magazine<T>) {
        self.depot.note_freed(contexts.len());
        drop(contexts);
    }

    #[cold]
    fn take_slowly(&'static self) -> Box<Node<T>> {
        let spares_length = match T::list().try_with(|list| list.0.borrow_mut().get_or_trade(&self.depot)) {
            Ok(Ok(context)) => {
                self.look_at_the_clock();
                return context;
            }
            Ok(Err(spares_length)) => spares_length,
            Err(_) => {
                // The thread is ending and has no list any more.
                self.depot.note_created(1);
                self.depot.note_in_flight(1);
                return Node::boxed(T::create());
            }
        };
        // The list is not borrowed here: a context may contain other contexts.
        let context = Node::boxed(T::create());
        let spares = (0..spares_length).map(|_| Node::boxed(T::create())).collect();
        let freed = T::list().with(|list| list.0.borrow_mut().adopt(&self.depot, spares));
        self.free(freed);
        context
    }

    #[cold]
    fn put_slowly(&'static self, context: Box<Node<T>>) {
        let mut context = Some(context);
        let freed = T::list().try_with(|list| {
            let context = context.take();
            context.map(|context| list.0.borrow_mut().put_or_trade(&self.depot, context))
        });
        match freed {
            Ok(freed) => self.free(freed.unwrap_or_default()),
            Err(_) => {
                // As in `take_slowly`.
                self.depot.note_in_flight(-1);
                self.free(context.into_iter().collect());
            }
        }
        self.look_at_the_clock();
    }

    /// Now and then, ends the decay period if it is over and frees some surplus. Called after a trade, because a change
    /// of the load shows in trades.
    fn look_at_the_clock(&self) {
        let due = T::list().try_with(|list| list.0.borrow_mut().looks_due(TRADES_A_LOOK));
        if due.unwrap_or(false) {
            if self.period_is_over() {
                self.depot.end_period();
            }
            self.free_surplus(BATCHES_FREED_A_LOOK);
        }
    }
}

impl<T> std::fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool of {}", self.name)
    }
}

/// A thread's idle contexts of one type, for the pool's own use. When the thread ends, they go to other threads.
pub struct ThreadList<T: Pooled>(RefCell<List<T>>);

impl<T: Pooled> ThreadList<T> {
    /// Makes an empty list. For [`pooled!`](crate::pooled).
    #[must_use]
    pub const fn new() -> Self {
        Self(RefCell::new(List::new()))
    }
}

impl<T: Pooled> Default for ThreadList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Pooled> Drop for ThreadList<T> {
    fn drop(&mut self) {
        let pool = T::pool();
        let freed = self.0.get_mut().close(&pool.depot);
        pool.free(freed);
    }
}

impl<T: Pooled> std::fmt::Debug for ThreadList<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ThreadList")
    }
}

/// A context in use. Dropping it, on any thread, resets the context and gives it to that thread's list.
pub struct PoolBox<T: Pooled>(ManuallyDrop<Box<Node<T>>>);

impl<T: Pooled> PoolBox<T> {
    /// Takes an idle context, or creates one if there is none.
    #[must_use]
    #[inline]
    pub fn take() -> Self {
        if other_source::IS_ON {
            return Self(ManuallyDrop::new(other_source::take(&T::pool().others)));
        }
        let context = match T::list().try_with(|list| list.0.borrow_mut().get()) {
            Ok(Some(context)) => context,
            _ => T::pool().take_slowly(),
        };
        Self(ManuallyDrop::new(context))
    }

    /// Returns the bare context, which must come back by [`PoolBox::from_raw`].
    #[inline]
    fn into_raw(self) -> NonNull<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once, here, and `this` is neither used nor dropped afterwards.
        let context = unsafe { ManuallyDrop::take(&mut this.0) };
        // The node's address, and the right to all of it: the context is its first field.
        NonNull::from(Box::leak(context)).cast()
    }

    /// # Safety
    /// `context` came from [`PoolBox::into_raw`], and nobody else uses it any more.
    #[inline]
    unsafe fn from_raw(context: NonNull<T>) -> Self {
        // SAFETY: it is the first field of a node leaked from a box (`Node` is `repr(C)`), which the caller has
        // exclusively.
        Self(ManuallyDrop::new(unsafe { Box::from_raw(context.as_ptr().cast()) }))
    }
}

impl<T: Pooled> Drop for PoolBox<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken once, here, and `self` is not used afterwards.
        let mut context = unsafe { ManuallyDrop::take(&mut self.0) };
        context.context.reset();
        if other_source::IS_ON {
            return other_source::put(&T::pool().others, context);
        }
        let mut context = Some(context);
        // If the thread is ending and its list is gone, the context is refused too.
        let _ = T::list().try_with(|list| {
            context = context.take().and_then(|context| list.0.borrow_mut().put(context).err());
        });
        if let Some(context) = context {
            T::pool().put_slowly(context);
        }
    }
}

impl<T: Pooled> Deref for PoolBox<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0.context
    }
}

impl<T: Pooled> DerefMut for PoolBox<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0.context
    }
}

impl<T: Pooled + std::fmt::Debug> std::fmt::Debug for PoolBox<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PoolBox").field(&**self).finish()
    }
}
