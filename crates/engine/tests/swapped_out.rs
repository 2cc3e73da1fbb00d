//! A file in memory of which something is swapped out: a worker fetches it, the reactor goes on copying the rest. Runs as
//! root, and alone: it gives the whole host a swap file, which stays in use if the test is killed (`swapoff` it).

mod common;

use block::{FileOp, PastEnd};
use common::{reactor, with_queue};
use engine::{CacheMode, OpenOptions, ReactorStats, ReactorThread};
use memory::{IoBuf, Mapping};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE: u64 = 4096;
/// The file holds data in its first half, and of that the first half is swapped out.
const FILE_BYTES: u64 = 4 << 20;
const DATA_BYTES: u64 = FILE_BYTES / 2;
const OUT_BYTES: u64 = DATA_BYTES / 2;
/// The engine looks every 10 ms or so whether anything is swapped out.
const NOTICED: Duration = Duration::from_millis(60);

/// One test at a time, also where both run in one process.
static ALONE: Mutex<()> = Mutex::new(());

/// A file that the host swaps to, until this is dropped.
struct SwapFile(PathBuf);

impl SwapFile {
    fn turned_on(dir: &Path) -> Result<Self, String> {
        let path = dir.join("swap");
        std::fs::write(&path, vec![0; 32 << 20]).unwrap();
        // Before any other that the host may have.
        for words in [&["chmod", "600"][..], &["mkswap"], &["swapon", "--priority", "32767"]] {
            let output =
                Command::new(words[0]).args(&words[1..]).arg(&path).output().map_err(|error| error.to_string())?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).into_owned());
            }
        }
        Ok(Self(path))
    }

    /// `Used` of its row, in KiB there.
    fn used_bytes(&self) -> u64 {
        let all = std::fs::read_to_string("/proc/swaps").unwrap();
        let row = all.lines().find(|row| Path::new(row.split_whitespace().next().unwrap_or("")) == self.0);
        row.and_then(|row| row.split_whitespace().nth(3)?.parse::<u64>().ok()).unwrap_or(0) << 10
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let status = Command::new("swapoff").arg(&self.0).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("'{}' is still in use as swap", self.0.display());
        }
    }
}

fn host_swaps() -> bool {
    let host = rustix::system::sysinfo();
    host.freeswap < host.totalswap
}

/// Whether the kernel tells what is swapped out, since Linux 6.5.
fn kernel_tells() -> bool {
    let uname = rustix::system::uname();
    let mut numbers = uname.release().to_str().unwrap_or("").split('.').map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(5))
}

/// What the file holds in the page at an offset.
fn content(offset: u64) -> u8 {
    (offset / PAGE % 251) as u8 + 1
}

