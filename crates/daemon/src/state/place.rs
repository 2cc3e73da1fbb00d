//! Where an export listens: at a path of its own, or on a socket that was passed to this program.

use block::{Disk, Error, ErrorKind, ReactorHandle, Result};
use drive::{ExportOptions, absolute, socket_beside};
use export_vhost_user::{Export, ExportOptions as VhostUserOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The default permissions of a socket that has a group of its own.
pub(crate) const GROUP_SOCKET_MODE: u32 = 0o660;

/// Where an export is going to listen.
pub(crate) enum Place {
    /// A path where the socket is made, and removed at the end.
    Path(PathBuf),
    /// A socket from the program that started this one.
    Passed {
        socket: OwnedFd,
        /// The path at which it listens, or a substitute for one.
        shown: PathBuf,
        /// Identifies the socket, whatever its descriptors' numbers are.
        inode: u64,
    },
}

/// A socket that was passed, and who comes in there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassedSocket {
    /// Identifies the socket, whatever its descriptors' numbers are.
    pub(crate) inode: u64,
    /// NBD clients, which name the export that they want. Otherwise a guest.
    pub(crate) is_for_nbd: bool,
}

impl PassedSocket {
    /// Whether two exports cannot both be here: the kernel would give each who connects to one or the other. A server
    /// has room for several NBD exports.
    pub(crate) fn collides_with(self, other: Self) -> bool {
        self.inode == other.inode && !(self.is_for_nbd && other.is_for_nbd)
    }
}

impl Place {
    /// Returns the place that `options` name; by default beside the image. `file` is the image's name in messages.
    pub(crate) fn of(options: &ExportOptions, image: Option<&Path>, file: &str) -> Result<Self> {
        if let Some(number) = options.socket_descriptor {
            return Self::passed(engine::duplicate_inherited(number)?, number);
        }
        let socket = options.socket.clone().or_else(|| image.map(socket_beside));
        let no_socket = || {
            Error::new(
                ErrorKind::BadOption,
                format!("{file} has no path to put a socket beside: give socket=PATH in --drive, or --socket PATH"),
            )
        };
        socket.map(Self::Path).ok_or_else(no_socket)
    }

    fn passed(socket: OwnedFd, number: i32) -> Result<Self> {
        let failed = |error: std::io::Error| Error::io(format!("cannot use the socket 'fd:{number}'"), error);
        let inode = inode_of(&socket).map_err(failed)?;
        let listener = UnixListener::from(socket);
        // A descriptor that is no Unix socket is refused when the export begins.
        let address = listener.local_addr().ok();
        let path = address.as_ref().and_then(|address| address.as_pathname()).map(absolute);
        let name = address.as_ref().and_then(|address| address.as_abstract_name());
        let name = name.map(|name| format!("@{}", std::ffi::OsStr::from_bytes(name).display()));
        let shown = path.unwrap_or_else(|| name.unwrap_or_else(|| format!("fd:{number}")).into());
        Ok(Self::Passed { socket: listener.into(), shown, inode })
    }

    /// Returns the path to show for it.
    pub(crate) fn shown(&self) -> PathBuf {
        match self {
            Self::Path(path) => absolute(path),
            Self::Passed { shown, .. } => shown.clone(),
        }
    }

    /// Returns the passed socket that this is.
    pub(crate) fn passed_socket(&self) -> Option<PassedSocket> {
        match self {
            Self::Path(_) => None,
            Self::Passed { inode, .. } => Some(PassedSocket { inode: *inode, is_for_nbd: false }),
        }
    }

    /// Begins to serve `disk` here.
    pub(crate) fn serve(
        self,
        disk: Arc<dyn Disk>,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        options: VhostUserOptions,
    ) -> Result<Export> {
        match self {
            Self::Path(path) => Export::listen(&path, disk, reactors, options),
            Self::Passed { socket, .. } => Export::adopt(socket, disk, reactors, options),
        }
    }
}

/// Identifies a socket: all of its descriptors have the same inode.
pub(crate) fn inode_of(socket: impl AsFd) -> std::io::Result<u64> {
    Ok(rustix::fs::fstat(socket)?.st_ino)
}
