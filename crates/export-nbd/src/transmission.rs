//! The requests of one client: from headers to the disk's queue, and from completions to replies.

use crate::context::Context;
use crate::export::NbdExport;
use crate::handshake::Negotiated;
use crate::limits::{Account, Grant, Limits};
use crate::mailbox::Answer;
use crate::output::Output;
use crate::requests::{Pending, Requests, Work, error_number};
use crate::status::{ANSWER_BYTES, QUESTIONS_MAX, Question, cut};
use crate::users::Presence;
use block::meter::{self, Stopwatch};
use block::{Completion, DiskInfo, DiskListener, DiskQueue, IoErrorKind, IoResult, Op, OpFlags, Tag};
use memory::{IoBuf, Window};
use nbd_wire::WireError;
use nbd_wire::numbers::{PAYLOAD_BYTES_MAX, chunk, command, command_flag, error};
use nbd_wire::reply::{Chunk, Extent, Style, put_error, put_status, simple};
use nbd_wire::request::Request;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests whose parts are timed: those with the first tags.
const TIMED_MAX: usize = 1024;
/// What is read ahead at once.
const CACHE_PIECE_BYTES: u64 = 1 << 20;
/// And for one request: no more than a read could ask for. The rest of the hint is not taken.
const CACHE_BYTES_MAX: u64 = PAYLOAD_BYTES_MAX as u64;
/// Requests to read ahead of one connection at once.
const CACHES_MAX: usize = 4;
/// Requests that a turn takes, and their data in bytes. Then what has ended is told, so that the client has something to do
/// while the next ones are carried out.
const TAKEN_MAX: usize = 8;
const TAKEN_BYTES_MAX: usize = 128 << 10;

/// What the connection does after a request's header.
#[derive(Debug)]
pub(crate) enum Next {
    /// The next header follows.
    Header,
    /// The request's payload follows: into this memory.
    Payload(Request, IoBuf, Option<Grant>),
    /// A payload follows that nobody wants; then the request is refused with this error.
    Unwanted(Request, u64, u32),
    /// Ask on the thread for it.
    Ask(Question),
    /// There is no room for it: it is to be taken again later.
    Later,
    /// The client says goodbye.
    Ends,
}

/// The size of a disk, which may grow.
struct Size(AtomicU64);

impl DiskListener for Size {
    fn info_changed(&self, info: &DiskInfo) {
        self.0.store(info.size_bytes, Ordering::Release);
    }
}

pub(crate) struct Transmission {
    export: NbdExport,
    style: Style,
    contexts: Vec<Context>,
    queue: Box<dyn DiskQueue>,
    requests: Requests,
    /// Requests at the disk's queue.
    submitted: usize,
    questions: usize,
    /// Requests to read ahead.
    caches: usize,
    /// Nothing is read ahead any more.
    is_ending: bool,
    /// The client has gone.
    is_abandoned: bool,
    done: Vec<Completion>,
    account: Rc<Account>,
    payload_bytes_max: u64,
    block_bytes: u64,
    size: Arc<Size>,
    refuses_writes: bool,
    can_discard: bool,
    presence: Arc<Presence>,
    stopwatch: Stopwatch,
    /// Requests that were taken in this turn, and their data in bytes.
    taken: usize,
    taken_bytes: usize,
    /// Requests that have ended and whose replies are not counted as sent yet.
    ended: usize,
}

