//! A file in memory on a host with swap: the reactor copies what is mapped, without asking anybody, and never waits for what
//! is not. See `common::swap`.

mod common;

use block::{FileOp, PastEnd};
use common::swap::*;
use common::{reactor, with_queue};
use engine::{OpenOptions, ReactorThread};
use memory::IoBuf;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn pages(start: u64, count: u64) -> Vec<u64> {
    (0..count).map(|index| start + index * PAGE).collect()
}

fn only_copied(completions: u64) -> Taken {
    Taken { completions, by_workers: 0, system_calls: 0 }
}

/// Page faults of the reactor's thread so far that waited for storage.
fn waits(reactor: &ReactorThread, file: &Arc<dyn block::File>) -> i64 {
    with_queue(reactor, file, |_| async {
        // SAFETY: an all-zero `rusage` is a valid one; the kernel writes no more than that.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
            usage.ru_majflt
        }
    })
}

/// Reads until the reactor does so by itself.
fn warm_up(reactor: &ReactorThread, file: &Arc<dyn block::File>, offsets: &[u64]) {
    let is_warm = (0..10).any(|_| {
        let taken = read_pages(reactor, file, offsets.to_vec(), true);
        assert_eq!(taken.system_calls, 0, "calls are workers' from the first one on");
        taken == only_copied(offsets.len() as u64)
    });
    assert!(is_warm);
}

/// The engine's own mappings of a file, of this very process.
fn mappings(path: &Path) -> Vec<usize> {
    let all = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts = all.lines().filter(|line| line.ends_with(path.to_str().unwrap()));
    let start = |line: &str| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    starts.map(start).collect()
}

/// Swaps out what is mapped of a range of the image.
fn page_out(path: &Path, offset: u64, length: u64) {
    for start in mappings(path) {
        let start = (start + offset as usize) as *mut libc::c_void;
        // SAFETY: the range lies in a mapping of the image; paging it out changes no byte of it.
        unsafe { libc::madvise(start, length as usize, libc::MADV_PAGEOUT) };
    }
}

/// How much of the image is swapped out. What the swap file has in use would not tell: that of what went out before may be
/// given back meanwhile.
fn bytes_out(path: &Path) -> u64 {
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let of_image = all.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let kib = of_image.filter_map(|line| line.strip_prefix("Swap:")).next().unwrap();
    kib.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// The same, and sees to it that a good part of it went.
fn swap_out_what_is_mapped(path: &Path, offset: u64, length: u64) {
    let before = bytes_out(path);
    let is_out = (0..200).any(|_| {
        page_out(path, offset, length);
        std::thread::sleep(std::time::Duration::from_millis(10));
        bytes_out(path) >= before + length / 4
    });
    assert!(is_out, "{} of {length} bytes went out", bytes_out(path).saturating_sub(before));
}

#[test]
fn what_went_out_after_it_was_mapped_is_fetched_by_workers_and_the_reactor_waits_for_nothing() {
    let Some(setup) = Setup::without_swap() else { return };
    let Some(_swap) = setup.swap().filter(|_| can_be_armed(&setup.path)) else { return };
    for read_only in [true, false] {
        let file = engine::open(&setup.path, &OpenOptions { read_only, ..OpenOptions::default() }).unwrap();
        let reactor = reactor("memory");
        for (in_a_batch, start) in [(true, 0), (false, 64 * PAGE)] {
            let all = pages(start, 64);
            warm_up(&reactor, &file, &all);
            assert_eq!(read_pages(&reactor, &file, all.clone(), in_a_batch), only_copied(64));
            swap_out_what_is_mapped(&setup.path, start, 64 * PAGE);
            let before = waits(&reactor, &file);
            let fetched = read_pages(&reactor, &file, all.clone(), in_a_batch);
            assert!(fetched.by_workers > 3 && fetched.system_calls == 0, "{fetched:?}");
            assert_eq!(waits(&reactor, &file), before);
            assert_eq!(read_pages(&reactor, &file, all, in_a_batch), only_copied(64), "mapped again");
        }
        reactor.stop().unwrap();
    }
}

struct EndsOnDrop<'a>(&'a AtomicBool);

