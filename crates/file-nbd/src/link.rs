//! The thread that owns the connections: sends calls, routes replies, and connects again when the server has gone.
//!
//! A server that allows several connections (`CAN_MULTI_CONN`) gets one for each queue, up to a limit. A flush on one
//! connection covers all of them, but only if all lead to the same running server. So a new connection is used only
//! after the first one has answered a request that was sent after the new one was made. If one connection is lost, all
//! are made anew.
//!
//! Before that, the calls on the other connections get some time to end. Calls without an answer are sent again, so
//! each of them may be carried out twice. Before them, the writes that the server had acknowledged and not flushed are
//! repeated.

mod outage;
mod renewal;

use crate::calls::{Answer, Call, Calls, Wish};
use crate::filled::Filled;
use crate::handshake::{Agreed, connect, end_of_patience};
use crate::lane::{Data, EFAULT, Lane};
use crate::replies::Said;
use crate::stream::Stream;
use crate::unflushed::{Change, Entry, Unflushed, kept_bytes};
use crate::uri::NbdUri;
use block::{IoError, IoResult};
use memory::Lent;
use nbd_wire::WireError;
use nbd_wire::numbers::{command, command_flag, error, export};
use nbd_wire::reply::{Extent, Style};
use nbd_wire::request::Request;
use outage::{Outage, Times};
use renewal::Renewal;
use rustix::event::Timespec;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Instant;

/// The most calls that the server has at once.
const ACTIVE_MAX: usize = 128;
/// The lane of a call that was not sent yet.
const NO_LANE: usize = usize::MAX;

/// A call that the server has.
#[derive(Debug)]
struct Active {
    call: Call,
    /// The index of the connection that carries it.
    lane: usize,
    /// For a flush: it covers the changes before this number.
    mark: u64,
    error: u32,
    /// The parts of a read that have arrived.
    filled: Filled,
    extents: Vec<Extent>,
    /// The call repeats an unflushed write.
    replays: bool,
}

pub(crate) struct Link {
    uri: NbdUri,
    calls: Arc<Calls>,
    agreed: Agreed,
    /// The connections; empty during an outage.
    lanes: Vec<Lane>,
    /// The result of a thread that makes another connection.
    making: Option<Receiver<Option<Lane>>>,
    /// The connection that is being made leads to a server that is gone.
    is_stale: bool,
    /// A new connection, used once the call with this number has ended.
    joining: Option<(u64, Lane)>,
    /// A connection could not be made, so no more are tried.
    has_enough: bool,
    /// Ends when a server has carried out a call: one that only accepts a connection is not back yet.
    outage: Option<Outage>,
    times: Times,
    waiting: VecDeque<Call>,
    /// Calls that want a new connection.
    renewals: Vec<Call>,
    renewal: Option<Renewal>,
    active: BTreeMap<u64, Active>,
    next_cookie: u64,
    unflushed: Unflushed,
    /// Bytes that the calls in flight may add to `unflushed`.
    in_hand_bytes: usize,
    /// The next entry of `unflushed` to repeat.
    replay: Option<usize>,
    /// A connection is lost, and calls on the others get time to end.
    drains: bool,
    flushes_itself: bool,
    /// A flush has failed, so all later flushes fail.
    has_lost: bool,
}

impl Link {
    pub(crate) fn new(uri: NbdUri, stream: Stream, agreed: Agreed, calls: Arc<Calls>) -> Self {
        Self {
            uri,
            calls,
            agreed,
            lanes: vec![Lane::new(stream)],
            making: None,
            is_stale: false,
            joining: None,
            has_enough: false,
            outage: None,
            times: Times::default(),
            waiting: VecDeque::new(),
            renewals: Vec::new(),
            renewal: None,
            active: BTreeMap::new(),
            next_cookie: 1,
            unflushed: Unflushed::default(),
            in_hand_bytes: 0,
            replay: None,
            drains: false,
            flushes_itself: false,
            has_lost: false,
        }
    }

