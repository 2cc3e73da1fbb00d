//! A file in memory on a host with swap: workers carry its requests out, so a reactor never waits for what is swapped out.
//!
//! The test gives the host a swap file, which takes root, and runs alone. If it is killed the swap file stays in use
//! (`swapoff` it).

mod common;

use block::PastEnd;
use common::{reactor, skip, with_queue};
use memory::Mapping;
use ringdisk_engine::{EngineKind, OpenOptions, ReactorThread};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const PAGE: usize = 4096;
const FILE_BYTES: usize = 2 << 20;

/// What the host swaps to until this is dropped.
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

    fn used_bytes(&self) -> u64 {
        let all = std::fs::read_to_string("/proc/swaps").unwrap();
        let row = all.lines().find(|row| Path::new(row.split_whitespace().next().unwrap_or("")) == self.0);
        row.and_then(|row| row.split_whitespace().nth(3)?.parse::<u64>().ok()).unwrap_or(0) << 10
    }

    /// Swaps a file out; false where the kernel does not do as it is told.
    fn takes(&self, path: &Path) -> bool {
        let file = std::fs::File::open(path).unwrap();
        let mapping = Mapping::of_storage(file.as_fd(), FILE_BYTES, false).unwrap();
        let start = mapping.as_ptr().as_ptr();
        // What another processor has just brought in may not be found the first time.
        (0..20).any(|_| {
            for offset in (0..FILE_BYTES).step_by(PAGE) {
                // SAFETY: the page lies in the mapping and in the file.
                unsafe { start.add(offset).read_volatile() };
            }
            // SAFETY: the range is mapped; paging it out changes no byte of it.
            unsafe { libc::madvise(start.cast(), FILE_BYTES, libc::MADV_PAGEOUT) };
            std::thread::sleep(Duration::from_millis(10));
            self.used_bytes() >= FILE_BYTES as u64 / 2
        })
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

/// Page faults of this thread so far that waited for storage.
fn waits() -> i64 {
    // SAFETY: an all-zero `rusage` is a valid one; the kernel writes no more than that.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage.ru_majflt
    }
}

/// Reads and writes pages all over the file on a reactor; returns how many of the reactor's page faults waited for storage.
fn carry(reactor: &ReactorThread, file: &Arc<dyn block::File>) -> i64 {
    with_queue(reactor, file, move |queue| async move {
        let before = waits();
        for _ in 0..20 {
            for offset in (0..FILE_BYTES as u64).step_by(FILE_BYTES / 8) {
                let page = common::read(&queue, offset, PAGE, PastEnd::Fails).await.unwrap();
                assert!(page == [7; PAGE], "at {offset}");
                common::write(&queue, offset + 100, &[7; 1000]).await.unwrap();
            }
        }
        queue.start(block::FileOp::Flush).await.unwrap();
        waits() - before
    })
}

#[test]
fn on_a_host_with_swap_workers_carry_out_what_a_file_in_memory_is_asked_for_and_its_name_says_so() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return skip("there is no tmpfs at /dev/shm") };
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = memory.path().join("image");
    std::fs::write(&path, vec![7; FILE_BYTES]).unwrap();
    let swap = match SwapFile::turned_on(disk.path()) {
        Ok(swap) => swap,
        Err(reason) => return skip(&format!("a swap file cannot be turned on here (it takes root): {reason}")),
    };
    for engine in [EngineKind::Auto, EngineKind::IoUring, EngineKind::Threads] {
        let Ok(file) = ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.engine = engine))
        else {
            continue;
        };
        let words = &file.info().engine;
        assert_eq!(words.contains("the host has swap"), engine != EngineKind::Threads, "{words}");
        let reactor = reactor("memory");
        // The first round brings in what the requests run through, so that only the file can be waited for in the second.
        carry(&reactor, &file);
        if !swap.takes(&path) {
            return skip("the kernel does not swap out what it is told to");
        }
        assert_eq!(carry(&reactor, &file), 0);
        let stats = reactor.stats();
        assert_eq!((stats.completions, stats.worker_calls), (642, 642), "engine={engine}: {stats:?}");
        reactor.stop().unwrap();
    }
}
