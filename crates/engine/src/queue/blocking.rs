//! Waits for a future on the calling thread: for opening images and for tools.

use super::engines::Engines;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Polls `future` on the calling thread until it ends. On a reactor's own thread its engines go on meanwhile, because
/// the future may wait for one of their requests.
pub(crate) fn wait_for<T>(future: impl Future<Output = T>) -> T {
    let Some(engines) = Engines::current() else {
        return block::block_on(future);
    };
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => engines.advance(),
        }
    }
}
