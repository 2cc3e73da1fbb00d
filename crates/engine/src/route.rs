//! Decides who carries out a request, and how: the engine's own queue in the kernel, the reactor itself, or a worker.
//!
//! The reactor never waits, and a ring never makes the kernel start a thread:
//!
//! * io_uring hands requests that would wait to kernel worker threads. The last of these threads stays as long as the
//!   ring and wakes up every five seconds. So a daemon that was busy once would never be idle again. For this reason a
//!   ring gets only two kinds of requests: reads from a page cache that fetches missing pages without a thread, and
//!   requests that must not wait (`RWF_NOWAIT`). If those would have to wait (holes, space to be found, a busy device),
//!   the kernel refuses them, and a worker carries them out.
//! * Requests that always wait go to a worker at once: syncs, changes of extents and lengths, durable writes through
//!   the page cache, and writes to a page cache that does not take `RWF_NOWAIT`.
//! * On a host without swap, a file in memory never waits: the reactor carries out short transfers itself.
//! * Writes to the page cache of a file are serialized: the kernel takes them one by one, and workers that waited for
//!   each other there would spin. All changes of a file in memory are serialized, too.

use crate::base::call::Action;
use crate::base::options::EngineKind;
use crate::file::open_file::{Storage, Traits};
use crate::request::queue_file::QueueFile;
use std::sync::atomic::Ordering;

/// The longest copy from or to the page cache that a ring is given: the kernel copies while the reactor submits. A
/// longer copy would hold up every other disk of the reactor, so it goes to a worker.
const INLINE_COPY_BYTES_MAX: usize = 1 << 20;

/// Conditions of a decision that may change from one request to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Now {
    /// The file is not known to refuse requests that must not wait.
    pub(crate) takes_nowait: bool,
    /// The file system can find the file's blocks without reading its own tables.
    pub(crate) extents_ready: bool,
    /// The engine has refused the request, or must not be asked.
    pub(crate) declined: bool,
    /// The longest transfer to or from a file in memory that the reactor carries out itself.
    pub(crate) inline_bytes: usize,
    /// The request needs a system call, which would wait for workers that change the file in memory.
    pub(crate) waits_for_workers: bool,
    /// Workers may submit requests by `io_submit`.
    pub(crate) io_submit: bool,
}

impl Now {
    /// Makes the conditions for a request that its engine is asked first.
    #[inline]
    pub(crate) fn of(target: &QueueFile) -> Self {
        Self {
            takes_nowait: target.file.takes_nowait.load(Ordering::Relaxed),
            extents_ready: target.are_extents_ready(),
            declined: false,
            inline_bytes: 0,
            waits_for_workers: false,
            io_submit: true,
        }
    }
}

/// How a worker carries a request out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// By a system call of its own.
    Call,
    /// By one `io_submit`, together with the jobs that wait behind it. They end one after the other during the call.
    Batch,
    /// The worker only begins the request, by one `io_submit` together with the jobs that wait behind it.
    Begin,
}

/// The part of the engine that carries a request out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The engine that serves the file, in its ring or context.
    Engine,
    /// The reactor, by a copy if possible, else by a system call.
    Reactor,
    /// A worker. If serialized, no other such request on the file is carried out at the same time.
    Worker { how: How, serialized: bool },
}

/// Decides who carries the action out. `length_bytes` are moved, zeroed or freed.
#[inline]
pub(crate) fn route(file: Traits, action: Action, length_bytes: usize, now: Now) -> Route {
    if !now.declined && suits_engine(file, action, length_bytes, now) {
        return Route::Engine;
    }
    if file.storage == Storage::Memory && suits_reactor(action, length_bytes, now) {
        return Route::Reactor;
    }
    by_worker(file, action, now)
}

#[inline]
fn suits_engine(file: Traits, action: Action, length_bytes: usize, now: Now) -> bool {
    let may_begin = now.takes_nowait && now.extents_ready && file.storage != Storage::Memory;
    match (file.engine, action) {
        (EngineKind::Threads, _) => false,
        // Only Linux AIO has syncs for which the reactor need not wait.
        (EngineKind::LinuxAio, Action::Sync) => file.storage != Storage::Memory,
        (EngineKind::LinuxAio, _) => may_begin && action.is_transfer(),
        (EngineKind::IoUring | EngineKind::Auto, _) => {
            let is_short = length_bytes <= INLINE_COPY_BYTES_MAX;
            may_begin
                && match (file.storage, action) {
                    (Storage::Direct, _) => action.is_transfer(),
                    (_, Action::Read { .. }) => is_short,
                    (Storage::PageCache { takes_nowait_writes, .. }, Action::Write { durable: false }) => {
                        takes_nowait_writes && is_short
                    }
                    _ => false,
                }
        }
    }
}

