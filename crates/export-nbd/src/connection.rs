//! One client on one reactor. Nothing here waits: a client that is slow keeps only its own requests.

use crate::export::NbdExport;
use crate::handshake::{Handshake, Step};
use crate::input::Input;
use crate::limits::{Account, Grant, Limits, PayloadMemory};
use crate::link::Link;
use crate::output::Output;
use crate::status::StatusThread;
use crate::tls::Entered;
use crate::transmission::{Next, Transmission};
use crate::under_tls::{self, Look, UnderTls};
use block::{Interest, LogLimit, Poller, PollerId, ReactorCtx, Timer, Watch};
use memory::{IoBuf, receive_into};
use nbd_wire::numbers::error;
use nbd_wire::request::Request;
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Steps of one turn: then others on the reactor come first.
const STEPS_PER_TURN: usize = 64;
/// Payload that is received in one turn.
const BYTES_PER_TURN: usize = 4 << 20;
/// After so many bytes of replies, the rest is sent in the next turn. A client that takes them as fast as they come would
/// get all of a long reply in one turn otherwise, which takes some 30 ms for 32 MiB.
const SENT_PER_TURN: usize = 1 << 20;

/// The exports that a client may choose from. They are let go of before `guard`.
pub(crate) struct Choice {
    pub(crate) exports: Arc<[NbdExport]>,
    /// Says that a client chooses, until it is dropped.
    #[expect(dead_code, reason = "only its drop counts")]
    pub(crate) guard: Box<dyn Send>,
}

/// What a connection is made of.
pub(crate) struct Setup<G> {
    pub(crate) entered: Entered,
    /// When it has to have chosen an export.
    pub(crate) until: Instant,
    pub(crate) choice: Choice,
    pub(crate) limits: Limits,
    pub(crate) payload: PayloadMemory,
    pub(crate) link: Arc<Link>,
    /// Counts the connection as long as anything of it lives.
    pub(crate) guard: G,
}

enum Phase {
    Handshake(Handshake),
    Transmission(Box<Transmission>),
}

/// What arrives next, if it is no header.
enum Incoming {
    Header,
    Payload { request: Request, buffer: IoBuf, grant: Option<Grant>, filled: usize },
    Unwanted { request: Request, left: u64, error: u32 },
}

pub(crate) struct Connection<G> {
    socket: Watch<OwnedFd>,
    tls: Option<UnderTls>,
    ctx: Rc<dyn ReactorCtx>,
    id: Option<PollerId>,
    phase: Phase,
    input: Input,
    output: Output,
    incoming: Incoming,
    /// For the handshake.
    deadline: Timer,
    payload: PayloadMemory,
    limits: Limits,
    /// Nothing when an export is chosen: whoever uses one disk keeps no other open. Dropped after the phase, which has
    /// them, too.
    choice: Option<Choice>,
    link: Arc<Link>,
    status: Option<StatusThread>,
    guard: G,
    /// Bytes that were sent in this turn, without TLS.
    sent_bytes: usize,
    /// No more requests are taken.
    shuts: bool,
    /// The client said goodbye: those that it sent before are carried out.
    is_leaving: bool,
    /// The socket is of no use any more.
    is_dead: bool,
}

/// What a step came to.
enum Outcome {
    Goes,
    Waits,
}

