//! Calls that may wait for the storage of a disk. If it hangs, so do they, and each keeps a thread. So there are limits:
//! the threads that are left answer calls about other disks, and the one that removes the disk.

use super::{beside, known};
use crate::api::ErrorKind;
use crate::failure::Failure;
use crate::manager::Manager;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Calls in progress on one disk.
const OF_A_DISK_MAX: usize = 8;
/// Calls in progress on all disks.
const TOTAL_MAX: usize = 48;

/// The calls in progress, by disk.
#[derive(Debug, Default)]
pub(crate) struct StorageCalls(Mutex<BTreeMap<String, usize>>);

/// A call in progress.
struct StorageCall {
    calls: Arc<StorageCalls>,
    disk: String,
}

impl StorageCalls {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(self: &Arc<Self>, disk: &str) -> Result<StorageCall, Failure> {
        let mut calls = self.lock();
        let of_disk = calls.get(disk).copied().unwrap_or(0);
        if of_disk >= OF_A_DISK_MAX || calls.values().sum::<usize>() >= TOTAL_MAX {
            let whose = if of_disk >= OF_A_DISK_MAX { "its storage" } else { "the storage of other disks" };
            let what = format!(
                "'{disk}': too many calls wait for {whose}: try again when they have ended, or remove a \
                 disk that hangs by force"
            );
            return Err(Failure::new(ErrorKind::InUse, what));
        }
        calls.insert(disk.to_owned(), of_disk + 1);
        drop(calls);
        Ok(StorageCall { calls: Arc::clone(self), disk: disk.to_owned() })
    }
}

impl Drop for StorageCall {
    fn drop(&mut self) {
        let mut calls = self.calls.lock();
        match calls.get_mut(&self.disk) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(calls.remove(&self.disk)),
        }
    }
}

/// As [`beside`], for a call that may wait for the storage of the disk of this name, which exists.
pub(super) async fn on_disk<T: Send + 'static>(
    manager: Arc<Manager>,
    name: String,
    call: impl FnOnce(&Arc<Manager>, &str) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    limited(manager, name.clone(), move |manager| {
        known(manager, &name)?;
        call(manager, &name)
    })
    .await
}

/// As [`beside`], for a call that may wait for the storage of `disk`. Too many at one time are refused.
pub(super) async fn limited<T: Send + 'static>(
    manager: Arc<Manager>,
    disk: String,
    call: impl FnOnce(&Arc<Manager>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let begun = manager.storage_calls.begin(&disk)?;
    let call = move |manager: &Arc<Manager>| {
        let result = call(manager);
        drop(begun);
        result
    };
    // The thread keeps its place, also when nobody waits for the answer any more.
    beside(manager, call).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_limited_on_each_disk_and_on_all_and_what_has_ended_makes_room() {
        let calls = Arc::<StorageCalls>::default();
        let mut begun: Vec<_> = (0..OF_A_DISK_MAX).map(|_| calls.begin("a").unwrap()).collect();
        let refused = calls.begin("a").err().unwrap();
        assert!(refused.0.message.contains("'a'") && refused.0.message.contains("by force"), "{refused:?}");
        begun.pop();
        begun.push(calls.begin("a").unwrap());
        begun.extend((OF_A_DISK_MAX..TOTAL_MAX).map(|number| calls.begin(&number.to_string()).unwrap()));
        assert_eq!(calls.begin("other").err().unwrap().0.kind, ErrorKind::InUse);
        drop(begun);
        assert!(calls.lock().is_empty());
    }
}
