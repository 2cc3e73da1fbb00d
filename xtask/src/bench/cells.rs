//! The measured cells: workloads on storages.

use std::fmt;

/// The storage that the servers serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Storage {
    /// No storage: the cost of the path itself.
    #[default]
    Null,
    /// A raw file in memory.
    RawTmpfs,
    /// The same as qcow2, every cluster allocated.
    Qcow2Tmpfs,
    /// A new, empty qcow2 image in memory for each measurement.
    Qcow2Empty,
    /// A new, empty overlay over the raw file in memory for each measurement.
    Qcow2Overlay,
    /// A chain of 16 in memory whose layers have every 16th cluster each.
    ChainSpread,
    /// A chain of 16 in memory with all data in the lowest layer.
    ChainBase,
    /// A raw file on a disk, all of it in the page cache.
    RawPageCache,
    /// The same, and every write is durable before it completes.
    RawSync,
    /// A raw file on a disk, with direct I/O.
    RawDirect,
    /// The same as qcow2, every cluster allocated.
    Qcow2Direct,
}

/// How bytes reach the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Engine {
    /// Ringdisk chooses; the others use io_uring.
    #[default]
    Auto,
    IoUring,
    LinuxAio,
    Threads,
}

/// The order of offsets, and whether it reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Access {
    #[default]
    RandomRead,
    RandomWrite,
    SequentialRead,
    SequentialWrite,
}

/// One workload on one storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cell {
    pub(super) storage: Storage,
    pub(super) engine: Engine,
    pub(super) access: Access,
    pub(super) block_kib: u32,
    pub(super) depth: u32,
    /// The guest flushes after each run of this many writes.
    pub(super) flush_every: Option<u32>,
    /// Whether the client's memory and fio's buffers are registered. Otherwise neither is.
    pub(super) fixed_buffers: bool,
    /// Whether the servers sleep as soon as they have nothing to do.
    pub(super) never_spins: bool,
}

/// The number of layers of a chain.
pub(super) const CHAIN_LAYERS: u64 = 16;

impl Storage {
    pub(super) const ALL: [Self; 11] = [
        Self::Null,
        Self::RawTmpfs,
        Self::Qcow2Tmpfs,
        Self::Qcow2Empty,
        Self::Qcow2Overlay,
        Self::ChainSpread,
        Self::ChainBase,
        Self::RawPageCache,
        Self::RawSync,
        Self::RawDirect,
        Self::Qcow2Direct,
    ];

    pub(super) fn is_qcow2(self) -> bool {
        !matches!(self, Self::Null | Self::RawTmpfs | Self::RawPageCache | Self::RawSync | Self::RawDirect)
    }

    pub(super) fn is_direct(self) -> bool {
        matches!(self, Self::RawDirect | Self::Qcow2Direct)
    }

    /// Whether each request has to wait for the disk.
    pub(super) fn is_at_the_disks_pace(self) -> bool {
        self.is_direct() || self == Self::RawSync
    }

    pub(super) fn is_tmpfs(self) -> bool {
        !matches!(self, Self::Null | Self::RawPageCache | Self::RawSync | Self::RawDirect | Self::Qcow2Direct)
    }

    pub(super) fn is_chain(self) -> bool {
        matches!(self, Self::ChainSpread | Self::ChainBase)
    }

    /// Whether it is made anew for each measurement, because measuring fills it.
    pub(super) fn is_fresh(self) -> bool {
        matches!(self, Self::Qcow2Empty | Self::Qcow2Overlay)
    }

    /// Returns the storage whose CPU time a request Ringdisk should not exceed here. It is measured in the same round.
    pub(super) fn reference(self) -> Option<Self> {
        match self {
            Self::Qcow2Tmpfs => Some(Self::RawTmpfs),
            Self::Qcow2Direct => Some(Self::RawDirect),
            Self::ChainSpread | Self::ChainBase => Some(Self::Qcow2Tmpfs),
            _ => None,
        }
    }

