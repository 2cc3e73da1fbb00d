//! The mailbox under loom: all schedules, and all values that the memory model lets a load return.

mod parts {
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
    pub(super) use loom::sync::{Mutex, MutexGuard};
    pub(super) use std::sync::PoisonError;
}

/// The production type, with loom's lock and flag.
#[allow(dead_code, clippy::duplicate_mod, reason = "the model uses its part of what is compiled once more")]
#[path = "mailbox.rs"]
mod mailbox;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use mailbox::Mailbox;

#[test]
fn what_two_workers_signal_is_found_by_a_look_or_leaves_the_flag_set() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::default());
        // What the kernel puts into a ring while a worker calls it: no lock orders that.
        let rings = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let workers = [0, 1].map(|index| {
            let (mailbox, rings) = (Arc::clone(&mailbox), Arc::clone(&rings));
            thread::spawn(move || {
                rings[index].store(1, Ordering::Relaxed);
                mailbox.signal();
            })
        });
        let mut found = [false; 2];
        if mailbox.take_signal() {
            found = [0, 1].map(|index| rings[index].load(Ordering::Relaxed) == 1);
        }
        let will_look = mailbox.has_signal();
        for worker in workers {
            worker.join().unwrap();
        }
        assert!(found == [true; 2] || will_look || mailbox.has_signal(), "{found:?}, and nobody looks again");
    });
}

#[test]
fn results_that_were_added_before_a_signal_are_taken_once() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let theirs = Arc::clone(&mailbox);
        let worker = thread::spawn(move || {
            for index in 0..2 {
                theirs.results().all.push((index, 0));
                theirs.signal();
            }
        });
        let mut taken = Vec::new();
        if mailbox.take_signal() {
            taken.append(&mut mailbox.results().all);
        }
        worker.join().unwrap();
        if mailbox.take_signal() {
            taken.append(&mut mailbox.results().all);
        }
        assert_eq!(taken, [(0, 0), (1, 0)]);
    });
}
