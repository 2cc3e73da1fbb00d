//! A copy that fails where a page of an armed mapping is not to be had at once. (Apart from the other tests, some of which bring
//! a handler of their own for the signal.)

use memory::{Mapping, PAGE_BYTES, try_copy};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

const PAGES: usize = 8;

fn byte(at: usize) -> u8 {
    (at % 251) as u8 + 1
}

/// A file of some pages of data and a hole as long, as the test sees it and as an armed mapping of ours.
fn armed(writable: bool) -> Option<(OwnedFd, Mapping, Mapping)> {
    let (fd, plain) = Mapping::anonymous_file(c"storage", 2 * PAGES * PAGE_BYTES).unwrap();
    for at in 0..PAGES * PAGE_BYTES {
        // SAFETY: the address lies in the mapping.
        unsafe { plain.as_ptr().as_ptr().add(at).write(byte(at)) };
    }
    let file = std::fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    let mapped_fd = if writable { fd.as_fd() } else { file.as_fd() };
    let ours = Mapping::of_storage(mapped_fd, 4 * PAGES * PAGE_BYTES, writable).unwrap();
    match ours.arm() {
        Ok(()) => Some((fd, plain, ours)),
        Err(error) => {
            eprintln!("skipped: no mapping can be armed here: {error}");
            None
        }
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(2).unwrap().parse::<u64>().unwrap() * PAGE_BYTES as u64
}

#[test]
fn every_length_is_copied_from_and_to_every_place_and_nothing_beside_it() {
    let source: Vec<u8> = (0..600).map(byte).collect();
    for length in (0..300).chain([511, 512]) {
        for (skip_from, skip_to) in [(0, 0), (1, 0), (0, 1), (3, 7), (8, 13), (15, 16), (63, 33)] {
            let mut target = [0xee_u8; 700];
            // SAFETY: both ranges lie in what was just made.
            let copied = unsafe { try_copy(source.as_ptr().add(skip_from), target.as_mut_ptr().add(skip_to), length) };
            assert!(copied);
            let (before, rest) = target.split_at(skip_to);
            let (part, behind) = rest.split_at(length);
            assert_eq!(part, &source[skip_from..skip_from + length], "{length} from {skip_from} to {skip_to}");
            assert!(before.iter().chain(behind).all(|byte| *byte == 0xee), "{length} from {skip_from} to {skip_to}");
        }
    }
}

#[test]
fn a_page_that_is_not_mapped_fails_the_copy_wherever_it_lies_until_it_was_mapped() {
    for writable in [true, false] {
        let Some((_fd, plain, ours)) = armed(writable) else { return };
        let at = |mapping: &Mapping, offset: usize| mapping.as_ptr().as_ptr().wrapping_add(offset);
        let mut memory = vec![0_u8; PAGES * PAGE_BYTES];
        // From the middle of the first page to the middle of the last: all but one is there.
        let (from, length) = (100, (PAGES - 1) * PAGE_BYTES);
        for missing in 0..PAGES {
            let Some((_fd, _plain, fresh)) = armed(writable) else { return };
            fresh.map_pages(0, missing * PAGE_BYTES);
            fresh.map_pages((missing + 1) * PAGE_BYTES, (PAGES - missing - 1) * PAGE_BYTES);
            // SAFETY: the ranges lie in the mapping and in memory of our own.
            let copied = unsafe { try_copy(at(&fresh, from), memory.as_mut_ptr(), length) };
            assert!(!copied, "without page {missing}");
            if writable {
                // SAFETY: as above.
                assert!(!unsafe { try_copy(memory.as_ptr(), at(&fresh, from), length) }, "without page {missing}");
            }
            assert!(!fresh.is_poisoned());
            // What is mapped already is no hindrance.
            fresh.map_pages(0, PAGES * PAGE_BYTES);
            // SAFETY: as above.
            assert!(unsafe { try_copy(at(&fresh, from), memory.as_mut_ptr(), length) });
        }
        ours.map_pages(0, PAGES * PAGE_BYTES);
        // SAFETY: as above.
        assert!(unsafe { try_copy(at(&ours, from), memory.as_mut_ptr(), length) });
        assert!(memory[..length].iter().enumerate().all(|(index, found)| *found == byte(from + index)));
        // What others write is seen, and what is written through it.
        // SAFETY: as above.
        unsafe {
            at(&plain, 5).write(77);
            assert_eq!(at(&ours, 5).read_volatile(), 77);
            if writable {
                assert!(try_copy([88].as_ptr(), at(&ours, 6), 1));
                assert_eq!(at(&plain, 6).read_volatile(), 88);
            }
        }
    }
}

#[test]
fn behind_the_end_of_the_file_the_copy_fails_and_poisons_nothing() {
    let Some((fd, _plain, ours)) = armed(true) else { return };
    std::fs::File::from(fd).set_len(PAGE_BYTES as u64).unwrap();
    let mut memory = [0_u8; PAGE_BYTES];
    // SAFETY: the ranges lie in the mapping and in memory of our own.
    let copied = unsafe { try_copy(ours.as_ptr().as_ptr().add(2 * PAGE_BYTES), memory.as_mut_ptr(), PAGE_BYTES) };
    assert!(!copied && !ours.is_poisoned());
}

#[test]
fn whoever_touches_an_armed_mapping_otherwise_finds_what_the_file_holds() {
    let Some((fd, _plain, ours)) = armed(true) else { return };
    let at = |offset: usize| ours.as_ptr().as_ptr().wrapping_add(offset);
    // SAFETY: the addresses lie in the mapping.
    unsafe {
        assert_eq!(at(3 * PAGE_BYTES + 9).read_volatile(), byte(3 * PAGE_BYTES + 9));
        at(5 * PAGE_BYTES).write_volatile(9);
        assert_eq!(at(PAGES * PAGE_BYTES).read_volatile(), 0, "a hole");
    }
    assert!(!ours.is_poisoned());
    let mut page = [0];
    std::os::unix::fs::FileExt::read_at(&std::fs::File::from(fd), &mut page, 5 * PAGE_BYTES as u64).unwrap();
    assert_eq!(page, [9]);
    // SAFETY: as above; it lies behind the end of the file.
    assert_eq!(unsafe { at(2 * PAGES * PAGE_BYTES).read_volatile() }, 0);
    assert!(ours.is_poisoned());
}

#[test]
fn a_guest_that_takes_its_memory_away_poisons_its_own_mapping_and_the_copy_goes_on() {
    let Some((_fd, _plain, ours)) = armed(true) else { return };
    ours.map_pages(0, PAGES * PAGE_BYTES);
    for to_guest in [true, false] {
        let (guest_fd, guest) = Mapping::anonymous_file(c"guest", 4 * PAGE_BYTES).unwrap();
        std::fs::File::from(guest_fd).set_len(PAGE_BYTES as u64).unwrap();
        let (storage, memory) = (ours.as_ptr().as_ptr(), guest.as_ptr().as_ptr());
        let (from, to) = if to_guest { (storage, memory) } else { (memory, storage) };
        // SAFETY: both ranges are mapped, and the handler repairs what of the guest's is gone.
        assert!(unsafe { try_copy(from, to, 3 * PAGE_BYTES) });
        assert!(guest.is_poisoned() && !ours.is_poisoned());
    }
}

#[test]
fn arming_a_mapping_brings_nothing_into_memory_and_is_for_our_own_files_only() {
    let (fd, theirs) = Mapping::anonymous_file(c"large", 64 << 20).unwrap();
    for offset in (0..theirs.length_bytes()).step_by(PAGE_BYTES) {
        // SAFETY: the address lies in the mapping.
        unsafe { theirs.as_ptr().as_ptr().add(offset).write(1) };
    }
    let Ok(ours) = Mapping::of_storage(fd.as_fd(), 32 << 30, true) else { panic!("cannot be mapped") };
    let before = resident_bytes();
    assert_eq!(theirs.arm().unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    if ours.arm().is_ok() {
        ours.arm().unwrap();
        let after = resident_bytes();
        assert!(after < before + (16 << 20), "{before} bytes, then {after}");
    }
}