    /// Returns the name for headings.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Null => "Null disk",
            Self::RawTmpfs => "Raw on tmpfs",
            Self::Qcow2Tmpfs => "qcow2 on tmpfs, allocated",
            Self::Qcow2Empty => "qcow2 on tmpfs, empty image",
            Self::Qcow2Overlay => "qcow2 on tmpfs, empty overlay over a raw file",
            Self::ChainSpread => "qcow2 on tmpfs, chain of 16, data spread over all layers",
            Self::ChainBase => "qcow2 on tmpfs, chain of 16, all data in the lowest",
            Self::RawPageCache => "Raw in a warm page cache",
            Self::RawSync => "Raw, every write durable (sync=on; cache=writethrough; fio with O_DSYNC)",
            Self::RawDirect => "Raw with O_DIRECT",
            Self::Qcow2Direct => "qcow2 with O_DIRECT, allocated",
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Null => "null",
            Self::RawTmpfs => "raw-tmpfs",
            Self::Qcow2Tmpfs => "qcow2-tmpfs",
            Self::Qcow2Empty => "qcow2-empty",
            Self::Qcow2Overlay => "qcow2-overlay",
            Self::ChainSpread => "chain-spread",
            Self::ChainBase => "chain-base",
            Self::RawPageCache => "raw-pagecache",
            Self::RawSync => "raw-sync",
            Self::RawDirect => "raw-direct",
            Self::Qcow2Direct => "qcow2-direct",
        })
    }
}

impl Engine {
    /// Returns Ringdisk's name of the engine.
    pub(super) fn ringdisk(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::Threads => "threads",
        }
    }

    /// Returns QEMU's name of the engine.
    pub(super) fn qemu(self) -> &'static str {
        match self {
            Self::Auto | Self::IoUring => "io_uring",
            Self::LinuxAio => "native",
            Self::Threads => "threads",
        }
    }

    /// Returns fio's name of the engine. fio's own threads cannot match a pool, so io_uring also stands for the host
    /// there.
    pub(super) fn fio(self) -> &'static str {
        match self {
            Self::Auto | Self::IoUring | Self::Threads => "io_uring",
            Self::LinuxAio => "libaio",
        }
    }
}

impl Access {
    /// Returns its name in fio and `ringdisk bench`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::RandomRead => "randread",
            Self::RandomWrite => "randwrite",
            Self::SequentialRead => "read",
            Self::SequentialWrite => "write",
        }
    }

    pub(super) fn is_write(self) -> bool {
        matches!(self, Self::RandomWrite | Self::SequentialWrite)
    }

    fn words(self) -> &'static str {
        match self {
            Self::RandomRead => "random read",
            Self::RandomWrite => "random write",
            Self::SequentialRead => "sequential read",
            Self::SequentialWrite => "sequential write",
        }
    }
}

impl Cell {
    fn new(storage: Storage, access: Access, block_kib: u32, depth: u32) -> Self {
        Self { storage, access, block_kib, depth, ..Self::default() }
    }

    /// Returns the name for `--filter`: storage, access, block, depth, engine, and special settings.
    pub(super) fn name(&self) -> String {
        let Self { storage, engine, access, block_kib, depth, .. } = self;
        let flush = self.flush_every.map_or_else(String::new, |every| format!("-flush{every}"));
        let fixed = if self.fixed_buffers { "-fixed" } else { "" };
        let sleeps = if self.never_spins { "-sleeps" } else { "" };
        format!("{storage}-{}-{block_kib}k-{depth}-{}{flush}{fixed}{sleeps}", access.name(), engine.ringdisk())
    }

    /// Returns the description for the page.
    pub(super) fn words(&self) -> String {
        let engine = if self.engine == Engine::Auto { "" } else { self.engine.ringdisk() };
        let comma = if engine.is_empty() { "" } else { ", " };
        let flush = self.flush_every.map_or_else(String::new, |every| format!(", a flush every {every}"));
        let fixed = if self.fixed_buffers { ", registered buffers" } else { "" };
        let sleeps = if self.never_spins { ", no server spins" } else { "" };
        format!("{} KiB {} at {}{comma}{engine}{flush}{fixed}{sleeps}", self.block_kib, self.access.words(), self.depth)
    }

