//! The one thread that talks to all web servers.

use block::{Error, Result};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::{Builder, Handle};

static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);

/// Returns the thread's handle; starts the thread at the first call.
pub(crate) fn handle() -> Result<Handle> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*runtime {
        return Ok(handle.clone());
    }
    let failed = |error| Error::io("cannot start the thread of web servers", error);
    let built = Builder::new_current_thread().enable_all().thread_name("http-aside").build().map_err(failed)?;
    let handle = built.handle().clone();
    let serve = move || built.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("http".into()).spawn(serve).map_err(failed)?;
    *runtime = Some(handle.clone());
    Ok(handle)
}
