//! Interrupts a thread in a system call in which another process makes it wait.
//!
//! Another process that sent us a descriptor can make it blocking at any moment, because both share the open file
//! description. So another thread watches calls on such a descriptor, and interrupts those that take too long.

use std::io;
use std::sync::OnceLock;

/// Ignored by default and hardly used, so a stray signal does no harm.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Names a thread of this process, to interrupt its system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterruptHandle {
    process: libc::pid_t,
    thread: libc::pid_t,
}

impl InterruptHandle {
    /// Makes a handle to the calling thread.
    pub fn of_this_thread() -> io::Result<Self> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        let installed = INSTALLED.get_or_init(|| install_handler().map_err(|error| error.raw_os_error().unwrap_or(0)));
        installed.map_err(io::Error::from_raw_os_error)?;
        // SAFETY: these two calls only return numbers.
        let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
        Ok(Self { process, thread })
    }

    /// Ends a system call in which the thread waits, with `EINTR`. Does nothing if it waits in none, or has ended.
    pub fn interrupt(&self) {
        // SAFETY: the call touches no memory. If the number has passed to another thread of ours, that thread gets an
        // interruption that it must expect anyway.
        unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, SIGNAL) };
    }
}

/// Installs a handler that does nothing. The interrupted call is not restarted (no `SA_RESTART`).
fn install_handler() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all-zero is a valid `sigaction`, and the handler does nothing.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc::channel;

    #[test]
    fn a_thread_that_waits_in_a_call_comes_out_of_it() {
        let (mut reader, _writer) = io::pipe().unwrap();
        let (sender, handle) = channel();
        let waiting = std::thread::spawn(move || {
            sender.send(InterruptHandle::of_this_thread().unwrap()).unwrap();
            reader.read(&mut [0]).map_err(|error| error.kind())
        });
        let handle = handle.recv().unwrap();
        while !waiting.is_finished() {
            handle.interrupt();
            std::thread::yield_now();
        }
        assert_eq!(waiting.join().unwrap(), Err(io::ErrorKind::Interrupted));
    }
}