impl Drop for EndsOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_is_written_while_pages_come_and_go_is_there_and_the_reactor_waits_for_nothing() {
    let Some(setup) = Setup::without_swap() else { return };
    let Some(_swap) = setup.swap().filter(|_| can_be_armed(&setup.path)) else { return };
    let file = engine::open(&setup.path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    const PAGES: u64 = 128;
    warm_up(&reactor, &file, &pages(0, PAGES));
    let (ends, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let (before, statistics) = (waits(&reactor, &file), reactor.stats());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                page_out(&setup.path, rounds.fetch_add(1, Ordering::Relaxed) % 4 * 32 * PAGE, 32 * PAGE);
            }
        });
        // Also when this thread panics: the other would go on.
        let _end = EndsOnDrop(&ends);
        let mut expected: Vec<u8> = (0..PAGES * PAGE).map(content).collect();
        let has_met_both = || rounds.load(Ordering::Relaxed) >= 8 && taken(&reactor, &statistics).by_workers > 0;
        for round in (0..20_000_u64).take_while(|round| *round < 60 || !has_met_both()) {
            let writes: Vec<(u64, usize, u8)> = (0..32)
                .map(|index| {
                    let offset = (index * 4 + round % 3) * PAGE + round * 61 % 3000;
                    (offset, (round * 97 % 5000 + 1) as usize, (round + index) as u8)
                })
                .collect();
            for (offset, length, byte) in &writes {
                expected[*offset as usize..*offset as usize + length].fill(*byte);
            }
            let found = with_queue(&reactor, &file, move |queue| async move {
                let write = |(offset, length, byte): (u64, usize, u8)| {
                    let data = IoBuf::zeroed(length).whole();
                    data.fill(byte);
                    FileOp::Write { offset, data, fua: false }
                };
                carry_out(&queue, writes.into_iter().map(write).collect(), round % 2 == 0).await;
                let mut all = Vec::new();
                for offset in (0..PAGES * PAGE).step_by(32 * PAGE as usize) {
                    all.extend(common::read(&queue, offset, 32 * PAGE as usize, PastEnd::Fails).await.unwrap());
                }
                all
            });
            assert!(found == expected, "in round {round}");
        }
    });
    let taken = taken(&reactor, &statistics);
    assert!(taken.by_workers > 0 && taken.system_calls == 0, "{taken:?} beside {rounds:?} times out");
    assert_eq!(waits(&reactor, &file), before);
    reactor.stop().unwrap();
}

