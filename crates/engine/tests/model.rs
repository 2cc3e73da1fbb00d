//! Every engine and cache mode against a model: odd offsets, misaligned and scattered memory, two reactors at once.

mod common;

use common::loop_device::{LoopDevice, Mounted};
use common::model::Model;
use common::reactor;
use memory::BufferBudget;
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};
use std::path::Path;

const CACHES: [CacheMode; 5] =
    [CacheMode::Writeback, CacheMode::None, CacheMode::Writethrough, CacheMode::Directsync, CacheMode::Unsafe];

fn check(engine: EngineKind) {
    check_in(tempfile::tempdir().unwrap().path(), engine, &engine.to_string());
}

fn check_in(dir: &Path, engine: EngineKind, chosen: &str) {
    let (one, two) = (reactor("one"), reactor("two"));
    for (number, cache) in CACHES.into_iter().enumerate() {
        if engine == EngineKind::LinuxAio && !cache.is_direct() {
            continue;
        }
        // Aligned requests first, so that the file is untracked for a while; then anything.
        for (unit, rounds) in [(4096, 40), (1, 150)] {
            let path = dir.join(format!("{cache}-{unit}"));
            ringdisk_engine::create(&path, 300_000 / unit * unit).unwrap();
            let options = OpenOptions::default().with(|options| {
                options.engine = engine;
                options.cache = cache;
                // Bounce buffers wait for each other.
                options.buffers = BufferBudget::new(256 << 10).account();
            });
            let file = ringdisk_engine::open(&path, &options).unwrap();
            assert!(file.info().engine.starts_with(chosen), "{}", file.info().engine);
            let mut model = Model::new(number as u64, (300_000 / unit * unit) as usize, 1 << 20, false, unit);
            for _ in 0..rounds {
                model.round(&file, [&one, &two]);
            }
            model.check_host(&path, &file);
        }
    }
    one.stop().unwrap();
    two.stop().unwrap();
}

#[test]
fn io_uring_agrees_with_the_model_in_every_cache_mode() {
    check(EngineKind::IoUring);
}

#[test]
fn linux_aio_agrees_with_the_model_in_every_cache_mode() {
    check(EngineKind::LinuxAio);
}

#[test]
fn threads_agree_with_the_model_in_every_cache_mode() {
    check(EngineKind::Threads);
}

#[test]
fn what_is_chosen_for_a_file_agrees_with_the_model_in_every_cache_mode() {
    check_in(tempfile::tempdir().unwrap().path(), EngineKind::Auto, "");
}

#[test]
fn a_file_in_memory_agrees_with_the_model_in_every_cache_mode() {
    match tempfile::tempdir_in("/dev/shm") {
        Ok(dir) => check_in(dir.path(), EngineKind::Auto, "threads"),
        Err(_) => common::skip("there is no tmpfs at /dev/shm"),
    }
}

#[test]
fn files_whose_direct_io_takes_large_blocks_only_agree_with_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (backing, at) = (dir.path().join("backing"), dir.path().join("mounted"));
    ringdisk_engine::create(&backing, 64 << 20).unwrap();
    std::fs::create_dir(&at).unwrap();
    let device = LoopDevice::over(&backing, 4096);
    let Some(_mounted) = device.as_ref().and_then(|device| Mounted::ext4(device, &at)) else {
        return common::skip("a file system cannot be made and mounted here (it takes root, losetup and mkfs.ext4)");
    };
    let path = at.join("probe");
    ringdisk_engine::create(&path, 1 << 16).unwrap();
    let file =
        ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.cache = CacheMode::None)).unwrap();
    assert_eq!(file.info().offset_alignment_bytes, 4096);
    for engine in [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads] {
        let at = at.join(engine.to_string());
        std::fs::create_dir(&at).unwrap();
        check_in(&at, engine, &engine.to_string());
    }
}