    /// Returns the description for text outside a heading's section.
    pub(super) fn words_with_storage(&self) -> String {
        format!("{}: {}", self.storage.title(), self.words())
    }

    /// Whether qemu-storage-daemon can run the cell: it registers no buffers.
    pub(super) fn has_peer(&self) -> bool {
        !self.fixed_buffers
    }

    /// Whether there is a file like the storage, so that the host's own rate is meaningful.
    pub(super) fn has_host(&self) -> bool {
        self.storage != Storage::Null && !self.storage.is_fresh() && !self.storage.is_chain()
    }

    /// Returns the number of measurements in a round.
    pub(super) fn sides(&self) -> u32 {
        1 + [self.has_peer(), self.has_host(), self.storage.reference().is_some()].map(u32::from).iter().sum::<u32>()
    }
}

/// Returns every cell, by storage.
pub(super) fn all() -> Vec<Cell> {
    Storage::ALL.into_iter().flat_map(cells_of).collect()
}

fn cells_of(storage: Storage) -> Vec<Cell> {
    use Access::{RandomRead, RandomWrite, SequentialRead, SequentialWrite};
    let cell = |access, block, depth| Cell::new(storage, access, block, depth);
    let flushing = |depth| Cell { flush_every: Some(32), ..cell(RandomWrite, 4, depth) };
    // Ringdisk with registered memory beside fio with registered memory: the rows above have neither.
    let fixed = |cell: Cell| Cell { engine: Engine::IoUring, fixed_buffers: true, ..cell };
    let small = [1, 32, 128].map(|depth| cell(RandomRead, 4, depth));
    let writes = [32, 128].map(|depth| cell(RandomWrite, 4, depth));
    let sequential = cell(SequentialRead, 128, 16);
    let mut cells = match storage {
        Storage::Qcow2Empty => vec![cell(RandomWrite, 4, 1), cell(RandomWrite, 4, 32), flushing(32)],
        Storage::Qcow2Overlay => vec![cell(RandomWrite, 4, 32), flushing(32)],
        Storage::ChainSpread | Storage::ChainBase => vec![cell(RandomRead, 4, 32), cell(RandomRead, 4, 128)],
        Storage::RawSync => vec![cell(RandomWrite, 16, 1), cell(RandomWrite, 16, 32)],
        _ => [&small[..], &writes[..], &[sequential]].concat(),
    };
    if storage.is_direct() {
        cells.push(cell(RandomWrite, 4, 1));
        cells.push(cell(SequentialWrite, 128, 16));
        cells.extend([RandomRead, RandomWrite, SequentialWrite].map(|access| cell(access, 16, 74)));
    }
    match storage {
        Storage::RawDirect => {
            // A depth between 32 and 128, with blocks between 4 and 128 KiB.
            for engine in [Engine::LinuxAio, Engine::Threads] {
                cells.extend([RandomWrite, SequentialWrite].map(|access| Cell { engine, ..cell(access, 16, 74) }));
            }
            cells.extend([small[1], small[2], writes[0], sequential].map(fixed));
            cells.extend([small[0], cell(RandomWrite, 4, 1)].map(|cell| Cell { never_spins: true, ..cell }));
        }
        Storage::RawTmpfs | Storage::RawPageCache => cells.extend([small[1], small[2], sequential].map(fixed)),
        _ => {}
    }
    if storage == Storage::RawTmpfs {
        // The reactor copies such a file by itself when it chooses the engine.
        cells.push(Cell { engine: Engine::IoUring, ..small[1] });
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_cells_have_one_name() {
        let mut names: Vec<String> = all().iter().map(Cell::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(Storage::ALL.iter().all(|storage| all().iter().any(|cell| cell.storage == *storage)));
    }
}
