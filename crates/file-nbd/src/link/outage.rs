//! What a link does when its server has gone: it drains what is left, waits, connects again, or gives up.

use super::Link;
use crate::handshake::{Agreed, connect};
use crate::lane::Lane;
use block::IoError;
use nbd_wire::numbers::export;
use nbd_wire::reply::Style;
use rustix::event::Timespec;
use std::io;
use std::time::{Duration, Instant};

/// Between two tries to connect.
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// What the server gets to answer on its other connections when one is gone.
const DRAIN_PATIENCE: Duration = Duration::from_secs(2);
/// Where the link is while it is not connected.
#[derive(Debug)]
pub(super) struct Outage {
    /// Until then calls are kept.
    pub(super) deadline: Instant,
    pub(super) next_try: Instant,
    pub(super) pause: Duration,
    pub(super) has_given_up: bool,
}

impl Link {
    /// A connection is gone.
    pub(super) fn lose(&mut self, lane: usize, error: &io::Error) {
        tracing::warn!("'{}': the server has gone ({error}), connecting again", self.uri);
        self.making = None;
        let asked = self.joining.take().map(|(cookie, _)| cookie);
        self.drain(lane);
        self.lanes.clear();
        asked.map(|cookie| self.active.remove(&cookie));
        self.active.retain(|_, active| !active.replays);
        let now = Instant::now();
        let deadline = now.checked_add(self.uri.reconnect).unwrap_or(now);
        self.outage = Some(Outage { deadline, next_try: now, pause: RETRY_MIN, has_given_up: false });
    }

    /// Lets what went over the other connections end: the server may still be at it, and would carry it out after what is
    /// sent again, and after what follows that.
    fn drain(&mut self, gone: usize) {
        let begun = Instant::now();
        let mut open: Vec<usize> = (0..self.lanes.len()).filter(|lane| *lane != gone).collect();
        self.drains = true;
        while !self.calls.is_cancelled() {
            open.retain(|lane| {
                let sent = self.lanes.get_mut(*lane).is_some_and(|lane| lane.send().is_ok());
                sent && self.receive(*lane).is_ok() && self.active.values().any(|active| active.lane == *lane)
            });
            let left = DRAIN_PATIENCE.saturating_sub(begun.elapsed());
            if open.is_empty() {
                break;
            }
            if left.is_zero() {
                tracing::warn!("'{}': the server does not answer on its other connections", self.uri);
                break;
            }
            let fds = open.iter().filter_map(|lane| self.lanes.get(*lane)).map(Lane::interest);
            self.calls.wait(fds.collect(), Timespec::try_from(left).ok());
        }
        self.drains = false;
    }

    pub(super) fn try_again(&mut self) {
        let Some(outage) = &mut self.outage else { return };
        let now = Instant::now();
        if now < outage.next_try && now < outage.deadline {
            return;
        }
        let has_time = now < outage.deadline;
        if now >= outage.next_try {
            match connect(&self.uri) {
                Ok((stream, agreed)) if self.is_same(&agreed) => {
                    tracing::info!("'{}': connected again", self.uri);
                    self.lanes.push(Lane::new(stream));
                    (self.agreed, self.outage, self.has_enough) = (agreed, None, false);
                    self.replay = Some(0);
                    return;
                }
                Ok(_) => tracing::error!("'{}': the server has another disk there, which is not used", self.uri),
                Err(error) => tracing::debug!("{error}"),
            }
            if let Some(outage) = &mut self.outage {
                outage.next_try = Instant::now().checked_add(outage.pause).unwrap_or(now);
                outage.pause = outage.pause.saturating_mul(2).min(RETRY_MAX);
            }
        }
        if !has_time {
            self.fail_all();
        }
    }

    /// Whether what was agreed on lets everything go on that was begun.
    fn is_same(&self, new: &Agreed) -> bool {
        let old = &self.agreed;
        let lost = old.flags & !new.flags;
        let is_as_able =
            lost & !export::READ_ONLY == 0 && old.flags & export::READ_ONLY == new.flags & export::READ_ONLY;
        is_as_able
            && new.size_bytes >= old.size_bytes
            && new.block_bytes <= old.block_bytes
            && new.payload_bytes_max >= old.payload_bytes_max
            && (new.style == Style::Extended || old.style != Style::Extended)
    }

    pub(super) fn fail_all(&mut self) {
        if let Some(outage) = &mut self.outage
            && !outage.has_given_up
        {
            outage.has_given_up = true;
            tracing::error!("'{}': the server does not come back, requests fail", self.uri);
        }
        let active = std::mem::take(&mut self.active);
        for call in active.into_values().map(|active| active.call).chain(self.waiting.drain(..)) {
            call.fail(IoError::EIO);
        }
        self.flushes_itself = false;
    }
}
