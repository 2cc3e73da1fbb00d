//! A peer that shrinks its memory does no harm, also where the kernel refuses to cover it, and whatever signals come.
//!
//! Limits hold for a whole process, so each case runs in a process of its own: this program once more.

use ringdisk_memory::{GuestMemory, GuestRegion, IoBuf, Mapping, MemoryLost, PAGE_BYTES, RegionSpec};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const GIB: usize = 1 << 30;

/// Runs one of the tests below that are parts of others, in a new process.
fn in_a_child(part: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", part, "--ignored", "--nocapture", "--test-threads=1"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{part}: {}\n{text}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{part} is no test");
}

/// A mapping whose file has become empty.
fn shrunk(length_bytes: usize) -> Mapping {
    let (fd, mapping) = Mapping::anonymous_file(c"shrinks", length_bytes).unwrap();
    File::from(fd).set_len(0).unwrap();
    mapping
}

fn write_and_read(mapping: &Mapping, offset: usize) {
    assert!(offset < mapping.length_bytes());
    // SAFETY: the address lies in the mapping.
    unsafe {
        let at = mapping.as_ptr().as_ptr().add(offset);
        at.write_volatile(7);
        assert_eq!(at.read_volatile(), 7);
    }
}

/// Runs something while the kernel gives this process no private memory, also in place of what is mapped. (Nothing may fail
/// meanwhile: a panic needs memory.)
fn without_private_memory<T>(run: impl FnOnce() -> T) -> T {
    let limit = |bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the kernel reads one `rlimit`.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) }
    };
    // Less than it has: the kernel counts only by how much a mapping is longer than what it replaces. (It takes zero for no
    // limit.)
    let before = limit(PAGE_BYTES as u64);
    let result = run();
    assert_eq!((before, limit(libc::RLIM_INFINITY)), (0, 0));
    result
}

/// Whether the two show the same bytes: the file of our own that takes no private memory covers both.
fn show_the_same(one: &Mapping, other: &Mapping) -> bool {
    // Behind the pages that exist from the start.
    const AT: usize = 1000 * PAGE_BYTES;
    write_and_read(one, AT);
    // SAFETY: the address lies in the mapping.
    unsafe { other.as_ptr().as_ptr().add(AT).read_volatile() == 7 }
}

/// Has this process take as many mappings as it may.
fn use_up_mappings() {
    let limit: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let length_bytes = 2 * (limit + 10) * PAGE_BYTES;
    // SAFETY: a fresh mapping, and changes of its protection, touch no other memory.
    let full = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let start = libc::mmap(std::ptr::null_mut(), length_bytes, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let protect = |page: usize| libc::mprotect(start.byte_add(page * PAGE_BYTES), PAGE_BYTES, libc::PROT_READ);
        let is_full = (0..limit).any(|index| protect(1 + 2 * index) != 0);
        // One more than the limit is tolerated for a mapping that splits none.
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        libc::mmap(std::ptr::null_mut(), PAGE_BYTES, libc::PROT_READ, flags, -1, 0);
        is_full
    };
    assert!(full, "the limit was not reached");
}

