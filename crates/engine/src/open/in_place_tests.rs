//! Tests of mapped ranges of files in memory.

use super::opening::open_file;
use crate::base::options::{CacheMode, OpenOptions};
use crate::file::open_file::OpenFile;
use block::{IoResult, PastEnd, ReadMap};
use memory::PAGE_BYTES;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};

const PAGE: u64 = PAGE_BYTES as u64;

fn opened(directory: &str, read_only: bool) -> (File, OpenFile) {
    let file = tempfile::tempfile_in(directory).unwrap();
    file.write_all_at(&[1; 3 * PAGE_BYTES], 0).unwrap();
    file.write_all_at(&[2; 100], 8 * PAGE).unwrap();
    let options = OpenOptions::default().with(|options| {
        options.cache = CacheMode::Writeback;
        options.lock = false;
        options.read_only = read_only;
    });
    let opened = open_file(OwnedFd::from(file.try_clone().unwrap()), "it", &options).unwrap();
    (file, opened)
}

fn bytes(file: &OpenFile, offset: u64, length: usize, past_end: PastEnd) -> Option<IoResult<Vec<u8>>> {
    let mut pieces = Vec::new();
    file.map(offset, length, past_end, &mut pieces).then(|| {
        let mut bytes = vec![9; length];
        ReadMap::new(pieces, Box::new(())).read_at(0, &mut bytes).map(|()| bytes)
    })
}

#[test]
fn a_file_shows_its_bytes_its_holes_and_its_end_in_memory_and_on_a_disk() {
    for directory in ["/dev/shm", env!("CARGO_MANIFEST_DIR")] {
        let (file, opened) = opened(directory, false);
        if opened.info.in_memory && opened.mapped.is_none() {
            eprintln!("skipped: this host has swap");
            continue;
        }
        let all = bytes(&opened, 100, 9 * PAGE_BYTES, PastEnd::Zeros).unwrap().unwrap();
        let expected = |at: usize| match at + 100 {
            at if at < 3 * PAGE_BYTES => 1,
            at if (8 * PAGE_BYTES..8 * PAGE_BYTES + 100).contains(&at) => 2,
            _ => 0,
        };
        assert!((0..all.len()).all(|at| all[at] == expected(at)), "{directory}");
        assert!(bytes(&opened, 100, 9 * PAGE_BYTES, PastEnd::Fails).is_none());
        if opened.info.in_memory {
            assert_eq!(file.metadata().unwrap().blocks(), 8 * 4, "no hole became a page");
        }
        // A map sees a file that has grown.
        file.write_all_at(&[3; 10], 300 << 20).unwrap();
        assert_eq!(bytes(&opened, 300 << 20, 10, PastEnd::Fails).unwrap().unwrap(), [3; 10]);
    }
}

#[test]
fn what_is_cut_off_is_an_error_and_shows_anew_when_it_is_back() {
    let (file, opened) = opened(env!("CARGO_MANIFEST_DIR"), false);
    let mut pieces = Vec::new();
    assert!(opened.map(0, 3 * PAGE_BYTES, PastEnd::Fails, &mut pieces));
    let map = ReadMap::new(pieces, Box::new(()));
    map.read_at(0, &mut [0; 3 * PAGE_BYTES]).unwrap();
    file.set_len(PAGE).unwrap();
    map.read_at(2 * PAGE_BYTES, &mut [0; 10]).unwrap_err();
    map.commit().unwrap_err();
    assert!(bytes(&opened, 0, 3 * PAGE_BYTES, PastEnd::Fails).is_none(), "it is shorter now");
    file.write_all_at(&[4; 3 * PAGE_BYTES], 0).unwrap();
    assert_eq!(bytes(&opened, PAGE, 10, PastEnd::Fails).unwrap().unwrap(), [4; 10]);
}

#[test]
fn reserved_space_is_written_in_place_and_what_is_not_there_or_only_read_is_not() {
    let (file, opened) = opened(env!("CARGO_MANIFEST_DIR"), false);
    opened.map_reserved(PAGE, 10).unwrap().copy_from_slice(0, &[7; 10]).unwrap();
    let mut found = [0; 11];
    file.read_exact_at(&mut found, PAGE).unwrap();
    assert_eq!(found, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1]);
    assert!(opened.map_reserved(8 * PAGE, PAGE_BYTES).is_none(), "it ends before");
    let (_file, opened) = super::in_place_tests::opened(env!("CARGO_MANIFEST_DIR"), true);
    assert!(opened.map_reserved(0, 10).is_none());
}

#[test]
fn a_file_that_we_cut_shows_its_end_and_what_is_written_in_place_changes_its_times() {
    for directory in ["/dev/shm", env!("CARGO_MANIFEST_DIR")] {
        let (file, opened) = opened(directory, false);
        if opened.info.in_memory && opened.mapped.is_none() {
            eprintln!("skipped: this host has swap");
            continue;
        }
        let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        file.set_modified(long_ago).unwrap();
        opened.map_reserved(0, 10).unwrap().copy_from_slice(0, &[7; 10]).unwrap();
        opened.stamp();
        if opened.info.in_memory {
            assert_ne!(file.metadata().unwrap().modified().unwrap(), long_ago);
        }
        assert!(bytes(&opened, 2 * PAGE, 10, PastEnd::Fails).is_some());
        opened.length_changes(PAGE);
        file.set_len(PAGE).unwrap();
        assert!(bytes(&opened, 2 * PAGE, 10, PastEnd::Fails).is_none(), "it ends before");
        assert!(opened.map_reserved(2 * PAGE, 10).is_none(), "it ends before");
    }
}
