//! A peer that shrinks its memory file ends its own session, not the daemon.
//!
//! Touching a mapping behind the end of its file raises SIGBUS. The handler looks the address up among the registered
//! mappings; if it finds it, it puts anonymous zero pages over the whole mapping, marks it as poisoned and returns, so
//! that the access completes. Sessions look at the mark once a batch and hang up. Any other SIGBUS goes to whoever
//! handled it before us (by default: the process ends, as it should).

use std::io;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// How many mappings can be registered at once; one more is refused.
pub const MAX_MAPPINGS: usize = 4096;

struct Slot {
    taken: AtomicBool,
    /// Zero while the slot is free or being filled, so that the handler skips it.
    start: AtomicUsize,
    length_bytes: AtomicUsize,
    poisoned: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        length_bytes: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// One past the highest slot ever used: bounds the handler's walk.
static USED: AtomicUsize = AtomicUsize::new(0);
static INSTALL: Once = Once::new();
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// A place in the handler's table.
#[derive(Debug)]
pub struct Registration {
    index: usize,
}

/// Registers a mapping, installing the handler the first time.
pub(crate) fn register(start: NonNull<u8>, length_bytes: usize) -> io::Result<Registration> {
    INSTALL.call_once(install_handler);
    for (index, slot) in SLOTS.iter().enumerate() {
        if slot.taken.swap(true, Ordering::AcqRel) {
            continue;
        }
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.length_bytes.store(length_bytes, Ordering::Relaxed);
        slot.start.store(start.as_ptr().addr(), Ordering::Release);
        USED.fetch_max(index + 1, Ordering::AcqRel);
        return Ok(Registration { index });
    }
    Err(io::Error::other(format!("more than {MAX_MAPPINGS} shared mappings at once")))
}

impl Registration {
    pub(crate) fn is_poisoned(&self) -> bool {
        SLOTS[self.index].poisoned.load(Ordering::Acquire)
    }

    /// Called before the range is unmapped: from then on the handler ignores it.
    pub(crate) fn withdraw(&self) {
        let slot = &SLOTS[self.index];
        slot.start.store(0, Ordering::Release);
        slot.taken.store(false, Ordering::Release);
    }
}

fn install_handler() {
    // SAFETY: all-zero is a valid `sigaction`; the handler only reads atomics and calls mmap, which the kernel allows
    // in a handler; `previous` is leaked on purpose, so the pointer stays valid for the handler for ever.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        let previous: &'static mut libc::sigaction = Box::leak(Box::new(std::mem::zeroed()));
        if libc::sigaction(libc::SIGBUS, &raw const action, previous) == 0 {
            PREVIOUS.store(previous, Ordering::Release);
        }
    }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a SA_SIGINFO handler of SIGBUS.
    let address = unsafe { (*info).si_addr() }.addr();
    for slot in &SLOTS[..USED.load(Ordering::Acquire)] {
        let start = slot.start.load(Ordering::Acquire);
        let length_bytes = slot.length_bytes.load(Ordering::Relaxed);
        if start != 0 && address >= start && address - start < length_bytes {
            cover_with_zeros(slot, start, length_bytes);
            return;
        }
    }
    hand_on(signal, info, context);
}

fn cover_with_zeros(slot: &Slot, start: usize, length_bytes: usize) {
    slot.poisoned.store(true, Ordering::Release);
    // SAFETY: the range is one of our own mappings (it is registered, and withdrawn before it is unmapped); replacing
    // its pages with private zeros keeps every address in it valid.
    let covered = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            length_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if covered == libc::MAP_FAILED {
        // SAFETY: always allowed; nothing can be continued here.
        unsafe { libc::abort() }
    }
}

fn hand_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: `previous` is null or the leaked action from `install_handler`; a handler that was installed with
    // SA_SIGINFO takes these three arguments; SIG_DFL is restored so that the fault ends the process when it recurs.
    unsafe {
        if !previous.is_null() && (*previous).sa_flags & libc::SA_SIGINFO != 0 && (*previous).sa_sigaction > 1 {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute((*previous).sa_sigaction);
            handler(signal, info, context);
        } else {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Mapping;

    #[test]
    fn a_shrunken_file_poisons_its_mapping_and_the_process_lives() {
        let (fd, mapping) = Mapping::anonymous_file(c"shrinks", 8192).unwrap();
        std::fs::File::from(fd).set_len(0).unwrap();
        // SAFETY: the address lies in the mapping.
        let byte = unsafe { std::ptr::read_volatile(mapping.as_ptr().as_ptr().add(5000)) };
        assert_eq!(byte, 0);
        assert!(mapping.is_poisoned());
    }
}
