//! The data plane of an image on one reactor: resolves, splits and pushes.
//!
//! A request takes a slot. Each piece that is pushed to a file, and each task that carries on with the slow rest, counts
//! in the slot and tells the queue's sink at its end; the last one completes the request. All pieces of a request carry
//! the same token, so the fast path allocates nothing and looks nothing up.

use crate::chain::exchange::attendant::attend;
use crate::chain::exchange::board::{Attendance, Board, Hold, Lease};
use crate::chain::give_up::{Ends, GiveUp, open_blocking};
use crate::chain::guessed_raw::checked_head;
use crate::chain::layer::Layer;
use crate::chain::layers::{Chain, Place};
use crate::chain::mapping::Overwrite;
use crate::chain::pieces::Pieces;
use crate::chain::slow_path::Slow;
use crate::chain::timings::Timings;
use block::latency::timed;
use block::sync::AtomicU64;
use block::{
    Completion, DiskQueue, Done, Extent, FileIo, FileOp, FileQueue, IoError, IoResult, MetaIo, Op, OpFlags, Part,
    Participant, Parts, Priority, ReactorCtx, Result, Sink, Tag, Task, Ticket, WriteMap, turn,
};
use memory::Window;
use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Most pieces of one request that are pushed at once. A guest chooses how long its requests are and how its disk is
/// fragmented: the rest goes piece after piece in a task, so that a request takes a bounded part of a turn and of the
/// engine's memory.
const MAX_PIECES: usize = 128;

/// Most compressed clusters of one request that are read beside each other, so that several processors decompress.
const MAX_COMPRESSED: usize = 8;

/// Most bytes that one piece of a read is looked for in: a layer may say nothing about a gigabyte, entry by entry, each
/// time that the one below is asked about a little of it.
const LOOKUP_BYTES: u64 = 2 << 20;

/// Pieces for which lists have room at least.
const LEAST_ROOM: usize = 64;

/// A chain as it is open on this reactor; what the queue and its tasks share.
pub(crate) struct Shared {
    pub(crate) chain: Arc<Chain>,
    /// One a layer: where the guest's data lie.
    pub(crate) files: Vec<Rc<dyn FileQueue>>,
    /// One a layer: where the tables lie, mostly in the same file.
    pub(crate) metas: Vec<MetaIo>,
    pub(crate) sink: Rc<Sink>,
    /// The other chain that gets all writes, where there is one.
    pub(crate) other: Option<Box<Shared>>,
}

/// A layer's files on this reactor.
type OpenFiles = (Rc<dyn FileQueue>, MetaIo);

impl Shared {
    fn open(chain: &Arc<Chain>, ctx: &Rc<dyn ReactorCtx>) -> Result<Self> {
        let queues = chain.layers.iter().map(|layer| layer.open_queues(ctx)).collect::<Result<Vec<_>>>()?;
        let shared = Self::of(chain, queues, Sink::new());
        let Some(both) = &chain.both else { return Ok(shared) };
        let open = |layer: &Arc<Layer>| shared.find(layer).map_or_else(|| layer.open_queues(ctx), Ok);
        let queues = both.next.layers.iter().map(open).collect::<Result<Vec<_>>>()?;
        let other = Some(Box::new(Self::of(&both.next, queues, Rc::clone(&shared.sink))));
        Ok(Self { other, ..shared })
    }

    /// A chain for calls that block.
    pub(crate) fn blocking(chain: &Arc<Chain>) -> Result<Self> {
        Self::blocking_or_given_up(chain, None, Ends::Reads)
    }

    /// A chain for calls that block until they end or are given up.
    pub(crate) fn blocking_or_given_up(chain: &Arc<Chain>, give_up: Option<&Arc<GiveUp>>, ends: Ends) -> Result<Self> {
        let open = |layer: &Arc<Layer>| {
            let meta = open_blocking(layer, give_up, ends)?;
            Ok((Rc::clone(meta.data().unwrap_or(meta.queue())), meta))
        };
        let queues = chain.layers.iter().map(open).collect::<Result<Vec<_>>>()?;
        Ok(Self::of(chain, queues, Sink::new()))
    }

    fn of(chain: &Arc<Chain>, queues: Vec<OpenFiles>, sink: Rc<Sink>) -> Self {
        let (files, metas) = queues.into_iter().unzip();
        Self { chain: Arc::clone(chain), files, metas, sink, other: None }
    }

