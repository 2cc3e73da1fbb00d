//! Files on io_uring never make the kernel start a worker thread of its own, which would wake up every few seconds for ever.
//!
//! One test in a program of its own: those threads are among the process's.

mod common;

use block::{File, FileOp, FileQueue, IoResult, PastEnd};
use common::loop_device::{LoopDevice, Mounted};
use common::{reactor, with_queue};
use memory::IoBuf;
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// What has data, in turn with holes; behind it there is a hole, and the end.
const DATA_BYTES: u64 = 8 * MIB;
const FILE_BYTES: u64 = 16 * MIB;
/// What is never looked at together: also a cold read shall go to the storage more than once.
const STEP_BYTES: u64 = 64 << 10;

/// Names of the kernel's workers among the threads of this process.
fn kernel_workers() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("iou-wrk")).collect()
}

fn make(path: &Path) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(FILE_BYTES).unwrap();
    for at in (0..DATA_BYTES).step_by(2 * STEP_BYTES as usize) {
        file.write_all_at(&[7; STEP_BYTES as usize], at).unwrap();
    }
    file.sync_all().unwrap();
    drop(file);
    ringdisk_engine::forget_cached(path).unwrap();
}

/// All at once; they end well, or are not supported.
async fn all(queue: &Rc<dyn FileQueue>, ops: impl IntoIterator<Item = FileOp>) {
    let ends: Vec<_> = ops.into_iter().map(|op| queue.start(op)).collect();
    for end in ends {
        let ended: IoResult = end.await;
        assert!(ended.is_ok_and(|()| true) || ended.is_err_and(|error| error.errno() == libc::EOPNOTSUPP), "{ended:?}");
    }
}

fn buf(length_bytes: u64) -> memory::Window {
    IoBuf::zeroed(length_bytes as usize).whole()
}

fn read(offset: u64, length_bytes: u64) -> FileOp {
    FileOp::Read { offset, data: buf(length_bytes), past_end: PastEnd::Fails }
}

fn write(offset: u64, length_bytes: u64, fua: bool) -> FileOp {
    FileOp::Write { offset, data: buf(length_bytes), fua }
}

/// One operation at each step.
fn everywhere(op: impl Fn(u64) -> FileOp, end: u64) -> Vec<FileOp> {
    (0..end).step_by(STEP_BYTES as usize).map(op).collect()
}

/// Whatever a guest or a format may ask of a file.
async fn work(queue: Rc<dyn FileQueue>, is_device: bool) {
    for _ in 0..2 {
        // Cold, then warm; data and holes.
        all(&queue, everywhere(|at| read(at, BLOCK), FILE_BYTES)).await;
    }
    all(&queue, [read(0, FILE_BYTES), write(MIB, 3 * MIB, false)]).await;
    for fua in [false, true] {
        // What is there and what is not, then at the end of the file; beside each other and beside a flush.
        let (here, there) = (if fua { 0 } else { BLOCK }, if fua { 2 * BLOCK } else { 3 * BLOCK });
        let mut ops = everywhere(|at| write(at + here, BLOCK, fua), FILE_BYTES);
        ops.push(FileOp::Flush);
        ops.extend(everywhere(|at| read(at + there, BLOCK), FILE_BYTES));
        all(&queue, ops).await;
        all(&queue, [write(BLOCK, BLOCK, fua)]).await;
        all(&queue, [FileOp::Flush]).await;
        if !is_device {
            let behind = FILE_BYTES + if fua { MIB } else { 0 };
            all(&queue, everywhere(|at| write(behind + at, STEP_BYTES, fua), MIB)).await;
        }
    }
    // In parts of blocks, and across.
    all(&queue, [write(100, 1000, false), write(STEP_BYTES - 100, 5000, true), read(77, 9999)]).await;
    let zeroes = |offset, may_unmap| FileOp::WriteZeroes { offset, length: STEP_BYTES, may_unmap };
    all(&queue, [zeroes(0, false), zeroes(STEP_BYTES, true)]).await;
    all(&queue, [FileOp::Discard { offset: 2 * STEP_BYTES, length: STEP_BYTES }]).await;
    all(&queue, everywhere(|at| write(at, BLOCK, false), FILE_BYTES)).await;
    if !is_device {
        for length in [FILE_BYTES + 4 * MIB, FILE_BYTES] {
            all(&queue, [FileOp::SetLength { length }]).await;
        }
    }
    all(&queue, [FileOp::Flush]).await;
}

fn open(path: &Path, engine: EngineKind, cache: CacheMode) -> Option<Arc<dyn File>> {
    let options = OpenOptions::default().with(|options| {
        options.engine = engine;
        options.cache = cache;
        options.write_behind = true;
    });
    ringdisk_engine::open(path, &options).ok()
}

/// Works on what lies at `path` in all ways, and says which made the kernel start a worker.
fn try_all(path: &Path, is_device: bool, of: &str) -> Vec<String> {
    let caches = [CacheMode::None, CacheMode::Directsync, CacheMode::Writeback, CacheMode::Writethrough];
    let mut found = Vec::new();
    for cache in caches {
        for engine in [EngineKind::Auto, EngineKind::IoUring] {
            if !is_device {
                make(path);
            }
            let reactor = reactor("own workers");
            // Some file systems take no direct I/O.
            let Some(file) = open(path, engine, cache) else { continue };
            with_queue(&reactor, &file, move |queue| work(queue, is_device));
            let workers = kernel_workers();
            if !workers.is_empty() {
                found.push(format!("{of}, cache={cache}, engine={engine}: {workers:?}"));
            }
            reactor.stop().unwrap();
            // The ring's workers end with it.
            drop(file);
            while !kernel_workers().is_empty() {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    }
    found
}

#[test]
fn no_file_on_io_uring_makes_the_kernel_start_a_worker_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let mut found = try_all(&path, false, "here");
    let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
    found.extend(try_all(&in_memory.path().join("disk"), false, "tmpfs"));
    make(&path);
    match LoopDevice::over(&path, 512) {
        Some(device) => found.extend(try_all(device.path(), true, "block device")),
        None => common::skip("a loop device cannot be had here (it takes root and losetup)"),
    }
    let at = dir.path().join("mounted");
    std::fs::create_dir(&at).unwrap();
    let image = dir.path().join("image");
    for name in ["ext4", "xfs", "btrfs"] {
        std::fs::File::create(&image).unwrap().set_len(512 * MIB).unwrap();
        let device = LoopDevice::over(&image, 512);
        match device.as_ref().and_then(|device| Mounted::fresh(name, device, &at)) {
            Some(_mounted) => found.extend(try_all(&at.join("disk"), false, name)),
            None if name == "ext4" => common::skip("ext4 cannot be mounted here"),
            None => eprintln!("skipped: {name} cannot be made or mounted here"),
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}