    pub(crate) fn run(mut self) {
        loop {
            if self.calls.is_cancelled() {
                return;
            }
            let is_closed = match self.calls.take() {
                Some(calls) => {
                    self.waiting.extend(calls);
                    false
                }
                None => true,
            };
            if is_closed && self.active.is_empty() && self.waiting.is_empty() || is_closed && self.lanes.is_empty() {
                return self.goodbye();
            }
            if self.lanes.is_empty() {
                self.try_again();
                if !self.lanes.is_empty() {
                    continue;
                }
            } else if let Err((lane, error)) = self.turn() {
                self.lose(lane, &error);
                continue;
            } else if self.renew() {
                continue;
            }
            self.wait();
        }
    }

    fn goodbye(self) {
        let extended = self.is_extended();
        self.lanes.into_iter().for_each(|lane| lane.end(extended));
    }

    fn is_extended(&self) -> bool {
        self.agreed.is_extended()
    }

    fn wait(&mut self) {
        let until = match (self.lanes.is_empty(), &self.outage, &self.renewal) {
            (true, Some(outage), _) => Some(outage.next_try),
            (false, _, Some(renewal)) => renewal.deadline(),
            _ => None,
        };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        self.calls.wait(self.lanes.iter().map(Lane::interest).collect(), timeout);
    }

    /// Runs one turn over all connections. An error names the connection.
    fn turn(&mut self) -> Result<(), (usize, io::Error)> {
        for lane in 0..self.lanes.len() {
            self.receive(lane).map_err(|error| (lane, error))?;
        }
        self.look_for_lanes();
        self.begin_calls();
        self.rest();
        let mut lanes = self.lanes.iter_mut().enumerate();
        lanes.try_for_each(|(index, lane)| lane.send().map_err(|error| (index, error)))
    }

    /// Makes one more connection, if there are more queues than connections. A server that is full may take its time
    /// over the handshake, so a thread waits for it.
    fn look_for_lanes(&mut self) {
        self.drop_stale();
        if self.is_stale {
            // The connection that is being made leads to a server that is gone.
            return;
        }
        match self.making.as_ref().map(Receiver::try_recv) {
            Some(Ok(Some(lane))) if self.replay.is_none() => {
                self.making = None;
                // The read only proves that the first connection's server still runs; its data are thrown away.
                let place = Lent::ended(usize::try_from(self.agreed.block_bytes.max(1)).unwrap_or(1));
                let cookie = self.begin(Call { queue: 0, offset: 0, wish: Wish::Read(place), reply: None }, false);
                self.joining = Some((cookie, lane));
            }
            Some(Ok(_) | Err(TryRecvError::Disconnected)) => (self.making, self.has_enough) = (None, true),
            // Only one connection is made at a time.
            Some(Err(TryRecvError::Empty)) => {}
            None if self.wants_lane() => self.make_lane(),
            None => {}
        }
    }

    fn wants_lane(&self) -> bool {
        let most = self.uri.connections.min(self.calls.queues());
        let allowed = self.agreed.flags & export::CAN_MULTI_CONN != 0 && self.agreed.size_bytes > 0;
        allowed && !self.has_enough && self.joining.is_none() && self.replay.is_none() && self.lanes.len() < most
    }

    fn make_lane(&mut self) {
        let (sender, made) = sync_channel(1);
        let (uri, calls, agreed) = (self.uri.clone(), Arc::clone(&self.calls), self.agreed.clone());
        let work = move || {
            let lane = match connect(&uri, end_of_patience()) {
                // All connections need the same agreement: replies are read by it.
                Ok((stream, same)) if same == agreed => Some(Lane::new(stream)),
                Ok(_) => None,
                Err(error) => {
                    tracing::debug!("no further connection: {error}");
                    None
                }
            };
            // Perhaps the link no longer waits for it.
            let _ = sender.send(lane);
            calls.ring();
        };
        match std::thread::Builder::new().name("nbd-connect".into()).spawn(work) {
            Ok(_) => self.making = Some(made),
            Err(_) => self.has_enough = true,
        }
    }

