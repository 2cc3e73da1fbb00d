//! The socket that an export listens on. Connecting is impossible before its mode is set, and a socket is never taken
//! from a process that still listens.

use block::{Error, ErrorKind, Result};
use rustix::fs::{FileType, Mode, chmod, stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The longest path of a Unix socket, without its end mark.
const MAX_PATH_BYTES: usize = 107;

/// The number of peers that may wait while one is served.
const BACKLOG: i32 = 16;

/// The permissions of a socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    /// The permissions of the socket's file.
    pub(crate) mode: u32,
    /// The group of the socket's file, if that is not ours.
    pub(crate) group: Option<u32>,
}

/// A listening socket, and its file if this object removes it.
#[derive(Debug)]
pub struct ListenSocket {
    pub(crate) listener: UnixListener,
    file: Option<OwnFile>,
}

#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    /// Device and inode, because a successor may have put its own socket there.
    identity: (u64, u64),
}

impl ListenSocket {
    /// Creates the socket at `path` for those that `access` names, and listens.
    pub(crate) fn bind(path: &Path, access: Access) -> Result<Self> {
        let length = path.as_os_str().len();
        if length > MAX_PATH_BYTES {
            let message = format!(
                "the socket path '{}' has {length} bytes, a Unix socket takes {MAX_PATH_BYTES}: choose a shorter one",
                path.display()
            );
            return Err(Error::new(ErrorKind::BadOption, message));
        }
        remove_stale(path)?;
        let failed = |what: &str, error: Errno| {
            Error::io(format!("cannot {what} the socket '{}'", path.display()), error.into())
        };
        let address = SocketAddrUnix::new(path).map_err(|error| failed("name", error))?;
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed("make", error))?;
        bind(&fd, &address).map_err(|error| failed("create", error))?;
        // Connecting is refused before the socket listens. So group and mode are set before the first peer connects.
        let listening = set_group(path, access.group).and_then(|()| {
            chmod(path, Mode::from_raw_mode(access.mode & 0o777))
                .and_then(|()| listen(&fd, BACKLOG))
                .and_then(|()| stat(path))
                .map_err(|error| failed("listen on", error))
        });
        let listening = listening.inspect_err(|_| drop(std::fs::remove_file(path)))?;
        let identity = (listening.st_dev, listening.st_ino);
        let file = Some(OwnFile { path: path.to_owned(), identity });
        Ok(Self { listener: UnixListener::from(fd), file })
    }

    /// Creates a listening socket at `path` with this mode and the group of this process.
    pub fn of_mode(path: &Path, mode: u32) -> Result<Self> {
        Self::of_mode_and_group(path, mode, None)
    }

    /// Creates a listening socket at `path` with this mode and the group of this number.
    pub fn of_mode_and_group(path: &Path, mode: u32, group: Option<u32>) -> Result<Self> {
        Self::bind(path, Access { mode, group })
    }

    /// Returns the listener to accept from.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Takes over a socket that another program made. That program owns its file.
    pub(crate) fn adopt(listener: UnixListener) -> Self {
        Self { listener, file: None }
    }
}

/// Changes the group of the socket's file.
fn set_group(path: &Path, group: Option<u32>) -> Result<()> {
    let Some(group) = group else { return Ok(()) };
    std::os::unix::fs::lchown(path, None, Some(group)).map_err(|error| {
        let is_denied = error.kind() == std::io::ErrorKind::PermissionDenied;
        let why = if is_denied { ", which only root and members of that group may" } else { "" };
        Error::io(format!("cannot give the socket '{}' to group {group}{why}", path.display()), error)
    })
}

impl ListenSocket {
    /// Removes the file, if it is ours and still belongs to this socket.
    pub(crate) fn remove(&self) {
        let Some(file) = &self.file else { return };
        if stat(&file.path).is_ok_and(|now| (now.st_dev, now.st_ino) == file.identity) {
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

impl Drop for ListenSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Removes the socket that an earlier run left behind. Fails if a process listens on it, or if the file is no socket.
fn remove_stale(path: &Path) -> Result<()> {
    let Ok(found) = rustix::fs::lstat(path) else { return Ok(()) };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        let message = format!("'{}' exists and is not a socket: choose another path or remove it", path.display());
        return Err(Error::new(ErrorKind::BadOption, message));
    }
    let in_use =
        || Error::new(ErrorKind::Locked, format!("somebody serves on the socket '{}' already", path.display()));
    // Not blocking: a server with a full backlog must not delay us.
    let probe =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
            .and_then(|fd| connect(&fd, &SocketAddrUnix::new(path)?));
    match probe {
        Ok(()) | Err(Errno::AGAIN) => Err(in_use()),
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path)
            .map_err(|error| Error::io(format!("cannot remove the stale socket '{}'", path.display()), error)),
        Err(error) => {
            let what = format!("cannot tell whether somebody uses the socket '{}'", path.display());
            Err(Error::io(what, error.into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    const OURS: Access = Access { mode: 0o600, group: None };

    #[test]
    fn a_socket_in_use_is_refused_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let first = ListenSocket::bind(&path, OURS).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ListenSocket::bind(&path, OURS).unwrap_err().kind(), ErrorKind::Locked);
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard library leaves the file");
        let second = ListenSocket::bind(&path, OURS).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _successor = UnixListener::bind(&path).unwrap();
        drop(second);
        assert!(path.exists(), "a successor's socket stays");
    }

    #[test]
    fn a_socket_gets_the_mode_and_the_group_that_were_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let own = std::fs::metadata(dir.path()).unwrap().gid();
        // Root can give it to any group, others only to their own.
        let group = if rustix::process::geteuid().is_root() { own + 1 } else { own };
        let socket = ListenSocket::bind(&path, Access { mode: 0o660, group: Some(group) }).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid()), (0o660, group));
        drop(socket);
        if !rustix::process::geteuid().is_root() {
            let error = ListenSocket::bind(&path, Access { mode: 0o660, group: Some(0) }).unwrap_err();
            assert!(error.to_string().contains("members of that group"), "{error}");
            assert!(!path.exists());
        }
    }

    #[test]
    fn impossible_paths_say_why() {
        let dir = tempfile::tempdir().unwrap();
        let long = ListenSocket::bind(&dir.path().join("x".repeat(120)), OURS).unwrap_err();
        assert!(long.to_string().contains("107"), "{long}");
        let file = dir.path().join("image.raw");
        std::fs::write(&file, "data").unwrap();
        assert_eq!(ListenSocket::bind(&file, OURS).unwrap_err().kind(), ErrorKind::BadOption);
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
        assert!(ListenSocket::bind(&dir.path().join("none/x.sock"), OURS).is_err());
    }
}
