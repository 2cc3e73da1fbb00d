//! The link after its server has gone: it drains the other connections, waits, connects again, or gives up.

use super::{Link, NO_LANE};
use crate::handshake::{Agreed, connect, end_of_patience};
use crate::lane::Lane;
use block::{IoError, LogLimit};
use nbd_wire::numbers::export;
use nbd_wire::reply::Style;
use rustix::event::Timespec;
use std::io;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// The pause between two tries to connect.
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// The time that the server gets to answer on its other connections when one is lost.
const DRAIN_PATIENCE: Duration = Duration::from_secs(2);

/// Keeps the log short if a server leaves again and again.
#[derive(Debug, Default)]
pub(super) struct Times {
    gone: LogLimit,
    back: LogLimit,
    silent: LogLimit,
    other: LogLimit,
    over: LogLimit,
}

/// The state of the link from the loss of its connections until a server carries out calls again.
#[derive(Debug)]
pub(super) struct Outage {
    /// How long calls are kept when a connection is lost: the rest of this outage's time. `None` means the full time,
    /// since nothing was to be done while the server was there.
    pub(super) left: Option<Duration>,
    /// Without a connection, calls are kept until then.
    pub(super) deadline: Instant,
    pub(super) next_try: Instant,
    pub(super) pause: Duration,
    pub(super) has_given_up: bool,
}

impl Outage {
    fn with_a_pause(self) -> Self {
        let now = Instant::now();
        let pause = self.pause.saturating_mul(2).min(RETRY_MAX);
        Self { next_try: now.checked_add(self.pause).unwrap_or(now), pause, ..self }
    }
}

impl Link {
    /// Handles the loss of a connection.
    pub(super) fn lose(&mut self, lane: usize, error: &io::Error) {
        if let Some(times) = self.times.gone.admit() {
            tracing::warn!("'{}': the server has gone ({error}), connecting again (time {times})", self.uri);
        }
        self.part(lane);
    }

    /// Ends all connections. All but `lane`, which is lost, are drained.
    fn part(&mut self, lane: usize) {
        self.is_stale = self.making.is_some();
        // A waiting renewal is answered by the next connection.
        self.renewal = None;
        let asked = self.joining.take().map(|(cookie, _)| cookie);
        self.drain(lane);
        self.lanes.clear();
        asked.map(|cookie| self.active.remove(&cookie));
        self.active.retain(|_, active| !active.replays);
        // No reply can name these calls until they are sent again.
        self.active.values_mut().for_each(|active| active.lane = NO_LANE);
        let now = Instant::now();
        let outage = match self.outage.take() {
            // The server accepted a connection and went again: pause as after a failed try.
            Some(outage) => outage.with_a_pause(),
            None => Outage { left: None, deadline: now, next_try: now, pause: RETRY_MIN, has_given_up: false },
        };
        let deadline = now.checked_add(outage.left.unwrap_or(self.uri.reconnect)).unwrap_or(now);
        self.outage = Some(Outage { deadline, ..outage });
    }

    /// Gives calls their full time again, if a server is there and nothing is to be done.
    pub(super) fn rest(&mut self) {
        if let Some(outage) = &mut self.outage
            && self.active.is_empty()
            && self.waiting.is_empty()
            && self.replay.is_none()
        {
            (outage.left, outage.has_given_up) = (None, false);
        }
    }

    /// Throws away a connection that was being made when the server went.
    pub(super) fn drop_stale(&mut self) {
        let is_made = |making: &Receiver<_>| !matches!(making.try_recv(), Err(TryRecvError::Empty));
        if self.is_stale && self.making.take_if(|making| is_made(making)).is_some() {
            self.is_stale = false;
        }
    }

