//! The merged map under shuttle: queues learn and look up at once, in a cache of two slices.

use super::*;
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::schedules::{SHORT, Verdict, explore, schedules, seed};
use testkit::{Dice, mix};

const G: u64 = 1 << 16;
/// Granules in three slices; the first two are adjacent in one file.
const GRANULES: [u64; 5] = [0, 1, 512, 1024, 1026];

/// Returns the layers' answer for a granule.
fn place(granule: u64) -> Place {
    let extent = match granule {
        512 => Extent::Zero,
        _ => Extent::Data { file: 0, offset: (granule + 7) * G },
    };
    let layer = if granule == 512 { 0 } else { 1 + (granule / 512) as usize };
    Place { layer, extent, length_bytes: G }
}

type Learn = fn(&LowerMap, u64);

fn learn(below: &LowerMap, granule: u64) {
    below.learn(granule * G + 512, |_, _| Some(place(granule)));
}

/// A mutant that changes the entry after it has released the book.
fn learn_late(below: &LowerMap, granule: u64) {
    let slice = below.slice_of(granule * G);
    if below.cache.view(slice).is_none() {
        below.book.lock().unwrap().install(&below.cache, slice, std::iter::repeat(0));
    }
    below.cache.set(slice, below.index_of(granule * G), encode(&place(granule)).unwrap());
}

fn judge(below: &LowerMap, granule: u64, verdict: &Verdict, found: &AtomicU64) {
    match below.lookup(granule * G, G) {
        Known::Nothing => {}
        Known::At(at) if at == place(granule) => {
            found.fetch_add(1, Ordering::Relaxed);
        }
        other => verdict.fail(format!("granule {granule} is said to be {other:?}")),
    }
    if let Some((layer, offset)) = below.lookup_data(granule * G + 512, 512) {
        let expected = place(granule);
        if expected.layer != layer || expected.extent != (Extent::Data { file: 0, offset: offset - 512 }) {
            verdict.fail(format!("data of granule {granule} are said to be at {offset} of layer {layer}"));
        }
    }
}

fn execution(seed: u64, learn: Learn, verdict: &Verdict, found: &Arc<AtomicU64>) {
    let below = Arc::new(LowerMap::new(2000 * G, 16, 0));
    let work = |thread| {
        let (below, verdict, found) = (Arc::clone(&below), verdict.clone(), Arc::clone(found));
        thread::spawn(move || {
            let mut dice = Dice::new(mix(seed, thread));
            for _ in 0..6 {
                let granule = GRANULES[dice.index(GRANULES.len())];
                match dice.chance(50) {
                    true => learn(&below, granule),
                    false => judge(&below, granule, &verdict, &found),
                }
            }
        })
    };
    let threads: Vec<_> = (1..=3).map(work).collect();
    for thread in threads {
        thread.join().unwrap();
    }
    for granule in GRANULES {
        judge(&below, granule, verdict, found);
    }
}

fn run(limit: u64, learn: Learn) -> (Result<(), String>, u64) {
    let found = Arc::new(AtomicU64::new(0));
    let theirs = Arc::clone(&found);
    let result = explore(seed(), limit, SHORT, move |seed, verdict| execution(seed, learn, verdict, &theirs));
    (result, found.load(Ordering::Relaxed))
}

#[test]
fn queues_that_learn_and_look_up_at_once_never_find_a_place_where_it_is_not() {
    let (result, found) = run(schedules(2000), learn);
    result.unwrap();
    assert!(found > 0, "nothing was ever found");
}

#[test]
fn a_mutant_that_notes_without_the_book_is_found() {
    let (result, _) = run(20_000, learn_late);
    println!("{}", result.unwrap_err());
}