impl Transmission {
    pub(crate) fn new(
        export: NbdExport,
        agreed: Negotiated,
        queue: Box<dyn DiskQueue>,
        account: Rc<Account>,
        limits: &Limits,
        presence: Arc<Presence>,
    ) -> Self {
        let size = Arc::new(Size(AtomicU64::new(0)));
        let listener = Arc::downgrade(&size);
        export.disk.subscribe(listener);
        let info = export.disk.info();
        size.0.fetch_max(info.size_bytes, Ordering::AcqRel);
        let block_bytes = u64::from(info.logical_block_bytes.max(1));
        let stopwatch = Stopwatch::new(presence.counters.latency(), limits.requests.min(TIMED_MAX));
        let Negotiated { style, contexts, .. } = agreed;
        let (requests, done) = (Requests::default(), Vec::new());
        let payload_bytes_max = limits.payload_bytes.into();
        let (submitted, questions) = (0, 0);
        Self {
            refuses_writes: export.refuses_writes(&info),
            can_discard: info.discard,
            export,
            style,
            contexts,
            queue,
            requests,
            submitted,
            questions,
            caches: 0,
            is_ending: false,
            is_abandoned: false,
            done,
            account,
            payload_bytes_max,
            block_bytes,
            size,
            presence,
            stopwatch,
            taken: 0,
            taken_bytes: 0,
            ended: 0,
        }
    }

    /// For whoever else works for this client.
    pub(crate) fn presence(&self) -> Arc<Presence> {
        Arc::clone(&self.presence)
    }

    pub(crate) fn is_extended(&self) -> bool {
        self.style == Style::Extended
    }

    pub(crate) fn export(&self) -> &NbdExport {
        &self.export
    }

    pub(crate) fn contexts(&self) -> &[Context] {
        &self.contexts
    }

    /// Requests without a reply.
    pub(crate) fn pending(&self) -> usize {
        self.requests.len()
    }

    /// Requests that the disk has in hand.
    pub(crate) fn in_flight(&self) -> usize {
        self.submitted
    }

    /// Whether this turn has taken as many as it takes.
    pub(crate) fn has_enough(&self) -> bool {
        self.taken >= TAKEN_MAX || self.taken_bytes >= TAKEN_BYTES_MAX
    }

    /// No more requests come: what is read ahead for those that are there is not gone on with.
    pub(crate) fn ends(&mut self) {
        self.is_ending = true;
    }

