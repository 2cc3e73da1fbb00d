//! Calls that may wait for the storage of a disk. If it hangs, so do they, and each keeps a thread. So few are carried out
//! at a time: the threads that are left answer calls about other disks, and the one that removes the disk. More wait for
//! their turn, without a thread, in the order in which they came.

use crate::api::ErrorKind;
use crate::failure::Failure;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Calls in progress on one disk.
const OF_A_DISK_MAX: usize = 8;
/// Calls in progress on all disks.
const TOTAL_MAX: usize = 48;
/// Calls that wait for their turn on one disk.
const WAITING_OF_A_DISK_MAX: usize = 64;
/// Calls that wait for their turn. Each keeps a connection.
const WAITING_MAX: usize = 256;
/// Disks and exports that are being removed at one time. Each may wait for storage that hangs. More wait.
const REMOVALS_MAX: usize = 32;
/// Removals that wait for their turn. Each keeps a connection.
const WAITING_REMOVALS_MAX: usize = 96;
/// Streams of events.
const WATCHERS_MAX: usize = 128;
/// Threads that storage which hangs may keep.
pub(crate) const HELD_THREADS_MAX: usize = TOTAL_MAX + REMOVALS_MAX;
/// Connections that are kept for long.
pub(crate) const HELD_CONNECTIONS_MAX: usize = WAITING_MAX + WAITING_REMOVALS_MAX + HELD_THREADS_MAX + WATCHERS_MAX;
/// How long a call waits for its turn.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// The same for a removal. Each of those before it may take as long as the daemon waits for requests that the storage does
/// not end, so this is longer.
const REMOVAL_WAIT_MAX: Duration = Duration::from_secs(600);

/// The calls in progress, those that wait, and what else keeps a thread or a connection for long.
#[derive(Debug)]
pub(crate) struct StorageCalls {
    turns: Mutex<Turns>,
    total: Arc<Semaphore>,
    removals: Arc<Semaphore>,
    /// For the removals in progress and those that wait.
    asked_removals: Arc<Semaphore>,
    watchers: Arc<Semaphore>,
    wait_max: Duration,
    removal_wait_max: Duration,
}

#[derive(Debug, Default)]
struct Turns {
    /// The disks that have calls.
    disks: BTreeMap<String, OfDisk>,
    waiting: usize,
}

#[derive(Debug)]
struct OfDisk {
    /// Permits for the calls in progress. Who waits for one has a clone.
    places: Arc<Semaphore>,
    waiting: usize,
}

impl Default for OfDisk {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(OF_A_DISK_MAX)), waiting: 0 }
    }
}

/// A call in progress.
#[derive(Debug)]
pub(crate) struct StorageCall {
    calls: Arc<StorageCalls>,
    disks: Vec<String>,
    places: Vec<OwnedSemaphorePermit>,
}

/// A call that waits for its turn. It leaves the queue also when its client goes away: this is dropped then.
struct Waiting<'a> {
    calls: &'a StorageCalls,
    disks: &'a [String],
}

impl Default for StorageCalls {
    fn default() -> Self {
        let places = |count| Arc::new(Semaphore::new(count));
        let (total, removals, watchers) = (places(TOTAL_MAX), places(REMOVALS_MAX), places(WATCHERS_MAX));
        let asked_removals = places(REMOVALS_MAX + WAITING_REMOVALS_MAX);
        Self {
            turns: Mutex::default(),
            total,
            removals,
            asked_removals,
            watchers,
            wait_max: WAIT_MAX,
            removal_wait_max: REMOVAL_WAIT_MAX,
        }
    }
}

impl StorageCalls {
    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until these disks, and all together, have room for one more call.
    pub(crate) async fn begin(self: &Arc<Self>, mut disks: Vec<String>) -> Result<StorageCall, Failure> {
        disks.sort_unstable();
        disks.dedup();
        let mut call = StorageCall { calls: Arc::clone(self), disks, places: Vec::new() };
        let rooms = self.rooms_of(&call.disks);
        if let Ok(mut places) = at_once(&rooms, None)
            && let Ok(place) = Arc::clone(&self.total).try_acquire_owned()
        {
            places.push(place);
            call.places = places;
            return Ok(call);
        }
        let waiting = Waiting::begin(self, &call.disks)?;
        let turn = tokio::time::timeout(self.wait_max, async {
            let mut places = in_turn(&rooms).await;
            // The room for all comes last: who waits for a disk that hangs keeps nothing from calls on others.
            places.extend(Arc::clone(&self.total).acquire_owned().await);
            places
        });
        let places = turn.await.map_err(|_| too_many(&call.disks))?;
        drop(waiting);
        call.places = places;
        Ok(call)
    }