    /// Lets calls on the other connections end. Otherwise the server might carry them out after they are sent again,
    /// and after later calls.
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
                if let Some(times) = self.times.silent.admit() {
                    tracing::warn!(times, "'{}': the server does not answer on its other connections", self.uri);
                }
                break;
            }
            let fds = open.iter().filter_map(|lane| self.lanes.get(*lane)).map(Lane::interest);
            self.calls.wait(fds.collect(), Timespec::try_from(left).ok());
        }
        self.drains = false;
    }

    pub(super) fn try_again(&mut self) {
        self.drop_stale();
        let Some(outage) = &mut self.outage else { return };
        let now = Instant::now();
        let has_time = now < outage.deadline;
        if now < outage.next_try && has_time {
            return;
        }
        if now >= outage.next_try {
            // Waiting calls fail at the deadline, so a try must not last longer. After it no call waits.
            let deadline = outage.deadline;
            let until = if has_time { deadline.min(end_of_patience()) } else { end_of_patience() };
            match connect(&self.uri, until) {
                Ok((stream, agreed)) if self.is_same(&agreed) => {
                    // The limit does not run while writes are repeated. If the server goes again, the rest of it
                    // counts.
                    let left = Some(deadline.saturating_duration_since(Instant::now()));
                    self.outage = self.outage.take().map(|outage| Outage { left, ..outage });
                    if let Some(times) = self.times.back.admit() {
                        tracing::info!("'{}': connected again (time {times})", self.uri);
                    }
                    self.take_up(Lane::new(stream), agreed);
                    return;
                }
                Ok(_) => {
                    if let Some(times) = self.times.other.admit() {
                        tracing::error!(times, "'{}': the server has another disk there, which is not used", self.uri);
                    }
                }
                Err(error) => tracing::debug!("{error}"),
            }
            self.outage = self.outage.take().map(Outage::with_a_pause);
        }
        if !has_time {
            self.fail_all();
        }
    }

    /// Whether everything that was begun can go on with the new agreement.
    pub(super) fn is_same(&self, new: &Agreed) -> bool {
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
            if let Some(times) = self.times.over.admit() {
                tracing::error!(times, "'{}': the server does not come back, requests fail", self.uri);
            }
        }
        let active = std::mem::take(&mut self.active);
        self.end_renewals(Err(IoError::EIO));
        for call in active.into_values().map(|active| active.call).chain(self.waiting.drain(..)) {
            call.fail(IoError::EIO);
        }
        (self.flushes_itself, self.in_hand_bytes) = (false, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::Calls;
    use crate::stream::Stream;
    use crate::uri::NbdUri;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::mpsc::{SyncSender, channel, sync_channel};

    #[test]
    fn a_connection_that_was_begun_before_an_outage_is_never_used_whenever_it_is_made() {
        // Without a size, none is begun here.
        let agreed = Agreed {
            style: Style::Simple,
            size_bytes: 0,
            flags: 0,
            block_bytes: 1,
            payload_bytes_max: 1 << 20,
            allocation: None,
        };
        let uri = NbdUri::parse("nbd+unix:///?socket=none").unwrap();
        let (stream, _peer) = UnixStream::pair().unwrap();
        let mut link = Link::new(uri, Stream::Unix(stream), agreed, Arc::new(Calls::new(0).unwrap()));
        let (work, jobs) = channel::<SyncSender<Option<Lane>>>();
        let makes = std::thread::spawn(move || {
            for (number, sender) in jobs.into_iter().enumerate() {
                // At any moment of what the other thread does.
                (0..number % 500).for_each(|_| std::hint::spin_loop());
                sender.send(None).unwrap();
            }
        });
        for round in 0..2_000 {
            let (sender, made) = sync_channel(1);
            (link.making, link.is_stale) = (Some(made), true);
            work.send(sender).unwrap();
            while link.making.is_some() {
                link.look_for_lanes();
            }
            // It is set where the answer is believed.
            assert!(!link.has_enough && !link.is_stale, "round {round}");
        }
        drop(work);
        makes.join().unwrap();
    }
}
