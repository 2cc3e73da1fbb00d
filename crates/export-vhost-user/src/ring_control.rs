//! How a session's thread starts, changes and stops a ring that lives on a reactor's thread.
//!
//! Rings stay on their thread; the session knows them by a key, which jobs on that thread look up.

use crate::ring_poller::{RingPoller, RingSetup, StoppedRing};
use block::{Poller, PollerId, ReactorCtx, ReactorHandle, Result, run_and_wait};
use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

struct Entry {
    /// The reactor keeps it: a ring goes when its reactor does.
    poller: Weak<RefCell<RingPoller>>,
    id: PollerId,
}

thread_local! {
    /// The rings of this reactor's thread.
    static RINGS: RefCell<HashMap<u64, Entry>> = RefCell::default();
}

static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// A ring that runs on a reactor.
pub(crate) struct RunningRing {
    reactor: Arc<dyn ReactorHandle>,
    key: u64,
}

impl RunningRing {
    /// Starts a ring on `reactor` and waits until it is there.
    pub(crate) fn start(reactor: &Arc<dyn ReactorHandle>, setup: RingSetup) -> Result<Self> {
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        run_and_wait(reactor.as_ref(), move |ctx| add(ctx, key, setup))??;
        Ok(Self { reactor: Arc::clone(reactor), key })
    }

    /// Replaces the descriptor for notifications. The old one is closed when this returns.
    pub(crate) fn set_call(&self, call: Option<OwnedFd>) {
        let key = self.key;
        let _ = run_and_wait(self.reactor.as_ref(), move |_| change(key, |ring| ring.set_call(call)));
    }

    /// Replaces the descriptor for faults. The old one is closed when this returns.
    pub(crate) fn set_err(&self, err: Option<OwnedFd>) {
        let key = self.key;
        let _ = run_and_wait(self.reactor.as_ref(), move |_| change(key, |ring| ring.set_err(err)));
    }

    /// Begins to stop: no request is taken any more. Several rings begin, then each is waited for.
    pub(crate) fn begin_stop(self) -> StoppingRing {
        let (sender, drained) = sync_channel(1);
        let key = self.key;
        // A reactor that has ended has no ring to stop.
        let _ = self.reactor.run(Box::new(move |_| change(key, |ring| ring.stop(sender))));
        StoppingRing { ring: self, drained }
    }
}

/// A ring whose requests in flight are waited for.
pub(crate) struct StoppingRing {
    ring: RunningRing,
    drained: Receiver<StoppedRing>,
}

impl StoppingRing {
    /// Waits until no request is in flight, and takes the ring off its reactor: it touches the peer's memory no more.
    /// `None` if the reactor ended before.
    pub(crate) fn wait(self) -> Option<StoppedRing> {
        let stopped = self.drained.recv().ok();
        let key = self.ring.key;
        let _ = run_and_wait(self.ring.reactor.as_ref(), move |ctx| remove(ctx, key));
        stopped
    }
}

fn add(ctx: &Rc<dyn ReactorCtx>, key: u64, setup: RingSetup) -> Result<()> {
    let poller = Rc::new(RefCell::new(RingPoller::new(ctx, setup)?));
    let id = ctx.add_poller(Rc::clone(&poller) as Rc<RefCell<dyn Poller>>)?;
    let poller = Rc::downgrade(&poller);
    RINGS.with_borrow_mut(|rings| rings.insert(key, Entry { poller, id }));
    Ok(())
}

fn change(key: u64, change: impl FnOnce(&mut RingPoller)) {
    let poller = RINGS.with_borrow(|rings| rings.get(&key).and_then(|entry| entry.poller.upgrade()));
    if let Some(poller) = poller {
        change(&mut poller.borrow_mut());
    }
}

fn remove(ctx: &Rc<dyn ReactorCtx>, key: u64) {
    let entry = RINGS.with_borrow_mut(|rings| rings.remove(&key));
    if let Some(entry) = entry {
        ctx.remove_poller(entry.id);
    }
}