    /// Waits until one more disk or export can be removed. Refuses, if too many wait.
    pub(crate) async fn begin_removal(&self) -> Result<Vec<OwnedSemaphorePermit>, Failure> {
        let asked = Arc::clone(&self.asked_removals).try_acquire_owned().map_err(|_| {
            let what = format!("{WAITING_REMOVALS_MAX} removals wait already: try again when some have ended");
            Failure::new(ErrorKind::InUse, what)
        })?;
        // It is never closed, so there is a place or none in time.
        let turn = tokio::time::timeout(self.removal_wait_max, Arc::clone(&self.removals).acquire_owned());
        let place = turn.await.map_err(|_| {
            let what = format!("{REMOVALS_MAX} removals wait for storage that hangs: try again when some have ended");
            Failure::new(ErrorKind::InUse, what)
        })?;
        Ok(place.into_iter().chain([asked]).collect())
    }

    /// The place of one more stream of events.
    pub(crate) fn watch(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Arc::clone(&self.watchers).try_acquire_owned().map_err(|_| {
            let what = format!("{WATCHERS_MAX} clients watch events already: end one of them first");
            Failure::new(ErrorKind::InUse, what)
        })
    }

    fn rooms_of(&self, disks: &[String]) -> Vec<Arc<Semaphore>> {
        let mut turns = self.lock();
        let of_disk = |disk: &String| Arc::clone(&turns.disks.entry(disk.clone()).or_default().places);
        disks.iter().map(of_disk).collect()
    }

    /// Forgets those of these disks that have no calls any more.
    fn forget_idle(&self, disks: &[String]) {
        let mut turns = self.lock();
        for disk in disks {
            let is_idle = |of_disk: &OfDisk| Arc::strong_count(&of_disk.places) == 1 && of_disk.waiting == 0;
            if turns.disks.get(disk).is_some_and(is_idle) {
                turns.disks.remove(disk);
            }
        }
    }
}

impl<'a> Waiting<'a> {
    fn begin(calls: &'a StorageCalls, disks: &'a [String]) -> Result<Self, Failure> {
        let mut turns = calls.lock();
        let is_full = |disk: &String| turns.disks.get(disk).is_some_and(|disk| disk.waiting >= WAITING_OF_A_DISK_MAX);
        if turns.waiting >= WAITING_MAX || disks.iter().any(is_full) {
            return Err(too_many(disks));
        }
        turns.waiting += 1;
        disks.iter().for_each(|disk| turns.disks.entry(disk.clone()).or_default().waiting += 1);
        Ok(Self { calls, disks })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut turns = self.calls.lock();
        turns.waiting = turns.waiting.saturating_sub(1);
        for disk in self.disks {
            if let Some(of_disk) = turns.disks.get_mut(disk) {
                of_disk.waiting = of_disk.waiting.saturating_sub(1);
            }
        }
    }
}

impl Drop for StorageCall {
    fn drop(&mut self) {
        self.places.clear();
        self.calls.forget_idle(&self.disks);
    }
}

/// Takes a place in each of these rooms, beside one in the room `taken`, if none of them is full; else returns the
/// number of a full one.
fn at_once(rooms: &[Arc<Semaphore>], taken: Option<usize>) -> Result<Vec<OwnedSemaphorePermit>, usize> {
    let others = rooms.iter().enumerate().filter(|(number, _)| Some(*number) != taken);
    others.map(|(number, room)| Arc::clone(room).try_acquire_owned().map_err(|_| number)).collect()
}

/// Waits for a place in each of these rooms. While it waits for one, it keeps none in the others: a disk that hangs
/// keeps nothing from calls on the others alone.
async fn in_turn(rooms: &[Arc<Semaphore>]) -> Vec<OwnedSemaphorePermit> {
    let mut missing = 0;
    while let Some(room) = rooms.get(missing) {
        let place = Arc::clone(room).acquire_owned().await;
        match at_once(rooms, Some(missing)) {
            // Nobody closes the room.
            Ok(others) => return others.into_iter().chain(place).collect(),
            Err(full) => missing = full,
        }
    }
    Vec::new()
}