fn suits_reactor(action: Action, length_bytes: usize, now: Now) -> bool {
    let is_free = !(now.waits_for_workers && changes_memory(action));
    match action {
        Action::Read { .. } | Action::Write { .. } | Action::Fallocate { .. } => {
            is_free && length_bytes <= now.inline_bytes
        }
        // There is nothing to make durable.
        Action::Sync => true,
        Action::Truncate | Action::DiscardBlocks { .. } | Action::BeginWriteback | Action::CopyFrom { .. } => false,
    }
}

fn by_worker(file: Traits, action: Action, now: Now) -> Route {
    let begins = file.engine != EngineKind::Threads && now.takes_nowait && now.extents_ready && now.io_submit;
    let is_write = matches!(action, Action::Write { .. });
    let serialized = ends_in_turn(file, action);
    match file.storage {
        // One worker at a time begins a file's writes: a second one would mostly wait for the first.
        Storage::Direct if begins && action.is_transfer() => Route::Worker { how: How::Begin, serialized: is_write },
        Storage::PageCache { writes_end_in_call: true, .. } if serialized && now.io_submit => {
            Route::Worker { how: How::Batch, serialized }
        }
        _ => Route::Worker { how: How::Call, serialized },
    }
}

/// Whether workers carry such requests out one after the other, each until its end.
pub(crate) fn ends_in_turn(file: Traits, action: Action) -> bool {
    match file.storage {
        Storage::Memory => changes_memory(action),
        // A durable write lets other writes go ahead while it is made durable.
        Storage::PageCache { .. } => action == Action::Write { durable: false },
        Storage::CachedDevice | Storage::Direct => false,
    }
}

/// Whether it changes a file in memory: the kernel allows one change at a time.
fn changes_memory(action: Action) -> bool {
    matches!(action, Action::Write { .. } | Action::Fallocate { .. } | Action::Truncate | Action::CopyFrom { .. })
}

