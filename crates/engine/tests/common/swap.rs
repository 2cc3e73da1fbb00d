//! A file in memory, and a swap file of the host's own that it goes to. Takes root, and runs alone: the whole host swaps to
//! that, which stays in use if the test is killed (`swapoff` it).

use super::{skip, with_queue};
use block::{FileOp, PastEnd};
use engine::{ReactorStats, ReactorThread};
use memory::{IoBuf, Mapping};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) const PAGE: u64 = 4096;
/// The file holds data in its first half, and of that the first half is swapped out.
pub(crate) const FILE_BYTES: u64 = 4 << 20;
pub(crate) const DATA_BYTES: u64 = FILE_BYTES / 2;
pub(crate) const OUT_BYTES: u64 = DATA_BYTES / 2;
/// The engine looks every 10 ms or so whether anything is swapped out.
pub(crate) const NOTICED: Duration = Duration::from_millis(60);

/// One test at a time, also where both run in one process.
static ALONE: Mutex<()> = Mutex::new(());

/// A file that the host swaps to, until this is dropped.
pub(crate) struct SwapFile(PathBuf);

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
    pub(crate) fn used_bytes(&self) -> u64 {
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

pub(crate) fn host_swaps() -> bool {
    let host = rustix::system::sysinfo();
    host.freeswap < host.totalswap
}

/// Whether the kernel tells what is swapped out, since Linux 6.5.
pub(crate) fn kernel_tells() -> bool {
    let uname = rustix::system::uname();
    let mut numbers = uname.release().to_str().unwrap_or("").split('.').map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(5))
}

/// What the file holds in the page at an offset.
pub(crate) fn content(offset: u64) -> u8 {
    (offset / PAGE % 251) as u8 + 1
}

/// Swaps the first part of the file out; false where the kernel does not do as it is told. Nobody else may have it mapped.
pub(crate) fn swap_out(path: &Path, swap: &SwapFile) -> bool {
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
pub(crate) struct Taken {
    pub(crate) completions: u64,
    pub(crate) by_workers: u64,
    pub(crate) system_calls: u64,
}

pub(crate) fn taken(reactor: &ReactorThread, before: &ReactorStats) -> Taken {
    let now = reactor.stats();
    Taken {
        completions: now.completions - before.completions,
        by_workers: now.worker_calls - before.worker_calls,
        system_calls: now.system_calls - before.system_calls,
    }
}

/// Carries operations out, all in one batch or one after the other.
pub(crate) async fn carry_out(queue: &Rc<dyn block::FileQueue>, operations: Vec<FileOp>, in_a_batch: bool) {
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
pub(crate) fn read_pages(
    reactor: &ReactorThread,
    file: &Arc<dyn block::File>,
    offsets: Vec<u64>,
    in_a_batch: bool,
) -> Taken {
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
pub(crate) fn part_of_a_page(page: u64, fua: bool) -> FileOp {
    let data = IoBuf::zeroed(512).whole();
    data.fill(9);
    FileOp::Write { offset: page + 512, data, fua }
}

/// Has the kernel refuse `userfaultfd` to this thread and those that it starts, as in many a container.
pub(crate) fn refuse_userfaultfd() {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0);
    let mut is_it = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_userfaultfd as u32);
    is_it.jf = 1;
    let answer = |answer| statement(libc::BPF_RET | libc::BPF_K, answer);
    let refuse = answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
    let mut program = [load, is_it, refuse, answer(libc::SECCOMP_RET_ALLOW)];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel reads the program while it takes it over.
    let results = unsafe {
        let mode = libc::SECCOMP_MODE_FILTER;
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0),
        ]
    };
    assert_eq!(results, [0; 2], "{}", std::io::Error::last_os_error());
}

/// Whether the mapping of a file can be armed here.
pub(crate) fn can_be_armed(path: &Path) -> bool {
    let file = std::fs::File::open(path).unwrap();
    let armed = Mapping::of_storage(file.as_fd(), FILE_BYTES as usize, false).unwrap().arm();
    if let Err(error) = &armed {
        eprintln!("skipped: no mapping can be armed here: {error}");
    }
    armed.is_ok()
}

/// An image in memory, and a directory on a disk where a swap file may lie.
pub(crate) struct Setup {
    pub(crate) path: PathBuf,
    disk: tempfile::TempDir,
    _memory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Setup {
    pub(crate) fn without_swap() -> Option<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
            skip("there is no tmpfs at /dev/shm");
            return None;
        };
        let path = memory.path().join("image");
        let data: Vec<u8> = (0..DATA_BYTES).map(content).collect();
        std::fs::write(&path, data).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(FILE_BYTES).unwrap();
        let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Some(Self { path, disk, _memory: memory, _alone: alone })
    }

    pub(crate) fn swap(&self) -> Option<SwapFile> {
        let swap = SwapFile::turned_on(self.disk.path());
        if let Err(reason) = &swap {
            skip(&format!("a swap file cannot be turned on here (it takes root): {reason}"));
        }
        std::thread::sleep(NOTICED);
        swap.ok()
    }

    /// The first pages of the image are swapped out.
    pub(crate) fn swapped_out(&self) -> Option<SwapFile> {
        if !kernel_tells() {
            // There all of such a file is left to workers.
            eprintln!("skipped: this kernel does not tell what is swapped out");
            return None;
        }
        let swap = self.swap()?;
        if swap_out(&self.path, &swap) {
            return Some(swap);
        }
        skip("the kernel does not swap out what it is told to");
        None
    }
}
