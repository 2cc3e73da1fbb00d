//! Moves a queue from one chain to the next: opens new files, holds requests, adopts. See [`crate::chain::exchange`].

use super::{Core, Former, Slot};
use crate::chain::exchange::board::Hold;
use crate::chain::exchange::lease::Lease;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Part, Parts, Result};
use std::rc::Rc;
use std::sync::Arc;

impl Core {
    /// Opens the files that only the next chain has. Holds requests from now on if `hold` says so.
    pub(crate) fn prepare(&mut self, layers: &[Arc<Layer>], hold: Hold) -> Result<()> {
        let opened = layers.iter().map(|layer| Ok((Arc::clone(layer), layer.open_queues(&self.ctx)?)));
        self.prepared = opened.collect::<Result<_>>()?;
        self.holds = hold != Hold::No;
        self.until_quiet = hold == Hold::UntilQuiet;
        // What has ended since the last harvest holds nothing up.
        self.take_ends();
        self.look_whether_quiet();
        Ok(())
    }

    /// Begins all requests on another chain from now on, the held ones first.
    pub(crate) fn adopt(&mut self, chain: &Arc<Chain>, lease: &Arc<Lease>) {
        self.take_ends();
        let shared = self.shared.next(chain, &std::mem::take(&mut self.prepared), &self.ctx);
        let participant = std::mem::replace(&mut self.participant, shared.join_epochs());
        let _lease = self.lease.replace(Arc::clone(lease));
        let in_flight = self.in_flight_here();
        if in_flight > 0 {
            self.formers.push(Former { generation: self.generation, in_flight, participant, _lease });
        }
        self.generation = self.generation.wrapping_add(1);
        self.reserves_ahead = shared.chain.reserves_ahead();
        self.shared = Rc::new(shared);
        self.release();
    }

    /// Goes on with the present chain.
    pub(crate) fn resume(&mut self, lease: &Arc<Lease>) {
        self.lease = Some(Arc::clone(lease));
        self.prepared = Vec::new();
        self.release();
    }

    fn release(&mut self) {
        (self.holds, self.until_quiet) = (false, false);
        for (since, tag, op) in std::mem::take(&mut self.held) {
            self.timings.note(tag, Parts::of(Part::Queue, since.elapsed()));
            self.begin(tag, op);
        }
    }

    /// Stops beginning requests: nobody gives this queue orders any more.
    pub(crate) fn orphan(&mut self) {
        (self.holds, self.until_quiet) = (true, true);
        self.look_whether_quiet();
    }

    /// Returns how many requests on the present chain have not ended.
    fn in_flight_here(&self) -> usize {
        let elsewhere: usize = self.formers.iter().map(|former| former.in_flight).sum();
        self.slots.len().saturating_sub(self.free.len()).saturating_sub(elsewhere)
    }

    pub(super) fn look_whether_quiet(&mut self) {
        if self.until_quiet && self.in_flight_here() == 0 {
            self.lease = None;
        }
    }

    /// Notes the end of a request that began on a former chain.
    #[cold]
    pub(super) fn end_former(&mut self, slot: &Slot) {
        let Some(former) = self.formers.iter_mut().find(|former| former.generation == slot.generation) else { return };
        if let (Some(participant), Some(ticket)) = (&mut former.participant, slot.ticket) {
            participant.end(ticket);
        }
        former.in_flight = former.in_flight.saturating_sub(1);
        self.formers.retain(|former| former.in_flight > 0);
    }
}
