//! The memory of an operation, lent to another thread.
//!
//! A window stays on the thread of its operation. [`Window::lend`] lets another thread fill it, from a socket or with
//! bytes that it has. The owner keeps a [`Held`], and takes the memory back by dropping that, at any time. After that,
//! the other thread cannot write to it. Each access is short and under a lock, so the owner waits for microseconds. One
//! call receives a limited part, however much room there is.

use crate::buffer::{Segment, Window};
use crate::socket::receive_into_segments;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most bytes that one call receives: the owner may wait for it.
const RECEIVED_BYTES_MAX: usize = 256 << 10;

/// The segments of a loan: most windows have one segment.
#[derive(Default)]
struct Segments {
    first: Option<Segment>,
    others: Vec<Segment>,
}

// SAFETY: they only name memory. `Loan` says when that may be accessed.
unsafe impl Send for Segments {}

impl Segments {
    /// Calls `visit` with the parts of a range, in order.
    fn for_each_part(&self, mut skip: usize, mut left: usize, mut visit: impl FnMut(Segment)) {
        for segment in self.first.iter().chain(&self.others) {
            let part = left.min(segment.length_bytes().saturating_sub(skip));
            if part > 0 {
                visit(segment.slice(skip, part));
            }
            skip = skip.saturating_sub(segment.length_bytes());
            left -= part;
        }
    }
}

/// Invariant: while there are segments, a [`Held`] keeps a handle to their window, so they are mapped memory (see
/// `IoBuf::refill`). They are used, and taken away, only under the lock.
struct Loan(Mutex<Option<Segments>>);

impl Loan {
    fn lock(&self) -> MutexGuard<'_, Option<Segments>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        *self.lock() = None;
    }
}

/// Access to an operation's memory, for another thread.
pub struct Lent {
    loan: Arc<Loan>,
    length_bytes: usize,
}

/// The owner's side of a loan. Dropping it ends the loan: after that, nobody else accesses the memory.
pub struct Held {
    loan: Arc<Loan>,
    _window: Window,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.loan.end();
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({} bytes)", self.length_bytes)
    }
}

impl Window {
    /// Lends the window's memory to another thread, until the [`Held`] is dropped.
    #[must_use]
    pub fn lend(&self) -> (Lent, Held) {
        let mut segments = Segments::default();
        self.for_each_segment(|segment| match segments.first {
            None => segments.first = Some(segment),
            Some(_) => segments.others.push(segment),
        });
        let loan = Arc::new(Loan(Mutex::new(Some(segments))));
        let held = Held { loan: Arc::clone(&loan), _window: self.clone() };
        (Lent { loan, length_bytes: self.length_bytes() }, held)
    }
}

impl Lent {
    /// Makes a loan that has ended, for bytes that are not wanted.
    #[must_use]
    pub fn ended(length_bytes: usize) -> Self {
        Self { loan: Arc::new(Loan(Mutex::new(None))), length_bytes }
    }

