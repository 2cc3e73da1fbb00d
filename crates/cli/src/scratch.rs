//! Temporary directories, for disks and for sockets.

use anyhow::Context;
use std::path::Path;
use tempfile::TempDir;

/// The longest path in a socket's address (unix(7)).
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// A temporary directory.
pub(crate) fn temporary_directory(parent: &Path) -> anyhow::Result<TempDir> {
    let made = tempfile::Builder::new().prefix("ringdisk-").tempdir_in(parent);
    made.with_context(|| format!("cannot make a temporary directory in '{}'", parent.display()))
}

/// Whether the name of a socket in `directory` is too long for its address.
pub(crate) fn is_too_long_for_sockets(directory: &Path) -> bool {
    directory.join("disk.sock").as_os_str().len() > SOCKET_PATH_MAX_BYTES
}

/// Makes a temporary directory whose name is short enough for a socket in it.
pub(crate) fn socket_directory() -> anyhow::Result<TempDir> {
    let directory = temporary_directory(&std::env::temp_dir())?;
    if is_too_long_for_sockets(directory.path()) { temporary_directory(Path::new("/tmp")) } else { Ok(directory) }
}
