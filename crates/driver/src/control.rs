//! Holds all queues: freezes, restores and resets a device.
//!
//! Rings live on their reactors' threads. A driver that wants the rings sets one word, which each queue compares with
//! its own once a turn. The queue then hands its ring over: for a reset at once, and for a freeze when the device has
//! ended its requests. What is submitted meanwhile waits in line. When the word is reset, queues take their renewed
//! rings back and go on with their lines.

mod rings;

pub(crate) use rings::{Control, Hold, Word};

use crate::inner::Inner;
use crate::layout::queue_setup;
use crate::queue::Core;
use crate::ring::{Ring, prepare};
use block::{Completion, Error, ErrorKind, Result};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Inner {
    /// Only one thread at a time sets it: the one that has locked `frozen`.
    fn set_hold(&self, hold: Hold) {
        let word = self.control.word().with(hold);
        let word = if hold == Hold::Reset { word.with_one_more_reset() } else { word };
        self.control.word.store(word.0, Ordering::Release);
        self.session.link.wake_all();
    }

    /// Whether the rings are stopped already.
    pub(crate) fn is_frozen(&self) -> bool {
        *self.control.frozen()
    }

    pub(crate) fn freeze(&self) -> Result<()> {
        let mut frozen = self.control.frozen();
        if *frozen {
            return Ok(());
        }
        let held = self.hold_queues(Hold::Freeze, true);
        if held.is_ok() {
            self.wait_for_follower();
            *frozen = true;
            return held;
        }
        drop(frozen);
        self.follow_what_was_missed();
        held
    }

    pub(crate) fn restore(&self) -> Result<()> {
        let mut frozen = self.control.frozen();
        if *frozen {
            self.restart_queues()?;
            *frozen = false;
        }
        drop(frozen);
        // The device may have changed its configuration meanwhile.
        self.follow_config();
        Ok(())
    }

    pub(crate) fn reset(&self) -> Result<()> {
        let mut frozen = self.control.frozen();
        let restart = || self.restart_queues().inspect_err(|_| self.end_for_good());
        let reset = self.hold_queues(Hold::Reset, !*frozen).and_then(|()| restart());
        *frozen &= reset.is_err();
        drop(frozen);
        if reset.is_ok() {
            self.follow_config();
        } else {
            self.follow_what_was_missed();
        }
        reset
    }

    /// Ends the connection to a device that refuses to go on. All requests end with an error.
    fn end_for_good(&self) {
        self.session.hang_up();
        self.set_hold(Hold::None);
    }

    /// Takes all rings, and stops them if they run.
    fn hold_queues(&self, hold: Hold, running: bool) -> Result<()> {
        if self.session.is_gone() {
            return Err(self.session.error("the connection is over".into()));
        }
        self.set_hold(hold);
        let waited = self.wait_for_rings();
        if waited.is_err() {
            self.set_hold(Hold::None);
            return waited;
        }
        let mut rings = (0..self.fds.len()).filter(|_| running);
        // Otherwise some rings may have stopped, and requests there would wait for ever.
        rings.try_for_each(|index| self.session.stop_ring(index)).inspect_err(|_| self.end_for_good())?;
        // The device no longer touches our memory.
        for ring in self.control.rings().all() {
            (0..ring.forget_orphans()).for_each(|_| self.pool.orphan_done());
        }
        Ok(())
    }

    fn wait_for_rings(&self) -> Result<()> {
        let timeout = Duration::from_millis(self.options.answer_timeout_ms);
        let until = Instant::now() + timeout;
        let mut rings = self.control.rings();
        while rings.parked.len() + rings.held.len() < self.fds.len() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.session.is_gone() {
                let waited_ms = timeout.as_millis();
                let what = format!("requests in flight did not end within {waited_ms} ms");
                return Err(Error::new(ErrorKind::Io, format!("'{}': {what}", self.session.name())));
            }
            let waited = self.control.handed_over.wait_timeout(rings, left.min(Duration::from_millis(100)));
            rings = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Starts all rings anew and gives them back.
    fn restart_queues(&self) -> Result<()> {
        for ring in self.control.rings().all() {
            let new = prepare(&self.memory, &self.layout(ring.index), self.options.queue_size, ring.limits)
                .map_err(|error| Error::with_source(ErrorKind::Io, "the driver's shared memory", error))?;
            ring.renew(new);
            // A signal that nobody has seen is about the ring that was.
            ring.fds.take_error();
            ring.fds.given_up.store(false, Ordering::SeqCst);
            self.start_ring(ring)?;
        }
        self.set_hold(Hold::None);
        Ok(())
    }

    /// Makes a ring known to the device.
    fn start_ring(&self, ring: &Ring) -> Result<()> {
        let layout = self.layout(ring.index);
        let setup = queue_setup(&layout, self.options.queue_size, ring.limits.ring_layout, &self.mapping);
        self.session.start_ring(ring.index, &setup, &ring.fds)
    }

    /// Hands an open queue's ring to the driver.
    fn hand_over(&self, ring: Ring) {
        ring.tell_idle();
        self.control.rings().held.push(ring);
        self.control.handed_over.notify_all();
    }

    /// Parks the ring of a dropped queue for the next one, after calling `leave` on it. The ring may be held by the
    /// driver.
    pub(crate) fn park(&self, index: usize, ring: Option<Ring>, leave: impl FnOnce(&mut Ring)) {
        let mut rings = self.control.rings();
        let ring = ring.map(|mut ring| {
            leave(&mut ring);
            ring
        });
        let ring = ring.or_else(|| rings.take_held(index));
        rings.parked.extend(ring);
        drop(rings);
        self.control.handed_over.notify_all();
    }
}

impl Core {
    /// Follows the driver's word. Costs one load in each turn.
    #[inline]
    pub(crate) fn follow_hold(&mut self) {
        if self.inner.control.word() != self.held || self.draining.is_some() {
            self.change_hold();
        }
    }

    #[cold]
    fn change_hold(&mut self) {
        let before = std::mem::replace(&mut self.held, self.inner.control.word());
        let has_ring = self.ring.is_some() || self.draining.is_some();
        if self.held.resets() != before.resets() && self.held.hold() != Hold::Reset && !has_ring {
            // The reset is over. The ring was held all the time; a queue that has kept its ring was not reset.
            self.end_all_at_once();
        }
        match self.held.hold() {
            Hold::None => self.go_on(),
            Hold::Freeze => {
                if let Some(mut ring) = self.ring.take() {
                    ring.publish();
                    self.draining = Some(ring);
                }
                let is_done = |ring: &mut Ring| self.failed || ring.in_flight() == 0;
                if let Some(ring) = self.draining.take_if(is_done) {
                    self.inner.hand_over(ring);
                }
            }
            Hold::Reset => {
                self.end_all_at_once();
                if let Some(ring) = self.ring.take().or(self.draining.take()) {
                    self.inner.hand_over(ring);
                }
            }
        }
    }

    /// Ends all submitted operations with an error, with the next harvest.
    fn end_all_at_once(&mut self) {
        let mut done = std::mem::take(&mut self.immediate);
        self.end_all(&mut done);
        self.immediate = done;
    }

    /// Takes the ring back. If the queue still has it, a freeze was given up.
    fn go_on(&mut self) {
        let kept = self.ring.take().or(self.draining.take());
        if kept.is_none() {
            self.ring = self.inner.control.rings().take_held(self.index);
            // A renewed ring is not broken.
            self.failed &= self.ring.is_none();
        } else {
            self.ring = kept;
        }
        if !self.line.is_empty() {
            let mut done = std::mem::take(&mut self.immediate);
            self.pump(&mut done);
            self.immediate = done;
        }
    }

    /// Harvests from a ring that gets nothing new.
    #[cold]
    pub(crate) fn harvest_draining(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        // Read before the used ring, so that what the device completed before it went away is seen.
        let over = !self.failed && self.is_over();
        self.ring = self.draining.take();
        if !self.failed {
            self.drain(done);
        }
        if over && !self.failed {
            self.fail_all(self.how_it_ended(), done);
        }
        self.draining = self.ring.take();
        done.append(&mut self.immediate);
        let count = done.len() - before;
        self.in_flight -= count;
        count
    }
}
