//! Page-aligned memory of a few sizes, for bounce buffers and for data of copy-on-write.

use super::{PoolBox, PoolContext};
use crate::{AlignedBuf, OutOfMemory, pooled};
use std::ptr::NonNull;

/// Page-aligned memory of `BYTES`; `None` if there was no memory when it was made.
pub(crate) struct Pages<const BYTES: usize>(Option<AlignedBuf>);

impl<const BYTES: usize> Pages<BYTES> {
    /// Returns its memory. Allocates it if there is none yet.
    fn memory(&mut self) -> Result<NonNull<u8>, OutOfMemory> {
        match &self.0 {
            Some(memory) => Ok(memory.as_non_null()),
            None => Ok(self.0.insert(AlignedBuf::try_zeroed(BYTES)?).as_non_null()),
        }
    }
}

impl<const BYTES: usize> PoolContext for Pages<BYTES> {
    const HELD_BYTES: usize = BYTES;

    fn create() -> Self {
        Self(AlignedBuf::try_zeroed(BYTES).ok())
    }
}

macro_rules! sizes {
    ($($name:ident $bytes:literal)*) => {
        $(pooled!(Pages<$bytes>, concat!("buffer of ", $bytes, " bytes"));)*

        /// Memory of the smallest size that suffices, from the pool. Longer memory comes from the allocator.
        pub(crate) enum PooledPages {
            $(
                /// Memory from the pool.
                $name(#[allow(dead_code)] PoolBox<Pages<$bytes>>),
            )*
            /// Memory longer than the largest size of the pool.
            Allocated(#[allow(dead_code)] AlignedBuf),
        }

        impl PooledPages {
            /// The largest size of the pool.
            pub(crate) const LONGEST_BYTES: usize = {
                let sizes = [$($bytes),*];
                sizes[sizes.len() - 1]
            };

            /// Takes at least `length_bytes`, and returns where they are. The old contents are still there.
            pub(crate) fn take(length_bytes: usize) -> Result<(Self, NonNull<u8>), OutOfMemory> {
                // In this crate's own unit tests the pool's atomics are the model checker's, which work only in a
                // model.
                $(if length_bytes <= $bytes && !cfg!(test) {
                    let mut pages = PoolBox::<Pages<$bytes>>::take();
                    let start = pages.memory()?;
                    return Ok((Self::$name(pages), start));
                })*
                let memory = AlignedBuf::try_zeroed(length_bytes)?;
                let start = memory.as_non_null();
                Ok((Self::Allocated(memory), start))
            }

            /// Returns how much memory a buffer of `length_bytes` takes.
            pub(crate) fn size_of(length_bytes: usize) -> usize {
                $(if length_bytes <= $bytes {
                    return $bytes;
                })*
                length_bytes
            }
        }
    };
}

sizes!(Pages4K 4096 Pages16K 16384 Pages64K 65536 Pages256K 262_144 Pages1M 1_048_576);