    /// What is open here of a layer: it may have another mapping there.
    fn find(&self, layer: &Layer) -> Option<OpenFiles> {
        let mine = self.chain.layers.iter().zip(self.files.iter().zip(&self.metas));
        match mine.into_iter().find(|(mine, _)| Arc::ptr_eq(&mine.file, &layer.file)) {
            Some((_, (file, meta))) => Some((Rc::clone(file), meta.clone())),
            None => self.other.as_ref()?.find(layer),
        }
    }

    /// Another chain, all of whose files are open here or among the prepared ones.
    fn next(&self, chain: &Arc<Chain>, prepared: &[(Arc<Layer>, OpenFiles)]) -> Self {
        let find = |layer: &Arc<Layer>| {
            let new = prepared.iter().find(|(prepared, _)| Arc::ptr_eq(prepared, layer));
            self.find(layer).or_else(|| new.map(|(_, (file, meta))| (Rc::clone(file), meta.clone())))
        };
        let all = |chain: &Arc<Chain>| {
            let queues = chain.layers.iter().map(find).collect::<Option<Vec<_>>>()?;
            Some(Self::of(chain, queues, Rc::clone(&self.sink)))
        };
        let both = || {
            let other = chain.both.as_ref().map(|both| all(&both.next).map(Box::new));
            Some(Self { other: other.map_or(Some(None), |other| other.map(Some))?, ..all(chain)? })
        };
        match both() {
            Some(shared) => shared,
            None => {
                tracing::error!("a queue was told of a chain that it has not prepared for: its requests fail");
                let dead = Chain::dead(self.chain.layers.clone(), &self.chain.disk);
                let mine = self.files.iter().cloned().zip(self.metas.iter().cloned()).collect();
                Self::of(&Arc::new(dead), mine, Rc::clone(&self.sink))
            }
        }
    }

    fn join_epochs(&self) -> Option<Participant> {
        self.chain.layers.first().and_then(|top| top.mapping.epochs()).map(block::Epochs::join)
    }
}

#[derive(Clone, Copy)]
struct Slot {
    tag: Tag,
    /// Pieces and tasks that have not ended, and one while the request is being split.
    pending: u32,
    /// Which of the queue's chains the request began on.
    generation: u32,
    /// The first error wins.
    result: IoResult,
    ticket: Option<Ticket>,
}

/// A chain that was exchanged, and on which requests of this queue are still in flight.
struct Former {
    generation: u32,
    in_flight: usize,
    participant: Option<Participant>,
    _lease: Option<Arc<Lease>>,
}

/// A queue of an [`crate::Image`].
pub(crate) struct ImageQueue(Rc<RefCell<Core>>);

/// The queue itself. An attendant on the same reactor reaches it, too, for exchanges of the chain.
pub(crate) struct Core {
    shared: Rc<Shared>,
    ctx: Rc<dyn ReactorCtx>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    in_flight: usize,
    participant: Option<Participant>,
    /// Lookups that tables in memory answered; nobody else counts here.
    hits: Arc<AtomicU64>,
    scratch: Vec<(u64, IoResult)>,
    timings: Rc<Timings>,
    /// Pieces and tasks on their way, and for how many of them the lists of ends have room: all may end at once.
    on_the_way: usize,
    room: usize,
    /// Requests that ended without the sink.
    ready: Vec<Completion>,
    generation: u32,
    /// While a queue may have requests on its chain.
    lease: Option<Arc<Lease>>,
    formers: Vec<Former>,
    /// New requests wait for the next chain.
    holds: bool,
    held: Vec<(Instant, Tag, Op)>,
    /// The lease goes when nothing is in flight.
    until_quiet: bool,
    prepared: Vec<(Arc<Layer>, OpenFiles)>,
    /// Dropped with the queue, which its attendant hears of.
    attendance: Option<Attendance>,
}

impl ImageQueue {
    pub(crate) fn open(board: &Arc<Board>, ctx: &Rc<dyn ReactorCtx>) -> Result<Self> {
        loop {
            let glance = board.glance();
            let mut core = Core::new(Shared::open(&glance.chain, ctx)?, ctx);
            core.lease.clone_from(&glance.lease);
            if let Some((layers, hold)) = &glance.pending {
                core.prepare(layers, *hold)?;
            }
            // What was announced meanwhile, this queue has not heard of: it looks again.
            let Some(attendance) = board.join(&glance) else { continue };
            let seat = Arc::clone(&attendance.seat);
            core.attendance = Some(attendance);
            let core = Rc::new(RefCell::new(core));
            let attendant = attend(Rc::downgrade(&core), Arc::downgrade(board), board.bell(), seat, glance.number);
            ctx.spawn(Task::new(attendant));
            return Ok(Self(core));
        }
    }
}