    fn begin_calls(&mut self) {
        if let Some(index) = self.replay {
            let is_busy = self.active.values().any(|active| active.replays);
            if is_busy {
                return;
            }
            if let Some(Entry { offset, change, .. }) = self.unflushed.get(index).cloned() {
                self.replay = Some(index.saturating_add(1));
                let wish = match change {
                    Change::Data(data) => Wish::Write { data, fua: false },
                    Change::Zeroes { length_bytes, may_unmap } => Wish::Zero { length_bytes, may_unmap },
                };
                self.begin(Call { queue: 0, offset, wish, reply: None }, true);
                return;
            }
            self.replay = None;
            // Calls that the server had not answered are still active, under their old cookies.
            for cookie in self.active.keys().copied().collect::<Vec<_>>() {
                self.put(cookie);
            }
        }
        if self.unflushed.is_too_much() && !self.flushes_itself {
            self.flushes_itself = true;
            self.waiting.push_front(Call { queue: 0, offset: 0, wish: Wish::Flush, reply: None });
        }
        if self.holds_calls() {
            return;
        }
        while self.active.len() < ACTIVE_MAX
            && let Some(call) = self.waiting.pop_front()
        {
            if matches!(call.wish, Wish::Renew) {
                self.renewals.push(call);
                continue;
            }
            let kept_bytes = kept_bytes(&call.wish);
            if kept_bytes > 0 && self.unflushed.is_full_with(self.in_hand_bytes.saturating_add(kept_bytes)) {
                // Writes that end lead to a flush, which makes room.
                self.waiting.push_front(call);
                return;
            }
            if self.has_lost && matches!(call.wish, Wish::Flush) {
                call.fail(IoError::EIO);
                continue;
            }
            self.begin(call, false);
        }
    }

