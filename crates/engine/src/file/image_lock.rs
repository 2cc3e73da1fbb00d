//! QEMU's image locks: open-file-description locks on bytes that stand for permissions.
//!
//! Every user of permission i holds a shared lock on byte 100+i. Every opener that denies it to others holds one on
//! byte 200+i. An opener locks its own bytes first. Then it tests whether the opposite bytes could be locked
//! exclusively. If not, another opener's role conflicts with its own.

use super::lock_holders::{self, Holder};
use block::{Error, ErrorKind, Locks, Result, WAITING};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

const USED_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

const CONSISTENT_READ: u8 = 1 << 0;
const WRITE: u8 = 1 << 1;
// Bit 2 is write-unchanged, which is neither used nor refused here.
const RESIZE: u8 = 1 << 3;
const BITS: u8 = 4;

/// The permissions that an opener uses, and those that it denies to others.
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

    /// Returns the bytes that this role locks.
    fn own_bytes(self) -> impl Iterator<Item = i64> {
        bytes_of(self.uses, USED_BASE).chain(bytes_of(self.refuses, UNSHARED_BASE))
    }

    /// Returns the bytes that no other opener may have locked.
    fn opposite_bytes(self) -> impl Iterator<Item = i64> {
        bytes_of(self.uses, UNSHARED_BASE).chain(bytes_of(self.refuses, USED_BASE))
    }

    /// Whether another opener's lock of these bytes contradicts this role.
    fn is_hindered(self, first: i64, last: i64, for_writing: bool) -> bool {
        let touches = |byte: i64| (first..=last).contains(&byte);
        self.opposite_bytes().any(touches) || (for_writing && self.own_bytes().any(touches))
    }
}

fn bytes_of(bits: u8, base: i64) -> impl Iterator<Item = i64> {
    (0..BITS).filter(move |bit| bits & (1 << bit) != 0).map(move |bit| base + i64::from(bit))
}

/// How long to wait before looking for the holders: a process that is ending gives up its locks sooner.
const HAND_OVER: Duration = Duration::from_secs(1);
const RETRY_SOON: Duration = Duration::from_millis(10);
const RETRY: Duration = Duration::from_millis(100);
/// Looking through all processes takes longer than trying again.
const TRIES_PER_LOOK: u32 = 10;

/// The result of an attempt to lock.
enum Attempt {
    Held,
    /// The file system has no locks.
    Lacking,
    /// Another opener's lock contradicts ours.
    Contradicted,
}

/// Locks an image for as long as its open file description lives, if its file system can. Waits up to `timeout` for
/// locks that no living process seems to hold, and a second at most for the others.
pub(crate) fn lock(fd: BorrowedFd<'_>, name: &str, read_only: bool, timeout: Duration) -> Result<Locks> {
    let role = if read_only { Role::READER } else { Role::WRITER };
    let began = Instant::now();
    let mut tries = 0_u32;
    loop {
        match attempt(fd, name, role)? {
            Attempt::Held => return Ok(Locks::Held),
            Attempt::Lacking => return Ok(Locks::Lacking),
            Attempt::Contradicted => {}
        }
        let waited = began.elapsed();
        let is_over = waited >= timeout;
        if is_over || (waited >= HAND_OVER && tries.is_multiple_of(TRIES_PER_LOOK)) {
            let holders =
                lock_holders::living(fd, |first, last, for_writing| role.is_hindered(first, last, for_writing));
            if is_over || !holders.is_empty() {
                let may_read = !read_only && may_read(fd);
                unlock(fd);
                return Err(in_use(name, read_only, may_read, &holders, waited));
            }
            if tries == 0 {
                let limit_s = timeout.as_secs();
                tracing::warn!(
                    target: WAITING,
                    "waiting up to {limit_s} s for the lock of '{name}': no living process is seen to hold it. After a \
                     kill it stays until the last write has landed"
                );
            }
        }
        tries = tries.wrapping_add(u32::from(waited >= HAND_OVER));
        // Two waiting openers must not keep each other out.
        unlock(fd);
        let pause = if waited < HAND_OVER { RETRY_SOON } else { RETRY };
        std::thread::sleep(pause.min(timeout.saturating_sub(waited)));
    }
}

