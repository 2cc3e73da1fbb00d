//! The kinds of files that a peer's memory may lie in. A reactor that touches a page outside memory waits for the
//! page's storage, and so do all disks on that reactor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// The file is memory by itself (`STATX_ATTR_DAX`).
const ATTRIBUTE_DAX: u64 = 0x0020_0000;

/// The kinds of files that a peer's memory may lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// Memory: anonymous memory files, tmpfs, huge pages, files that are memory (DAX). On a host with swap it may be swapped
    /// out.
    #[default]
    Ram,
    /// As `Ram`, and each page stays in memory from the first touch on.
    Locked,
    /// Any file. A page of a file on a disk is read from there while the reactor waits.
    Any,
}

impl Placement {
    /// All placements by name.
    pub const NAMES: [(&str, Self); 3] = [("ram", Self::Ram), ("locked", Self::Locked), ("any", Self::Any)];

    /// Refuses a regular file whose pages may have to be read from elsewhere.
    pub fn check(self, file: BorrowedFd<'_>) -> io::Result<()> {
        if self == Self::Any {
            return Ok(());
        }
        // SAFETY: all-zero is a valid `statfs`; the kernel writes one.
        let (result, stat) = unsafe {
            let mut stat: libc::statfs = std::mem::zeroed();
            (libc::fstatfs(file.as_raw_fd(), &raw mut stat), stat)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        match stat.f_type {
            TMPFS_MAGIC | RAMFS_MAGIC | HUGETLBFS_MAGIC => Ok(()),
            _ if is_dax(file) => Ok(()),
            other => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "it lies in a file on a disk (file system {other:#x}), and other disks would wait when it is read from \
                     there: use a memfd, tmpfs or huge pages, or allow it with guest-memory=any"
                ),
            )),
        }
    }
}

fn is_dax(file: BorrowedFd<'_>) -> bool {
    // SAFETY: all-zero is a valid `statx`, the path is a C string, and the kernel writes one `statx`.
    let (result, stat) = unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        (libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, 0, &raw mut stat), stat)
    };
    result == 0 && stat.stx_attributes & ATTRIBUTE_DAX != 0
}