/// Returns the `RWF_` flags for a transfer by io_uring.
#[inline]
pub(crate) fn ring_flags(file: Traits, action: Action) -> i32 {
    match (file.storage, action) {
        (_, Action::Write { durable: true }) => libc::RWF_NOWAIT | libc::RWF_DSYNC,
        (Storage::PageCache { reads_later: true, .. } | Storage::CachedDevice, Action::Read { .. }) => 0,
        _ => libc::RWF_NOWAIT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Action = Action::Read { need_bytes: 0 };
    const WRITE: Action = Action::Write { durable: false };
    const DURABLE: Action = Action::Write { durable: true };
    const CHANGE: Action = Action::Truncate;
    const SHORT: usize = 4096;
    const LONG: usize = INLINE_COPY_BYTES_MAX + 1;

    const FIRST: Now = Now {
        takes_nowait: true,
        extents_ready: true,
        declined: false,
        inline_bytes: SHORT,
        waits_for_workers: false,
        io_submit: true,
    };

    const EXT4: Storage =
        Storage::PageCache { reads_later: true, takes_nowait_writes: false, writes_end_in_call: true };
    const XFS: Storage = Storage::PageCache { reads_later: true, takes_nowait_writes: true, writes_end_in_call: true };
    const NFS: Storage =
        Storage::PageCache { reads_later: false, takes_nowait_writes: false, writes_end_in_call: false };

    fn cell(route: Route) -> &'static str {
        match route {
            Route::Engine => "engine",
            Route::Reactor => "reactor",
            Route::Worker { how: How::Call, serialized: false } => "call",
            Route::Worker { how: How::Call, serialized: true } => "call*",
            Route::Worker { how: How::Batch, serialized: false } => "batch",
            Route::Worker { how: How::Batch, serialized: true } => "batch*",
            Route::Worker { how: How::Begin, serialized: false } => "begin",
            Route::Worker { how: How::Begin, serialized: true } => "begin*",
        }
    }

    /// One row for each storage and engine: short and long reads, short and long writes, a durable write, a sync, a
    /// change.
    fn table(now: Now) -> String {
        let engines = [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];
        let storages = [
            ("memory", Storage::Memory),
            ("ext4", EXT4),
            ("xfs", XFS),
            ("nfs", NFS),
            ("device", Storage::CachedDevice),
            ("direct", Storage::Direct),
        ];
        let actions = [
            (READ, SHORT),
            (READ, LONG),
            (WRITE, SHORT),
            (WRITE, LONG),
            (DURABLE, SHORT),
            (Action::Sync, 0),
            (CHANGE, 0),
        ];
        let mut text = String::new();
        for (name, storage) in storages {
            for engine in engines {
                let cells =
                    actions.map(|(action, length)| cell(route(Traits { engine, storage }, action, length, now)));
                let cells = cells.map(|cell| format!("{cell:8}")).concat();
                text += &format!("{name:7} {:10} {}\n", engine.to_string(), cells.trim_end());
            }
        }
        text
    }

    /// `*`: serialized with others of the file.
    #[test]
    fn who_carries_what_out() {
        let expected = "\
memory  io_uring   reactor call    reactor call*   reactor reactor call*
memory  linux-aio  reactor call    reactor call*   reactor reactor call*
memory  threads    reactor call    reactor call*   reactor reactor call*
ext4    io_uring   engine  call    batch*  batch*  call    call    call
ext4    linux-aio  engine  engine  engine  engine  engine  engine  call
ext4    threads    call    call    batch*  batch*  call    call    call
xfs     io_uring   engine  call    engine  batch*  call    call    call
xfs     linux-aio  engine  engine  engine  engine  engine  engine  call
xfs     threads    call    call    batch*  batch*  call    call    call
nfs     io_uring   engine  call    call*   call*   call    call    call
nfs     linux-aio  engine  engine  engine  engine  engine  engine  call
nfs     threads    call    call    call*   call*   call    call    call
device  io_uring   engine  call    call    call    call    call    call
device  linux-aio  engine  engine  engine  engine  engine  engine  call
device  threads    call    call    call    call    call    call    call
direct  io_uring   engine  engine  engine  engine  engine  call    call
direct  linux-aio  engine  engine  engine  engine  engine  engine  call
direct  threads    call    call    call    call    call    call    call
";
        assert_eq!(table(FIRST), expected, "\n{}", table(FIRST));
    }

    /// Requests that the engine has refused, or was not asked for.
    #[test]
    fn who_carries_out_what_the_engine_does_not() {
        let declined = table(Now { declined: true, ..FIRST });
        let row = |name: &str| declined.lines().find(|row| row.starts_with(name)).unwrap().split_at(19).1.to_owned();
        assert_eq!(row("ext4    io_uring"), "call    call    batch*  batch*  call    call    call");
        assert_eq!(row("ext4    linux-aio"), row("ext4    io_uring"));
        assert_eq!(row("direct  io_uring"), "begin   begin   begin*  begin*  begin*  call    call");
        assert_eq!(row("direct  linux-aio"), row("direct  io_uring"));
        assert_eq!(row("direct  threads"), "call    call    call    call    call    call    call");
        assert!(!declined.contains("engine"), "{declined}");
    }

    #[test]
    fn where_nothing_can_be_begun_without_waiting_workers_wait_for_each() {
        for now in [Now { takes_nowait: false, ..FIRST }, Now { extents_ready: false, ..FIRST }] {
            let table = table(now);
            let transfers: String = table.lines().map(|row| &row[..row.len().min(19 + 5 * 8)]).collect();
            assert!(!transfers.contains("engine") && !transfers.contains("begin"), "{table}");
        }
        let without = table(Now { io_submit: false, declined: true, ..FIRST });
        assert!(!without.contains("batch") && !without.contains("begin"), "{without}");
        assert_eq!(without.matches("call*").count(), 3 * 2 + 9 * 2, "still serialized:\n{without}");
    }

    #[test]
    fn beside_a_workers_change_of_a_file_in_memory_other_changes_are_workers_too() {
        let file = Traits { engine: EngineKind::Threads, storage: Storage::Memory };
        let to = |action| cell(route(file, action, SHORT, Now { waits_for_workers: true, ..FIRST }));
        assert_eq!([READ, WRITE, DURABLE, Action::Sync].map(to), ["reactor", "call*", "call*", "reactor"]);
    }

    #[test]
    fn all_but_reads_that_the_kernel_ends_later_must_not_wait() {
        let flags = |storage, action| ring_flags(Traits { engine: EngineKind::IoUring, storage }, action);
        let must_not = |storage, action| flags(storage, action) & libc::RWF_NOWAIT != 0;
        for storage in [EXT4, XFS, Storage::CachedDevice] {
            assert!(!must_not(storage, READ) && must_not(storage, WRITE));
        }
        assert!(must_not(NFS, READ) && must_not(Storage::Direct, READ) && must_not(Storage::Direct, DURABLE));
        assert_eq!(flags(Storage::Direct, DURABLE) & libc::RWF_DSYNC, libc::RWF_DSYNC);
    }
}
