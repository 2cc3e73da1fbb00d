//! Linux AIO's system calls and shared structures (`linux/aio_abi.h`; the ring is described in `fs/aio.c` only).

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const PREAD: u16 = 0;
pub(crate) const PWRITE: u16 = 1;
pub(crate) const FDSYNC: u16 = 3;
pub(crate) const PREADV: u16 = 7;
pub(crate) const PWRITEV: u16 = 8;

/// Flag: the completion also signals `result_fd`.
pub(crate) const FLAG_RESULT_FD: u32 = 1;
/// Flag: the block names a priority (from Linux 4.18; earlier kernels ignore both).
pub(crate) const FLAG_PRIORITY: u32 = 2;

/// `struct iocb`, little-endian layout.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct ControlBlock {
    pub(crate) data: u64,
    pub(crate) key: u32,
    pub(crate) rw_flags: i32,
    pub(crate) opcode: u16,
    pub(crate) priority: u16,
    pub(crate) fd: u32,
    pub(crate) buf: u64,
    pub(crate) count: u64,
    pub(crate) offset: i64,
    pub(crate) reserved: u64,
    pub(crate) flags: u32,
    pub(crate) result_fd: u32,
}

/// `struct io_event`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Event {
    pub(crate) data: u64,
    pub(crate) object: u64,
    pub(crate) result: i64,
    pub(crate) result2: i64,
}

/// The head of the completion ring, which the kernel maps into the process; events follow.
#[repr(C)]
struct Ring {
    id: u32,
    count: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    header_bytes: u32,
}

const RING_MAGIC: u32 = 0xa10a_10a1;

/// An AIO context. Dropping it destroys it, after waiting for requests in flight.
#[derive(Debug)]
pub(crate) struct Context {
    id: usize,
    /// The ring, if it has the layout that this module knows.
    ring: Option<NonNull<Ring>>,
}

fn result_of(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

impl Context {
    pub(crate) fn new(events: u32) -> io::Result<Self> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `id`.
        result_of(unsafe { libc::syscall(libc::SYS_io_setup, libc::c_ulong::from(events), &raw mut id) })?;
        let id = id as usize;
        let ring = NonNull::new(id as *mut Ring).filter(|ring| {
            // SAFETY: a context's name is the address of its ring, mapped until the context is destroyed.
            let ring = unsafe { ring.as_ref() };
            ring.magic == RING_MAGIC
                && ring.incompatible == 0
                && ring.header_bytes as usize == size_of::<Ring>()
                && ring.count > 0
        });
        Ok(Self { id, ring })
    }

    /// Submits as many of `blocks` as the kernel takes, from the first on.
    ///
    /// # Safety
    /// Each block must name memory and a descriptor that stay valid until its event has been taken.
    pub(crate) unsafe fn submit(&self, blocks: &mut [*mut ControlBlock]) -> io::Result<usize> {
        // SAFETY: the kernel reads the list and the blocks during the call only; the rest is the caller's promise.
        result_of(unsafe { libc::syscall(libc::SYS_io_submit, self.id, blocks.len(), blocks.as_mut_ptr()) })
    }

    /// Whether an event waits, as far as the ring tells without a system call.
    pub(crate) fn has_events(&self) -> bool {
        // SAFETY: the ring is mapped as long as the context lives.
        self.ring.is_some_and(|ring| unsafe {
            let ring = ring.as_ref();
            ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
        })
    }

    /// Whether [`Context::take`] needs no system call.
    pub(crate) fn is_mapped(&self) -> bool {
        self.ring.is_some()
    }

    /// Takes the events that are in the ring, without a system call.
    pub(crate) fn take(&self, mut each: impl FnMut(Event)) {
        let Some(ring) = self.ring else { return };
        // SAFETY: as in `has_events`; only this thread moves the head.
        let header = unsafe { ring.as_ref() };
        let tail = header.tail.load(Ordering::Acquire);
        let mut head = header.head.load(Ordering::Relaxed);
        if head >= header.count || tail >= header.count {
            return;
        }
        while head != tail {
            // SAFETY: `count` events follow the header, and those between head and tail were written before the tail
            // moved.
            each(unsafe { ring.add(1).cast::<Event>().add(head as usize).read_volatile() });
            head = if head + 1 == header.count { 0 } else { head + 1 };
        }
        // The kernel may overwrite the events only after they were read.
        header.head.store(head, Ordering::Release);
    }

    /// Takes events by system call, waiting for at least `least`.
    pub(crate) fn wait(&self, least: usize, mut each: impl FnMut(Event)) -> io::Result<()> {
        let mut events = [Event::default(); 64];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let limit = if least == 0 { &raw const now } else { std::ptr::null() };
        // SAFETY: the kernel writes at most as many events as there is room for.
        let call =
            unsafe { libc::syscall(libc::SYS_io_getevents, self.id, least, events.len(), events.as_mut_ptr(), limit) };
        let count = result_of(call)?;
        events.iter().take(count).for_each(|event| each(*event));
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is ours and nobody uses it or its ring any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}