/// Writes to as many pages as several long requests copy before anybody looks at the mark.
fn write_to_many_pages(mapping: &Mapping) {
    for page in 0..1000 {
        write_and_read(mapping, page * 3 * PAGE_BYTES);
    }
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_no_memory_at_all() {
    let (mapping, other) = (shrunk(GIB), shrunk(GIB));
    let by_refuge = without_private_memory(|| {
        write_to_many_pages(&mapping);
        show_the_same(&mapping, &other)
    });
    assert!(by_refuge && mapping.is_poisoned() && other.is_poisoned());
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_cut_off_where_the_refuge_lies() {
    let mapping = Arc::new(shrunk(GIB));
    let region = GuestRegion::of_mapping(RegionSpec::new(0, GIB as u64), Arc::clone(&mapping), 0).unwrap();
    let memory = GuestMemory::new(vec![region]).unwrap();
    let fenced = without_private_memory(|| {
        write_and_read(&mapping, 5 * PAGE_BYTES);
        let fenced = [memory.fence(), memory.fence()];
        write_and_read(&mapping, 7 * PAGE_BYTES);
        fenced
    });
    assert_eq!(fenced, [true; 2]);
}

/// What the kernel says to a write of a few pages from the mapping.
fn kernel_writes(mapping: &Mapping, offset: usize) -> i32 {
    let file = File::from(Mapping::anonymous_file(c"written", PAGE_BYTES).unwrap().0);
    file.set_len(0).unwrap();
    // SAFETY: the kernel reads a part of the mapping.
    let written = unsafe {
        let at = mapping.as_ptr().as_ptr().add(offset);
        libc::pwrite(file.as_raw_fd(), at.cast(), 3 * PAGE_BYTES, 0)
    };
    let error = std::io::Error::last_os_error();
    assert_eq!(file.metadata().unwrap().len(), written.max(0) as u64);
    if written < 0 { error.raw_os_error().unwrap() } else { 0 }
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_the_refuge_is_written_to_again() {
    // Behind the pages that exist from the start.
    const AT: usize = 1000 * PAGE_BYTES;
    let mapping = shrunk(GIB);
    let kept = without_private_memory(|| {
        [(); 3].map(|()| {
            write_and_read(&mapping, AT);
            drop(Mapping::anonymous_file(c"next", PAGE_BYTES));
            // SAFETY: the address lies in the mapping.
            unsafe { mapping.as_ptr().as_ptr().add(AT).read_volatile() }
        })
    });
    assert_eq!(kept, [0; 3]);
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_too_many_mappings() {
    let mapping = shrunk(GIB);
    use_up_mappings();
    write_to_many_pages(&mapping);
    assert!(mapping.is_poisoned());
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_neither_memory_nor_mappings() {
    let (mapping, other) = (shrunk(GIB), shrunk(GIB));
    use_up_mappings();
    let by_refuge = without_private_memory(|| {
        write_to_many_pages(&mapping);
        show_the_same(&mapping, &other)
    });
    assert!(by_refuge && mapping.is_poisoned() && other.is_poisoned());
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_stray_signals() {
    let before = shrunk(4 * PAGE_BYTES);
    for _ in 0..3 {
        // SAFETY: these calls touch no memory.
        unsafe {
            assert_eq!(libc::kill(libc::getpid(), libc::SIGBUS), 0);
            assert_eq!(libc::raise(libc::SIGBUS), 0);
        }
    }
    write_and_read(&before, 5000);
    assert!(before.is_poisoned());
    let after = shrunk(PAGE_BYTES);
    write_and_read(&after, 0);
}

/// How often the handler of another library was called.
static CALLS: AtomicU32 = AtomicU32::new(0);

/// Covers the page that was touched.
extern "C" fn anothers_handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the kernel passes a valid `siginfo_t`, and the page is the test's own.
    unsafe {
        let page = (*info).si_addr().map_addr(|address| address & !(PAGE_BYTES - 1));
        libc::mmap(page, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
    }
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_anothers_fault() {
    // SAFETY: all-zero is a valid `sigaction`, and the handler only calls mmap and counts.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = anothers_handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
    }
    let ours = shrunk(2 * PAGE_BYTES);
    let (fd, _) = Mapping::anonymous_file(c"anothers", PAGE_BYTES).unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping touches no other memory.
    let theirs = unsafe {
        libc::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0).cast::<u8>()
    };
    File::from(fd).set_len(0).unwrap();
    // SAFETY: the page is mapped, and its handler covers it.
    let byte = unsafe {
        theirs.write_volatile(7);
        theirs.read_volatile()
    };
    assert_eq!((byte, CALLS.load(Ordering::Relaxed)), (7, 1));
    write_and_read(&ours, 5000);
    assert_eq!((ours.is_poisoned(), CALLS.load(Ordering::Relaxed)), (true, 1));
}

#[test]
fn where_the_kernel_gives_nothing_the_whole_is_covered_all_the_same() {
    in_a_child("part_of_another_no_memory_at_all");
    in_a_child("part_of_another_too_many_mappings");
    in_a_child("part_of_another_neither_memory_nor_mappings");
}

#[test]
fn memory_that_the_refuge_covers_can_be_cut_off() {
    in_a_child("part_of_another_cut_off_where_the_refuge_lies");
}

/// A write that was given up may begin in the kernel only later. It must not store zeros then.
#[test]
fn from_memory_that_is_cut_off_the_kernel_writes_nothing_and_our_own_accesses_find_zeros() {
    const LENGTH: usize = 8 << 20;
    let (_fd, mapping) = Mapping::anonymous_file(c"guest", LENGTH).unwrap();
    let mapping = Arc::new(mapping);
    write_and_read(&mapping, 0);
    assert_eq!(kernel_writes(&mapping, 0), 0);
    let region = GuestRegion::of_mapping(RegionSpec::new(0, LENGTH as u64), Arc::clone(&mapping), 0).unwrap();
    let memory = GuestMemory::new(vec![region]).unwrap();
    let buffer = IoBuf::in_mapping(&mapping, 8192, 4096, Box::new(())).unwrap().whole();
    assert_eq!(buffer.check(), Ok(()));
    for _ in 0..2 {
        assert!(memory.fence());
        assert!(memory.is_poisoned());
        assert_eq!(buffer.check(), Err(MemoryLost));
        assert_eq!(kernel_writes(&mapping, 0), libc::EFAULT);
        // SAFETY: the address lies in the mapping.
        assert_eq!(unsafe { mapping.as_ptr().as_ptr().read_volatile() }, 0);
        write_and_read(&mapping, 100 * PAGE_BYTES + 5);
        write_and_read(&mapping, LENGTH - 1);
        // Only the pages that were touched are zeros for the kernel.
        for page in [1, 97, 101, LENGTH / PAGE_BYTES - 4] {
            assert_eq!(kernel_writes(&mapping, page * PAGE_BYTES), libc::EFAULT, "page {page}");
        }
    }
    // Nor does it matter how many are touched.
    in_a_child("part_of_another_many_pages_that_are_cut_off");
}

#[test]
#[ignore = "a part of another test"]
fn part_of_another_many_pages_that_are_cut_off() {
    let (_fd, mapping) = Mapping::anonymous_file(c"guest", GIB).unwrap();
    let mapping = Arc::new(mapping);
    let region = GuestRegion::of_mapping(RegionSpec::new(0, GIB as u64), Arc::clone(&mapping), 0).unwrap();
    let memory = GuestMemory::new(vec![region]).unwrap();
    assert!(memory.fence());
    for page in 0..100_000 {
        write_and_read(&mapping, page * 2 * PAGE_BYTES);
    }
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(mappings < 10_000, "{mappings} mappings");
    use_up_mappings();
    assert!(memory.fence());
    write_to_many_pages(&mapping);
}

#[test]
fn what_the_refuge_has_taken_is_given_back_as_long_as_it_is_mapped() {
    in_a_child("part_of_another_the_refuge_is_written_to_again");
}

#[test]
fn a_bus_error_signal_from_outside_neither_ends_the_process_nor_disarms_the_guard() {
    in_a_child("part_of_another_stray_signals");
}

#[test]
fn a_fault_in_memory_that_is_not_ours_goes_to_the_handler_that_was_there_before() {
    in_a_child("part_of_another_anothers_fault");
}
