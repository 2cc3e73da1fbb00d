//! The bottom of the path: memory that the kernel reads and writes for us.
//!
//! * [`IoBuf`] and [`Window`]: scattered memory an operation owns (or pins) while the kernel may touch it.
//! * [`AlignedBuf`]: owned, aligned memory for metadata and bounce buffers.
//! * [`GuestMemory`]: a guest's address space, mapped from the file descriptors that its monitor sent.
//! * [`Pool`] and [`PoolBox`]: request contexts that are used again, without atomics or allocation; [`Placed`], [`PoolRc`]
//!   and [`PooledFuture`] put what belongs to one thread into such memory.
//! * [`fault`]: what happens when such a file shrinks under us.
//! * [`InterruptHandle`]: gets a thread out of a system call in which a peer makes it wait.
//!
//! Nearly all `unsafe` of the project is here and in `engine`: the types are built so that code above them needs none.

mod aligned;
mod buffer;
pub mod fault;
mod guest;
mod interrupt;
mod mapping;
mod pool;

pub use aligned::{AlignedBuf, PAGE_BYTES};
pub use buffer::{IoBuf, Segment, Window};
pub use guest::{GuestMemory, GuestRegion, MemoryError, RegionSpec};
pub use interrupt::InterruptHandle;
pub use mapping::{Mapping, duplicate_fd};
pub use pool::{
    DECAY_PERIOD, HasRoom, Placed, Pool, PoolBox, PoolContext, PoolRc, PoolStats, Pooled, PooledFuture, Room,
    ThreadList, maintain_pools, pools, trim_pools,
};
