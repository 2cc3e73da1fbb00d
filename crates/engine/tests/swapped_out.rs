//! A file in memory of which something is swapped out, where its mapping cannot be armed (see `armed.rs` for where it can): a
//! worker fetches it, the reactor goes on copying the rest. See `common::swap`.

mod common;

use block::{FileOp, PastEnd};
use common::swap::*;
use common::{reactor, with_queue};
use engine::{CacheMode, OpenOptions};
use memory::IoBuf;

/// Without `userfaultfd`: the kernel is asked before each copy.
fn unarmed(test: impl FnOnce() + Send + 'static) {
    let all = move || {
        refuse_userfaultfd();
        test();
    };
    if let Err(panic) = std::thread::spawn(all).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Completions, and how many of them by workers.
fn counts(taken: &Taken) -> (u64, u64) {
    (taken.completions, taken.by_workers)
}

const NONE_BY_WORKERS: (u64, u64) = (32, 0);

#[test]
fn what_is_swapped_out_is_fetched_by_a_worker_and_the_rest_copied_by_the_reactor() {
    unarmed(fetched_by_a_worker);
}

fn fetched_by_a_worker() {
    let Some(setup) = Setup::without_swap() else { return };
    let Some(swap) = setup.swapped_out() else { return };
    let file = engine::open(&setup.path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    let pages = |start: u64| (0..32).map(|index| start + index * PAGE).collect::<Vec<_>>();
    for (in_a_batch, out) in [(true, 0), (false, OUT_BYTES / 2)] {
        let read = |at| counts(&read_pages(&reactor, &file, pages(at), in_a_batch));
        assert_eq!(read(OUT_BYTES), NONE_BY_WORKERS, "what is there");
        assert_eq!(read(DATA_BYTES), NONE_BY_WORKERS, "a hole");
        let fetched = read(out);
        // Of a few the kernel may have read those behind as well.
        assert!(fetched.1 > if in_a_batch { 16 } else { 0 } && fetched.0 == 32, "{fetched:?}");
        assert_eq!(read(out), NONE_BY_WORKERS, "what was fetched");
    }
    drop(swap);
    std::thread::sleep(NOTICED);
    let others_swap = host_swaps();
    let before = reactor.stats();
    assert_eq!(counts(&read_pages(&reactor, &file, pages(OUT_BYTES / 4), true)), NONE_BY_WORKERS);
    let calls = reactor.stats().system_calls - before.system_calls;
    assert!(others_swap || calls <= 32, "{calls}: nobody asks any more whether it is there");
    reactor.stop().unwrap();
}

/// The kernel lets one change the file at a time: beside a worker that waits for a page the reactor would wait as well.
#[test]
fn what_changes_the_file_beside_a_worker_is_a_workers_too_and_reads_are_not() {
    unarmed(changed_beside_a_worker);
}

fn changed_beside_a_worker() {
    let Some(setup) = Setup::without_swap() else { return };
    let Some(_swap) = setup.swapped_out() else { return };
    // (A page that is swapped out for each case.)
    let mut last = OUT_BYTES;
    for cache in [CacheMode::Writeback, CacheMode::None] {
        let Ok(file) = engine::open(&setup.path, &OpenOptions { cache, ..OpenOptions::default() }) else {
            eprintln!("{cache} is not to be had on this tmpfs");
            continue;
        };
        let reactor = reactor("memory");
        let there = DATA_BYTES - PAGE;
        for fua in [false, true] {
            last -= 16 * PAGE;
            let (out, before) = (last, reactor.stats());
            let read =
                || FileOp::Read { offset: OUT_BYTES, data: IoBuf::zeroed(512).whole(), past_end: PastEnd::Fails };
            with_queue(&reactor, &file, move |queue| async move {
                let batch = vec![part_of_a_page(out, fua), part_of_a_page(there, fua), read(), FileOp::Flush];
                carry_out(&queue, batch, true).await;
            });
            assert_eq!(counts(&taken(&reactor, &before)), (4, 2), "{cache}, durable: {fua}");
            let found = with_queue(&reactor, &file, move |queue| async move {
                common::read(&queue, out, PAGE as usize, PastEnd::Fails).await.unwrap()
            });
            let mut page = vec![content(out); PAGE as usize];
            page[512..1024].fill(9);
            assert!(found == page, "what was swapped out is there, around what was written");
            // When the worker is done, the reactor copies again.
            let before = reactor.stats();
            with_queue(&reactor, &file, move |queue| async move {
                carry_out(&queue, vec![part_of_a_page(there, fua)], true).await;
            });
            assert_eq!(counts(&taken(&reactor, &before)), (1, 0));
        }
        // Zeroing a part of a page reads it.
        last -= 16 * PAGE;
        let (out, before) = (last, reactor.stats());
        with_queue(&reactor, &file, move |queue| async move {
            let zeroes = FileOp::WriteZeroes { offset: out + 512, length: 2 * PAGE, may_unmap: true };
            carry_out(&queue, vec![zeroes], true).await;
        });
        assert_eq!(taken(&reactor, &before).by_workers, 1, "{cache}: zeroes in a page that is swapped out");
        reactor.stop().unwrap();
    }
}