    /// Returns the length of the lent memory, in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Whether the loan has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.loan.lock().is_none()
    }

    /// Ends the loan: its memory cannot be used.
    pub fn give_up(&self) {
        self.loan.end();
    }

    /// Receives at most `length_bytes` from a stream socket into the memory behind `skip_bytes`. One call takes 256 KiB
    /// at most, and less if the memory is in many parts. Returns the number of bytes, zero if the stream has ended, and
    /// whether the socket had no more; `None` if the loan has ended. The socket must not block.
    pub fn receive_into(
        &self,
        socket: BorrowedFd<'_>,
        skip_bytes: usize,
        length_bytes: usize,
    ) -> Option<io::Result<(usize, bool)>> {
        let length_bytes = length_bytes.min(RECEIVED_BYTES_MAX);
        let loan = self.loan.lock();
        let segments = loan.as_ref()?;
        // SAFETY: by the invariant of `Loan`, the memory is mapped while the lock is held.
        Some(unsafe { receive_into_segments(socket, |list| segments.for_each_part(skip_bytes, length_bytes, list)) })
    }

    /// Copies bytes into the memory behind `skip_bytes`. Drops the bytes that do not fit, and all of them if the loan
    /// has ended.
    pub fn copy_in(&self, skip_bytes: usize, bytes: &[u8]) {
        let mut from = bytes;
        self.for_each_part(skip_bytes, bytes.len(), |to, length_bytes| {
            let (part, rest) = from.split_at(length_bytes);
            from = rest;
            // SAFETY: the place is mapped memory of this length, and cannot overlap bytes that are borrowed.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to.as_ptr(), part.len()) }
        });
    }

    /// Sets bytes to zero.
    pub fn zero(&self, skip_bytes: usize, length_bytes: usize) {
        self.for_each_part(skip_bytes, length_bytes, |to, length_bytes| {
            // SAFETY: the place is mapped, writable memory of this length.
            unsafe { std::ptr::write_bytes(to.as_ptr(), 0, length_bytes) }
        });
    }

    /// Calls `visit` with the places of a range, under the lock.
    fn for_each_part(&self, skip_bytes: usize, length_bytes: usize, mut visit: impl FnMut(NonNull<u8>, usize)) {
        let loan = self.loan.lock();
        let Some(segments) = loan.as_ref() else { return };
        segments.for_each_part(skip_bytes, length_bytes, |part| {
            NonNull::new(part.as_ptr()).into_iter().for_each(|place| visit(place, part.length_bytes()));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoBuf;
    use std::io::Write;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixStream;

    fn scattered() -> (Window, Window) {
        let whole = IoBuf::zeroed(100).whole();
        whole.fill(7);
        let parts = vec![whole.slice(60, 10), whole.slice(0, 20), whole.slice(90, 10)];
        (IoBuf::gather(parts).whole(), whole)
    }

    #[test]
    fn another_thread_fills_the_parts_of_a_scattered_window() {
        let (window, whole) = scattered();
        let (lent, held) = window.lend();
        assert_eq!((lent.length_bytes(), lent.has_ended()), (40, false));
        std::thread::spawn(move || {
            lent.copy_in(5, &[1; 10]);
            lent.zero(28, 4);
            let (near, mut far) = UnixStream::pair().unwrap();
            far.write_all(&[2; 30]).unwrap();
            assert_eq!(lent.receive_into(near.as_fd(), 32, 6).unwrap().unwrap(), (6, false), "no more than wanted");
            drop(far);
            assert_eq!(
                lent.receive_into(near.as_fd(), 38, 100).unwrap().unwrap(),
                (2, false),
                "and than there is room for"
            );
            lent.copy_in(39, &[3; 10]);
            lent.copy_in(400, &[3; 10]);
        })
        .join()
        .unwrap();
        drop(held);
        let expected = [&[7; 5][..], &[1; 10], &[7; 13], &[0; 4], &[2; 7], &[3]].concat();
        assert_eq!(window.to_vec(), expected);
        assert!(whole.slice(20, 40).to_vec().iter().all(|byte| *byte == 7), "nothing outside is touched");
    }

    #[test]
    fn one_call_takes_a_limited_part_and_says_whether_more_is_there() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let receive = |window: &Window| window.lend().0.receive_into(near.as_fd(), 0, window.length_bytes()).unwrap();
        let whole = IoBuf::zeroed(200).whole();
        let scattered = IoBuf::gather((0..100).map(|index| whole.slice(2 * index, 1)).collect()).whole();
        far.write_all(&[1; 170]).unwrap();
        assert_eq!(receive(&scattered).unwrap(), (64, false), "more parts than one call has");
        assert_eq!(receive(&scattered).unwrap(), (64, false));
        assert_eq!(receive(&scattered).unwrap(), (42, true));
        far.set_nonblocking(true).unwrap();
        widen(&far);
        let large = IoBuf::zeroed(2 * RECEIVED_BYTES_MAX).whole();
        let sent = std::iter::from_fn(|| far.write(&[2; 64 << 10]).ok()).sum::<usize>();
        assert_eq!(receive(&large).unwrap(), (sent.min(RECEIVED_BYTES_MAX), sent < RECEIVED_BYTES_MAX), "{sent} bytes");
    }

    /// Makes room in a socket, as far as the system allows.
    fn widen(socket: &UnixStream) {
        let bytes: libc::c_int = 1 << 20;
        let length = size_of_val(&bytes) as libc::socklen_t;
        let place = std::ptr::from_ref(&bytes).cast();
        // SAFETY: `place` is an integer of this length, and is only read.
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, place, length) };
    }

    #[test]
    fn memory_that_was_taken_back_is_not_touched_again() {
        let (window, _whole) = scattered();
        let (lent, held) = window.lend();
        drop(held);
        assert!(lent.has_ended());
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&[2; 30]).unwrap();
        lent.copy_in(0, &[1; 40]);
        lent.zero(0, 40);
        assert!(lent.receive_into(near.as_fd(), 0, 40).is_none());
        assert_eq!(window.to_vec(), [7; 40]);
        let (lent, _held) = window.lend();
        lent.give_up();
        assert!(lent.has_ended() && Lent::ended(9).has_ended());
    }

    #[test]
    fn an_owner_may_take_memory_back_at_any_moment() {
        let (sender, receiver) = std::sync::mpsc::channel::<Lent>();
        let filler = std::thread::spawn(move || {
            for lent in receiver {
                while !lent.has_ended() {
                    lent.copy_in(0, &[1; 40]);
                }
            }
        });
        for _ in 0..200 {
            let (window, _whole) = scattered();
            let (lent, held) = window.lend();
            sender.send(lent).unwrap();
            std::thread::yield_now();
            drop(held);
            window.fill(5);
            assert_eq!(window.to_vec(), [5; 40]);
        }
        drop(sender);
        filler.join().unwrap();
    }
}