    /// The client has gone. What of it still waits is not carried out: it may be back, and have written newer data.
    pub(crate) fn abandon(&mut self) {
        self.is_abandoned = true;
        self.queue.abandon();
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// Begins a request.
    pub(crate) fn begin(&mut self, request: Request, out: &mut Output) -> Result<Next, WireError> {
        let Request { command: kind, flags, length_bytes, .. } = request;
        let has_payload = kind == command::WRITE || self.is_extended() && flags & command_flag::PAYLOAD_LEN != 0;
        if has_payload && length_bytes > self.payload_bytes_max {
            return Err(WireError("a request has a longer payload than the server said it takes"));
        }
        if kind == command::DISC {
            return Ok(Next::Ends);
        }
        if let Err(number) = self.check(&request) {
            if has_payload && length_bytes > 0 {
                return Ok(Next::Unwanted(request, length_bytes, number));
            }
            self.refuse(&request, number, out);
            return Ok(Next::Header);
        }
        if length_bytes == 0 && !matches!(kind, command::FLUSH | command::READ) {
            self.succeed(&request, out);
            return Ok(Next::Header);
        }
        match kind {
            command::READ => self.read(request, out),
            command::WRITE => {
                let Some(buffer) = self.buffer(length_bytes) else { return Ok(Next::Later) };
                Ok(match buffer {
                    Ok((buffer, grant)) => Next::Payload(request, buffer, grant),
                    Err(number) => Next::Unwanted(request, length_bytes, number),
                })
            }
            command::CACHE => self.cache(request, out),
            command::BLOCK_STATUS => Ok(self.status(request)),
            _ => {
                self.without_data(request, out);
                Ok(Next::Header)
            }
        }
    }

    /// Whether a request can be carried out; the protocol's error number if not.
    fn check(&self, request: &Request) -> Result<(), u32> {
        use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
        let Request { command: kind, flags, offset, length_bytes, .. } = *request;
        let known = match kind {
            command::READ => DF,
            command::WRITE if self.is_extended() => PAYLOAD_LEN,
            command::WRITE_ZEROES => NO_HOLE | FAST_ZERO,
            command::BLOCK_STATUS => REQ_ONE,
            command::WRITE | command::FLUSH | command::TRIM | command::CACHE => 0,
            _ => return Err(error::EINVAL),
        };
        // Some clients write without PAYLOAD_LEN: what else could follow?
        if flags & !(known | FUA) != 0 {
            return Err(error::EINVAL);
        }
        let writes = matches!(kind, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if writes && self.refuses_writes {
            return Err(error::EPERM);
        }
        if kind == command::FLUSH {
            return Ok(());
        }
        let is_inside = offset.checked_add(length_bytes).is_some_and(|end| end <= self.size.0.load(Ordering::Acquire));
        if !is_inside {
            return Err(if writes { error::ENOSPC } else { error::EINVAL });
        }
        if kind == command::READ && length_bytes > self.payload_bytes_max {
            return Err(error::EOVERFLOW);
        }
        if kind == command::BLOCK_STATUS && (self.contexts.is_empty() || length_bytes == 0) {
            return Err(error::EINVAL);
        }
        let is_whole = |value: u64| value.checked_rem(self.block_bytes) == Some(0);
        let must_be_whole = matches!(kind, command::WRITE | command::WRITE_ZEROES);
        if must_be_whole && !(is_whole(offset) && is_whole(length_bytes)) {
            return Err(error::EINVAL);
        }
        // Zeros are written fast only as holes.
        if flags & FAST_ZERO != 0 && kind == command::WRITE_ZEROES && !(self.can_discard && flags & NO_HOLE == 0) {
            return Err(error::ENOTSUP);
        }
        Ok(())
    }

    /// Memory for payload; `None` while there is no room.
    #[allow(clippy::type_complexity, reason = "room, then memory")]
    fn buffer(&self, length_bytes: u64) -> Option<Result<(IoBuf, Option<Grant>), u32>> {
        let length = usize::try_from(length_bytes).unwrap_or(usize::MAX);
        let grant = self.account.take(length)?;
        Some(IoBuf::from_pool_in_pieces(length).map(|buffer| (buffer, Some(grant))).map_err(|_| error::ENOMEM))
    }

    fn whole_blocks_around(&self, offset: u64, length_bytes: u64) -> (u64, u64) {
        let before = offset.checked_rem(self.block_bytes).unwrap_or(0);
        let start = offset.saturating_sub(before);
        let end = offset.saturating_add(length_bytes);
        (start, end.checked_next_multiple_of(self.block_bytes).unwrap_or(end))
    }

    fn read(&mut self, request: Request, out: &mut Output) -> Result<Next, WireError> {
        if request.length_bytes == 0 {
            self.succeed(&request, out);
            return Ok(Next::Header);
        }
        // A disk takes whole blocks; what is around the bytes that were asked for is not sent.
        let (start, end) = self.whole_blocks_around(request.offset, request.length_bytes);
        let Some(buffer) = self.buffer(end.saturating_sub(start)) else { return Ok(Next::Later) };
        match buffer {
            Err(number) => self.refuse(&request, number, out),
            Ok((buffer, grant)) => {
                let whole = buffer.whole();
                let skip = usize::try_from(request.offset.saturating_sub(start)).unwrap_or(0);
                let length = usize::try_from(request.length_bytes).unwrap_or(0);
                let work = Work::Read(whole.slice(skip, length));
                self.stopwatch.moves(meter::READ, length);
                self.taken_bytes = self.taken_bytes.saturating_add(length);
                self.submit(Pending { request, work, grant, key: 0 }, Op::read(start, whole));
            }
        }
        Ok(Next::Header)
    }

    /// Carries out a write whose payload has arrived.
    pub(crate) fn write(&mut self, request: Request, data: Window, grant: Option<Grant>) {
        self.stopwatch.moves(meter::WRITE, data.length_bytes());
        self.taken_bytes = self.taken_bytes.saturating_add(data.length_bytes());
        let op = Op::write(request.offset, data, fua(&request));
        self.submit(Pending { request, work: Work::Write, grant, key: 0 }, op);
    }

    fn cache(&mut self, request: Request, out: &mut Output) -> Result<Next, WireError> {
        if self.caches >= CACHES_MAX {
            // It is a hint.
            self.succeed(&request, out);
            return Ok(Next::Header);
        }
        let length_bytes = request.length_bytes.min(CACHE_BYTES_MAX);
        let (next, end) = self.whole_blocks_around(request.offset, length_bytes);
        let piece = end.saturating_sub(next).min(CACHE_PIECE_BYTES);
        let Some(buffer) = self.buffer(piece) else { return Ok(Next::Later) };
        match buffer {
            Err(number) => self.refuse(&request, number, out),
            Ok((buffer, grant)) => {
                self.caches = self.caches.saturating_add(1);
                let op = Op::read(next, buffer.whole());
                let next = next.saturating_add(piece);
                self.submit(Pending { request, work: Work::Cache { buffer, next, end }, grant, key: 0 }, op);
            }
        }
        Ok(Next::Header)
    }

    fn status(&mut self, request: Request) -> Next {
        if self.questions >= QUESTIONS_MAX {
            return Next::Later;
        }
        let room = ANSWER_BYTES.saturating_mul(self.contexts.len());
        let Some(grant) = self.account.take(room) else { return Next::Later };
        self.questions = self.questions.saturating_add(1);
        let (offset, length_bytes) = (request.offset, request.length_bytes);
        let one = request.flags & command_flag::REQ_ONE != 0;
        let tag = self.requests.put(Pending { request, work: Work::Status, grant: Some(grant), key: 0 });
        Next::Ask(Question { tag, offset, length_bytes, one })
    }

    fn without_data(&mut self, request: Request, out: &mut Output) {
        let Request { offset, length_bytes: length, flags, .. } = request;
        let (work, op) = match request.command {
            command::FLUSH => (Work::Flush, Op::Flush),
            command::WRITE_ZEROES => {
                let may_unmap = flags & command_flag::NO_HOLE == 0;
                (Work::Zero, Op::WriteZeroes { offset, length, may_unmap, flags: fua(&request) })
            }
            _ => {
                // Blocks that it covers in part stay.
                let start = offset.checked_next_multiple_of(self.block_bytes).unwrap_or(u64::MAX);
                let end = offset.saturating_add(length);
                let end = end.saturating_sub(end.checked_rem(self.block_bytes).unwrap_or(0));
                let then_flush = flags & command_flag::FUA != 0;
                match end.checked_sub(start).filter(|length| *length > 0) {
                    Some(length) => (Work::Trim { then_flush }, Op::Discard { offset: start, length }),
                    None => return self.succeed(&request, out),
                }
            }
        };
        self.submit(Pending { request, work, grant: None, key: 0 }, op);
    }

    /// Gives a request to the disk; one that goes on keeps its key.
    fn submit(&mut self, mut pending: Pending, op: Op) {
        if pending.key == 0 {
            if self.taken == 0 {
                self.stopwatch.begins_batch();
            }
            self.taken = self.taken.saturating_add(1);
            pending.key = self.stopwatch.key(pending.work.kind());
        }
        let tag = self.requests.put(pending);
        self.submitted = self.submitted.saturating_add(1);
        self.queue.submit(tag, op);
    }

    /// The requests of this turn are taken. Those that have ended at once are taken, too; returns whether there were any.
    pub(crate) fn ends_turn(&mut self, out: &mut Output) -> bool {
        let taken = std::mem::take(&mut self.taken);
        self.taken_bytes = 0;
        if taken == 0 {
            return false;
        }
        self.presence.counters.requests.add(taken);
        self.presence.counters.batches.add(1);
        let did = self.harvest(out);
        // A request that went on is of this turn.
        self.taken = 0;
        self.stopwatch.ends_batch(self.submitted == 0);
        did
    }

    /// Just before replies are sent: when that is; nothing where no request has ended.
    pub(crate) fn publishes(&self) -> Option<u64> {
        (self.ended > 0).then(|| self.stopwatch.publishes())
    }

    /// Replies were sent, or the socket takes none just now.
    pub(crate) fn published(&mut self, end_ns: u64, sent: bool) {
        self.ended = 0;
        if sent {
            self.presence.counters.notifications.add(1);
        }
        self.stopwatch.published(end_ns, sent);
    }

    /// Whether somebody wants to know the oldest request.
    pub(crate) fn is_asked(&self) -> bool {
        self.stopwatch.is_asked()
    }

    /// The client broke the protocol's rules.
    pub(crate) fn broke_the_rules(&self) {
        self.presence.counters.faults.add(1);
    }

    /// Lets others know since when the oldest request has been in flight.
    pub(crate) fn note_oldest(&self) {
        self.stopwatch.note_oldest(self.requests.keys());
    }

    /// Takes what has ended; returns whether that was anything. The disk's queue may have work of its own that ends, also
    /// while no request is in flight.
    pub(crate) fn harvest(&mut self, out: &mut Output) -> bool {
        let mut done = std::mem::take(&mut self.done);
        self.queue.harvest(&mut done);
        let has_any = !done.is_empty();
        if has_any {
            let requests = &mut self.requests;
            self.stopwatch.take_timings(&mut *self.queue, |head, note| {
                requests.key(head.into()).filter(|key| **key != 0).into_iter().for_each(note);
            });
        }
        for Completion { tag, result } in done.drain(..) {
            self.submitted = self.submitted.saturating_sub(1);
            if let Some(pending) = self.requests.take(tag) {
                self.count(&pending, &result);
                self.end(pending, tag, result, out);
            }
        }
        self.done = done;
        has_any
    }

    /// Failures of the storage are counted, and those logged by which their number has doubled. An abandoned request need
    /// not have reached the storage.
    fn count(&self, pending: &Pending, result: &IoResult) {
        let Some(error) = result.as_ref().err().filter(|_| !self.is_abandoned) else { return };
        let counters = &self.presence.counters;
        let (counter, full) = match error.kind() {
            IoErrorKind::Unsupported => return,
            IoErrorKind::NoSpace => (&counters.no_space, "the storage is full: "),
            _ => (&counters.io_errors, ""),
        };
        if let Some(times) = counter.add_to_log() {
            let NbdExport { name: export, disk_name, .. } = &self.export;
            let (disk, request) = (disk_name.as_deref().unwrap_or(export), name_of(pending));
            tracing::warn!(
                disk,
                export,
                times,
                errno = error.errno(),
                "{full}an NBD client's {request} failed: {error}"
            );
        }
    }

    fn end(&mut self, pending: Pending, tag: Tag, result: IoResult, out: &mut Output) {
        let Pending { request, work, grant, key } = pending;
        if let Work::Cache { next, end, .. } = work
            && (result.is_err() || next >= end || self.is_ending)
        {
            self.caches = self.caches.saturating_sub(1);
        }
        match (work, result) {
            (Work::Trim { then_flush: true }, Ok(())) => {
                return self.submit(Pending { request, work: Work::Flush, grant, key }, Op::Flush);
            }
            (Work::Cache { buffer, next, end }, Ok(())) if next < end && !self.is_ending => {
                let piece = end.saturating_sub(next).min(CACHE_PIECE_BYTES);
                let length = usize::try_from(piece).unwrap_or(0).min(buffer.length_bytes());
                let op = Op::read(next, buffer.whole().slice(0, length));
                let next = next.saturating_add(piece);
                return self.submit(Pending { request, work: Work::Cache { buffer, next, end }, grant, key }, op);
            }
            (Work::Read(data), Ok(())) => {
                let head = match self.style {
                    Style::Simple => simple(request.cookie, 0),
                    Style::Structured | Style::Extended => {
                        Chunk::data(self.is_extended(), request.cookie, request.offset, request.length_bytes)
                    }
                };
                out.reply(head, Some((data, grant)));
            }
            // It is a hint, and a disk that gives no space back has taken it.
            (Work::Trim { .. }, Err(failed)) if failed.kind() == IoErrorKind::Unsupported => {
                self.succeed(&request, out);
            }
            (_, Ok(())) => self.succeed(&request, out),
            (_, Err(failed)) => self.refuse(&request, error_number(failed), out),
        }
        self.ended = self.ended.saturating_add(1);
        self.stopwatch.ended(u16::try_from(tag).unwrap_or(u16::MAX), key);
    }

    /// Replies to a question.
    pub(crate) fn answer(&mut self, tag: u64, answer: Option<Answer>, out: &mut Output) {
        let Some(Pending { request, grant, .. }) = self.requests.take(tag) else { return };
        self.questions = self.questions.saturating_sub(1);
        let one = request.flags & command_flag::REQ_ONE != 0;
        let lists: Vec<(Context, Vec<Extent>)> = answer.unwrap_or_default();
        let lists = lists.into_iter().map(|(context, list)| (context, cut(list, one, request.length_bytes)));
        let lists: Vec<_> = lists.collect();
        if lists.is_empty() || lists.iter().any(|(_, list)| list.is_empty()) {
            return self.refuse(&request, error::EIO, out);
        }
        let (mut bytes, last) = (Vec::new(), lists.len().saturating_sub(1));
        for (index, (context, list)) in lists.iter().enumerate() {
            let flags = if index == last { chunk::DONE } else { 0 };
            let Request { cookie, offset, .. } = request;
            let head = Chunk { flags, kind: chunk::NONE, cookie, offset, length_bytes: 0 };
            put_status(&mut bytes, self.is_extended(), head, context.id(), list);
        }
        out.bytes(bytes, grant);
    }

    fn succeed(&self, request: &Request, out: &mut Output) {
        let Request { cookie, offset, .. } = *request;
        out.reply(
            match self.style {
                Style::Simple => simple(cookie, 0),
                Style::Structured | Style::Extended => {
                    let (flags, kind) = (chunk::DONE, chunk::NONE);
                    Chunk { flags, kind, cookie, offset, length_bytes: 0 }.head(self.is_extended())
                }
            },
            None,
        );
    }

    /// Replies that it failed.
    pub(crate) fn refuse(&self, request: &Request, number: u32, out: &mut Output) {
        self.presence.counters.failed.add(1);
        match self.style {
            Style::Simple => out.reply(simple(request.cookie, number), None),
            Style::Structured | Style::Extended => {
                let mut bytes = Vec::new();
                put_error(&mut bytes, self.is_extended(), request.cookie, request.offset, number, "");
                out.bytes(bytes, None);
            }
        }
    }
}

/// Describes a request, for a person.
fn name_of(Pending { request, work, .. }: &Pending) -> String {
    let byte = request.offset;
    match work {
        Work::Read(_) => format!("read at byte {byte}"),
        Work::Write => format!("write at byte {byte}"),
        Work::Flush => "flush".to_owned(),
        Work::Trim { .. } => format!("discard at byte {byte}"),
        Work::Zero => format!("write of zeros at byte {byte}"),
        Work::Cache { .. } => format!("read ahead at byte {byte}"),
        Work::Status => format!("block status at byte {byte}"),
    }
}

fn fua(request: &Request) -> OpFlags {
    OpFlags::from_fua(request.flags & command_flag::FUA != 0)
}
