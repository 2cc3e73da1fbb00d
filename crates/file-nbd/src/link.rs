//! The thread that has the connection: sends calls, routes replies, and connects again when the server has gone.
//!
//! What the server has in hand when it goes is sent once more, as all of it can be done twice. Before that, what it had
//! acknowledged and not flushed is written again.

use crate::calls::{Answer, Call, Calls, Wish};
use crate::handshake::{Agreed, Stream, connect};
use crate::replies::{Replies, Said};
use crate::unflushed::{Change, Unflushed};
use crate::uri::NbdUri;
use block::{IoError, IoResult};
use memory::{AlignedBuf, SocketPart, send_parts};
use nbd_wire::WireError;
use nbd_wire::numbers::{command, command_flag, error, export};
use nbd_wire::reply::{Extent, Style};
use nbd_wire::request::Request;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls that the server has at once.
const ACTIVE_MAX: usize = 128;
/// Between two tries to connect.
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// A call that the server has.
#[derive(Debug)]
struct Active {
    call: Call,
    /// Of a flush: what it covers.
    mark: u64,
    error: u32,
    /// Bytes of a read that are here.
    filled: u64,
    extents: Vec<Extent>,
    /// It is part of the replay.
    replays: bool,
}

/// Data on their way to a call.
#[derive(Debug, Clone, Copy)]
struct Data {
    cookie: u64,
    at: usize,
    left: usize,
    done: bool,
}

/// Where the link is while it is not connected.
#[derive(Debug)]
struct Outage {
    /// Until then calls are kept.
    deadline: Instant,
    next_try: Instant,
    pause: Duration,
    has_given_up: bool,
}

pub(crate) struct Link {
    uri: NbdUri,
    calls: Arc<Calls>,
    agreed: Agreed,
    stream: Option<Stream>,
    outage: Option<Outage>,
    waiting: VecDeque<Call>,
    active: BTreeMap<u64, Active>,
    next_cookie: u64,
    /// Headers with the payload behind them.
    sending: VecDeque<(Vec<u8>, Option<Arc<AlignedBuf>>)>,
    /// What of the first of them is sent.
    sent: usize,
    replies: Replies,
    data: Option<Data>,
    unflushed: Unflushed,
    /// The next entry to write once more.
    replay: Option<usize>,
    flushes_itself: bool,
    /// A flush has failed: none is believed any more.
    has_lost: bool,
}

impl Link {
    pub(crate) fn new(uri: NbdUri, stream: Stream, agreed: Agreed, calls: Arc<Calls>) -> Self {
        Self {
            uri,
            calls,
            agreed,
            stream: Some(stream),
            outage: None,
            waiting: VecDeque::new(),
            active: BTreeMap::new(),
            next_cookie: 1,
            sending: VecDeque::new(),
            sent: 0,
            replies: Replies::new(),
            data: None,
            unflushed: Unflushed::default(),
            replay: None,
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
            if is_closed && self.active.is_empty() && self.waiting.is_empty() || is_closed && self.stream.is_none() {
                return self.goodbye();
            }
            if self.stream.is_none() {
                self.try_again();
                if self.stream.is_some() {
                    continue;
                }
            } else if let Err(error) = self.turn() {
                self.lose(&error);
                continue;
            }
            self.wait();
        }
    }

    fn goodbye(mut self) {
        let request = Request { flags: 0, command: command::DISC, cookie: 0, offset: 0, length_bytes: 0 };
        let mut bytes = Vec::new();
        request.put(&mut bytes, self.agreed.style == Style::Extended);
        self.sending.push_back((bytes, None));
        // It is a courtesy.
        let _ = self.send();
    }

    fn wait(&mut self) {
        let mut fds = vec![PollFd::new(&self.calls.wake, PollFlags::IN)];
        let mut timeout = None;
        if let Some(stream) = &self.stream {
            let writes = if self.sending.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            fds.push(PollFd::new(stream, PollFlags::IN | writes));
        } else if let Some(outage) = &self.outage {
            let left = outage.next_try.saturating_duration_since(Instant::now());
            timeout = Timespec::try_from(left).ok();
        }
        // Whatever it says, all are looked at.
        let _ = poll(&mut fds, timeout.as_ref());
        drop(fds);
        self.calls.calm();
    }

    fn turn(&mut self) -> io::Result<()> {
        self.receive()?;
        self.begin_calls();
        self.send()
    }

    fn begin_calls(&mut self) {
        if let Some(index) = self.replay {
            let is_busy = self.active.values().any(|active| active.replays);
            if is_busy {
                return;
            }
            if let Some((offset, change)) = self.unflushed.get(index).cloned() {
                self.replay = Some(index.saturating_add(1));
                let wish = match change {
                    Change::Data(data) => Wish::Write { data, fua: false },
                    Change::Zeroes { length_bytes, may_unmap } => Wish::Zero { length_bytes, may_unmap },
                };
                return self.begin(Call { offset, wish, reply: None }, true);
            }
            self.replay = None;
            // Those that the server had in hand are still there, under their old names.
            for cookie in self.active.keys().copied().collect::<Vec<_>>() {
                self.put(cookie);
            }
        }
        if self.unflushed.is_too_much() && !self.flushes_itself {
            self.flushes_itself = true;
            self.waiting.push_front(Call { offset: 0, wish: Wish::Flush, reply: None });
        }
        while self.active.len() < ACTIVE_MAX
            && let Some(call) = self.waiting.pop_front()
        {
            if self.has_lost && matches!(call.wish, Wish::Flush) {
                call.fail(IoError::EIO);
                continue;
            }
            self.begin(call, false);
        }
    }

