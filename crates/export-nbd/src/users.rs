//! The connections that use an export: so that it can be taken away, and what they have counted, together.

use crate::limits::ExportShare;
use crate::link::Link;
use block::meter::{Latency, QueueLatency, RingCounters, RingStats};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// What connections get to end whose requests were given up.
pub(crate) const HOPELESS_PATIENCE: Duration = Duration::from_secs(2);

/// Who uses an export.
#[derive(Default)]
pub(crate) struct Users {
    state: Mutex<State>,
    /// One has gone, or all were given up.
    changed: Condvar,
    share: ExportShare,
}

#[derive(Default)]
struct State {
    /// Nobody comes in any more.
    is_closing: bool,
    is_given_up: bool,
    links: Vec<Weak<Link>>,
    live: Vec<Arc<RingCounters>>,
    /// Of those that have gone.
    past: RingStats,
    past_latency: QueueLatency,
}

/// A user, until the last clone of this is dropped.
pub(crate) struct Presence {
    users: Arc<Users>,
    pub(crate) counters: Arc<RingCounters>,
}

impl Drop for Presence {
    fn drop(&mut self) {
        let (stats, latency) = (self.counters.snapshot(), self.counters.latency_if_any().map(Latency::snapshot));
        let mut state = self.users.lock();
        state.live.retain(|counters| !Arc::ptr_eq(counters, &self.counters));
        state.past.merge(&stats);
        if let Some(mut latency) = latency {
            // It has no requests in flight any more.
            latency.oldest_ns = 0;
            state.past_latency.merge(latency);
        }
        drop(state);
        self.users.changed.notify_all();
    }
}

impl Users {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in, unless the export is going.
    pub(crate) fn enter(self: &Arc<Self>, link: &Arc<Link>) -> Option<Arc<Presence>> {
        let mut state = self.lock();
        if state.is_closing {
            return None;
        }
        let counters = Arc::<RingCounters>::default();
        state.links.retain(|link| link.strong_count() > 0);
        state.links.push(Arc::downgrade(link));
        state.live.push(Arc::clone(&counters));
        Some(Arc::new(Presence { users: Arc::clone(self), counters }))
    }

    /// What all of them hold.
    pub(crate) fn share(&self) -> ExportShare {
        self.share.clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().live.len()
    }

    pub(crate) fn stats(&self) -> RingStats {
        let state = self.lock();
        let mut sum = state.past;
        state.live.iter().for_each(|counters| sum.merge(&counters.snapshot()));
        sum
    }

    pub(crate) fn ask_for_oldest(&self) {
        self.lock().live.iter().filter_map(|counters| counters.latency_if_any()).for_each(Latency::ask);
    }

    pub(crate) fn latency(&self) -> QueueLatency {
        let state = self.lock();
        let mut sum = state.past_latency.clone();
        let live = state.live.iter().filter_map(|counters| counters.latency_if_any());
        live.for_each(|latency| sum.merge(latency.snapshot()));
        sum
    }

    /// Lets nobody in any more, ends all connections, and waits until they have gone. Those that were given up may not go.
    pub(crate) fn close(&self) {
        let links: Vec<Arc<Link>> = {
            let mut state = self.lock();
            state.is_closing = true;
            state.links.iter().filter_map(Weak::upgrade).collect()
        };
        links.iter().for_each(|link| link.close());
        drop(links);
        let waits = |state: &mut State| !state.live.is_empty() && !state.is_given_up;
        let state = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(state, HOPELESS_PATIENCE, |state| !state.live.is_empty()));
    }

    /// Has connections wait for their requests no longer: they are disconnected.
    pub(crate) fn give_up(&self) {
        let links: Vec<Arc<Link>> = {
            let mut state = self.lock();
            state.is_given_up = true;
            state.links.iter().filter_map(Weak::upgrade).collect()
        };
        for link in links {
            link.given_up.store(true, Ordering::Release);
            link.close();
        }
        self.changed.notify_all();
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.lock().is_given_up
    }
}
