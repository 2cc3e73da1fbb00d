//! Carries a request out on the calling thread, before it returns: for opening images and for tools.

use crate::inflight::{Request, Step, buffers_of};
use crate::reactor::Local;
use block::IoError;
use std::future::Future;
use std::os::fd::AsFd;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const RETRIES: usize = 100;
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Polls `future` on the calling thread until it ends. On a reactor's own thread its engines go on meanwhile: what the
/// future waits for may be one of their requests.
pub(crate) fn wait_for<T>(future: impl Future<Output = T>) -> T {
    let Some(local) = Local::current() else {
        return block::block_on(future);
    };
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => local.advance_engines(),
        }
    }
}

/// Carries `request` out and tells its owner. Returns how many calls that took.
pub(crate) fn run(mut request: Request) -> u64 {
    let mut iovecs = Vec::new();
    let (mut retries, mut calls) = (0, 0);
    let result = loop {
        let buffers = buffers_of(&request, &mut iovecs);
        let (file, offset) = (&request.target.file, request.file_offset());
        // SAFETY: the request holds its memory, and `iovecs` is not touched until the copy or call is over.
        let moved = unsafe {
            let copied = file.without_call(request.action, offset, buffers);
            copied.unwrap_or_else(|| {
                calls += 1;
                crate::sys::run(file.fd.as_fd(), request.action, offset, buffers)
            })
        };
        match request.advance(moved) {
            Step::Finished(result) => break result,
            Step::Again => {}
            Step::ToWorker if retries < RETRIES => {
                retries += 1;
                std::thread::sleep(RETRY_PAUSE);
            }
            Step::ToWorker => break Err(IoError::from_errno(libc::EAGAIN)),
        }
    };
    request.finish(result);
    calls
}

/// Carries `request` out if that takes no call, and tells its owner; otherwise what is left of it is given back.
pub(crate) fn run_without_call(mut request: Request) -> Option<Request> {
    let mut iovecs = Vec::new();
    let buffers = buffers_of(&request, &mut iovecs);
    // SAFETY: the request holds its memory, and `iovecs` is not touched until the copy is over.
    let copied = unsafe { request.target.file.without_call(request.action, request.file_offset(), buffers) };
    match copied.map(|moved| request.advance(moved)) {
        Some(Step::Finished(result)) => {
            request.finish(result);
            None
        }
        _ => Some(request),
    }
}