    fn begin(&mut self, call: Call, replays: bool) {
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(1);
        self.active.insert(cookie, Active { call, mark: 0, error: 0, filled: 0, extents: Vec::new(), replays });
        self.put(cookie);
    }

    /// Sends a call, perhaps once more.
    fn put(&mut self, cookie: u64) {
        let extended = self.agreed.style == Style::Extended;
        let Some(active) = self.active.get_mut(&cookie) else { return };
        (active.error, active.filled, active.mark) = (0, 0, self.unflushed.mark());
        active.extents.clear();
        let (command, flags, payload) = match &active.call.wish {
            Wish::Read(_) => (command::READ, 0, None),
            Wish::Write { data, fua } => {
                let fua = if *fua { command_flag::FUA } else { 0 };
                let length = if extended { command_flag::PAYLOAD_LEN } else { 0 };
                (command::WRITE, fua | length, Some(Arc::clone(data)))
            }
            Wish::Zero { may_unmap, .. } => {
                (command::WRITE_ZEROES, if *may_unmap { 0 } else { command_flag::NO_HOLE }, None)
            }
            Wish::Trim { .. } => (command::TRIM, 0, None),
            Wish::Flush => (command::FLUSH, 0, None),
            Wish::Status { .. } => (command::BLOCK_STATUS, 0, None),
        };
        let length_bytes = active.call.length_bytes();
        let request = Request { flags, command, cookie, offset: active.call.offset, length_bytes };
        let mut head = Vec::new();
        request.put(&mut head, extended);
        self.sending.push_back((head, payload));
    }