impl<G: Clone + Send + 'static> Connection<G> {
    /// Begins to serve a client, on the reactor's own thread.
    pub(crate) fn start(ctx: &Rc<dyn ReactorCtx>, setup: Setup<G>) -> block::Result<()> {
        let Setup { entered, until, choice, limits, payload, link, guard } = setup;
        let Entered { socket, tls, said } = entered;
        let mut greeting = Vec::new();
        let mut handshake = Handshake::begin(Arc::clone(&choice.exports), limits.payload_bytes, &mut greeting);
        if tls.is_some() {
            handshake = handshake.under_tls();
        }
        let mut output = Output::default();
        if said.is_empty() {
            output.bytes(greeting, None);
        }
        let mut deadline = ctx.timer();
        let left = until.saturating_duration_since(Instant::now());
        deadline.set(ctx.now().checked_add(left).unwrap_or_else(|| ctx.now()));
        let connection = Self {
            socket: Watch::new(ctx, socket)?,
            tls,
            ctx: Rc::clone(ctx),
            id: None,
            phase: Phase::Handshake(handshake),
            input: Input::new(&said),
            output,
            incoming: Incoming::Header,
            deadline,
            payload,
            limits,
            choice: Some(choice),
            link,
            status: None,
            guard,
            sent_bytes: 0,
            shuts: false,
            is_leaving: false,
            is_dead: false,
        };
        let connection = Rc::new(RefCell::new(connection));
        let id = ctx.add_poller(Rc::clone(&connection) as _)?;
        connection.borrow_mut().id = Some(id);
        Ok(())
    }

    fn name(&self) -> &str {
        match &self.phase {
            Phase::Handshake(_) => "",
            Phase::Transmission(transmission) => &transmission.export().name,
        }
    }

    fn breaks(&mut self, why: impl std::fmt::Display) {
        if !self.is_dead {
            tracing::debug!(export = %self.name(), "an NBD client is disconnected: {why}");
        }
        (self.is_dead, self.shuts) = (true, true);
        if let Some(tls) = &mut self.tls {
            // Why, where that is for TLS to say.
            tls.last_word(self.socket.get_ref().as_fd());
        }
        self.output.clear();
        self.incoming = Incoming::Header;
        self.abandon();
    }

    /// Gives up what waits for a client that has gone without a goodbye. Returns false if that was done before.
    fn abandon(&mut self) -> bool {
        match &mut self.phase {
            Phase::Transmission(transmission) if !self.is_leaving && !transmission.is_abandoned() => {
                transmission.abandon();
                true
            }
            _ => false,
        }
    }

    fn harvest(&mut self) -> bool {
        let Phase::Transmission(transmission) = &mut self.phase else { return false };
        if self.shuts {
            transmission.ends();
        }
        let mut did = transmission.harvest(&mut self.output);
        while let Some((tag, answer)) = self.link.mailbox.take() {
            transmission.answer(tag, answer, &mut self.output);
            did = true;
        }
        did
    }

    /// Takes what has arrived.
    fn receive(&mut self) -> bool {
        let (mut did, mut steps, mut bytes) = (false, 0_usize, 0_usize);
        let bytes_max = if self.tls.is_some() { under_tls::BYTES_PER_TURN } else { BYTES_PER_TURN };
        while !self.shuts && steps < STEPS_PER_TURN && bytes < bytes_max && !self.has_enough() {
            match self.step(&mut bytes) {
                Ok(Outcome::Goes) => did = true,
                // There is no room for what a client has sent before it went.
                Ok(Outcome::Waits) if self.socket.has_ended() => return did | self.abandon(),
                Ok(Outcome::Waits) => break,
                Err(error) => {
                    if let (Phase::Transmission(transmission), io::ErrorKind::InvalidData) = (&self.phase, error.kind())
                    {
                        transmission.broke_the_rules();
                    }
                    self.breaks(error);
                    did = true;
                }
            }
            steps = steps.saturating_add(1);
        }
        did
    }

    fn has_enough(&self) -> bool {
        matches!(&self.phase, Phase::Transmission(transmission) if transmission.has_enough())
    }

    fn step(&mut self, bytes: &mut usize) -> io::Result<Outcome> {
        let pending = match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Transmission(transmission) => transmission.pending(),
        };
        if pending.saturating_add(self.output.len()) >= self.limits.requests {
            return Ok(Outcome::Waits);
        }
        match std::mem::replace(&mut self.incoming, Incoming::Header) {
            Incoming::Header => self.header(bytes),
            Incoming::Payload { request, buffer, grant, filled } => self.payload(request, buffer, grant, filled, bytes),
            Incoming::Unwanted { request, left, error } => self.unwanted(request, left, error, bytes),
        }
    }

    fn header(&mut self, bytes: &mut usize) -> io::Result<Outcome> {
        let broken = |error: nbd_wire::WireError| io::Error::new(io::ErrorKind::InvalidData, error);
        let mut reader = self.input.reader();
        let waits = match &mut self.phase {
            Phase::Handshake(handshake) => {
                let mut answers = Vec::new();
                let step = handshake.take(&mut reader, &mut answers);
                self.output.bytes(answers, None);
                let left = reader.rest().len();
                self.input.keep(left);
                match step.map_err(broken)? {
                    Step::Waits => true,
                    Step::Goes => false,
                    Step::Ends => {
                        self.shuts = true;
                        false
                    }
                    Step::Ready(agreed) => {
                        let choice = self.choice.as_ref().and_then(|choice| choice.exports.get(agreed.export));
                        let export = choice.cloned();
                        let export = export.ok_or(io::ErrorKind::NotFound)?;
                        let gone = || io::Error::new(io::ErrorKind::NotFound, "its export is being removed");
                        let presence = export.users.enter(&self.link).ok_or_else(gone)?;
                        tracing::debug!(export = %export.name, "an NBD client connected");
                        let queue = export.disk.open_queue(&self.ctx).map_err(io::Error::other)?;
                        let account = Account::new(&self.limits, self.payload.clone(), export.users.share());
                        let transmission = Transmission::new(export, agreed, queue, account, &self.limits, presence);
                        self.deadline.clear();
                        self.phase = Phase::Transmission(Box::new(transmission));
                        self.choice = None;
                        false
                    }
                }
            }
            Phase::Transmission(transmission) => {
                match Request::read(&mut reader, transmission.is_extended()).map_err(broken)? {
                    None => true,
                    Some(request) => {
                        let left = reader.rest().len();
                        let next = transmission.begin(request, &mut self.output).map_err(broken)?;
                        if matches!(next, Next::Later) {
                            return Ok(Outcome::Waits);
                        }
                        self.input.keep(left);
                        self.goes_on(next);
                        false
                    }
                }
            }
        };
        if waits { self.fill(bytes) } else { Ok(Outcome::Goes) }
    }

    fn goes_on(&mut self, next: Next) {
        match next {
            Next::Header | Next::Later => {}
            Next::Ends => (self.shuts, self.is_leaving) = (true, true),
            Next::Payload(request, buffer, grant) => {
                self.incoming = Incoming::Payload { request, buffer, grant, filled: 0 };
            }
            Next::Unwanted(request, left, error) => self.incoming = Incoming::Unwanted { request, left, error },
            Next::Ask(question) => {
                let tag = question.tag;
                if !self.status_thread().is_some_and(|thread| thread.ask(question))
                    && let Phase::Transmission(transmission) = &mut self.phase
                {
                    transmission.answer(tag, None, &mut self.output);
                }
            }
        }
    }

    fn status_thread(&mut self) -> Option<&StatusThread> {
        if self.status.is_none() {
            let Phase::Transmission(transmission) = &self.phase else { return None };
            let export = transmission.export().clone();
            let guard = (self.guard.clone(), transmission.presence());
            let contexts = transmission.contexts().to_vec();
            let started = StatusThread::start(export, contexts, &self.link, guard);
            self.status = started
                .inspect_err(|error| {
                    static TIMES: LogLimit = LogLimit::new();
                    if let Some(times) = TIMES.admit() {
                        tracing::warn!(times, "cannot start a thread: {error}");
                    }
                })
                .ok();
        }
        self.status.as_ref()
    }

    /// Receives into the input; an end of the stream is an error.
    fn fill(&mut self, bytes: &mut usize) -> io::Result<Outcome> {
        if self.tls.is_some() {
            let (outcome, has_plain) = self.decrypt(bytes)?;
            if let (Some(tls), true) = (&mut self.tls, has_plain) {
                self.input.fill(|room| tls.take(|plain| nbd_tls::copy_to(room, plain)))?;
            }
            return Ok(outcome);
        }
        if !self.socket.is_ready(Interest::Read) {
            return Ok(Outcome::Waits);
        }
        let (socket, mut is_drained) = (self.socket.get_ref(), false);
        let filled = self.input.fill(|room| {
            let count = rustix::io::read(socket, &mut *room)?;
            is_drained = count < room.len();
            Ok(count)
        });
        match filled {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(_) => {
                if is_drained {
                    self.socket.is_drained();
                }
                Ok(Outcome::Goes)
            }
            Err(error) => self.or_waits(error),
        }
    }

    /// Looks for plain bytes under TLS, and says whether there are some.
    fn decrypt(&mut self, bytes: &mut usize) -> io::Result<(Outcome, bool)> {
        let waits = Ok((Outcome::Waits, false));
        let Some(tls) = &mut self.tls else { return waits };
        if !tls.has_arrived() && !self.socket.is_ready(Interest::Read) {
            return waits;
        }
        match tls.look(self.socket.get_ref().as_fd()) {
            Ok(Look { has_plain, read_bytes, is_drained }) => {
                if is_drained {
                    self.socket.is_drained();
                }
                *bytes = bytes.saturating_add(read_bytes);
                Ok((Outcome::Goes, has_plain))
            }
            Err(error) => Ok((self.or_waits(error)?, false)),
        }
    }

    fn or_waits(&self, error: io::Error) -> io::Result<Outcome> {
        match error.kind() {
            io::ErrorKind::WouldBlock => {
                self.socket.not_ready(Interest::Read);
                Ok(Outcome::Waits)
            }
            io::ErrorKind::Interrupted => Ok(Outcome::Goes),
            _ => Err(error),
        }
    }

    fn payload(
        &mut self,
        request: Request,
        buffer: IoBuf,
        grant: Option<Grant>,
        mut filled: usize,
        bytes: &mut usize,
    ) -> io::Result<Outcome> {
        let window = buffer.whole();
        let mut outcome = Ok(Outcome::Goes);
        // What came together with the header.
        let here = window.copy_from_slice(filled, self.input.rest());
        self.input.skip(here);
        filled = filled.saturating_add(here);
        if filled < window.length_bytes() && self.tls.is_some() {
            let (looked, has_plain) = self.decrypt(bytes)?;
            outcome = Ok(looked);
            if let (Some(tls), true) = (&mut self.tls, has_plain) {
                let count = tls.take(|plain| window.copy_from_slice(filled, plain))?;
                filled = filled.saturating_add(count);
            }
        } else if filled < window.length_bytes() {
            if !self.socket.is_ready(Interest::Read) {
                outcome = Ok(Outcome::Waits);
            } else {
                match receive_into(self.socket.get_ref().as_fd(), &window, filled) {
                    Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it left within a request")),
                    Ok(count) => {
                        filled = filled.saturating_add(count);
                        if filled < window.length_bytes() {
                            self.socket.is_drained();
                        }
                        *bytes = bytes.saturating_add(count);
                    }
                    Err(error) => outcome = Ok(self.or_waits(error)?),
                }
            }
        }
        match &mut self.phase {
            Phase::Transmission(transmission) if filled >= window.length_bytes() => {
                drop(buffer);
                transmission.write(request, window, grant);
            }
            _ => {
                drop(window);
                self.incoming = Incoming::Payload { request, buffer, grant, filled };
            }
        }
        outcome
    }

    fn unwanted(&mut self, request: Request, left: u64, number: u32, bytes: &mut usize) -> io::Result<Outcome> {
        let taken = self.input.skip(usize::try_from(left).unwrap_or(usize::MAX));
        let left = left.saturating_sub(taken as u64);
        if left > 0 {
            self.incoming = Incoming::Unwanted { request, left, error: number };
            return self.fill(bytes);
        }
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.refuse(&request, number, &mut self.output);
        }
        Ok(Outcome::Goes)
    }

    fn send(&mut self) -> bool {
        let mut did = false;
        while self.has_to_send() && self.socket.is_ready(Interest::Write) {
            let socket = self.socket.get_ref().as_fd();
            let sent = match &mut self.tls {
                None => self.output.send(socket).map(|count| {
                    self.sent_bytes = self.sent_bytes.saturating_add(count);
                    count > 0
                }),
                Some(tls) => tls.send(&mut self.output, socket),
            };
            match sent {
                Ok(sent) => did |= sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.socket.not_ready(Interest::Write),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.breaks(error);
                    did = true;
                }
            }
        }
        if !self.has_left_to_send() {
            self.socket.has_written();
        }
        did
    }

    /// Whether something is to be sent in this turn.
    fn has_to_send(&self) -> bool {
        // What is sealed cannot be taken back, so there may be something left of it for a peer that has gone.
        let sends_plain = !self.output.is_empty() && self.sent_bytes < SENT_PER_TURN;
        !self.is_dead && self.tls.as_ref().map_or(sends_plain, |tls| tls.sends(&self.output))
    }

    fn has_left_to_send(&self) -> bool {
        !self.output.is_empty() || self.tls.as_ref().is_some_and(UnderTls::wants_write)
    }

    /// Whether nothing is left to do. A server that ends does not wait for a client to take its replies.
    fn is_over(&self) -> bool {
        let (in_flight, pending) = match &self.phase {
            Phase::Handshake(_) => (0, 0),
            Phase::Transmission(transmission) => (transmission.in_flight(), transmission.pending()),
        };
        let closing = self.link.closing.load(Ordering::Acquire);
        let given_up = self.is_dead && self.link.given_up.load(Ordering::Acquire);
        let is_told = pending == 0 && !self.has_left_to_send();
        // The turn was too short for what the client would have taken.
        let was_short = self.tls.as_ref().map_or(self.sent_bytes >= SENT_PER_TURN, UnderTls::was_short);
        let goes_on = was_short && !self.output.is_empty() && self.socket.is_ready(Interest::Write);
        given_up || self.shuts && in_flight == 0 && (self.is_dead || closing && !goes_on || is_told)
    }

    /// Has TLS say that all was said, when that is so.
    fn says_goodbye(&mut self) -> bool {
        let Some(tls) = self.tls.as_mut().filter(|_| !self.is_dead) else { return false };
        let is_new = tls.close();
        tls.last_word(self.socket.get_ref().as_fd());
        is_new
    }

    /// Requests that a server that ends does not carry out any more are refused, so that their client knows.
    fn close(&mut self) {
        self.shuts = true;
        if let (Phase::Transmission(transmission), Incoming::Payload { request, .. }) = (&self.phase, &self.incoming) {
            transmission.refuse(request, error::ESHUTDOWN, &mut self.output);
        }
        self.incoming = Incoming::Header;
    }

    /// Lets others know since when the oldest request has been in flight.
    fn note_oldest(&self) {
        if let Phase::Transmission(transmission) = &self.phase {
            transmission.note_oldest();
        }
    }

    /// Takes requests, and what of them has ended at once, as disks do that need no storage.
    fn take(&mut self) -> bool {
        let mut did = self.receive();
        if let Phase::Transmission(transmission) = &mut self.phase {
            did |= transmission.ends_turn(&mut self.output);
        }
        did
    }

    /// Sends replies, and counts what they took.
    fn reply(&mut self) -> bool {
        let end_ns = match &self.phase {
            Phase::Handshake(_) => None,
            Phase::Transmission(transmission) => transmission.publishes(),
        };
        let did = self.send();
        if let (Phase::Transmission(transmission), Some(end_ns)) = (&mut self.phase, end_ns) {
            transmission.published(end_ns, did);
        }
        did
    }
}

impl<G: Clone + Send + 'static> Poller for Connection<G> {
    fn poll(&mut self) -> bool {
        let mut did = self.harvest();
        self.sent_bytes = 0;
        if let Some(tls) = &mut self.tls {
            tls.begins_turn();
        }
        if self.deadline.is_due() && matches!(self.phase, Phase::Handshake(_)) {
            self.breaks("it took too long to choose an export");
        }
        if !self.shuts && self.link.closing.load(Ordering::Acquire) {
            self.close();
        }
        if self.link.given_up.load(Ordering::Acquire) {
            self.breaks("its requests were given up");
        }
        // What has ended is told before its tags are used again.
        did |= self.reply();
        did |= self.take();
        did |= self.reply();
        if matches!(&self.phase, Phase::Transmission(transmission) if transmission.is_asked()) {
            self.note_oldest();
        }
        if self.is_over() {
            did |= self.says_goodbye();
        }
        if self.is_over()
            && let Some(id) = self.id.take()
        {
            self.ctx.remove_poller(id);
            did = true;
        }
        did
    }

    fn arm(&mut self) -> bool {
        let did = self.poll();
        self.note_oldest();
        did
    }
}
