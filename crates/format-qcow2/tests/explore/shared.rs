//! What formats share, by itself: the slice cache and the epochs, each with a reader that leaves its rule out.

use block::{Epochs, SliceBook, SliceCache};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::sync::Arc;
use testkit::schedules::{SHORT, Verdict, explore, schedules, seed};

const ENTRIES: usize = 2;

fn entries(slice: u64) -> impl Iterator<Item = u64> {
    std::iter::repeat(slice * 100)
}

/// Two threads put slices into a cache of two slots; a third reads without a lock.
fn slices_change_hands(looks_again: bool, verdict: &Verdict) {
    let cache = Arc::new(SliceCache::new(1 << 20, ENTRIES, 0));
    let book = Arc::new(Mutex::new(SliceBook::default()));
    let install = |slices: [u64; 3]| {
        let (cache, book) = (Arc::clone(&cache), Arc::clone(&book));
        thread::spawn(move || {
            for slice in slices {
                let mut book = book.lock().unwrap();
                if cache.view(slice).is_none() {
                    assert!(book.install(&cache, slice, entries(slice)));
                }
            }
        })
    };
    let writers = [install([1, 2, 3]), install([3, 1, 4])];
    for slice in [1, 3, 1, 4] {
        let Some(view) = cache.view(slice) else { continue };
        let (first, second) = (view.get(0).unwrap(), view.get(1).unwrap());
        if (view.is_valid() || !looks_again) && (first, second) != (slice * 100, slice * 100) {
            verdict.fail(format!("slice {slice} shows {first} and {second}"));
        }
    }
    for writer in writers {
        writer.join().unwrap();
    }
}

/// A slot is freed and, when its epoch is over, given to another; operations use it without a lock meanwhile.
fn space_is_reused(waits: bool, verdict: &Verdict) {
    let epochs = Arc::new(Epochs::default());
    let mapping = Arc::new(AtomicU64::new(1));
    let stranger = Arc::new(AtomicU64::new(0));
    let reader = || {
        let (epochs, mapping, stranger) = (Arc::clone(&epochs), Arc::clone(&mapping), Arc::clone(&stranger));
        let verdict = verdict.clone();
        thread::spawn(move || {
            let mut part = epochs.join();
            for _ in 0..2 {
                let first = part.begin(&epochs);
                let second = part.begin(&epochs);
                if mapping.load(Ordering::Acquire) == 1 && stranger.load(Ordering::Acquire) == 1 {
                    verdict.fail("an operation that found the mapping found a stranger's data there".to_owned());
                }
                part.end(second);
                part.end(first);
            }
        })
    };
    let readers = [reader(), reader()];
    mapping.store(0, Ordering::Release);
    let epoch = epochs.retire();
    if !waits || epochs.is_over(epoch) {
        stranger.store(1, Ordering::Release);
    }
    for reader in readers {
        reader.join().unwrap();
    }
}

#[test]
fn a_reader_never_believes_an_entry_of_another_slice() {
    explore(seed(), schedules(2000), SHORT, |_, verdict| slices_change_hands(true, verdict)).unwrap();
}

#[test]
fn a_mutant_reader_that_does_not_look_at_the_tag_again_is_found() {
    let found = explore(seed(), 20_000, SHORT, |_, verdict| slices_change_hands(false, verdict));
    println!("{}", found.unwrap_err());
}

#[test]
fn nobody_finds_a_stranger_where_a_mapping_led() {
    explore(seed(), schedules(2000), SHORT, |_, verdict| space_is_reused(true, verdict)).unwrap();
}

#[test]
fn a_mutant_that_does_not_wait_for_epochs_is_found() {
    let found = explore(seed(), 20_000, SHORT, |_, verdict| space_is_reused(false, verdict));
    println!("{}", found.unwrap_err());
}