/// Swaps the first part of the file out; false where the kernel does not do as it is told. Nobody else may have it mapped.
fn swap_out(path: &Path, swap: &SwapFile) -> bool {
    let file = std::fs::File::open(path).unwrap();
    let mapping = Mapping::of_storage(file.as_fd(), FILE_BYTES as usize, false).unwrap();
    let start = mapping.as_ptr().as_ptr();
    // What another processor has just brought in may not be found the first time.
    let is_out = (0..20).any(|_| {
        for offset in (0..OUT_BYTES).step_by(PAGE as usize) {
            // SAFETY: the page lies in the mapping and in the file.
            unsafe { start.add(offset as usize).read_volatile() };
        }
        // SAFETY: the range is mapped; paging it out changes no byte of it.
        unsafe { libc::madvise(start.cast(), OUT_BYTES as usize, libc::MADV_PAGEOUT) };
        std::thread::sleep(Duration::from_millis(10));
        swap.used_bytes() >= OUT_BYTES
    });
    drop(mapping);
    std::thread::sleep(NOTICED);
    is_out
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

/// Carries operations out, all in one batch or one after the other.
async fn carry_out(queue: &Rc<dyn block::FileQueue>, operations: Vec<FileOp>, in_a_batch: bool) {
    let (sink, count, mut ended) = (block::Sink::new(), operations.len(), Vec::new());
    for (token, op) in (0..).zip(operations) {
        match in_a_batch {
            true => queue.push(block::FileIo { op, done: block::Done::Sink { sink: Rc::clone(&sink), token } }),
            false => queue.start(op).await.unwrap(),
        }
    }
    while in_a_batch && ended.len() < count {
        // Another task's turn.
        let mut looked = false;
        std::future::poll_fn(|context| {
            context.waker().wake_by_ref();
            match std::mem::replace(&mut looked, true) {
                true => std::task::Poll::Ready(()),
                false => std::task::Poll::Pending,
            }
        })
        .await;
        let mut some = Vec::new();
        sink.take(&mut some);
        ended.extend(some);
    }
    assert!(ended.iter().all(|(_, result)| result.is_ok()), "{ended:?}");
}

/// Reads a page at each offset and looks at what is there.
fn read_pages(reactor: &ReactorThread, file: &Arc<dyn block::File>, offsets: Vec<u64>, in_a_batch: bool) -> Taken {
    let before = reactor.stats();
    with_queue(reactor, file, move |queue| async move {
        let bufs: Vec<_> = offsets.iter().map(|_| IoBuf::zeroed(PAGE as usize)).collect();
        let read = |(offset, buf): (&u64, &IoBuf)| FileOp::Read {
            offset: *offset,
            data: buf.whole(),
            past_end: PastEnd::Fails,
        };
        carry_out(&queue, offsets.iter().zip(&bufs).map(read).collect(), in_a_batch).await;
        for (offset, buf) in offsets.iter().zip(&bufs) {
            let expected = if *offset < DATA_BYTES { content(*offset) } else { 0 };
            assert_eq!(buf.whole().to_vec(), vec![expected; PAGE as usize], "at {offset}");
        }
    });
    taken(reactor, &before)
}

/// A write of half a kibibyte into a page: the rest of it has to be there.
fn part_of_a_page(page: u64, fua: bool) -> FileOp {
    let data = IoBuf::zeroed(512).whole();
    data.fill(9);
    FileOp::Write { offset: page + 512, data, fua }
}

/// The image, its first pages swapped out, until the host swaps no more.
struct Setup {
    path: PathBuf,
    swap: SwapFile,
    _dirs: [tempfile::TempDir; 2],
    _alone: MutexGuard<'static, ()>,
}

fn set_up() -> Option<Setup> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !kernel_tells() {
        // There all of such a file is left to workers.
        eprintln!("skipped: this kernel does not tell what is swapped out");
        return None;
    }
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        common::skip("there is no tmpfs at /dev/shm");
        return None;
    };
    let path = memory.path().join("image");
    let data: Vec<u8> = (0..DATA_BYTES).map(content).collect();
    std::fs::write(&path, data).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(FILE_BYTES).unwrap();
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let swap = match SwapFile::turned_on(disk.path()) {
        Ok(swap) => swap,
        Err(reason) => {
            common::skip(&format!("a swap file cannot be turned on here (it takes root): {reason}"));
            return None;
        }
    };
    if !swap_out(&path, &swap) {
        common::skip("the kernel does not swap out what it is told to");
        return None;
    }
    Some(Setup { path, swap, _dirs: [memory, disk], _alone: alone })
}

const NONE_BY_WORKERS: Taken = Taken { completions: 32, by_workers: 0 };

#[test]
fn what_is_swapped_out_is_fetched_by_a_worker_and_the_rest_copied_by_the_reactor() {
    let Some(setup) = set_up() else { return };
    let file = engine::open(&setup.path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    let pages = |start: u64| (0..32).map(|index| start + index * PAGE).collect::<Vec<_>>();
    for (in_a_batch, out) in [(true, 0), (false, OUT_BYTES / 2)] {
        let read = |at| read_pages(&reactor, &file, pages(at), in_a_batch);
        assert_eq!(read(OUT_BYTES), NONE_BY_WORKERS, "what is there");
        assert_eq!(read(DATA_BYTES), NONE_BY_WORKERS, "a hole");
        let fetched = read(out);
        // Of a few the kernel may have read those behind as well.
        assert!(fetched.by_workers > if in_a_batch { 16 } else { 0 } && fetched.completions == 32, "{fetched:?}");
        assert_eq!(read(out), NONE_BY_WORKERS, "what was fetched");
    }
    drop(setup.swap);
    std::thread::sleep(NOTICED);
    let others_swap = host_swaps();
    let before = reactor.stats();
    assert_eq!(read_pages(&reactor, &file, pages(OUT_BYTES / 4), true), NONE_BY_WORKERS);
    let calls = reactor.stats().system_calls - before.system_calls;
    assert!(others_swap || calls <= 32, "{calls}: nobody asks any more whether it is there");
    reactor.stop().unwrap();
}

/// The kernel lets one change the file at a time: beside a worker that waits for a page the reactor would wait as well.
#[test]
fn what_changes_the_file_beside_a_worker_is_a_workers_too_and_reads_are_not() {
    let Some(setup) = set_up() else { return };
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
            assert_eq!(taken(&reactor, &before), Taken { completions: 4, by_workers: 2 }, "{cache}, durable: {fua}");
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
            assert_eq!(taken(&reactor, &before), Taken { completions: 1, by_workers: 0 });
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
