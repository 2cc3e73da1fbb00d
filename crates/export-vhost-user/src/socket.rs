//! The socket that an export listens on: made so that nobody connects before its mode is set, never taken from somebody
//! who still listens.

use block::{Error, ErrorKind, Result};
use rustix::fs::{FileType, Mode, chmod, stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// What a Unix socket's address holds, without its end mark.
const MAX_PATH_BYTES: usize = 107;

/// Peers that may wait while one is served.
const BACKLOG: i32 = 16;

/// A listening socket, and its file if it is ours to remove.
#[derive(Debug)]
pub(crate) struct ListenSocket {
    pub(crate) listener: UnixListener,
    file: Option<OwnFile>,
}

#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    /// Device and inode: a successor may have put its own socket there.
    identity: (u64, u64),
}

impl ListenSocket {
    /// Creates the socket at `path` with `mode` and listens.
    pub(crate) fn bind(path: &Path, mode: u32) -> Result<Self> {
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
        // Until it listens, connecting is refused: the mode is right before anybody gets in.
        let listening = chmod(path, Mode::from_raw_mode(mode & 0o777))
            .and_then(|()| listen(&fd, BACKLOG))
            .and_then(|()| stat(path))
            .map_err(|error| {
                let _ = std::fs::remove_file(path);
                failed("listen on", error)
            })?;
        let identity = (listening.st_dev, listening.st_ino);
        let file = Some(OwnFile { path: path.to_owned(), identity });
        Ok(Self { listener: UnixListener::from(fd), file })
    }

    /// A socket that somebody else made and listens on already (a service manager).
    pub(crate) fn adopt(listener: UnixListener) -> Self {
        Self { listener, file: None }
    }
}

impl Drop for ListenSocket {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        if stat(&file.path).is_ok_and(|now| (now.st_dev, now.st_ino) == file.identity) {
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

/// Removes what an earlier run left behind; refuses where somebody listens, or where something else lies.
fn remove_stale(path: &Path) -> Result<()> {
    let Ok(found) = rustix::fs::lstat(path) else { return Ok(()) };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        let message = format!("'{}' exists and is not a socket: choose another path or remove it", path.display());
        return Err(Error::new(ErrorKind::BadOption, message));
    }
    let in_use =
        || Error::new(ErrorKind::Locked, format!("somebody serves on the socket '{}' already", path.display()));
    // Not blocking: a server with a full backlog must not hold us up.
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
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_socket_in_use_is_refused_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let first = ListenSocket::bind(&path, 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ListenSocket::bind(&path, 0o600).unwrap_err().kind(), ErrorKind::Locked);
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard library leaves the file");
        let second = ListenSocket::bind(&path, 0o600).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _successor = UnixListener::bind(&path).unwrap();
        drop(second);
        assert!(path.exists(), "a successor's socket stays");
    }

    #[test]
    fn impossible_paths_say_why() {
        let dir = tempfile::tempdir().unwrap();
        let long = ListenSocket::bind(&dir.path().join("x".repeat(120)), 0o600).unwrap_err();
        assert!(long.to_string().contains("107"), "{long}");
        let file = dir.path().join("image.raw");
        std::fs::write(&file, "data").unwrap();
        assert_eq!(ListenSocket::bind(&file, 0o600).unwrap_err().kind(), ErrorKind::BadOption);
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
        assert!(ListenSocket::bind(&dir.path().join("none/x.sock"), 0o600).is_err());
    }
}
