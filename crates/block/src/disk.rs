//! A disk: its control plane ([`Disk`], shared) and its data plane ([`DiskQueue`], one thread each).

use crate::{
    Completion, IoResult, Op, OpFlags, Parts, ReactorCtx, ReadMap, Result, Run, Runs, StatusQuery, Tag, WriteMap,
};
use std::rc::Rc;
use std::sync::Weak;

/// Sizes a guest may want to align to, all in bytes; zero where unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Topology {
    /// Physical block: writes smaller than it are slow, never wrong.
    pub physical_block_bytes: u32,
    /// Smallest I/O that is efficient.
    pub minimum_io_bytes: u32,
    /// Best I/O size.
    pub optimal_io_bytes: u32,
    /// The offset of the first physical block.
    pub alignment_offset_bytes: u32,
}

/// The wear of a disk, as in JEDEC's eMMC registers; zero if not known (virtio 1.2, 5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lifetime {
    /// Reserved blocks that are left: 1 is normal, 2 a warning, 3 urgent.
    pub end_of_life: u16,
    /// Wear of memory of the first type, in tenths of its life: 1 is up to 10%, 11 beyond.
    pub worn_a: u16,
    /// Wear of memory of the second type.
    pub worn_b: u16,
}

/// The properties of a disk. Only `size_bytes` and `volatile_cache` may change while it is served; see
/// [`Disk::subscribe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskInfo {
    /// Capacity, a multiple of 512. It may grow at any time, so subscribe to changes if you keep a copy. A disk serves
    /// requests up to its new end before it tells its listeners.
    pub size_bytes: u64,
    /// The smallest unit a guest may address (a power of two, at least 512).
    pub logical_block_bytes: u32,
    /// Sizes to align to.
    pub topology: Topology,
    /// The disk is read-only: writes fail with [`crate::IoErrorKind::ReadOnly`].
    pub read_only: bool,
    /// Whether completed writes can be lost without a flush: false for write-through disks, on which every completed
    /// write is durable.
    pub volatile_cache: bool,
    /// Whether discard has an effect.
    pub discard: bool,
    /// Best alignment and granularity of discard in bytes; zero if discard does nothing.
    pub discard_granularity_bytes: u32,
    /// Whether write-zeroes is served. True for all disks but read-only ones.
    pub write_zeroes: bool,
    /// The answer to `GET_ID`, at most 20 bytes; empty if there is none.
    pub serial: String,
}

/// Is told of a disk's changes; see [`crate::Disk::subscribe`].
pub trait DiskListener: Send + Sync {
    /// Tells that the disk's size or its cache type may have changed; `info` has the new properties. Called on any
    /// thread, that of a reactor included, so it must not block, and must not change the disk. Calls of one disk come
    /// one at a time, and the last one has the newest information. A call may bring nothing new.
    fn info_changed(&self, info: &DiskInfo);
}

/// The control plane of a disk.
///
/// Contract: a disk serves any number of queues on any threads at once; a flush on one covers writes completed on all.
/// Nothing that a guest submits may panic. Overlapping requests in flight at once may be carried out in any order. Two
/// writes never tear a sector between them. A read that overlaps a write may see any part of it, because the kernel's
/// page cache copies without a lock.
pub trait Disk: Send + Sync {
    /// Returns the disk's properties.
    fn info(&self) -> DiskInfo;

    /// Opens a queue; called on the thread of the reactor that `ctx` belongs to, and used only there.
    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>>;

    /// Changes whether completed writes may stay volatile (`false` makes every later write durable before it
    /// completes). Disks that cannot switch ignore it; [`Disk::info`] says which holds.
    fn set_volatile_cache(&self, volatile: bool) {
        let _ = volatile;
    }

    /// Returns the present wear of the storage, if it is known. It may wait, so reactors do not call it.
    fn lifetime(&self) -> Option<Lifetime> {
        None
    }

    /// Whether a write overwrites old data in place, so that none of them stay. This may change while the disk is
    /// served.
    fn overwrites_in_place(&self) -> bool {
        false
    }

    /// Whether a device may hold pages of requests' memory (direct I/O), and still write to them after a read was given
    /// up.
    fn may_pin_memory(&self) -> bool {
        false
    }

    /// Returns the status of a range. A disk without such knowledge reports all of it as data.
    ///
    /// Blocks while tables are read, and may need a reactor to go on. So only threads of jobs and sessions may call it.
    /// Concurrent writes may show or not. Neighbouring runs may be alike.
    fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        Ok(query.answered_with(self.info().size_bytes, Run::of_data))
    }

    /// Maps the bytes of a range in the host's memory, for any thread. `None` means that they are not there: they are
    /// compressed, for example, or remote. A read delivers them then, or fails with the reason.
    ///
    /// This does not wait, but an access to the mapped bytes may, for a page that the host reads first. So reactors use
    /// it only for files in memory. A map ends with an error if the disk's layers or its file change. A new map, or a
    /// read, then gives the new state.
    fn map_read(&self, offset: u64, length_bytes: usize) -> Option<ReadMap> {
        let _ = (offset, length_bytes);
        None
    }

    /// Provides space for the new bytes of a range. It is all zeros at first, and invisible before
    /// [`DiskQueue::submit_map`]. After `None`, use [`WriteMap::in_memory`]. Does not wait, and reads nothing from the
    /// disk.
    fn map_write(&self, offset: u64, length_bytes: usize) -> Option<WriteMap> {
        let _ = (offset, length_bytes);
        None
    }

    /// Tells `listener` of every later change of [`Disk::info`], for as long as the listener's owner keeps it. Ask
    /// [`Disk::info`] after subscribing, so that no change is missed. A disk that never changes ignores this; others
    /// keep a [`crate::Listeners`]. A filter passes the subscription on to the disk below. If its own [`DiskInfo`]
    /// differs, it listens itself and tells its own listeners.
    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        let _ = listener;
    }
}

/// The data plane of a disk on one thread.
///
/// Dropping a queue with requests in flight is allowed. Requests that were pushed to the storage still happen, and
/// their memory stays alive until then. No completion is delivered.
pub trait DiskQueue {
    /// Takes one request. This only pushes: nothing waits, and nothing reaches the kernel before the reactor's next
    /// submit. An engine with resident data may complete the request at once. The completion comes through
    /// [`DiskQueue::harvest`], also for requests that are refused.
    fn submit(&mut self, tag: Tag, op: Op);

    /// Commits the new bytes of a range, as a write. A disk that provided the space takes it over.
    ///
    /// An error means that the new bytes were lost: nothing was submitted, and no completion comes.
    fn submit_map(&mut self, tag: Tag, map: WriteMap) -> IoResult {
        self.submit(tag, map.into_op(OpFlags::NONE)?);
        Ok(())
    }

    /// Appends the completions since the last call to `done`. Returns their number.
    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize;

    /// Returns how many requests are submitted and not yet harvested.
    fn in_flight(&self) -> usize;

    /// Nobody waits for the requests of this queue any more, and newer ones may come through others. A request that waits
    /// here and was not handed on ends with an error. So does each that would have to wait from then on. A filter passes
    /// the call on.
    fn abandon(&mut self) {}

    /// Appends the known times of requests, including those that the last harvest completed. Call it after each
    /// harvest, before their tags are used again. Requests that it does not name spent their time in the engine. A
    /// filter passes the call on.
    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        let _ = timings;
    }
}
