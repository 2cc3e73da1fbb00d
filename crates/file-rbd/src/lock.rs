//! Who may write an image: the client that has its exclusive lock.
//!
//! librbd hands the lock over whenever another client of the usual kind asks. A guest's disk is not to change hands while it
//! is written. So whoever has the lock is left alone here, and once it is ours it is kept from others.

use crate::ffi::{Errno, Image};
use crate::name::RbdName;
use block::{Error, ErrorKind, Locks, Result, WAITING};
use std::io;
use std::time::{Duration, Instant};

const EXCLUSIVE_LOCK: u64 = 1 << 2;
const PAUSE: Duration = Duration::from_millis(250);

const EBUSY: Errno = 16;
const EROFS: Errno = 30;

/// Takes the lock. One that another client has is waited for: a client that was killed has it until the cluster misses it,
/// 30 seconds by default.
pub(crate) fn take(name: &RbdName, image: &Image, features: u64, timeout: Duration) -> Result<Locks> {
    if features & EXCLUSIVE_LOCK == 0 {
        tracing::warn!("'{name}': the image has no exclusive lock (feature exclusive-lock): others may write it, too");
        return Ok(Locks::Lacking);
    }
    let failed = |errno| {
        let message = format!("'{name}': cannot get the image's exclusive lock");
        Error::with_source(ErrorKind::Io, message, io::Error::from_raw_os_error(errno))
    };
    let (deadline, mut has_said) = (Instant::now().checked_add(timeout), false);
    loop {
        let holder = living_owner(image).map_err(failed)?;
        let holder = match holder {
            Some(holder) => holder,
            None => match image.acquire_lock() {
                Ok(()) => return Ok(Locks::Held),
                // Somebody was faster.
                Err(EROFS | EBUSY) => String::new(),
                Err(errno) => return Err(failed(errno)),
            },
        };
        if deadline.is_none_or(|deadline| Instant::now() >= deadline) {
            return Err(held(name, &holder));
        }
        if !has_said {
            has_said = true;
            let holder = client(&holder);
            tracing::warn!(target: WAITING, "'{name}': waiting for the image's exclusive lock, which {holder} has");
        }
        std::thread::sleep(PAUSE);
    }
}

/// Who has the lock and is seen by the cluster. The lock of a client that is gone is librbd's to break.
fn living_owner(image: &Image) -> Result<Option<String>, Errno> {
    let owners = image.lock_owners()?;
    if owners.is_empty() {
        return Ok(None);
    }
    let watchers = image.watchers()?;
    Ok(owners.into_iter().find(|owner| watchers.contains(owner)))
}

fn client(holder: &str) -> String {
    match holder {
        "" => "another client".to_owned(),
        address => format!("the client at {address}"),
    }
}

fn held(name: &RbdName, holder: &str) -> Error {
    let holder = client(holder);
    let message = format!(
        "'{name}' is in use: {holder} has the image's exclusive lock. End that client; if it is gone for good, wait half a \
         minute, or break the lock with 'rbd lock rm'"
    );
    Error::new(ErrorKind::Locked, message).only_for_writing()
}
