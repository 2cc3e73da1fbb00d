//! Where an export listens: at a path of its own, or on a socket that was passed to this program.

use super::passed::{Listener, PassedListener, path_of};
use block::{Disk, Error, ErrorKind, ReactorHandle, Result};
use drive::{ExportOptions, absolute, socket_beside};
use export_vhost_user::{Export, ExportOptions as VhostUserOptions};
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
        listener: UnixListener,
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
            return Self::passed(number);
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

    fn passed(number: i32) -> Result<Self> {
        let PassedListener { listener, inode } = PassedListener::of(number)?;
        let Listener::Unix(listener) = listener else {
            let what = format!("cannot use the socket 'fd:{number}': guests connect to a Unix socket, and it is none");
            return Err(Error::new(ErrorKind::BadOption, what));
        };
        let shown = path_of(&listener).unwrap_or_else(|| format!("fd:{number}").into());
        Ok(Self::Passed { listener, shown, inode })
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
            Self::Passed { listener, .. } => Export::adopt(listener, disk, reactors, options),
        }
    }
}