fn too_many(disks: &[String]) -> Failure {
    // A disk that is being added without a name is known by its file.
    let disks: Vec<_> = disks.iter().map(|disk| image::without_secrets(disk)).collect();
    let what = format!(
        "'{}': too many calls wait for storage: try again when they have ended, or remove a disk that hangs by force",
        disks.join("', '")
    );
    Failure::new(ErrorKind::InUse, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use tokio::task::JoinHandle;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(test);
    }

    async fn begin(calls: &Arc<StorageCalls>, disks: &[&str]) -> Result<StorageCall, Failure> {
        calls.begin(disks.iter().map(|disk| (*disk).to_owned()).collect()).await
    }

    /// A call that waits for its turn by the time this returns.
    async fn wait(calls: &Arc<StorageCalls>, disk: &'static str) -> JoinHandle<Result<StorageCall, Failure>> {
        let (before, mine) = (calls.lock().waiting, Arc::clone(calls));
        let waits = tokio::spawn(async move { begin(&mine, &[disk]).await });
        while calls.lock().waiting == before && !waits.is_finished() {
            tokio::task::yield_now().await;
        }
        waits
    }

    #[test]
    fn a_refusal_shows_no_secrets() {
        let refused = too_many(&["rbd:vms/a:key=S3CRET".to_owned()]).0.message;
        assert!(refused.contains("rbd:vms/a") && !refused.contains("S3CRET"), "{refused}");
    }

    #[test]
    fn calls_wait_for_their_turn_and_only_too_many_are_refused() {
        run(async {
            let calls = Arc::<StorageCalls>::default();
            let mut begun = Vec::new();
            for _ in 0..OF_A_DISK_MAX {
                begun.push(begin(&calls, &["a"]).await.unwrap());
            }
            let mut waiting = Vec::new();
            for _ in 0..WAITING_OF_A_DISK_MAX {
                waiting.push(wait(&calls, "a").await);
            }
            assert!(waiting.iter().all(|call| !call.is_finished()));
            let refused = begin(&calls, &["a"]).await.unwrap_err();
            assert_eq!(refused.0.kind, ErrorKind::InUse);
            assert!(refused.0.message.contains("'a'") && refused.0.message.contains("by force"), "{refused:?}");
            // Other disks do not notice.
            drop(begin(&calls, &["b"]).await.unwrap());
            // The first that came is the first to go on.
            drop(begun.pop());
            let first = waiting.remove(0).await.unwrap().unwrap();
            assert!(waiting.iter().all(|call| !call.is_finished()));
            // A client that goes away leaves its place in the queue.
            waiting.pop().unwrap().abort();
            while calls.lock().waiting >= WAITING_OF_A_DISK_MAX - 1 {
                tokio::task::yield_now().await;
            }
            drop((first, begun));
            for call in waiting {
                drop(call.await.unwrap().unwrap());
            }
            assert!(calls.lock().disks.is_empty());
            assert_eq!((calls.lock().waiting, calls.total.available_permits()), (0, TOTAL_MAX));
        });
    }

    #[test]
    fn all_disks_together_have_a_limit_and_who_waits_for_one_keeps_no_place() {
        run(async {
            let calls = Arc::<StorageCalls>::default();
            let mut begun = Vec::new();
            for number in 0..TOTAL_MAX - 1 {
                begun.push(begin(&calls, &[&format!("{}", number / OF_A_DISK_MAX)]).await.unwrap());
            }
            // One disk is full, and a call on it and another one waits: what is left is for the others.
            let full = wait(&calls, "0").await;
            let both = Arc::clone(&calls);
            let both = tokio::spawn(async move { begin(&both, &["z", "0", "z"]).await });
            while calls.lock().waiting < 2 {
                tokio::task::yield_now().await;
            }
            let last = begin(&calls, &["y"]).await.unwrap();
            let other = wait(&calls, "x").await;
            assert!(!other.is_finished());
            drop(last);
            drop(other.await.unwrap().unwrap());
            begun.clear();
            drop(full.await.unwrap().unwrap());
            assert_eq!(both.await.unwrap().unwrap().disks, ["0", "z"]);
            assert!(calls.lock().disks.is_empty());
        });
    }

    #[test]
    fn calls_that_wait_for_a_full_disk_and_a_healthy_one_keep_nobody_from_the_healthy_one() {
        run(async {
            let calls = Arc::<StorageCalls>::default();
            let mut begun = Vec::new();
            for _ in 0..OF_A_DISK_MAX {
                begun.push(begin(&calls, &["full"]).await.unwrap());
            }
            let mut both = Vec::new();
            for number in 1..=OF_A_DISK_MAX {
                let mine = Arc::clone(&calls);
                // Names that sort before and after that of the full one.
                both.push(tokio::spawn(async move { begin(&mine, &["a", "full", "z"]).await }));
                while calls.lock().waiting < number {
                    tokio::task::yield_now().await;
                }
            }
            for disk in ["a", "z"] {
                drop(begin(&calls, &[disk]).await.unwrap());
                assert_eq!(calls.lock().waiting, OF_A_DISK_MAX, "the call on '{disk}' did not wait");
            }
            let has_room = |disk| at_once(&calls.rooms_of(&[String::from(disk)]), None).is_ok();
            assert!(has_room("a") && has_room("z") && !has_room("full"));
            begun.clear();
            for call in both {
                drop(call.await.unwrap().unwrap());
            }
            assert!(calls.lock().disks.is_empty());
            assert_eq!((calls.lock().waiting, calls.total.available_permits()), (0, TOTAL_MAX));
        });
    }

    #[test]
    fn removals_wait_and_only_too_many_are_refused() {
        run(async {
            let calls = Arc::<StorageCalls>::default();
            let mut begun = Vec::new();
            for _ in 0..REMOVALS_MAX {
                begun.push(calls.begin_removal().await.unwrap());
            }
            let mut waiting = Vec::new();
            for _ in 0..WAITING_REMOVALS_MAX {
                let calls = Arc::clone(&calls);
                waiting.push(tokio::spawn(async move { calls.begin_removal().await }));
            }
            while calls.asked_removals.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            let refused = calls.begin_removal().await.unwrap_err();
            assert_eq!(refused.0.kind, ErrorKind::InUse, "{refused:?}");
            // A client that goes away makes room.
            waiting.pop().unwrap().abort();
            while calls.asked_removals.available_permits() == 0 {
                tokio::task::yield_now().await;
            }
            begun.clear();
            for removal in waiting {
                drop(removal.await.unwrap().unwrap());
            }
            drop(calls.begin_removal().await.unwrap());
            assert_eq!(calls.removals.available_permits(), REMOVALS_MAX);
        });
    }

    #[test]
    fn a_removal_that_waits_too_long_is_refused() {
        run(async {
            let removal_wait_max = Duration::from_millis(20);
            let calls = StorageCalls { removal_wait_max, ..StorageCalls::default() };
            let mut begun = Vec::new();
            for _ in 0..REMOVALS_MAX {
                begun.push(calls.begin_removal().await.unwrap());
            }
            assert_eq!(calls.begin_removal().await.unwrap_err().0.kind, ErrorKind::InUse);
            drop(begun);
            drop(calls.begin_removal().await.unwrap());
            let left = (calls.removals.available_permits(), calls.asked_removals.available_permits());
            assert_eq!(left, (REMOVALS_MAX, REMOVALS_MAX + WAITING_REMOVALS_MAX));
        });
    }

    /// Calls on any disks come, wait, are given up and end, in an order that a seed chooses.
    #[test]
    fn whoever_waits_gets_a_turn_and_no_place_is_lost() {
        for seed in 0..50 {
            run(async move {
                let calls = Arc::<StorageCalls>::default();
                let mut state: u64 = seed;
                let mut dice = |limit: usize| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) as usize % limit
                };
                let mut tasks = Vec::new();
                for _ in 0..100 {
                    let disks: Vec<_> = (0..=dice(3)).map(|_| dice(6).to_string()).collect();
                    let (mine, turns) = (Arc::clone(&calls), dice(20));
                    tasks.push(tokio::spawn(async move {
                        let begun = mine.begin(disks).await;
                        for _ in 0..turns {
                            tokio::task::yield_now().await;
                        }
                        begun.map(drop)
                    }));
                    if dice(4) == 0 {
                        tasks[dice(tasks.len())].abort();
                    }
                    for _ in 0..dice(3) {
                        tokio::task::yield_now().await;
                    }
                }
                for task in tasks {
                    // An error of the task says that it was given up.
                    task.await.unwrap_or(Ok(())).unwrap();
                }
                assert!(calls.lock().disks.is_empty(), "seed {seed}: {calls:?}");
                let left = (calls.lock().waiting, calls.total.available_permits());
                assert_eq!(left, (0, TOTAL_MAX), "seed {seed}");
            });
        }
    }

    #[test]
    fn a_call_that_waits_too_long_is_refused() {
        run(async {
            let calls = Arc::new(StorageCalls { wait_max: Duration::from_millis(20), ..StorageCalls::default() });
            let mut begun = Vec::new();
            for _ in 0..OF_A_DISK_MAX {
                begun.push(begin(&calls, &["a"]).await.unwrap());
            }
            assert_eq!(begin(&calls, &["a"]).await.unwrap_err().0.kind, ErrorKind::InUse);
            drop(begun);
            assert!(calls.lock().disks.is_empty());
        });
    }
}
