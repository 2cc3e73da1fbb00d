//! A file in memory of which something is swapped out: a worker fetches it, the reactor goes on copying the rest. Runs as
//! root, and alone: it gives the whole host a swap file.

mod common;

use block::{FileOp, PastEnd};
use common::{reactor, with_queue};
use engine::{OpenOptions, ReactorStats, ReactorThread};
use memory::{IoBuf, Mapping};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 4096;
/// The file holds data in its first half, and of that the first half is swapped out.
const FILE_BYTES: u64 = 4 << 20;
const DATA_BYTES: u64 = FILE_BYTES / 2;
const OUT_BYTES: u64 = DATA_BYTES / 2;
/// The engine looks every 10 ms whether anything is swapped out.
const NOTICED: Duration = Duration::from_millis(50);

/// A file that the host swaps to, until this is dropped.
struct SwapFile(PathBuf);

impl SwapFile {
    fn in_use(dir: &Path) -> Option<Self> {
        let path = dir.join("swap");
        std::fs::write(&path, vec![0; 32 << 20]).unwrap();
        let run = |program: &str, words: &[&str]| {
            let output = Command::new(program).args(words).arg(&path).output();
            output.is_ok_and(|output| output.status.success())
        };
        (run("chmod", &["600"]) && run("mkswap", &[]) && run("swapon", &[])).then(|| Self(path))
    }

    /// The fourth column of its row.
    fn used_bytes(&self) -> u64 {
        let all = std::fs::read_to_string("/proc/swaps").unwrap();
        let row = all.lines().find(|row| Path::new(row.split_whitespace().next().unwrap_or("")) == self.0);
        row.and_then(|row| row.split_whitespace().nth(3)?.parse::<u64>().ok()).unwrap_or(0) << 10
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).status();
    }
}

/// What the file holds in the page at an offset.
fn content(offset: u64) -> u8 {
    (offset / PAGE % 251) as u8 + 1
}

/// Swaps the first part of the file out; false where the kernel does not do as it is told.
fn swap_out(path: &Path, swap: &SwapFile) -> bool {
    let file = std::fs::File::open(path).unwrap();
    let mapping = Mapping::of_storage(file.as_fd(), FILE_BYTES as usize, false).unwrap();
    let start = mapping.as_ptr().as_ptr();
    for offset in (0..OUT_BYTES).step_by(PAGE as usize) {
        // SAFETY: the page lies in the mapping and in the file.
        unsafe { start.add(offset as usize).read_volatile() };
    }
    // SAFETY: the range is mapped; paging it out changes no byte of it.
    unsafe { libc::madvise(start.cast(), OUT_BYTES as usize, libc::MADV_PAGEOUT) };
    drop(mapping);
    swap.used_bytes() >= OUT_BYTES
}

/// What a stretch of work took.
#[derive(Debug, PartialEq, Eq)]
struct Taken {
    completions: u64,
    by_workers: u64,
}

fn taken(reactor: &ReactorThread, before: &ReactorStats) -> Taken {
    let now = reactor.stats();
    Taken { completions: now.completions - before.completions, by_workers: now.worker_calls - before.worker_calls }
}

/// Reads a page at each offset, all in one batch or one after the other, and looks at what is there.
fn read_pages(reactor: &ReactorThread, file: &Arc<dyn block::File>, offsets: Vec<u64>, in_a_batch: bool) -> Taken {
    let before = reactor.stats();
    with_queue(reactor, file, move |queue| async move {
        let (sink, mut ended) = (block::Sink::new(), Vec::new());
        let bufs: Vec<_> = offsets.iter().map(|_| IoBuf::zeroed(PAGE as usize)).collect();
        for (token, (offset, buf)) in offsets.iter().zip(&bufs).enumerate() {
            let op = FileOp::Read { offset: *offset, data: buf.whole(), past_end: PastEnd::Fails };
            match in_a_batch {
                true => {
                    let done = block::Done::Sink { sink: Rc::clone(&sink), token: token as _ };
                    queue.push(block::FileIo { op, done });
                }
                false => queue.start(op).await.unwrap(),
            }
        }
        while in_a_batch && ended.len() < offsets.len() {
            let mut looked = false;
            std::future::poll_fn(|context| {
                context.waker().wake_by_ref();
                match std::mem::replace(&mut looked, true) {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                }
            })
            .await;
            sink.take(&mut ended);
        }
        assert!(ended.iter().all(|(_, result)| result.is_ok()));
        for (offset, buf) in offsets.iter().zip(&bufs) {
            let expected = if *offset < DATA_BYTES { content(*offset) } else { 0 };
            assert_eq!(buf.whole().to_vec(), vec![expected; PAGE as usize], "at {offset}");
        }
    });
    taken(reactor, &before)
}

fn write(reactor: &ReactorThread, file: &Arc<dyn block::File>, offset: u64, bytes: &'static [u8]) -> Taken {
    let before = reactor.stats();
    with_queue(reactor, file, move |queue| async move { common::write(&queue, offset, bytes).await.unwrap() });
    taken(reactor, &before)
}

#[test]
fn what_is_swapped_out_is_fetched_by_a_worker_and_the_rest_copied_by_the_reactor() {
    let (disk, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm"));
    let Some(swap) = SwapFile::in_use(disk.path()) else { return common::skip("this process may not swap") };
    let Ok(memory) = memory else { return common::skip("there is no tmpfs at /dev/shm") };
    let path = memory.path().join("image");
    let data: Vec<u8> = (0..DATA_BYTES).map(content).collect();
    std::fs::write(&path, data).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(FILE_BYTES).unwrap();
    if !swap_out(&path, &swap) {
        return common::skip("the kernel does not swap out what it is told to");
    }
    std::thread::sleep(NOTICED);
    let file = engine::open(&path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    let half = |start: u64| (0..32).map(|index| start + index * PAGE).collect::<Vec<_>>();
    let swapped = OUT_BYTES / 2;
    for in_a_batch in [true, false] {
        let (first, there) = (if in_a_batch { 0 } else { swapped }, OUT_BYTES);
        let read = |at| read_pages(&reactor, &file, half(at), in_a_batch);
        assert_eq!(read(there), Taken { completions: 32, by_workers: 0 }, "what is there");
        assert_eq!(read(DATA_BYTES), Taken { completions: 32, by_workers: 0 }, "a hole");
        let fetched = read(first);
        // Of a few the kernel may have read those behind as well.
        assert!(fetched.by_workers > if in_a_batch { 16 } else { 0 } && fetched.completions == 32, "{fetched:?}");
        assert_eq!(read(first), Taken { completions: 32, by_workers: 0 }, "what was fetched");
    }
    // A write that covers its page in part has to have the rest of it.
    let last = OUT_BYTES - PAGE;
    assert_eq!(write(&reactor, &file, last + 512, &[9; 512]), Taken { completions: 1, by_workers: 1 });
    assert_eq!(write(&reactor, &file, last + 1024, &[9; 512]), Taken { completions: 1, by_workers: 0 });
    let mut page = vec![content(last); PAGE as usize];
    page[512..1536].fill(9);
    let found = with_queue(&reactor, &file, move |queue| async move {
        common::read(&queue, last, PAGE as usize, PastEnd::Fails).await.unwrap()
    });
    assert!(found == page);

    drop(swap);
    std::thread::sleep(NOTICED);
    let before = reactor.stats();
    assert_eq!(read_pages(&reactor, &file, half(swapped / 2), true), Taken { completions: 32, by_workers: 0 });
    assert!(reactor.stats().system_calls - before.system_calls <= 32, "nobody asks any more whether it is there");
    reactor.stop().unwrap();
}
