//! What is measured: workloads on storages.

use std::fmt;

/// What the servers serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storage {
    /// No storage: what the path itself costs.
    Null,
    /// A raw file in memory.
    RawTmpfs,
    /// The same as qcow2, every cluster allocated.
    Qcow2Tmpfs,
    /// A raw file on a disk, all of it in the page cache.
    RawPageCache,
    /// A raw file on a disk, past the page cache.
    RawDirect,
    /// The same as qcow2, every cluster allocated.
    Qcow2Direct,
}

/// How bytes reach the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    IoUring,
    LinuxAio,
    Threads,
}

/// In which order offsets come, and which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    RandomRead,
    RandomWrite,
    SequentialRead,
    SequentialWrite,
}

/// One workload on one storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) storage: Storage,
    pub(super) engine: Engine,
    pub(super) access: Access,
    pub(super) block_kib: u32,
    pub(super) depth: u32,
}

impl Storage {
    pub(super) const ALL: [Self; 6] =
        [Self::Null, Self::RawTmpfs, Self::Qcow2Tmpfs, Self::RawPageCache, Self::RawDirect, Self::Qcow2Direct];

    pub(super) fn is_qcow2(self) -> bool {
        matches!(self, Self::Qcow2Tmpfs | Self::Qcow2Direct)
    }

    pub(super) fn is_direct(self) -> bool {
        matches!(self, Self::RawDirect | Self::Qcow2Direct)
    }

    pub(super) fn is_tmpfs(self) -> bool {
        matches!(self, Self::RawTmpfs | Self::Qcow2Tmpfs)
    }

    /// For headings.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Null => "Null disk",
            Self::RawTmpfs => "Raw on tmpfs",
            Self::Qcow2Tmpfs => "qcow2 on tmpfs",
            Self::RawPageCache => "Raw in a warm page cache",
            Self::RawDirect => "Raw with O_DIRECT",
            Self::Qcow2Direct => "qcow2 with O_DIRECT",
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Null => "null",
            Self::RawTmpfs => "raw-tmpfs",
            Self::Qcow2Tmpfs => "qcow2-tmpfs",
            Self::RawPageCache => "raw-pagecache",
            Self::RawDirect => "raw-direct",
            Self::Qcow2Direct => "qcow2-direct",
        })
    }
}

impl Engine {
    /// As Ringdisk calls it.
    pub(super) fn ringdisk(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::Threads => "threads",
        }
    }

    /// As QEMU calls it.
    pub(super) fn qemu(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "native",
            Self::Threads => "threads",
        }
    }

    /// As fio calls it; its own threads are no match for a pool, so io_uring stands for the host there, too.
    pub(super) fn fio(self) -> &'static str {
        match self {
            Self::IoUring | Self::Threads => "io_uring",
            Self::LinuxAio => "libaio",
        }
    }
}

impl Access {
    /// As fio and `ringdisk bench` call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::RandomRead => "randread",
            Self::RandomWrite => "randwrite",
            Self::SequentialRead => "read",
            Self::SequentialWrite => "write",
        }
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
    /// For `--filter`: storage, access, block, depth, engine.
    pub(super) fn name(&self) -> String {
        let Self { storage, engine, access, block_kib, depth } = self;
        format!("{storage}-{}-{block_kib}k-{depth}-{}", access.name(), engine.ringdisk())
    }

    /// For the page.
    pub(super) fn words(&self) -> String {
        let engine =
            if self.engine == Engine::IoUring { String::new() } else { format!(", {}", self.engine.ringdisk()) };
        format!("{} KiB {} at {}{engine}", self.block_kib, self.access.words(), self.depth)
    }
}

/// Every cell, by storage.
pub(super) fn all() -> Vec<Cell> {
    let common = [
        (Access::RandomRead, 4, 1),
        (Access::RandomRead, 4, 32),
        (Access::RandomRead, 4, 128),
        (Access::RandomWrite, 4, 32),
        (Access::SequentialRead, 128, 16),
    ];
    let mut cells = Vec::new();
    for storage in Storage::ALL {
        let cell = |engine, access, block_kib, depth| Cell { storage, engine, access, block_kib, depth };
        cells.extend(common.iter().map(|(access, block, depth)| cell(Engine::IoUring, *access, *block, *depth)));
        if storage == Storage::RawDirect {
            // The depth at which the engines were once compared (mission row S1).
            for engine in [Engine::IoUring, Engine::LinuxAio, Engine::Threads] {
                cells.push(cell(engine, Access::RandomWrite, 16, 74));
                cells.push(cell(engine, Access::SequentialWrite, 16, 74));
            }
        }
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
        assert_eq!((names.len(), count), (36, 36));
    }
}
