//! How a link learns that the disk has grown: a server tells the size only when a client connects.
//!
//! The link makes another connection, and keeps those that it has: some servers end with their last client. If the disk
//! is longer, the new connection takes the place of all others, once no calls are in flight. If calls were sent again
//! while the server still has them, it could carry them out after later ones.

use super::Link;
use crate::calls::Answer;
use crate::handshake::{Agreed, connect, end_of_patience};
use crate::lane::Lane;
use block::{IoError, IoResult, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How long new calls are held until the server has ended those that it has.
const PATIENCE: Duration = Duration::from_secs(5);

/// The state of a renewal.
pub(super) enum Renewal {
    /// A thread is making another connection.
    Asks(Receiver<Result<(Lane, Agreed)>>),
    /// The new connection has a longer disk. No call is begun until the connection is used, or the time is over.
    Waits { lane: Box<Lane>, agreed: Agreed, until: Instant },
}

impl Renewal {
    /// Returns when to look again if nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Asks(_) => None,
            Self::Waits { until, .. } => Some(*until),
        }
    }
}

impl Link {
    /// Whether no call may be begun.
    pub(super) fn holds_calls(&self) -> bool {
        matches!(self.renewal, Some(Renewal::Waits { .. }))
    }

    /// Goes on with a renewal. Returns whether other calls may go on because of it.
    pub(super) fn renew(&mut self) -> bool {
        match self.renewal.take() {
            None if self.renewals.is_empty() => false,
            None => {
                self.connect_aside();
                false
            }
            Some(Renewal::Asks(asked)) => match asked.try_recv() {
                Err(TryRecvError::Empty) => {
                    self.renewal = Some(Renewal::Asks(asked));
                    false
                }
                Ok(Ok((lane, agreed))) => {
                    self.look_at(lane, agreed);
                    true
                }
                Ok(Err(error)) => {
                    tracing::warn!("'{}': cannot see whether the disk has grown: {error}", self.uri);
                    self.end_renewals(Err(IoError::EIO));
                    false
                }
                Err(TryRecvError::Disconnected) => {
                    self.end_renewals(Err(IoError::EIO));
                    false
                }
            },
            Some(Renewal::Waits { lane, agreed, .. }) if self.active.is_empty() && self.replay.is_none() => {
                // A connection that is being made may know the old size.
                self.is_stale = self.making.is_some();
                let extended = self.is_extended();
                self.lanes.drain(..).for_each(|lane| lane.end(extended));
                self.take_up(*lane, agreed);
                true
            }
            Some(Renewal::Waits { lane, agreed, until }) if Instant::now() >= until => {
                tracing::warn!("'{}': requests do not end, so its new size cannot be used", self.uri);
                lane.end(agreed.is_extended());
                self.end_renewals(Err(IoError::EIO));
                true
            }
            waits => {
                self.renewal = waits;
                false
            }
        }
    }

    fn connect_aside(&mut self) {
        tracing::debug!("'{}': connecting on the side, to see whether the disk has grown", self.uri);
        let (sender, asked) = sync_channel(1);
        let (uri, calls) = (self.uri.clone(), Arc::clone(&self.calls));
        let work = move || {
            let made = connect(&uri, end_of_patience());
            // Perhaps the link no longer waits for it.
            let _ = sender.send(made.map(|(stream, agreed)| (Lane::new(stream), agreed)));
            calls.ring();
        };
        match std::thread::Builder::new().name("nbd-connect".into()).spawn(work) {
            Ok(_) => self.renewal = Some(Renewal::Asks(asked)),
            Err(_) => self.end_renewals(Err(IoError::EIO)),
        }
    }

    fn look_at(&mut self, lane: Lane, agreed: Agreed) {
        if agreed.size_bytes > self.agreed.size_bytes && self.is_same(&agreed) {
            let now = Instant::now();
            let until = now.checked_add(PATIENCE).unwrap_or(now);
            self.renewal = Some(Renewal::Waits { lane: Box::new(lane), agreed, until });
        } else {
            lane.end(agreed.is_extended());
            self.end_renewals(Ok(()));
        }
    }

    /// Takes over a new connection when there is no other.
    pub(super) fn take_up(&mut self, lane: Lane, agreed: Agreed) {
        self.lanes.push(lane);
        self.calls.has_size(agreed.size_bytes);
        (self.agreed, self.has_enough, self.replay) = (agreed, false, Some(0));
        self.end_renewals(Ok(()));
    }

    pub(super) fn end_renewals(&mut self, result: IoResult) {
        self.renewal = None;
        for reply in self.renewals.drain(..).filter_map(|call| call.reply) {
            reply.give(result.map(|()| Answer::Done));
        }
    }
}
