//! Page-aligned memory of a few sizes: bounce buffers, and what copy-on-write reads.

use super::{PoolBox, PoolContext};
use crate::{AlignedBuf, pooled};
use std::ptr::NonNull;

/// Page-aligned memory of `BYTES`.
pub(crate) struct Pages<const BYTES: usize>(AlignedBuf);

impl<const BYTES: usize> Pages<BYTES> {
    fn as_non_null(&self) -> NonNull<u8> {
        self.0.as_non_null()
    }
}

impl<const BYTES: usize> PoolContext for Pages<BYTES> {
    const HELD_BYTES: usize = BYTES;

    fn create() -> Self {
        Self(AlignedBuf::zeroed(BYTES))
    }
}

macro_rules! sizes {
    ($($name:ident $bytes:literal)*) => {
        $(pooled!(Pages<$bytes>, concat!("buffer of ", $bytes, " bytes"));)*

        /// Memory from the pool of the smallest size that suffices. Longer memory comes from the allocator.
        pub(crate) enum PooledPages {
            $(
                /// From the pool.
                $name(PoolBox<Pages<$bytes>>),
            )*
            /// Longer than the largest size of the pool.
            Allocated(AlignedBuf),
        }

        impl PooledPages {
            /// At least `length_bytes`. The old contents are still there.
            pub(crate) fn take(length_bytes: usize) -> Self {
                // In this crate's own unit tests the pool's atomics are the model checker's, which work in a model
                // only.
                $(if length_bytes <= $bytes && !cfg!(test) {
                    return Self::$name(PoolBox::take());
                })*
                Self::Allocated(AlignedBuf::zeroed(length_bytes))
            }

            pub(crate) fn as_non_null(&self) -> NonNull<u8> {
                match self {
                    $(Self::$name(pages) => pages.as_non_null(),)*
                    Self::Allocated(buf) => buf.as_non_null(),
                }
            }
        }
    };
}

sizes!(Pages4K 4096 Pages16K 16384 Pages64K 65536 Pages256K 262_144 Pages1M 1_048_576);
