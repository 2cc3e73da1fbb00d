//! Several queues work on a disk whose layers change, and every read is checked against the history of the writes.

mod live;

use live::{Bench, Shape};
use testkit::HistoryLoad;

/// Requests while layers change, in each test.
const OPERATIONS: u64 = 100_000;

#[test]
fn no_write_is_lost_or_shown_old_while_layers_are_put_on_and_taken_back() {
    let bench = Bench::new(&Shape::qcow2(4 << 20, &[65536]));
    let load = bench.start(HistoryLoad::default());
    let mut exchanges = 0;
    while load.operations() < OPERATIONS {
        bench.put_overlay(8192);
        load.wait_for_more(4000);
        bench.take_back();
        load.wait_for_more(1000);
        exchanges += 1;
    }
    assert_eq!(load.finish(), [""; 0]);
    eprintln!("{exchanges} layers were put on and taken back");
    bench.assert_sound_and_as_written();
}

#[test]
fn a_queue_that_adopts_a_chain_late_is_found() {
    let bench = Bench::new(&Shape::qcow2(1 << 20, &[4096]));
    let load = bench.start(HistoryLoad::default());
    load.wait_for_more(2000);
    bench.image.miss_chains_for_test(u64::MAX);
    bench.put_overlay(4096);
    load.wait_for_more(OPERATIONS);
    let faults = load.finish();
    assert!(faults.iter().any(|fault| fault.contains("is old")), "{faults:?}");
}