/// Changes the locks of an image that is locked: to those of a writer, or back to those of a reader. There is no moment
/// without locks. Waits a second at most for others.
pub(crate) fn lock_again(fd: BorrowedFd<'_>, name: &str, for_writing: bool) -> Result<()> {
    let (role, former) = if for_writing { (Role::WRITER, Role::READER) } else { (Role::READER, Role::WRITER) };
    let began = Instant::now();
    loop {
        let contradicted = matches!(attempt(fd, name, role)?, Attempt::Contradicted);
        let (stays, goes) = if contradicted { (former, role) } else { (role, former) };
        let goes = goes.own_bytes().filter(|byte| !stays.own_bytes().any(|own| own == *byte));
        goes.for_each(|byte| drop(ofd_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, byte)));
        let waited = began.elapsed();
        if !contradicted {
            return Ok(());
        }
        if waited >= HAND_OVER {
            let holders =
                lock_holders::living(fd, |first, last, for_writing| role.is_hindered(first, last, for_writing));
            return Err(in_use(name, !for_writing, for_writing && may_read(fd), &holders, waited));
        }
        std::thread::sleep(RETRY_SOON);
    }
}

fn attempt(fd: BorrowedFd<'_>, name: &str, role: Role) -> Result<Attempt> {
    for byte in role.own_bytes() {
        match ofd_lock(fd, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            Err(error) if lacks_locks(&error) => {
                tracing::warn!(%error, "the file system cannot lock '{name}': nobody is kept from using it twice");
                return Ok(Attempt::Lacking);
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Ok(Attempt::Contradicted);
            }
            Err(error) => return Err(Error::io(format!("cannot lock '{name}'"), error)),
        }
    }
    for byte in role.opposite_bytes() {
        let is_taken = ofd_lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, byte);
        if is_taken.map_err(|error| Error::io(format!("cannot look at the locks of '{name}'"), error))? {
            return Ok(Attempt::Contradicted);
        }
    }
    Ok(Attempt::Held)
}

/// Releases all locks.
pub(crate) fn unlock(fd: BorrowedFd<'_>) {
    for byte in (0..i64::from(BITS)).flat_map(|bit| [USED_BASE + bit, UNSHARED_BASE + bit]) {
        // Fails only if the file system has no locks.
        let _ = ofd_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, byte);
    }
}

/// Whether nobody's lock keeps the image from being read.
fn may_read(fd: BorrowedFd<'_>) -> bool {
    let is_taken = |byte| ofd_lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, byte);
    Role::READER.opposite_bytes().all(|byte| matches!(is_taken(byte), Ok(false)))
}

/// Makes the error for an image in use. It names the living processes, because one of them has to end. `may_read` says
/// whether opening it for reading only would help.
fn in_use(name: &str, read_only: bool, may_read: bool, holders: &[Holder], waited: Duration) -> Error {
    let who = match holders {
        [] => {
            let message = format!(
                "'{name}' is in use, but no living process is seen to hold its lock (waited {} s). A process that was \
                 killed holds it until its last write has landed. So may another user, a container or another host",
                waited.as_secs()
            );
            return Error::new(ErrorKind::Locked, message);
        }
        holders if holders.iter().any(Holder::is_this_program) => "a second time in this program".to_owned(),
        holders => format!("by {}", holders.iter().map(Holder::to_string).collect::<Vec<_>>().join(" and ")),
    };
    let refused = |why: &str| Error::new(ErrorKind::Locked, format!("'{name}' is in use {who}: {why}"));
    match (read_only, may_read) {
        (true, _) => refused("it is open for writing there. Stop what writes to it"),
        (false, true) => refused("an image that is written belongs to one alone. Stop what uses it").only_for_writing(),
        (false, false) => refused("it is written there, and belongs to one alone then. Stop what writes to it"),
    }
}

fn lacks_locks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// Sets or tests a lock of one byte. A test returns whether another opener's lock is in the way.
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