    fn begin(&mut self, call: Call, replays: bool) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(1);
        if !replays {
            self.in_hand_bytes = self.in_hand_bytes.saturating_add(kept_bytes(&call.wish));
        }
        let filled = Filled::default();
        let active = Active { call, lane: 0, mark: 0, error: 0, filled, extents: Vec::new(), replays };
        self.active.insert(cookie, active);
        self.put(cookie);
        cookie
    }

    /// Sends a call, perhaps once more.
    fn put(&mut self, cookie: u64) {
        let extended = self.is_extended();
        let Some(active) = self.active.get_mut(&cookie) else { return };
        (active.error, active.filled, active.mark) = (0, Filled::default(), self.unflushed.mark());
        active.lane = active.call.queue.checked_rem(self.lanes.len()).unwrap_or(0);
        active.extents.clear();
        let (command, flags, payload) = match &active.call.wish {
            Wish::Read(_) => (command::READ, 0, None),
            Wish::Write { data, fua } => {
                let fua = if *fua { command_flag::FUA } else { 0 };
                let length = if extended { command_flag::PAYLOAD_LEN } else { 0 };
                (command::WRITE, fua | length, Some(data.clone()))
            }
            Wish::Zero { may_unmap, .. } => {
                (command::WRITE_ZEROES, if *may_unmap { 0 } else { command_flag::NO_HOLE }, None)
            }
            Wish::Trim { .. } => (command::TRIM, 0, None),
            Wish::Flush => (command::FLUSH, 0, None),
            Wish::Status { .. } => (command::BLOCK_STATUS, 0, None),
            // A renewal is no command of the protocol.
            Wish::Renew => return,
        };
        let length_bytes = active.call.length_bytes();
        let request = Request { flags, command, cookie, offset: active.call.offset, length_bytes };
        if let Some(lane) = self.lanes.get_mut(active.lane) {
            lane.put(&request, extended, payload);
        }
    }

    fn receive(&mut self, index: usize) -> io::Result<()> {
        let broken = |error: WireError| io::Error::new(io::ErrorKind::InvalidData, error);
        if let Some(lane) = self.lanes.get_mut(index) {
            lane.is_drained = false;
        }
        while let Some(lane) = self.lanes.get_mut(index) {
            if lane.data.is_some() {
                if !self.receive_data(index)? {
                    return Ok(());
                }
                continue;
            }
            if let Some(said) = lane.replies.next(self.agreed.style).map_err(broken)? {
                self.hear(index, said).map_err(broken)?;
                continue;
            }
            if !lane.fill()? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Puts data of a read into place; false if more has to arrive.
    fn receive_data(&mut self, index: usize) -> io::Result<bool> {
        let Some(lane) = self.lanes.get_mut(index) else { return Ok(false) };
        let Some(data) = lane.data else { return Ok(false) };
        let Some(Wish::Read(place)) = self.active.get(&data.cookie).map(|active| &active.call.wish) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let Some(count) = lane.receive_into(place, data.at, data.left)? else { return Ok(false) };
        let left = data.left.saturating_sub(count);
        lane.data = Some(Data { at: data.at.saturating_add(count), left, ..data });
        if left == 0 {
            lane.data = None;
            if data.done {
                self.end(data.cookie);
            }
        }
        Ok(true)
    }

    /// Returns the call that a reply on this connection names.
    fn active(&mut self, lane: usize, cookie: u64) -> Result<&mut Active, WireError> {
        let active = self.active.get_mut(&cookie).filter(|active| active.lane == lane);
        active.ok_or(WireError("a reply names a request that was not sent"))
    }

    fn set_error(&mut self, lane: usize, cookie: u64, error: u32) -> Result<(), WireError> {
        let active = self.active(lane, cookie)?;
        if active.replays && error == error::ESHUTDOWN {
            // The next connection repeats all unflushed writes from the beginning.
            return Err(WireError("it is shutting down"));
        }
        // A later part of the reply without an error does not clear an earlier error.
        if error != 0 {
            active.error = error;
        }
        Ok(())
    }

    fn hear(&mut self, lane: usize, said: Said) -> Result<(), WireError> {
        match said {
            Said::Ended { cookie, error } => {
                self.set_error(lane, cookie, error)?;
                self.end(cookie);
            }
            Said::Failed { cookie, error, done } => {
                self.set_error(lane, cookie, error)?;
                if done {
                    self.end(cookie);
                }
            }
            Said::Simple { cookie } => {
                let is_simple = self.agreed.style == Style::Simple;
                let active = self.active(lane, cookie)?;
                match &active.call.wish {
                    Wish::Read(_) if !is_simple => {
                        return Err(WireError("a read has a simple reply, although structured replies were chosen"));
                    }
                    Wish::Read(place) => {
                        let length_bytes = place.length_bytes() as u64;
                        let offset = active.call.offset;
                        return self.hear(lane, Said::Data { cookie, offset, length_bytes, done: true });
                    }
                    _ => self.end(cookie),
                }
            }
            Said::Data { cookie, offset, length_bytes, done } => {
                let (at, left) = self.part_of(lane, cookie, offset, length_bytes)?;
                if let Some(lane) = self.lanes.get_mut(lane) {
                    lane.data = Some(Data { cookie, at, left, done });
                }
            }
            Said::Hole { cookie, offset, length_bytes, done } => {
                let (at, length) = self.part_of(lane, cookie, offset, length_bytes)?;
                if let Some(Wish::Read(place)) = self.active.get(&cookie).map(|active| &active.call.wish) {
                    place.zero(at, length);
                }
                if done {
                    self.end(cookie);
                }
            }
            Said::Extents { cookie, context, extents, done } => {
                let is_wanted = Some(context) == self.agreed.allocation;
                let active = self.active(lane, cookie)?;
                if is_wanted {
                    active.extents = extents;
                }
                if done {
                    self.end(cookie);
                }
            }
        }
        Ok(())
    }

    /// Checks where data of a read go; returns the first byte and the length, in bytes.
    fn part_of(
        &mut self,
        lane: usize,
        cookie: u64,
        offset: u64,
        length_bytes: u64,
    ) -> Result<(usize, usize), WireError> {
        let outside = WireError("a reply has data that were not asked for");
        let active = self.active(lane, cookie)?;
        let Wish::Read(place) = &active.call.wish else { return Err(outside) };
        let at = offset.checked_sub(active.call.offset).and_then(|at| usize::try_from(at).ok()).ok_or(outside)?;
        let length = usize::try_from(length_bytes).map_err(|_| outside)?;
        let end = at.checked_add(length).filter(|end| length > 0 && *end <= place.length_bytes()).ok_or(outside)?;
        if !active.filled.add(at..end) {
            return Err(WireError("a reply has data that were sent already, or in too many pieces"));
        }
        Ok((at, length))
    }

    /// Ends a call that the server has ended.
    fn end(&mut self, cookie: u64) {
        let Some(active) = self.active.remove(&cookie) else { return };
        let Active { call, lane, mark, error, filled, extents, replays } = active;
        if let Some((_, lane)) = self.joining.take_if(|(asked, _)| *asked == cookie) {
            // Whatever the answer, the first connection's server still runs, so the new connection leads to it, too.
            match error {
                error::ESHUTDOWN => self.has_enough = true,
                _ => self.lanes.push(lane),
            }
            return;
        }
        let is_early = self.drains && error == 0 && matches!(call.wish, Wish::Flush);
        if (error == error::ESHUTDOWN || is_early) && !replays {
            // The server is about to go; the call is sent again when a server is there. So is a flush that ends while a
            // connection is lost: it does not cover that connection's writes.
            let (error, filled, extents) = (0, Filled::default(), Vec::new());
            let lane = if self.drains { NO_LANE } else { lane };
            self.active.insert(cookie, Active { call, lane, mark, error, filled, extents, replays });
            return;
        }
        let Call { offset, wish, reply, .. } = call;
        if !replays {
            self.outage = None;
            self.in_hand_bytes = self.in_hand_bytes.saturating_sub(kept_bytes(&wish));
        }
        let result = match (error, &wish) {
            (0, Wish::Read(place)) if !filled.has_all(place.length_bytes()) => Err(IoError::EIO),
            // The memory was gone, or the caller has stopped waiting.
            (0, Wish::Read(place)) if place.has_ended() => Err(IoError::from_errno(EFAULT)),
            (0, _) => Ok(()),
            (number, _) => Err(error_of(number)),
        };
        if replays {
            if result.is_err() {
                self.give_up_flushes("what was not flushed cannot be written again");
            }
            return;
        }
        let answer = self.note(offset, wish, mark, extents, result);
        if let Some(reply) = reply {
            reply.give(answer);
        }
    }

    /// Records what a call has changed, for repeats and flushes.
    fn note(&mut self, offset: u64, wish: Wish, mark: u64, extents: Vec<Extent>, result: IoResult) -> IoResult<Answer> {
        let keeps = self.agreed.flags & export::SEND_FLUSH != 0 && !self.has_lost;
        match wish {
            Wish::Flush => {
                self.flushes_itself = false;
                let result = if self.has_lost { Err(IoError::EIO) } else { result };
                match result {
                    Ok(()) => self.unflushed.forget_before(mark),
                    Err(_) => self.give_up_flushes("the server failed to flush"),
                }
                result.map(|()| Answer::Done)
            }
            Wish::Write { data, fua } => {
                match (&result, fua) {
                    (Ok(()), false) if keeps => self.unflushed.add(offset, Change::Data(data)),
                    (Ok(()), true) => self.unflushed.forget_range(offset, data.len() as u64),
                    _ => {}
                }
                result.map(|()| Answer::Done)
            }
            Wish::Zero { length_bytes, may_unmap } => {
                if result.is_ok() && keeps {
                    self.unflushed.add(offset, Change::Zeroes { length_bytes, may_unmap });
                }
                result.map(|()| Answer::Done)
            }
            Wish::Read(_) | Wish::Trim { .. } | Wish::Renew => result.map(|()| Answer::Done),
            Wish::Status { .. } => result.map(|()| Answer::Extents(extents)),
        }
    }

    fn give_up_flushes(&mut self, why: &str) {
        tracing::error!("'{}': {why}: no flush succeeds until the disk is opened anew", self.uri);
        self.has_lost = true;
        self.unflushed.clear();
        self.replay = self.replay.map(|_| 0);
    }
}

fn error_of(number: u32) -> IoError {
    const EROFS: i32 = 30;
    match number {
        error::EPERM => IoError::from_errno(EROFS),
        number => IoError::from_errno(i32::try_from(number).unwrap_or(5)),
    }
}
