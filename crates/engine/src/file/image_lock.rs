//! QEMU's image locks: open-file-description locks on bytes that stand for permissions.
//!
//! Byte 100+i is locked (shared) by everybody who uses permission i, byte 200+i by everybody who does not allow others
//! to use it. Whoever opens an image locks its own bytes first, then looks whether an exclusive lock of the opposite
//! bytes would be possible: if not, somebody else's use and ours contradict each other.

use block::{Error, ErrorKind, Locks, Result};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const USED_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

const CONSISTENT_READ: u8 = 1 << 0;
const WRITE: u8 = 1 << 1;
// Bit 2 is write-unchanged: nobody here uses it or minds it.
const RESIZE: u8 = 1 << 3;
const BITS: u8 = 4;

/// What an opener does with an image, and what it does not allow others to do meanwhile.
#[derive(Debug, Clone, Copy)]
struct Role {
    uses: u8,
    refuses: u8,
}

impl Role {
    /// An image that is served for writing, whatever its format: one writer.
    const WRITER: Self = Self { uses: CONSISTENT_READ | WRITE | RESIZE, refuses: WRITE | RESIZE };
    /// A read-only image or a backing file: any number of readers, no writer.
    const READER: Self = Self { uses: CONSISTENT_READ, refuses: WRITE | RESIZE };
}

/// Locks an image for as long as its open file description lives, if its file system can.
pub(crate) fn lock(fd: BorrowedFd<'_>, name: &str, read_only: bool) -> Result<Locks> {
    let role = if read_only { Role::READER } else { Role::WRITER };
    for bit in 0..BITS {
        for (base, bits) in [(USED_BASE, role.uses), (UNSHARED_BASE, role.refuses)] {
            if bits & (1 << bit) == 0 {
                continue;
            }
            match ofd_lock(fd, libc::F_OFD_SETLK, libc::F_RDLCK, base + i64::from(bit)) {
                Ok(_) => {}
                Err(error) if lacks_locks(&error) => {
                    tracing::warn!(%error, "the file system cannot lock '{name}': nobody is kept from using it twice");
                    return Ok(Locks::Lacking);
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                    return Err(in_use(name, read_only));
                }
                Err(error) => return Err(Error::io(format!("cannot lock '{name}'"), error)),
            }
        }
    }
    for bit in 0..BITS {
        for (base, bits) in [(UNSHARED_BASE, role.uses), (USED_BASE, role.refuses)] {
            if bits & (1 << bit) != 0
                && ofd_lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, base + i64::from(bit))
                    .map_err(|error| Error::io(format!("cannot look at the locks of '{name}'"), error))?
            {
                return Err(in_use(name, read_only));
            }
        }
    }
    Ok(Locks::Held)
}

/// Gives all locks back.
pub(crate) fn unlock(fd: BorrowedFd<'_>) {
    for byte in (0..i64::from(BITS)).flat_map(|bit| [USED_BASE + bit, UNSHARED_BASE + bit]) {
        // Fails only where there are no locks.
        let _ = ofd_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, byte);
    }
}

fn in_use(name: &str, read_only: bool) -> Error {
    let message = if read_only {
        format!(
            "'{name}' is in use: it is open for writing, in another program or a second time in this one. Stop what \
             writes to it, or copy the image and open the copy"
        )
    } else {
        format!(
            "'{name}' is in use, in another program or a second time in this one, and an image that is written belongs \
             to one alone. Stop what uses it, or open it read-only if that only reads it"
        )
    };
    Error::new(ErrorKind::Locked, message)
}

fn lacks_locks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// Sets or tests a lock of one byte; a test returns whether somebody's lock is in the way.
fn ofd_lock(fd: BorrowedFd<'_>, command: libc::c_int, kind: libc::c_int, byte: i64) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the kernel reads and writes one `flock`.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) } {
        0.. => Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}
