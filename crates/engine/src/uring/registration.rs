//! Registers a guest's memory with a reactor's ring.
//!
//! A guest's memory is registered piece by piece, one in each turn, so that other work never waits long. Until a piece
//! is registered, or if that fails, requests name their memory by address. Registered pages stay in memory, and stay
//! the same pages, until they are unregistered. A guest that returns memory to its host and takes it back (a balloon)
//! would find other pages than those that the kernel writes to. So memory is registered only if the user asks for it.

use super::ring::Uring;
use block::{LogLimit, Poller, PollerId};
use memory::GuestMemory;
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The most bytes registered at a time.
const PIECE_BYTES: usize = 64 << 20;

/// A guest's memory on one reactor. It is registered with the reactor's ring as long as this lives.
pub(crate) struct Registered {
    memory: Arc<GuestMemory>,
    ring: Rc<Uring>,
    /// The slot of each piece.
    slots: RefCell<Vec<u16>>,
}

impl Registered {
    pub(crate) fn new(memory: Arc<GuestMemory>, ring: Rc<Uring>) -> Rc<Self> {
        Rc::new(Self { memory, ring, slots: RefCell::default() })
    }

    pub(crate) fn is_of(&self, memory: &Arc<GuestMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// Returns the pieces to register, in order: the address and the length.
    fn pieces(&self) -> Vec<(*mut u8, usize)> {
        let mut pieces = Vec::new();
        for region in self.memory.regions() {
            let (start, length_bytes) = region.host_range();
            for skip in (0..length_bytes).step_by(PIECE_BYTES) {
                pieces.push((start.as_ptr().wrapping_add(skip), PIECE_BYTES.min(length_bytes - skip)));
            }
        }
        pieces
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        for slot in self.slots.take() {
            self.ring.unregister_buffer(slot);
        }
    }
}

/// Registers one piece in each turn, then removes itself.
pub(crate) struct Registrar {
    registered: Weak<Registered>,
    pieces: std::vec::IntoIter<(*mut u8, usize)>,
    done_bytes: usize,
    /// Removes this poller from its reactor.
    remove: Box<dyn Fn(PollerId)>,
    id: Option<PollerId>,
}

impl Registrar {
    pub(crate) fn new(registered: &Rc<Registered>, remove: Box<dyn Fn(PollerId)>) -> Self {
        let pieces = registered.pieces().into_iter();
        Self { registered: Rc::downgrade(registered), pieces, done_bytes: 0, remove, id: None }
    }

    pub(crate) fn set_id(&mut self, id: PollerId) {
        self.id = Some(id);
    }

    /// Registers the next piece. Returns false if there is no more to do.
    fn step(&mut self) -> bool {
        let Some(registered) = self.registered.upgrade() else { return false };
        let Some((ptr, length_bytes)) = self.pieces.next() else {
            static TIMES: LogLimit = LogLimit::new();
            if let Some(times) = TIMES.admit() {
                tracing::info!(times, "fixed-buffers=on: {} MiB of guest memory are registered", self.done_bytes >> 20);
            }
            return false;
        };
        match registered.ring.register_buffer(ptr, length_bytes) {
            Ok(slot) => {
                registered.slots.borrow_mut().push(slot);
                self.done_bytes += length_bytes;
                true
            }
            Err(error) => {
                let hint = match error.raw_os_error() {
                    Some(libc::ENOMEM) => " (the limit of locked memory, ulimit -l, is used up)",
                    Some(libc::EOPNOTSUPP) => " (the kernel registers anonymous, shared and huge memory only)",
                    Some(libc::EINVAL) => " (Linux 5.19 is needed)",
                    _ => "",
                };
                let done_mib = self.done_bytes >> 20;
                static TIMES: LogLimit = LogLimit::new();
                if let Some(times) = TIMES.admit() {
                    tracing::warn!(
                        times,
                        "fixed-buffers=on: guest memory cannot be registered{hint}: {error}; {done_mib} MiB are, the \
                         rest is served without"
                    );
                }
                false
            }
        }
    }
}

impl Poller for Registrar {
    fn poll(&mut self) -> bool {
        let more = self.step();
        if !more && let Some(id) = self.id.take() {
            (self.remove)(id);
        }
        more
    }

    fn arm(&mut self) -> bool {
        self.id.is_some()
    }
}
