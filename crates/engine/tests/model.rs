//! Every engine and cache mode against a model: odd offsets, misaligned and scattered memory, two reactors at once.

mod common;

use common::model::Model;
use common::reactor;
use engine::{CacheMode, EngineKind, OpenOptions};

const CACHES: [CacheMode; 5] =
    [CacheMode::Writeback, CacheMode::None, CacheMode::Writethrough, CacheMode::Directsync, CacheMode::Unsafe];

fn check(engine: EngineKind) {
    check_in(&tempfile::tempdir().unwrap(), engine, &engine.to_string());
}

fn check_in(dir: &tempfile::TempDir, engine: EngineKind, chosen: &str) {
    let (one, two) = (reactor("one"), reactor("two"));
    for (number, cache) in CACHES.into_iter().enumerate() {
        if engine == EngineKind::LinuxAio && !cache.is_direct() {
            continue;
        }
        // Aligned requests first, so that the file is untracked for a while; then anything.
        for (unit, rounds) in [(4096, 40), (1, 150)] {
            let path = dir.path().join(format!("{cache}-{unit}"));
            engine::create(&path, 300_000 / unit * unit).unwrap();
            let options = OpenOptions { engine, cache, ..OpenOptions::default() };
            let file = engine::open(&path, &options).unwrap();
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
fn a_file_in_memory_agrees_with_the_model_in_every_cache_mode() {
    match tempfile::tempdir_in("/dev/shm") {
        Ok(dir) => check_in(&dir, EngineKind::Auto, "threads"),
        Err(_) => common::skip("there is no tmpfs at /dev/shm"),
    }
}
