//! A disk: its control plane ([`Disk`], shared) and its data plane ([`DiskQueue`], one thread each).

use crate::{
    Completion, DiskListener, IoResult, Op, OpFlags, Parts, ReactorCtx, ReadMap, Result, Run, Runs, StatusQuery, Tag,
    WriteMap,
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
    /// Where the first physical block begins.
    pub alignment_offset_bytes: u32,
}

/// How worn a disk is, as JEDEC's eMMC registers say it; zero is not known (virtio 1.2, 5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lifetime {
    /// Reserved blocks that are left: 1 is normal, 2 a warning, 3 urgent.
    pub end_of_life: u16,
    /// Wear of memory of the first type, in tenths of its life: 1 is up to 10%, 11 beyond.
    pub worn_a: u16,
    /// The same of the second type.
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
    /// Writes fail with [`crate::IoErrorKind::ReadOnly`].
    pub read_only: bool,
    /// Whether completed writes can be lost without a flush: false for write-through disks, on which every completed
    /// write is durable.
    pub volatile_cache: bool,
    /// Whether discard has an effect.
    pub discard: bool,
    /// Best alignment and granularity of discard in bytes; zero where discard does nothing.
    pub discard_granularity_bytes: u32,
    /// Whether write-zeroes is served (it always is where writes are; false for read-only disks).
    pub write_zeroes: bool,
    /// What `GET_ID` answers, at most 20 bytes, empty where there is none.
    pub serial: String,
}

/// The control plane of a disk.
///
/// Contract: a disk serves any number of queues on any threads at once; a flush on one covers writes completed on all.
/// Nothing that a guest submits may panic. Overlapping requests in flight at once may be carried out in any order. Two
/// writes never tear a sector between them; a read that overlaps a write may see any part of it (the kernel's page
/// cache copies without a lock).
pub trait Disk: Send + Sync {
    /// Its properties at this moment.
    fn info(&self) -> DiskInfo;

    /// Opens a queue; called on the thread of the reactor that `ctx` belongs to, and used only there.
    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>>;

    /// Changes whether completed writes may stay volatile (`false` makes every later write durable before it
    /// completes). Disks that cannot switch ignore it; the next [`Disk::info`] tells.
    fn set_volatile_cache(&self, volatile: bool) {
        let _ = volatile;
    }

    /// How worn the storage is, where it says so.
    fn lifetime(&self) -> Option<Lifetime> {
        None
    }

    /// Whether a write goes to where the data that it replaces lie, so that nothing of them stays. May change while the
    /// disk is served.
    fn overwrites_in_place(&self) -> bool {
        false
    }

    /// Whether a device may hold pages of requests' memory for itself (direct I/O). A read that was given up could still
    /// change them.
    fn may_pin_memory(&self) -> bool {
        false
    }

    /// What lies where in a range. A disk that cannot tell says that all of it is data.
    ///
    /// This blocks while tables are read, so it is for threads of jobs and sessions: a reactor may have to go on for it to
    /// end. What is written meanwhile may show or not. Neighbouring runs may be alike.
    fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        Ok(query.answered_with(self.info().size_bytes, Run::of_data))
    }

    /// Shows a range where it lies in the host's memory, to any thread. `None` is "not here": it is compressed, or remote, or
    /// nowhere near; a read delivers it then, and says what is wrong with a range that the disk does not have.
    ///
    /// This does not wait, but looking at what it shows may: for a page that the host has to read first. So it is not for
    /// reactors, unless all lies in memory. A map ends with an error where the disk's layers or its file change beneath: a new
    /// one, or a read, shows what holds then.
    fn map_read(&self, offset: u64, length_bytes: usize) -> Option<ReadMap> {
        let _ = (offset, length_bytes);
        None
    }

    /// Gives space for the new bytes of a range, all zeros at first, which nobody sees before [`DiskQueue::submit_map`].
    /// `None` is "not here": [`WriteMap::in_memory`] does then. Does not wait, and reads nothing of the disk.
    fn map_write(&self, offset: u64, length_bytes: usize) -> Option<WriteMap> {
        let _ = (offset, length_bytes);
        None
    }

    /// Tells `listener` of every later change of [`Disk::info`], as long as the listener's owner keeps it. Ask
    /// [`Disk::info`] after subscribing, so that no change is missed. A disk that never changes ignores this; others
    /// keep a [`crate::Listeners`]. A filter passes the subscription on to the disk below. If its own [`DiskInfo`]
    /// differs, it listens itself and tells its own listeners.
    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        let _ = listener;
    }
}

/// The data plane of a disk on one thread.
///
/// Dropping a queue with requests in flight is allowed. What was pushed to the storage still happens, and its memory
/// stays alive until then. No completion is delivered.
pub trait DiskQueue {
    /// Takes one request. This only pushes: nothing waits, and nothing reaches the kernel before the reactor's next
    /// submit. An engine with resident data may complete the request at once. The completion comes through
    /// [`DiskQueue::harvest`], also for requests that are refused.
    fn submit(&mut self, tag: Tag, op: Op);

    /// Commits the new bytes of a range, which is a write like others. A disk that gave space for them takes that over.
    ///
    /// An error is for bytes that cannot be had any more: nothing was submitted then, and no completion comes.
    fn submit_map(&mut self, tag: Tag, map: WriteMap) -> IoResult {
        self.submit(tag, map.into_op(OpFlags::NONE)?);
        Ok(())
    }

    /// Appends the completions since the last call to `done`, and returns their number.
    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize;

    /// Requests submitted and not yet harvested.
    fn in_flight(&self) -> usize;

    /// Appends what is known of how requests spend their time, those included whose completions came with the last
    /// harvest. To be asked after each harvest, before their tags are used again. Requests of which nothing is said
    /// spent it in the engine. A filter passes the call on.
    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        let _ = timings;
    }
}
