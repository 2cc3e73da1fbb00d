//! Calls that wait for their turn before they go on beside the thread of the socket.

use super::{beside, known};
use crate::failure::Failure;
use crate::manager::Manager;
use crate::server::AtWork;
use std::sync::Arc;

/// As [`beside`], for a call that may wait for the storage of the disk of this name, which exists.
pub(super) async fn on_disk<T: Send + 'static>(
    manager: Arc<Manager>,
    name: String,
    call: impl FnOnce(&Arc<Manager>, &str) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    // Who names no disk gets the answer at once.
    known(&manager, &name)?;
    limited(manager, vec![name.clone()], move |manager| {
        known(manager, &name)?;
        call(manager, &name)
    })
    .await
}

/// As [`beside`], for a call that may wait for the storage of these `disks`. It waits for its turn; too many that wait
/// are refused.
pub(super) async fn limited<T: Send + 'static>(
    manager: Arc<Manager>,
    disks: Vec<String>,
    call: impl FnOnce(&Arc<Manager>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let _at_work = AtWork::begin();
    let begun = manager.storage_calls.begin(disks).await?;
    let call = move |manager: &Arc<Manager>| {
        let result = call(manager);
        drop(begun);
        result
    };
    // The thread keeps its place, also when nobody waits for the answer any more.
    beside(manager, call).await
}

/// As [`beside`], for a call that ends what may hang. It waits for its turn, but not for the calls above; too many that
/// wait are refused.
pub(super) async fn ending<T: Send + 'static>(
    manager: Arc<Manager>,
    call: impl FnOnce(&Arc<Manager>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let _at_work = AtWork::begin();
    let places = manager.storage_calls.begin_removal().await?;
    let call = move |manager: &Arc<Manager>| {
        let result = call(manager);
        drop(places);
        result
    };
    beside(manager, call).await
}