    fn send(&mut self) -> io::Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        while !self.sending.is_empty() {
            let mut skip = self.sent;
            let parts = self.sending.iter().flat_map(|(head, payload)| {
                let skipped = std::mem::take(&mut skip);
                let payload = payload.as_ref().map_or(&[][..], |payload| payload);
                let in_payload = skipped.saturating_sub(head.len());
                [head.get(skipped..).unwrap_or_default(), payload.get(in_payload..).unwrap_or_default()]
                    .map(SocketPart::Bytes)
            });
            match send_parts(stream.as_fd(), parts) {
                Ok(count) => self.sent = self.sent.saturating_add(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some((head, payload)) = self.sending.front() {
                let length = head.len().saturating_add(payload.as_ref().map_or(0, |payload| payload.len()));
                if self.sent < length {
                    break;
                }
                self.sent = self.sent.saturating_sub(length);
                self.sending.pop_front();
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        let broken = |error: WireError| io::Error::new(io::ErrorKind::InvalidData, error);
        loop {
            if self.data.is_some() {
                if !self.receive_data()? {
                    return Ok(());
                }
                continue;
            }
            if let Some(said) = self.replies.next(self.agreed.style).map_err(broken)? {
                self.hear(said).map_err(broken)?;
                continue;
            }
            let Some(stream) = &self.stream else { return Ok(()) };
            match self.replies.fill(|room| Ok(rustix::io::read(stream, room)?)) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Puts data where they belong; false if more has to arrive.
    fn receive_data(&mut self) -> io::Result<bool> {
        let (Some(data), Some(stream)) = (self.data, &self.stream) else { return Ok(false) };
        let Some(Wish::Read(target)) = self.active.get_mut(&data.cookie).map(|active| &mut active.call.wish) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let end = data.at.saturating_add(data.left);
        let place = target.get_mut(data.at..end).ok_or(io::ErrorKind::InvalidData)?;
        let count = match self.replies.is_empty() {
            false => self.replies.move_to(place),
            true => match rustix::io::read(stream, place).map_err(io::Error::from) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it left within a reply")),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(error),
            },
        };
        let left = data.left.saturating_sub(count);
        self.data = Some(Data { at: data.at.saturating_add(count), left, ..data });
        if left == 0 {
            self.data = None;
            if data.done {
                self.end(data.cookie);
            }
        }
        Ok(true)
    }

    fn hear(&mut self, said: Said) -> Result<(), WireError> {
        let unknown = WireError("a reply names a request that was not sent");
        match said {
            Said::Ended { cookie, error } => {
                self.active.get_mut(&cookie).ok_or(unknown)?.error = error;
                self.end(cookie);
            }
            Said::Failed { cookie, error, done } => {
                self.active.get_mut(&cookie).ok_or(unknown)?.error = error;
                if done {
                    self.end(cookie);
                }
            }
            Said::Simple { cookie } => {
                let active = self.active.get_mut(&cookie).ok_or(unknown)?;
                match &active.call.wish {
                    Wish::Read(_) if self.agreed.style != Style::Simple => {
                        return Err(WireError("a read has a simple reply, although structured replies were chosen"));
                    }
                    Wish::Read(data) => {
                        let length_bytes = data.len() as u64;
                        let offset = active.call.offset;
                        return self.hear(Said::Data { cookie, offset, length_bytes, done: true });
                    }
                    _ => self.end(cookie),
                }
            }
            Said::Data { cookie, offset, length_bytes, done } => {
                let (at, left) = self.part_of(cookie, offset, length_bytes)?;
                self.data = Some(Data { cookie, at, left, done });
            }
            Said::Hole { cookie, offset, length_bytes, done } => {
                let (at, length) = self.part_of(cookie, offset, length_bytes)?;
                let wish = self.active.get_mut(&cookie).map(|active| &mut active.call.wish);
                if let Some(Wish::Read(data)) = wish
                    && let Some(part) = data.get_mut(at..at.saturating_add(length))
                {
                    part.fill(0);
                }
                if done {
                    self.end(cookie);
                }
            }
            Said::Extents { cookie, context, extents, done } => {
                let active = self.active.get_mut(&cookie).ok_or(unknown)?;
                if Some(context) == self.agreed.allocation {
                    active.extents = extents;
                }
                if done {
                    self.end(cookie);
                }
            }
        }
        Ok(())
    }

    /// Where data of a read go: first byte and bytes.
    fn part_of(&mut self, cookie: u64, offset: u64, length_bytes: u64) -> Result<(usize, usize), WireError> {
        let outside = WireError("a reply has data that were not asked for");
        let active = self.active.get_mut(&cookie).ok_or(outside)?;
        let Wish::Read(data) = &active.call.wish else { return Err(outside) };
        let at = offset.checked_sub(active.call.offset).and_then(|at| usize::try_from(at).ok()).ok_or(outside)?;
        let length = usize::try_from(length_bytes).map_err(|_| outside)?;
        if length == 0 || at.checked_add(length).is_none_or(|end| end > data.len()) {
            return Err(outside);
        }
        active.filled = active.filled.saturating_add(length_bytes);
        Ok((at, length))
    }

    /// The server has ended a call.
    fn end(&mut self, cookie: u64) {
        let Some(active) = self.active.remove(&cookie) else { return };
        let Active { call, mark, error, filled, extents, replays } = active;
        if error == error::ESHUTDOWN && !replays {
            // The server is about to go. When it is back, or another is there, the call is sent again.
            self.active.insert(cookie, Active { call, mark, error: 0, filled: 0, extents: Vec::new(), replays });
            return;
        }
        let Call { offset, wish, reply } = call;
        let length_bytes = match &wish {
            Wish::Read(data) => data.len() as u64,
            _ => 0,
        };
        let result = match error {
            0 if filled < length_bytes => Err(IoError::EIO),
            0 => Ok(()),
            number => Err(error_of(number)),
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

    /// Remembers what a call has changed.
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
            Wish::Read(data) => result.map(|()| Answer::Data(data)),
            Wish::Write { data, fua } => {
                if result.is_ok() && keeps && !fua {
                    self.unflushed.add(offset, Change::Data(data));
                }
                result.map(|()| Answer::Done)
            }
            Wish::Zero { length_bytes, may_unmap } => {
                if result.is_ok() && keeps {
                    self.unflushed.add(offset, Change::Zeroes { length_bytes, may_unmap });
                }
                result.map(|()| Answer::Done)
            }
            Wish::Trim { .. } => result.map(|()| Answer::Done),
            Wish::Status { .. } => result.map(|()| Answer::Extents(extents)),
        }
    }

    fn give_up_flushes(&mut self, why: &str) {
        tracing::error!("'{}': {why}: no flush succeeds until the disk is opened anew", self.uri);
        self.has_lost = true;
        self.unflushed.clear();
        self.replay = self.replay.map(|_| 0);
    }

    /// The connection is gone.
    fn lose(&mut self, error: &io::Error) {
        tracing::warn!("'{}': the server has gone ({error}), connecting again", self.uri);
        self.stream = None;
        self.sending.clear();
        (self.sent, self.data, self.replies) = (0, None, Replies::new());
        self.active.retain(|_, active| !active.replays);
        let now = Instant::now();
        let deadline = now.checked_add(self.uri.reconnect).unwrap_or(now);
        self.outage = Some(Outage { deadline, next_try: now, pause: RETRY_MIN, has_given_up: false });
    }

    fn try_again(&mut self) {
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
                    (self.stream, self.agreed, self.outage) = (Some(stream), agreed, None);
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

    fn fail_all(&mut self) {
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

fn error_of(number: u32) -> IoError {
    const EROFS: i32 = 30;
    match number {
        error::EPERM => IoError::from_errno(EROFS),
        number => IoError::from_errno(i32::try_from(number).unwrap_or(5)),
    }
}
