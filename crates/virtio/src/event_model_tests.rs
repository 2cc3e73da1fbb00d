//! The order of stores and loads around "publish" and "does the other side want to know", in all interleavings and with
//! all that a weak memory model allows (loom). It holds for both layouts and both directions: one side publishes an
//! entry and looks at a wish, the other says its wish and looks for an entry.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU16, Ordering, fence};
use loom::thread;

/// An entry of a ring, and an event structure.
#[derive(Default)]
struct Shared {
    payload: AtomicU16,
    entry: AtomicU16,
    position: AtomicU16,
    wish: AtomicU16,
}

const NEVER: u16 = 0;
const AT: u16 = 2;

impl Shared {
    /// What `publish` does; true if the other side is to be told.
    fn publish(&self, with_fence: bool) -> bool {
        self.payload.store(7, Ordering::Relaxed);
        self.entry.store(1, Ordering::Release);
        if with_fence {
            fence(Ordering::SeqCst);
        }
        let wish = self.wish.load(Ordering::Acquire);
        if wish == AT {
            assert_eq!(self.position.load(Ordering::Relaxed), 1, "a wish is never seen without its position");
        }
        wish != NEVER
    }

    /// What a side does before it sleeps; true if there is an entry already.
    fn wish(&self, with_fence: bool) -> bool {
        self.position.store(1, Ordering::Relaxed);
        self.wish.store(AT, Ordering::Release);
        if with_fence {
            fence(Ordering::SeqCst);
        }
        let seen = self.entry.load(Ordering::Acquire) == 1;
        if seen {
            assert_eq!(self.payload.load(Ordering::Relaxed), 7, "an entry is never seen without what it announces");
        }
        seen
    }
}

/// One side publishes while the other goes to sleep.
fn both_sides(publisher_has_fence: bool, sleeper_has_fence: bool) {
    loom::model(move || {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let publisher = thread::spawn(move || theirs.publish(publisher_has_fence));
        let seen = shared.wish(sleeper_has_fence);
        let told = publisher.join().unwrap();
        assert!(seen || told, "one side sleeps and the other does not wake it");
    });
}

#[test]
fn nobody_sleeps_through_an_entry() {
    both_sides(true, true);
}

#[test]
#[should_panic(expected = "does not wake it")]
fn without_the_publishers_fence_somebody_may() {
    both_sides(false, true);
}

#[test]
#[should_panic(expected = "does not wake it")]
fn without_the_sleepers_fence_somebody_may() {
    both_sides(true, false);
}
