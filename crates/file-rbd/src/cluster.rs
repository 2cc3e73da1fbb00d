//! Connections to clusters, which images share.

use crate::closing::{wait_for, wait_until_let_go};
use crate::ffi::{Cluster, Errno, Pool, librbd};
use crate::name::{Access, RbdName};
use block::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How long a cluster may take to answer the first time, in seconds, where nobody says otherwise. Ceph's own default is five
/// minutes.
const MOUNT_TIMEOUT_S: &CStr = c"30";
const CEPHS_MOUNT_TIMEOUT_S: &CStr = c"300";
const MOUNT_TIMEOUT: &CStr = c"client_mount_timeout";

/// librbd's cache, which a flush empties, and whether it is used.
const CACHE: &CStr = c"rbd_cache";

const ENOENT: Errno = 2;
const EPERM: Errno = 1;
const EACCES: Errno = 13;
const EBUSY: Errno = 16;
const EEXIST: Errno = 17;
const ETIMEDOUT: Errno = 110;

/// What was said about a cluster, and whether librbd caches.
type Key = (Access, bool);

/// Connections that are in use.
static CLUSTERS: Mutex<Option<HashMap<Key, Weak<Cluster>>>> = Mutex::new(None);

/// A failed call of librbd, with what to do about it.
pub(crate) fn failed(name: &RbdName, what: &str, errno: Errno, hint: &str) -> Error {
    let message = format!("'{name}': {what}{hint}");
    Error::io(message, io::Error::from_raw_os_error(errno))
}

fn connection(name: &RbdName, is_cached: bool) -> Result<Arc<Cluster>> {
    let key = (name.access.clone(), is_cached);
    let known = |clusters: &mut Option<HashMap<Key, Weak<Cluster>>>| {
        let clusters = clusters.get_or_insert_default();
        clusters.retain(|_, cluster| cluster.strong_count() > 0);
        clusters.get(&key).and_then(Weak::upgrade).filter(|cluster| !cluster.is_shut_out())
    };
    if let Some(cluster) = known(&mut CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(cluster);
    }
    // A cluster that does not answer keeps nobody from others.
    let own = Arc::new(connect(name, is_cached)?);
    let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
    let theirs = known(&mut clusters);
    if theirs.is_none() {
        clusters.get_or_insert_default().insert(key, Arc::downgrade(&own));
    }
    // Ours may be shut down now, which takes time.
    drop(clusters);
    Ok(theirs.unwrap_or(own))
}

fn connect(name: &RbdName, is_cached: bool) -> Result<Cluster> {
    let Access { user, conf, options } = &name.access;
    let librbd = librbd().map_err(|error| error.in_context(format!("'{name}'")))?;
    let cluster = Cluster::new(librbd, user.as_deref()).map_err(|errno| failed(name, "no connection", errno, ""))?;
    match (cluster.read_conf(conf.as_deref()), conf) {
        (Err(errno), Some(conf)) => {
            let what = format!("cannot read Ceph's configuration '{}'", conf.to_string_lossy());
            return Err(failed(name, &what, errno, ""));
        }
        // All may be said in the name, or in the environment.
        (Err(errno), None) => tracing::debug!("'{name}': no configuration of Ceph: error {errno}"),
        (Ok(()), _) => {}
    }
    if cluster.get(MOUNT_TIMEOUT).is_some_and(|seconds| seconds.as_c_str() == CEPHS_MOUNT_TIMEOUT_S)
        && let Err(errno) = cluster.set(MOUNT_TIMEOUT, MOUNT_TIMEOUT_S)
    {
        tracing::debug!("'{name}': no time limit for the connection: error {errno}");
    }
    for (key, value) in options {
        cluster.set(key, value).map_err(|errno| {
            let what = format!("Ceph does not take the option '{}'", key.to_string_lossy());
            failed(name, &what, errno, "")
        })?;
    }
    // Last: whether a write that has ended is durable follows from how the disk was opened, and from nothing else.
    let cached = if is_cached { c"true" } else { c"false" };
    cluster.set(CACHE, cached).map_err(|errno| failed(name, "cannot choose whether librbd caches", errno, ""))?;
    cluster.connect().map_err(|errno| {
        let hint = match errno {
            ENOENT => " (no monitor or no keyring is known: name a configuration by :conf=FILE)",
            EPERM | EACCES => " (the cluster does not know this user: name another one by :id=USER)",
            ETIMEDOUT => " (no monitor answers)",
            _ => "",
        };
        failed(name, "cannot connect to the cluster", errno, hint)
    })?;
    Ok(cluster)
}

/// The pool of an image, over a connection that others use, too.
pub(crate) fn pool(name: &RbdName, is_cached: bool) -> Result<Pool> {
    Pool::new(connection(name, is_cached)?, &name.pool, name.namespace.as_deref()).map_err(|errno| {
        let hint = if errno == ENOENT { " (there is no pool of that name)" } else { "" };
        failed(name, "cannot use the pool", errno, hint)
    })
}

/// Makes an image of so many zeros, with the cluster's defaults. Fails if there is one of this name.
pub fn create(name: &RbdName, size_bytes: u64) -> Result<()> {
    if name.snapshot.is_some() {
        return Err(Error::new(ErrorKind::BadOption, format!("'{name}': a snapshot cannot be made here")));
    }
    let made = pool(name, false)?.create(&name.image, size_bytes);
    made.map_err(|errno| {
        let hint = match errno {
            EEXIST => {
                " (what is there is not overwritten: if nothing needs it, remove it with 'rbd rm'; or say that it is to be \
                 written over)"
            }
            _ => "",
        };
        failed(name, "cannot create the image", errno, hint)
    })
}

/// Removes an image that nobody has open. What this process has open is waited for, a few seconds at most.
pub fn remove(name: &RbdName) -> Result<()> {
    let key = name.to_string();
    wait_for(&key);
    let pool = pool(name, false)?;
    let removed = pool.remove(&name.image).or_else(|errno| match errno {
        EBUSY => {
            wait_until_let_go(&key);
            pool.remove(&name.image)
        }
        _ => Err(errno),
    });
    removed.map_err(|errno| {
        let hint = if errno == EBUSY { " (somebody has it open, or did until lately)" } else { "" };
        failed(name, "cannot remove the image", errno, hint)
    })
}