/// What exchanges do with a queue; see [`super::exchange`].
impl Core {
    /// Opens the files of layers that the next chain has and this one not, and holds requests from now on if it is to.
    pub(crate) fn prepare(&mut self, layers: &[Arc<Layer>], hold: Hold) -> Result<()> {
        let opened = layers.iter().map(|layer| Ok((Arc::clone(layer), layer.open_queues(&self.ctx)?)));
        self.prepared = opened.collect::<Result<_>>()?;
        self.holds = hold != Hold::No;
        self.until_quiet = hold == Hold::UntilQuiet;
        self.look_whether_quiet();
        Ok(())
    }

    /// Begins all requests from now on on another chain, those that were held first.
    pub(crate) fn adopt(&mut self, chain: &Arc<Chain>, lease: &Arc<Lease>) {
        let shared = self.shared.next(chain, &std::mem::take(&mut self.prepared));
        let participant = std::mem::replace(&mut self.participant, shared.join_epochs());
        let _lease = self.lease.replace(Arc::clone(lease));
        let in_flight = self.in_flight_here();
        if in_flight > 0 {
            self.formers.push(Former { generation: self.generation, in_flight, participant, _lease });
        }
        self.generation = self.generation.wrapping_add(1);
        self.shared = Rc::new(shared);
        self.release();
    }

    /// Goes on with the chain that the queue has.
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

    /// Nobody tells this queue anything any more: it begins nothing.
    pub(crate) fn orphan(&mut self) {
        (self.holds, self.until_quiet) = (true, true);
        self.look_whether_quiet();
    }

    /// Requests on the present chain that have not ended.
    fn in_flight_here(&self) -> usize {
        let elsewhere: usize = self.formers.iter().map(|former| former.in_flight).sum();
        self.slots.len().saturating_sub(self.free.len()).saturating_sub(elsewhere)
    }

    fn look_whether_quiet(&mut self) {
        if self.until_quiet && self.in_flight_here() == 0 {
            self.lease = None;
        }
    }

    /// A request has ended that began on a chain that was exchanged.
    #[cold]
    fn end_former(&mut self, slot: &Slot) {
        let Some(former) = self.formers.iter_mut().find(|former| former.generation == slot.generation) else { return };
        if let (Some(participant), Some(ticket)) = (&mut former.participant, slot.ticket) {
            participant.end(ticket);
        }
        former.in_flight = former.in_flight.saturating_sub(1);
        self.formers.retain(|former| former.in_flight > 0);
    }
}

impl Core {
    fn new(shared: Shared, ctx: &Rc<dyn ReactorCtx>) -> Self {
        Self {
            ctx: Rc::clone(ctx),
            slots: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            participant: shared.join_epochs(),
            hits: shared.chain.disk.hits.join(),
            scratch: Vec::new(),
            timings: Rc::default(),
            on_the_way: 0,
            room: 0,
            ready: Vec::new(),
            generation: 0,
            lease: None,
            formers: Vec::new(),
            holds: false,
            held: Vec::new(),
            until_quiet: false,
            prepared: Vec::new(),
            attendance: None,
            shared: Rc::new(shared),
        }
    }

    fn begin(&mut self, tag: Tag, op: Op) {
        let index = self.take_slot(tag);
        let result = self.start(index, op);
        self.piece_ended(index, result);
    }

    /// Makes the lists of what has ended longer when more is in flight than ever before, not when the machine happens
    /// to end much at once.
    #[cold]
    fn make_room(&mut self) {
        self.room = self.on_the_way.max(self.slots.len()).next_power_of_two().max(LEAST_ROOM);
        self.shared.sink.reserve(self.room);
        self.scratch.reserve(self.room);
        self.timings.make_room(self.room);
        self.ready.reserve(self.room);
        self.free.reserve(self.room);
    }

