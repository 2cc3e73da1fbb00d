//! Files that this program inherited as open descriptors when it was started.

use super::opening::open_fd;
use crate::base::options::OpenOptions;
use crate::file::storage;
use block::{Error, ErrorKind, File, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Opens the regular file or block device behind the inherited descriptor `number`. The descriptor itself stays open.
/// It stays unchanged if the kernel allows opening its file once more.
///
/// Refuses a descriptor that was not passed, is no regular file or block device, or lacks the access that `options`
/// need.
pub fn open_inherited(number: RawFd, options: &OpenOptions) -> Result<Arc<dyn File>> {
    options.check()?;
    let name = format!("fd:{number}");
    let copy = duplicate(number, &name)?;
    let stat = rustix::fs::fstat(&copy).map_err(|errno| failed(&name, errno))?;
    storage::check_type(&stat, &name)?;
    let passed = rustix::fs::fcntl_getfl(&copy).map_err(|errno| failed(&name, errno))?;
    check_access(passed, &name, options)?;
    match open_anew(number, options) {
        Some(own) => open_fd(own, &name, options),
        None => open_shared(copy, (stat.st_dev, stat.st_ino), &name, options),
    }
}

/// Duplicates the inherited descriptor `number`, of a socket for example. The passed one stays open.
pub fn duplicate_inherited(number: RawFd) -> Result<OwnedFd> {
    duplicate(number, &format!("fd:{number}"))
}

/// Returns a descriptor of our own for the same open file.
fn duplicate(number: RawFd, name: &str) -> Result<OwnedFd> {
    let not_passed = |why: &str| {
        let message = format!("there is no '{name}': {why}; it has to be open when this program starts");
        Error::new(ErrorKind::BadOption, message)
    };
    if number < 0 {
        return Err(not_passed("descriptors have no negative numbers"));
    }
    // SAFETY: the borrow ends with this function, which only asks the kernel about the number and has it duplicated. If
    // nothing is open there, or something unexpected, the kernel's answer says so.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    match rustix::io::fcntl_getfd(borrowed) {
        // A descriptor that this program opened itself is always close-on-exec.
        Ok(flags) if flags.contains(FdFlags::CLOEXEC) => Err(not_passed("this program opened that descriptor itself")),
        Ok(_) => rustix::io::fcntl_dupfd_cloexec(borrowed, 0).map_err(|errno| failed(name, errno)),
        Err(Errno::BADF) => Err(not_passed("nothing was passed under that number")),
        Err(errno) => Err(failed(name, errno)),
    }
}

fn check_access(passed: OFlags, name: &str, options: &OpenOptions) -> Result<()> {
    let access = passed & OFlags::RWMODE;
    let missing = match (access, options.read_only) {
        (OFlags::RDWR, _) | (OFlags::RDONLY, true) => return Ok(()),
        (OFlags::RDONLY, false) => "it was opened for reading only: open it for writing too, or say readonly=on",
        _ => "it was not opened for reading",
    };
    Err(Error::new(ErrorKind::BadOption, format!("'{name}' cannot be used: {missing}")))
}

/// Opens the same file again, so that its locks are distinct from the passed description's and its flags are ours.
/// `None` if this user may not open the file, which is often why a descriptor is passed.
fn open_anew(number: RawFd, options: &OpenOptions) -> Option<OwnedFd> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let flags = OFlags::CLOEXEC | OFlags::NOCTTY | access;
    rustix::fs::open(format!("/proc/self/fd/{number}"), flags, Mode::empty()).ok()
}

/// Files whose open file description is shared with the process that passed it: device and inode, and the file as long
/// as it is open.
static SHARED: Mutex<Vec<Shared>> = Mutex::new(Vec::new());
type Shared = ((u64, u64), Weak<dyn File>);

/// Uses the passed open file description. All who share it share its locks, so locks cannot keep this program from
/// using one descriptor twice. [`SHARED`] does.
fn open_shared(copy: OwnedFd, identity: (u64, u64), name: &str, options: &OpenOptions) -> Result<Arc<dyn File>> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.retain(|(_, file)| file.strong_count() > 0);
    let in_the_way = |file: Arc<dyn File>| !(file.info().read_only && options.read_only);
    let others = shared.iter().filter(|(other, _)| *other == identity).filter_map(|(_, file)| file.upgrade());
    if options.lock && others.into_iter().any(in_the_way) {
        return Err(Error::new(ErrorKind::Locked, format!("'{name}' is in use: this program writes it already")));
    }
    let file = open_fd(copy, name, options)?;
    shared.push((identity, Arc::downgrade(&file)));
    Ok(file)
}

fn failed(name: &str, errno: Errno) -> Error {
    Error::io(format!("cannot use '{name}'"), errno.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::fcntl_setfd;
    use std::os::fd::AsRawFd;

    /// A file of 4 KiB, open as if it had been passed.
    fn passed(write: bool) -> std::fs::File {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let file = std::fs::File::options().read(true).write(write).open(file.path()).unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        file
    }

    fn read_only() -> OpenOptions {
        OpenOptions { read_only: true, ..OpenOptions::default() }
    }

    #[test]
    fn a_passed_file_is_opened_with_the_access_that_it_has() {
        let file = passed(true);
        let opened = open_inherited(file.as_raw_fd(), &OpenOptions::default()).unwrap();
        assert_eq!(opened.info().length_bytes, 4096);
        assert!(!opened.info().read_only);
        let error = open_inherited(file.as_raw_fd(), &OpenOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
        drop(opened);
        open_inherited(file.as_raw_fd(), &OpenOptions::default()).unwrap();
        let file = passed(false);
        assert!(open_inherited(file.as_raw_fd(), &OpenOptions::default()).unwrap_err().to_string().contains("reading"));
        assert!(open_inherited(file.as_raw_fd(), &read_only()).unwrap().info().read_only);
    }

    #[test]
    fn what_was_not_passed_or_is_no_file_is_refused_with_the_reason() {
        let own = tempfile::tempfile().unwrap();
        let (pipe, _writer) = std::io::pipe().unwrap();
        fcntl_setfd(&pipe, FdFlags::empty()).unwrap();
        for (number, reason) in
            [(own.as_raw_fd(), "itself"), (999_999, "nothing was passed"), (-1, "negative"), (pipe.as_raw_fd(), "pipe")]
        {
            let message = open_inherited(number, &read_only()).unwrap_err().to_string();
            assert!(message.contains(reason), "{message}");
        }
    }

    #[test]
    fn a_shared_descriptor_is_used_once_for_writing_and_often_for_reading() {
        let file = passed(true);
        let stat = rustix::fs::fstat(&file).unwrap();
        let identity = (stat.st_dev, stat.st_ino);
        let open = |options: &OpenOptions| open_shared(file.try_clone().unwrap().into(), identity, "fd:x", options);
        let first = open(&OpenOptions::default()).unwrap();
        assert_eq!(open(&OpenOptions::default()).unwrap_err().kind(), ErrorKind::Locked);
        assert_eq!(open(&read_only()).unwrap_err().kind(), ErrorKind::Locked);
        drop(first);
        let readers = (open(&read_only()).unwrap(), open(&read_only()).unwrap());
        assert_eq!(open(&OpenOptions::default()).unwrap_err().kind(), ErrorKind::Locked);
        drop(readers);
        open(&OpenOptions::default()).unwrap();
    }
}
