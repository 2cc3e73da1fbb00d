//! The bottom of the path: memory that the kernel reads and writes for us.
//!
//! * [`IoBuf`] and [`Window`]: scattered memory that an operation owns (or pins) while the kernel may touch it.
//! * [`Lent`] and [`Held`]: an operation's memory that another thread fills.
//! * [`AlignedBuf`]: owned, aligned memory for metadata and bounce buffers. [`PooledBuf`]: the same from a pool.
//! * [`BufferBudget`]: a limit for the memory of such buffers, with a share for each disk.
//! * [`GuestMemory`]: a guest's address space, mapped from the file descriptors that its monitor sent.
//! * [`Placement`]: the kinds of files that a guest's memory may lie in.
//! * [`Pool`] and [`PoolBox`]: request contexts that are used again, without atomics or allocation. [`Placed`],
//!   [`PoolRc`] and [`PooledFuture`] use such memory for values that stay on one thread.
//! * [`MappingShare`]: the share of mappings that is set aside for one peer. [`MappedWords`]: a file of our own as an
//!   array of words.
//! * [`MappedRange`]: a part of a file of our own in memory, for any thread.
//! * [`fault`]: the guard against mapped files that shrink.
//! * [`InterruptHandle`]: interrupts a thread in a system call in which a peer makes it wait.
//! * [`receive_into`] and [`send_parts`]: a stream socket's bytes, straight from and to windows.
//! * [`to_usize`]: a length on storage as one in memory.
//! * [`peer_process`]: whether the process at the other end of a socket still lives.
//!
//! Nearly all `unsafe` of the project is here and in `engine`: the types are built so that code above them needs none.
//!
//! ```
//! use ringdisk_memory::IoBuf;
//!
//! let buf = IoBuf::zeroed(8192);
//! let second_page = buf.whole().slice(4096, 4096);
//! second_page.copy_from_slice(0, b"data");
//! drop(buf);
//! assert_eq!(second_page.to_vec()[..5], *b"data\0", "a window keeps its memory");
//! ```

mod aligned;
mod budget;
mod buffer;
pub mod fault;
mod guest;
mod interrupt;
mod lent;
mod mapped_range;
mod mapping;
mod peer;
mod placement;
mod pool;
mod pooled_buf;
mod share;
mod size;
mod socket;
mod words;

pub use aligned::{AlignedBuf, OutOfMemory, PAGE_BYTES};
pub use budget::{BudgetStats, BufferAccount, BufferBudget, BufferGrant, BufferUse};
pub use buffer::{IoBuf, MemoryLost, Segment, Window};
pub use guest::{GuestMemory, GuestRegion, MemoryError, RegionSpec};
pub use interrupt::InterruptHandle;
pub use lent::{Held, Lent};
pub use mapped_range::{MappedRange, MappingLost};
pub use mapping::{Mapping, duplicate_fd};
pub use peer::{PeerProcess, peer_process};
pub use placement::Placement;
pub use pool::{
    DECAY_PERIOD, HasRoom, Placed, Pool, PoolBox, PoolContext, PoolRc, PoolStats, Pooled, PooledFuture, Room,
    ThreadList, maintain_pools, pools, trim_pools,
};
pub use pooled_buf::PooledBuf;
pub use share::MappingShare;
pub use size::to_usize;
pub use socket::{SocketPart, receive_into, send_parts};
pub use words::MappedWords;