#[test]
fn whatever_takes_a_call_is_a_workers_and_holes_stay_holes() {
    let Some(setup) = Setup::without_swap() else { return };
    let Some(_swap) = setup.swap().filter(|_| can_be_armed(&setup.path)) else { return };
    let file = engine::open(&setup.path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    let calls = |operations: fn() -> Vec<FileOp>, in_a_batch| {
        let before = reactor.stats();
        with_queue(&reactor, &file, move |queue| async move { carry_out(&queue, operations(), in_a_batch).await });
        let taken = taken(&reactor, &before);
        assert_eq!(taken.system_calls, 0);
        (taken.completions, taken.by_workers)
    };
    let stat = || std::fs::metadata(&setup.path).unwrap();
    let blocks = stat().blocks();
    for in_a_batch in [true, false, true, false] {
        let holes = || {
            let read = |offset| FileOp::Read { offset, data: IoBuf::zeroed(512).whole(), past_end: PastEnd::Fails };
            pages(DATA_BYTES, 8).into_iter().map(read).collect()
        };
        assert_eq!(calls(holes, in_a_batch), (8, 8), "holes");
        assert_eq!(calls(|| vec![part_of_a_page(0, true)], in_a_batch), (1, 1), "a durable write");
        assert_eq!(calls(|| vec![FileOp::Flush], in_a_batch), (1, 0), "nothing was written but by workers");
    }
    warm_up(&reactor, &file, &pages(DATA_BYTES - 32 * PAGE, 32));
    for in_a_batch in [true, false] {
        let write = || vec![part_of_a_page(DATA_BYTES - 32 * PAGE, false)];
        let modified = stat().modified().unwrap();
        std::thread::sleep(NOTICED);
        assert_eq!(calls(write, in_a_batch), (1, 0));
        assert_eq!(calls(|| vec![FileOp::Flush], in_a_batch), (1, 1), "the file's times are set");
        assert!(stat().modified().unwrap() > modified);
    }
    assert_eq!(stat().blocks(), blocks);
    // What is given back, a part of a page at each end, is given back; what was ready in it is so no more.
    let zeroes =
        || vec![FileOp::WriteZeroes { offset: DATA_BYTES - 20 * PAGE - 512, length: 17 * PAGE, may_unmap: true }];
    assert_eq!(calls(zeroes, true), (1, 1));
    assert_eq!(stat().blocks(), blocks - 16 * 8);
    for _ in 0..4 {
        let inside = || {
            let read = |offset| FileOp::Read { offset, data: IoBuf::zeroed(512).whole(), past_end: PastEnd::Fails };
            pages(DATA_BYTES - 20 * PAGE, 16).into_iter().map(read).collect()
        };
        assert_eq!(calls(inside, true), (16, 16));
    }
    assert_eq!(stat().blocks(), blocks - 16 * 8);
    reactor.stop().unwrap();
}

#[test]
fn a_file_that_is_open_when_the_host_gets_swap_is_armed_by_a_worker_and_stays_so_when_it_goes() {
    let Some(setup) = Setup::without_swap().filter(|setup| can_be_armed(&setup.path)) else { return };
    if rustix::system::sysinfo().totalswap > 0 {
        eprintln!("skipped: this host has swap");
        return;
    }
    let file = engine::open(&setup.path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    let all = pages(0, 32);
    let first = read_pages(&reactor, &file, all.clone(), true);
    assert_eq!(first, Taken { completions: 32, by_workers: 0, system_calls: 1 }, "without swap: a call of its own");
    let is_warm = (0..100).any(|_| read_pages(&reactor, &file, all.clone(), true) == only_copied(32));
    assert!(is_warm);
    let Some(swap) = setup.swap() else { return };
    let arming = read_pages(&reactor, &file, vec![0], true);
    assert_eq!((arming.by_workers, arming.system_calls), (1, 0));
    assert_eq!(read_pages(&reactor, &file, all.clone(), true), only_copied(32), "what was mapped is mapped");
    swap_out_what_is_mapped(&setup.path, 0, 32 * PAGE);
    let before = waits(&reactor, &file);
    assert!(read_pages(&reactor, &file, all.clone(), true).by_workers > 3);
    assert_eq!((waits(&reactor, &file), read_pages(&reactor, &file, all.clone(), true)), (before, only_copied(32)));
    drop(swap);
    std::thread::sleep(NOTICED);
    assert_eq!(read_pages(&reactor, &file, all, true), only_copied(32));
    // Somebody else takes half of it away: nobody is killed, and what the file holds is read.
    std::fs::File::options().write(true).open(&setup.path).unwrap().set_len(16 * PAGE).unwrap();
    let image = std::fs::File::options().write(true).open(&setup.path).unwrap();
    image.set_len(FILE_BYTES).unwrap();
    image.write_all_at(&[content(20 * PAGE); PAGE as usize], 20 * PAGE).unwrap();
    read_pages(&reactor, &file, pages(0, 16), true);
    read_pages(&reactor, &file, vec![20 * PAGE], true);
    reactor.stop().unwrap();
}