    #[inline]
    fn note_hit(&self) {
        if self.participant.is_some() {
            self.hits.store(self.hits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    fn take_slot(&mut self, tag: Tag) -> usize {
        let epochs = self.shared.chain.layers.first().and_then(|top| top.mapping.epochs());
        let ticket = match (&mut self.participant, epochs) {
            (Some(participant), Some(epochs)) => Some(participant.begin(epochs)),
            _ => None,
        };
        let slot = Slot { tag, pending: 1, generation: self.generation, result: Ok(()), ticket };
        self.in_flight = self.in_flight.saturating_add(1);
        match self.free.pop() {
            Some(index) => {
                if let Some(place) = self.slots.get_mut(index) {
                    *place = slot;
                }
                index
            }
            None => {
                self.slots.push(slot);
                if self.slots.len() > self.room {
                    self.make_room();
                }
                self.slots.len().saturating_sub(1)
            }
        }
    }

    /// One more piece of the request is on its way.
    fn count(&mut self, index: usize) -> Done {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.pending = slot.pending.saturating_add(1);
        }
        self.on_the_way = self.on_the_way.saturating_add(1);
        if self.on_the_way > self.room {
            self.make_room();
        }
        Done::Sink { sink: Rc::clone(&self.shared.sink), token: index as u64 }
    }

    /// A piece, a task or the splitting itself has ended.
    fn piece_ended(&mut self, index: usize, result: IoResult) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        if slot.result.is_ok() {
            slot.result = result;
        }
        slot.pending = slot.pending.saturating_sub(1);
        if slot.pending > 0 {
            return;
        }
        let slot = *slot;
        if slot.generation != self.generation {
            self.end_former(&slot);
        } else if let (Some(participant), Some(ticket)) = (&mut self.participant, slot.ticket) {
            participant.end(ticket);
        }
        self.free.push(index);
        self.ready.push(Completion { tag: slot.tag, result: slot.result });
    }

    fn push(&mut self, index: usize, layer: usize, op: FileOp, priority: Priority) -> IoResult {
        let file = Rc::clone(self.shared.files.get(layer).ok_or(IoError::EIO)?);
        let done = self.count(index);
        file.push(FileIo { op, priority, done });
        Ok(())
    }

    /// Hands the rest of a request to a task.
    fn spawn(&mut self, index: usize, slow: Slow) {
        let done = self.count(index);
        let shared = Rc::clone(&self.shared);
        let Some(tag) = self.slots.get(index).map(|slot| slot.tag) else { return };
        // One kind of task: another would take its memory from another place of the pool.
        let (is_timed, timings) = (self.timings.is_to_be_timed(), Rc::clone(&self.timings));
        self.ctx.spawn(Task::new(async move {
            let result = match is_timed {
                true => {
                    let (result, parts) = timed(pin!(slow.run(&shared))).await;
                    timings.tell(tag, parts);
                    result
                }
                false => {
                    timings.note(tag, Parts::AS_BEFORE);
                    slow.run(&shared).await
                }
            };
            done.complete(result);
        }));
    }

    /// Writes that go to another chain, too.
    #[cold]
    fn start_on_both_sides(&mut self, index: usize, op: Op) {
        let flags = self.needed(op.flags());
        let done = self.count(index);
        let (shared, ctx) = (Rc::clone(&self.shared), Rc::clone(&self.ctx));
        self.ctx.spawn(Task::new(async move {
            let result = shared.on_both_sides(op.with_flags(flags), &ctx).await;
            done.complete(result);
        }));
    }

    fn start(&mut self, index: usize, op: Op) -> IoResult {
        if let Some((offset, length)) = op.range() {
            self.shared.chain.check_range(offset, length)?;
            if self.shared.chain.looks_at_writes && op.is_write() {
                self.shared.chain.look_at_write(offset, length)?;
                if self.shared.chain.both.is_some() {
                    self.start_on_both_sides(index, op);
                    return Ok(());
                }
            }
        }
        match op {
            Op::Read { offset, data, priority } => {
                match self.shared.chain.lookup_data(offset, data.length_bytes() as u64) {
                    Some((layer, offset, past_end)) => {
                        self.note_hit();
                        self.push(index, layer, FileOp::Read { offset, data, past_end }, priority)
                    }
                    None => self.read(index, offset, &data, priority),
                }
            }
            Op::Write { offset, data, flags, priority } => {
                let flags = self.needed(flags);
                let chain = &self.shared.chain;
                let (top, fua) = (chain.top()?, flags.is_fua());
                // The long way looks after tables that are not durable yet, after what a guessed format must not get, and
                // after a flush before the data.
                let place = match chain.guessed_raw || flags.is_preflush() {
                    true => None,
                    false => top.mapping.begin_overwrite(offset, data.length_bytes() as u64),
                };
                match place.filter(|_| !fua || chain.is_durable_in_place()) {
                    Some(offset) => {
                        self.note_hit();
                        self.push(index, 0, FileOp::Write { offset, data, fua }, priority)
                    }
                    None => self.write(index, offset, &data, flags, priority),
                }
            }
            Op::Flush => self.flush(index),
            Op::Discard { offset, length } => self.discard(index, offset, length),
            // Layers below and snapshots keep what they hold.
            Op::SecureErase { .. } => Err(IoError::new(block::IoErrorKind::Unsupported)),
            Op::WriteZeroes { offset, length, may_unmap, flags } => {
                self.write_zeroes(index, offset, length, may_unmap, self.needed(flags))
            }
        }
    }

    /// What is left to do of a write's flags: without a volatile cache all writes are durable, and no flush is needed.
    #[inline]
    fn needed(&self, flags: OpFlags) -> OpFlags {
        if self.shared.chain.disk.volatile_cache.load(Ordering::Acquire) { flags } else { OpFlags::FUA }
    }

    fn read(&mut self, index: usize, offset: u64, data: &Window, priority: Priority) -> IoResult {
        let shared = Rc::clone(&self.shared);
        let chain = &shared.chain;
        let mut pieces = Pieces::new(offset, data);
        let (mut count, mut compressed) = (0_usize, 0_usize);
        while let Some((at, left)) = pieces.rest() {
            let place = match chain.lookup(at, left.min(LOOKUP_BYTES)) {
                Some(place) if count < MAX_PIECES && is_quick(&place) => place,
                Some(Place { extent: Extent::Compressed(_), length_bytes, .. }) if compressed < MAX_COMPRESSED => {
                    compressed = compressed.saturating_add(1);
                    let data = pieces.take(length_bytes);
                    self.spawn(index, Slow::Read { offset: at, data, priority });
                    continue;
                }
                _ => {
                    self.spawn(index, Slow::Read { offset: at, data: pieces.remaining(), priority });
                    return Ok(());
                }
            };
            count = count.saturating_add(1);
            let piece = pieces.take(place.length_bytes);
            self.note_hit();
            match place.extent {
                Extent::Data { offset, .. } => {
                    let past_end = chain.layer(place.layer)?.mapping.past_end(offset);
                    self.push(index, place.layer, FileOp::Read { offset, data: piece, past_end }, priority)?;
                }
                _ => {
                    piece.fill(0);
                    turn::note_moved(piece.length_bytes());
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, index: usize, offset: u64, data: &Window, flags: OpFlags, priority: Priority) -> IoResult {
        let shared = Rc::clone(&self.shared);
        let chain = &shared.chain;
        let top = chain.top()?;
        let checked = match chain.guessed_raw {
            true => checked_head(offset, data).inspect_err(|_| chain.log_refused_header(offset))?,
            false => None,
        };
        let data = checked.as_ref().unwrap_or(data);
        let end = offset.saturating_add(data.length_bytes() as u64);
        if flags.is_preflush() || top.mapping.needs_padding(end) {
            self.spawn(index, Slow::Write { offset, data: data.clone(), flags, priority });
            return Ok(());
        }
        let fua = flags.is_fua();
        let mut pieces = Pieces::new(offset, data);
        let mut count = 0_usize;
        while let Some((at, left)) = pieces.rest() {
            let place = top.mapping.lookup_overwrite(at, left);
            let is_quick = |length_bytes| match fua {
                false => count < MAX_PIECES,
                // In one piece it is durable by itself, where the tables that lead there are; several share a flush.
                true => length_bytes == data.length_bytes() as u64 && chain.is_durable_in_place(),
            };
            match place {
                Overwrite::InPlace { offset, length_bytes } if is_quick(length_bytes) => {
                    count = count.saturating_add(1);
                    let data = pieces.take(length_bytes);
                    self.note_hit();
                    self.push(index, 0, FileOp::Write { offset, data, fua }, priority)?;
                }
                Overwrite::InPlace { .. } | Overwrite::Slow => {
                    self.spawn(index, Slow::Write { offset: at, data: pieces.remaining(), flags, priority });
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self, index: usize) -> IoResult {
        if self.shared.chain.disk.read_only {
            return Ok(());
        }
        if self.shared.chain.top()?.mapping.has_tables() || self.shared.chain.both.is_some() {
            self.spawn(index, Slow::Flush);
            return Ok(());
        }
        self.push(index, 0, FileOp::Flush, Priority::NONE)
    }

    fn discard(&mut self, index: usize, offset: u64, length: u64) -> IoResult {
        let shared = Rc::clone(&self.shared);
        let chain = &shared.chain;
        let top = chain.top()?;
        if length == 0 {
            return Ok(());
        }
        if top.mapping.has_tables() {
            self.spawn(index, Slow::Discard { offset, length });
            return Ok(());
        }
        if !top.file_info().can_discard {
            // A hint that nobody can follow is not an error.
            return Ok(());
        }
        self.push(index, 0, FileOp::Discard { offset, length }, Priority::NONE)
    }

    /// Makes the space of a map the top layer's.
    fn take_over(&mut self, index: usize, map: WriteMap) -> IoResult {
        let offset = map.offset();
        self.shared.chain.check_range(offset, map.length_bytes() as u64)?;
        map.check()?;
        let claim = map.into_claim().map_err(|_| IoError::EIO)?;
        let staged = claim.downcast().map_err(|_| IoError::EIO)?;
        self.spawn(index, Slow::TakeOver { offset, staged, flags: self.needed(OpFlags::NONE) });
        Ok(())
    }

    fn write_zeroes(&mut self, index: usize, offset: u64, length: u64, may_unmap: bool, flags: OpFlags) -> IoResult {
        if length == 0 {
            return if flags.is_preflush() { self.flush(index) } else { Ok(()) };
        }
        let top = self.shared.chain.top()?;
        let is_plain = flags == OpFlags::NONE && !top.mapping.has_tables();
        if !is_plain || top.mapping.needs_padding(offset.saturating_add(length)) {
            self.spawn(index, Slow::WriteZeroes { offset, length, may_unmap, flags });
            return Ok(());
        }
        self.push(index, 0, FileOp::WriteZeroes { offset, length, may_unmap }, Priority::NONE)
    }
}

impl DiskQueue for ImageQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let mut core = self.0.borrow_mut();
        match core.holds {
            false => core.begin(tag, op),
            true => core.held.push((Instant::now(), tag, op)),
        }
    }

    fn submit_map(&mut self, tag: Tag, map: WriteMap) -> IoResult {
        let mut core = self.0.borrow_mut();
        if core.holds || !core.shared.chain.owns(&map) {
            drop(core);
            // An exchange of the chain may have come between.
            self.submit(tag, map.into_op(OpFlags::NONE)?);
            return Ok(());
        }
        let index = core.take_slot(tag);
        let result = core.take_over(index, map);
        core.piece_ended(index, result);
        Ok(())
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        self.0.borrow_mut().harvest(done)
    }

    fn in_flight(&self) -> usize {
        let core = self.0.borrow();
        core.in_flight.saturating_add(core.held.len())
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        self.0.borrow().timings.take(timings);
    }
}

impl Core {
    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if !self.shared.sink.is_empty() {
            let mut scratch = std::mem::take(&mut self.scratch);
            self.shared.sink.take(&mut scratch);
            self.on_the_way = self.on_the_way.saturating_sub(scratch.len());
            for (token, result) in scratch.drain(..) {
                if let Ok(index) = usize::try_from(token) {
                    self.piece_ended(index, result);
                }
            }
            self.scratch = scratch;
        }
        let count = self.ready.len();
        done.append(&mut self.ready);
        self.in_flight = self.in_flight.saturating_sub(count);
        if self.until_quiet {
            self.look_whether_quiet();
        }
        count
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // What is still in flight holds the sink: its places in the images' epochs, and on its chains, live as long.
        let formers = std::mem::take(&mut self.formers);
        self.shared.sink.keep(Box::new((self.participant.take(), self.lease.take(), formers)));
    }
}

/// Whether a piece of a read can be started at once.
fn is_quick(place: &Place) -> bool {
    match place.extent {
        Extent::Data { .. } => true,
        // Long runs are zeroed in a task, step by step.
        Extent::Zero | Extent::Backing => place.length_bytes <= turn::STEP_BYTES as u64 && !turn::has_moved_enough(),
        Extent::Compressed(_) => false,
    }
}
