//! **The** interface between the rooms. Everything above and below meets here:
//!
//! * [`Disk`] and [`DiskQueue`]: a disk, as front ends (vhost-user, NBD, the driver's tests) see it.
//! * [`DiskListener`]: learns of a disk's changes.
//! * [`Run`]: a range of a disk with its status. [`DirtyMap`]: the written parts of a disk.
//! * [`ReadMap`] and [`WriteMap`]: access to a disk's bytes in the host's memory, without an operation.
//! * [`Op`] and [`Completion`]: one request and its end. Operations own their buffers. [`OpFlags`] and [`Priority`] say
//!   how durable and how urgent it is.
//! * [`File`] and [`FileQueue`]: an open file, as images see it; engines and the simulator implement them. Pushing an
//!   operation never waits: the reactor submits once a turn and routes the completion through its [`Done`].
//! * [`MetaIo`]: how formats read and write their tables, by awaiting the same queue.
//! * [`DiskIo`]: a disk's queue for tasks, which await each operation.
//! * [`Mapped`] and [`Extent`]: a format's answer to *where*.
//! * [`ReactorCtx`], [`ReactorHandle`], [`Poller`]: a reactor, from its own thread and from others.
//! * [`Timers`], [`Watch`]: waiting for a time, and for a descriptor.
//! * [`Executor`], [`WaitList`], [`RangeLocks`]: the slow path's tasks and what they wait on. [`turn`]: how many bytes
//!   they may move in one turn. [`in_pieces`]: a long request, cut.
//! * [`Epochs`]: when a freed host cluster may be used again. [`InFlightOps`]: what a dropped task has left to the kernel.
//! * [`SliceCache`]: tables of 64-bit entries in memory, read without a lock.
//! * [`UntilChange`]: what a file's server said of it, until something changes.
//! * [`LogLimit`]: keeps guests and peers from filling the log.
//! * [`meter`]: the counters of front ends.
//! * [`Error`] (for a person) and [`IoError`] (for a guest).
//!
//! ```
//! # use memory as ringdisk_memory;
//! use ringdisk_block::{DiskIo, IoResult, Op};
//! use ringdisk_memory::AlignedBuf;
//!
//! /// A task on a reactor: copies the first sector of a disk to the second, and makes it durable.
//! async fn copy_first_sector(disk: &DiskIo) -> IoResult {
//!     let mut sector = AlignedBuf::zeroed(512);
//!     disk.read(0, &mut sector, 512).await?;
//!     disk.write(512, &mut sector, 0..512).await?;
//!     disk.run(Op::Flush).await
//! }
//! ```

#![forbid(unsafe_code)]

mod aside;
mod block_status;
mod dirty;
mod disk;
mod disk_io;
mod done;
mod epoch;
mod error;
mod executor;
mod extent;
mod file;
mod flags;
mod in_flight_ops;
pub mod latency;
mod listeners;
mod log_limit;
mod map;
mod meta;
pub mod meter;
mod op;
mod pieces;
mod plain_words;
mod range_lock;
mod reactor;
mod readiness;
mod slice_cache;
#[doc(hidden)]
pub mod sync;
mod timers;
pub mod turn;
mod until_change;
mod wait;
mod watch;
mod with_or_without;

pub use aside::Work;
pub use block_status::{Run, Runs, StatusQuery};
pub use dirty::{DirtyBitmaps, DirtyMap};
pub use disk::{Disk, DiskInfo, DiskListener, DiskQueue, Lifetime, Topology};
pub use disk_io::{DiskIo, reclaim};
pub use done::{Done, Sink, Waiter};
pub use epoch::{EpochPin, Epochs, Participant, Promise, Ticket};
pub use error::{Error, ErrorKind, IoError, IoErrorKind, IoResult, Result, without_numbers};
pub use executor::{Executor, Task, block_on};
pub use extent::{CompressedExtent, Extent, Fill, Mapped, Prepared};
pub use file::{CopyRange, File, FileInfo, FileIo, FileOp, FileQueue, Locks, PastEnd};
pub use flags::{OpFlags, Priority};
pub use in_flight_ops::InFlightOps;
pub use latency::{Part, Parts};
pub use listeners::Listeners;
pub use log_limit::{LogLimit, WAITING};
pub use map::{Claim, Keep, MapPiece, ReadMap, WriteMap};
pub use meta::MetaIo;
pub use op::{Completion, Op, SECTOR_BYTES, Tag};
pub use pieces::in_pieces;
pub use plain_words::in_plain_words;
pub use range_lock::{RangeGuard, RangeLocks};
pub use reactor::{BatchEnd, Job, Poller, PollerId, ReactorCtx, ReactorHandle, run_and_wait};
pub use readiness::{Interest, Readiness, WatchId};
pub use slice_cache::{CacheStats, SliceBook, SliceCache, SliceView};
pub use timers::{Sleep, Timer, Timers};
pub use until_change::{Asked, UntilChange};
pub use wait::{Wait, WaitList, yield_now};
pub use watch::Watch;
pub use with_or_without::{run_aside_or_here, spawn_or_block_on};
