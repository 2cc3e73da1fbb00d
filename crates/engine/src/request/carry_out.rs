//! Carries a request out on the calling thread: for opening images, for tools, and for a reactor if the request does
//! not wait.

use super::progress::{Request, Step};
use super::segments::buffers_of;
use block::IoError;

/// Carries `request` out and tells its owner. Returns how many system calls that took.
pub(crate) fn run(mut request: Request) -> u64 {
    let mut iovecs = Vec::new();
    let mut calls = 0;
    let result = loop {
        let call = request.call(buffers_of(&request, &mut iovecs));
        // SAFETY: the request holds its memory and its file, and `iovecs` is not touched until the copy or call is over.
        let moved = unsafe {
            request.target.file.without_call(&call).unwrap_or_else(|| {
                calls += 1;
                call.run()
            })
        };
        match request.advance(moved) {
            Step::Finished(result) => break result,
            Step::Again => {}
            Step::ToWorker => break Err(IoError::from_errno(libc::EAGAIN)),
        }
    };
    request.finish(result);
    calls
}

/// Carries `request` out if that takes no system call, and tells its owner. Otherwise returns the rest of it.
pub(crate) fn run_without_call(mut request: Request) -> Option<Request> {
    let mut iovecs = Vec::new();
    let call = request.call(buffers_of(&request, &mut iovecs));
    // SAFETY: as above.
    let copied = unsafe { request.target.file.without_call(&call) };
    match copied.map(|moved| request.advance(moved)) {
        Some(Step::Finished(result)) => {
            request.finish(result);
            None
        }
        _ => Some(request),
    }
}
