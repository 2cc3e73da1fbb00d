//! Lets a job give up calls on storage that hangs.
//!
//! A job makes calls that block. A thread that waits for its storage cannot be interrupted. So threads of their own make
//! the calls ([`super::job_calls`]). The job waits for them, or until somebody gives up.
//!
//! A late write still lands at its place in the file. So a write is given up only if nobody uses the file afterwards:
//! the target of a copy. A write to a layer of the disk is never abandoned: the job's thread waits for its own writes, and
//! guests' writes go on in tasks of their own ([`LateCalls`]). A write keeps its space and its locks until it has ended.

use block::{Done, IoError, IoResult, ReactorCtx, Task, WaitList, Waiter};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;

/// After so many waits, those that are over are forgotten.
const WAITS_KEPT: u64 = 1024;
/// ETIMEDOUT.
const TIMED_OUT: i32 = 110;

/// Says whether the calls of a job are given up.
#[derive(Debug, Default)]
pub(crate) struct GiveUp {
    is_given_up: AtomicBool,
    /// Tasks on reactors that wait for the same storage.
    tasks: WaitList,
    /// How often somebody began to wait.
    waits: AtomicU64,
}

/// Which calls end when they are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    Reads,
    All,
}

impl GiveUp {
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
        self.tasks.wake_all();
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }

    /// Waits until the calls are given up.
    pub(crate) async fn wait(&self) {
        self.tasks.until(|| self.is_given_up().then_some(())).await;
    }

    /// Drops the wakers of tasks that have stopped waiting.
    pub(crate) fn tidy(&self) {
        self.tasks.wake_all();
    }

    /// Awaits `call`. Fails as soon as the calls are given up and `may_end` allows this one to end.
    pub(crate) async fn or_end<T>(
        this: Option<&Self>,
        may_end: impl Fn() -> bool,
        call: impl Future<Output = IoResult<T>>,
    ) -> IoResult<T> {
        let Some(this) = this else { return call.await };
        if this.waits.fetch_add(1, Ordering::Relaxed) % WAITS_KEPT == WAITS_KEPT - 1 {
            this.tidy();
        }
        let may_end = &may_end;
        let mut call = pin!(call);
        let mut end = pin!(this.tasks.until(move || (this.is_given_up() && may_end()).then_some(())));
        std::future::poll_fn(|context| match call.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => end.as_mut().poll(context).map(|()| Err(given_up())),
        })
        .await
    }
}

/// Writes and flushes on reactors that nobody waits for any more, and that have to end before anything of theirs is let go.
#[derive(Default)]
pub(crate) struct LateCalls {
    count: AtomicU64,
    ended: WaitList,
}

impl LateCalls {
    /// Runs a call in a task of its own, which goes on if its end is not waited for.
    pub(crate) fn run<C: Future<Output = IoResult> + 'static>(
        this: &Arc<Self>,
        ctx: &dyn ReactorCtx,
        call: C,
    ) -> impl Future<Output = IoResult> + use<C> {
        this.count.fetch_add(1, Ordering::AcqRel);
        let (waiter, late) = (Waiter::new(), LateCall(Arc::clone(this)));
        let done = Done::Waiter(waiter.clone());
        ctx.spawn(Task::new(async move {
            let result = call.await;
            drop(late);
            done.complete(result);
        }));
        Waiter::wait(&waiter)
    }

    /// Waits until all have ended.
    pub(crate) async fn end(&self) {
        self.ended.until(|| (self.count.load(Ordering::Acquire) == 0).then_some(())).await;
    }
}

/// Counted until it is dropped.
struct LateCall(Arc<LateCalls>);

impl Drop for LateCall {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.ended.wake_all();
        }
    }
}

pub(crate) fn given_up() -> IoError {
    IoError::from_errno(TIMED_OUT)
}
