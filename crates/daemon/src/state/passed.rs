//! Listening sockets that another program made and passed to this one, such as a service manager.

use block::{Error, ErrorKind, Result};
use drive::absolute;
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::ffi::OsStr;
use std::net::TcpListener;
use std::os::fd::{OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

/// A listening socket that was passed. Its file, if it has one, belongs to whoever passed it.
#[derive(Debug)]
pub(crate) struct PassedListener {
    pub(crate) listener: Listener,
    /// Identifies the socket: all of its descriptors have the same inode.
    pub(crate) inode: u64,
}

#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl PassedListener {
    /// Takes a descriptor of our own for the socket that was passed under this number. Refuses what is no Unix or TCP
    /// socket that listens for streams.
    pub(crate) fn of(number: RawFd) -> Result<Self> {
        Self::check(engine::duplicate_inherited(number)?)
            .map_err(|why| Error::new(ErrorKind::BadOption, format!("cannot use the socket 'fd:{number}': {why}")))
    }

    fn check(socket: OwnedFd) -> Result<Self, String> {
        let unreadable = |error| format!("it does not say what it is: {error}");
        let family = sockopt::socket_domain(&socket).map_err(unreadable)?;
        if sockopt::socket_type(&socket).map_err(unreadable)? != SocketType::STREAM {
            return Err("it is no stream socket".to_owned());
        }
        if !sockopt::socket_acceptconn(&socket).map_err(unreadable)? {
            return Err("nobody listens on it; a socket unit of systemd needs Accept=no".to_owned());
        }
        let inode = rustix::fs::fstat(&socket).map_err(unreadable)?.st_ino;
        let listener = match family {
            AddressFamily::UNIX => Listener::Unix(socket.into()),
            AddressFamily::INET | AddressFamily::INET6 => Listener::Tcp(socket.into()),
            _ => return Err("it is neither a Unix nor a TCP socket".to_owned()),
        };
        Ok(Self { listener, inode })
    }
}

/// Returns the path at which a socket listens, or its abstract name after an `@`.
pub(crate) fn path_of(listener: &UnixListener) -> Option<PathBuf> {
    let address = listener.local_addr().ok()?;
    let path = address.as_pathname().map(absolute);
    path.or_else(|| Some(format!("@{}", OsStr::from_bytes(address.as_abstract_name()?).display()).into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn a_passed_socket_is_used_if_somebody_listens_on_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let unix = UnixListener::bind(&path).unwrap();
        let found = PassedListener::check(unix.try_clone().unwrap().into()).unwrap();
        let again = PassedListener::check(unix.into()).unwrap();
        assert_eq!(found.inode, again.inode);
        let Listener::Unix(listener) = found.listener else { panic!("it is a Unix socket") };
        assert_eq!(path_of(&listener), Some(path));
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(matches!(PassedListener::check(tcp.into()).unwrap().listener, Listener::Tcp(_)));

        let (connected, _other) = UnixStream::pair().unwrap();
        let others: [(OwnedFd, &str); 3] = [
            (connected.into(), "nobody listens"),
            (UnixDatagram::unbound().unwrap().into(), "stream"),
            (std::fs::File::open(directory.path()).unwrap().into(), "what it is"),
        ];
        for (other, reason) in others {
            let error = PassedListener::check(other).unwrap_err();
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }
}
