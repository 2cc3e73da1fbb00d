//! Keeps futures of any type, such as tasks, in chunks of a few sizes.
//!
//! A future stays on its thread and does not move. The chunk is only memory; any thread may use it next.

use super::{PoolBox, PoolContext, Pooled};
use crate::pooled;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::future::Future;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

const CHUNK_ALIGNMENT_BYTES: usize = 64;

/// Memory for a future of at most `BYTES`.
#[repr(C, align(64))]
struct Chunk<const BYTES: usize>(MaybeUninit<[u8; BYTES]>);

impl<const BYTES: usize> PoolContext for Chunk<BYTES> {
    fn create() -> Self {
        Self(MaybeUninit::uninit())
    }
}

/// The place that a future's memory comes from.
#[derive(Debug, Clone, Copy)]
enum Home {
    Pool {
        take: fn() -> NonNull<u8>,
        give_back: unsafe fn(NonNull<u8>),
    },
    /// The future is larger than any chunk.
    Allocator(Layout),
}

fn take<const BYTES: usize>() -> NonNull<u8>
where
    Chunk<BYTES>: Pooled,
{
    PoolBox::<Chunk<BYTES>>::take().into_raw().cast()
}

/// # Safety
/// `chunk` came from [`take`] of the same size, and nobody else uses it any more.
unsafe fn give_back<const BYTES: usize>(chunk: NonNull<u8>)
where
    Chunk<BYTES>: Pooled,
{
    // SAFETY: as the caller says.
    drop(unsafe { PoolBox::<Chunk<BYTES>>::from_raw(chunk.cast()) });
}

macro_rules! chunks {
    ($($bytes:literal)*) => {
        $(pooled!(Chunk<$bytes>, concat!("task of up to ", $bytes, " bytes"));)*

        /// Returns the smallest chunk that fits `layout`.
        fn home_of(layout: Layout) -> Home {
            // In this crate's own unit tests the pool's atomics are the model checker's, which work only in a model.
            let fits = |bytes| layout.size() <= bytes && layout.align() <= CHUNK_ALIGNMENT_BYTES && !cfg!(test);
            $(if fits($bytes) {
                return Home::Pool { take: take::<$bytes>, give_back: give_back::<$bytes> };
            })*
            // The allocator must not be asked for zero bytes.
            Home::Allocator(Layout::from_size_align(layout.size().max(1), layout.align()).unwrap_or(layout))
        }
    };
}

chunks!(256 512 1024 2048 4096 8192 16384);

impl Home {
    fn take(self) -> NonNull<u8> {
        match self {
            Self::Pool { take, .. } => take(),
            Self::Allocator(layout) => {
                // SAFETY: the size is not zero (`home_of`).
                NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout))
            }
        }
    }

    /// # Safety
    /// `place` came from [`Home::take`] of the same home, and nobody else uses it any more.
    unsafe fn give_back(self, place: NonNull<u8>) {
        match self {
            // SAFETY: as the caller says.
            Self::Pool { give_back, .. } => unsafe { give_back(place) },
            // SAFETY: as the caller says; the layout is the same.
            Self::Allocator(layout) => unsafe { dealloc(place.as_ptr(), layout) },
        }
    }
}

/// A future without a result, pinned in memory from the pool; it stays on its thread.
pub struct PooledFuture {
    future: NonNull<dyn Future<Output = ()>>,
    home: Home,
    owns: PhantomData<Box<dyn Future<Output = ()>>>,
}

impl PooledFuture {
    /// Puts `future` into the pool's memory.
    #[must_use]
    pub fn new<F: Future<Output = ()> + 'static>(future: F) -> Self {
        let home = home_of(Layout::new::<F>());
        let place = home.take().cast::<F>();
        // SAFETY: the memory is ours, large enough and aligned (`home_of`).
        unsafe { place.write(future) };
        Self { future: place, home, owns: PhantomData }
    }
}

impl Future for PooledFuture {
    type Output = ();

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // SAFETY: we alone own the future, and it is neither moved nor overwritten before it is dropped in place.
        unsafe { Pin::new_unchecked(self.future.as_mut()) }.poll(context)
    }
}

impl Drop for PooledFuture {
    fn drop(&mut self) {
        // SAFETY: the future is ours alone, it is dropped once, and nobody sees its memory again.
        unsafe {
            self.future.as_ptr().drop_in_place();
            self.home.give_back(self.future.cast());
        }
    }
}

impl std::fmt::Debug for PooledFuture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PooledFuture")
    }
}
