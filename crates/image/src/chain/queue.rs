//! The data plane of an image on one reactor: resolves, splits and pushes.
//!
//! A request takes a slot. The slot counts each piece that is pushed to a file and each task that does the slow rest.
//! At its end, each tells the queue's sink; the last one completes the request. All pieces of a request carry the same
//! token, so the fast path allocates nothing and looks nothing up.

mod attendant;
mod exchanging;
mod shared;
mod start;
mod unpacking;

pub(crate) use shared::{OtherSide, Shared};

use crate::chain::exchange::board::{Attendance, Board};
use crate::chain::exchange::lease::Lease;
use crate::chain::layer::Layer;
use crate::chain::slow_path::Slow;
use crate::chain::timings::Timings;
use attendant::attend;
use block::latency::timed;
use block::sync::AtomicU64;
use block::{
    Completion, DiskQueue, Done, FileIo, FileOp, IoError, IoResult, Op, OpFlags, Participant, Parts, Priority,
    ReactorCtx, Result, Tag, Task, Ticket, WriteMap,
};
use shared::OpenFiles;
use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use unpacking::{AtWork, Unpacking};

/// Lists have room for at least so many pieces.
const LEAST_ROOM: usize = 64;

#[derive(Clone, Copy)]
struct Slot {
    /// `None` for work of the queue itself.
    tag: Option<Tag>,
    /// Pieces and tasks that have not ended, and one while the request is being split.
    pending: u32,
    /// The queue's chain on which the request began.
    generation: u32,
    /// The first error that a piece met.
    result: IoResult,
    ticket: Option<Ticket>,
}

/// A former chain on which requests of this queue are still in flight.
struct Former {
    generation: u32,
    in_flight: usize,
    participant: Option<Participant>,
    _lease: Option<Arc<Lease>>,
}

/// A queue of an [`crate::Image`].
pub(crate) struct ImageQueue(Rc<RefCell<Core>>);

/// The queue itself. The attendant on the same reactor also reaches it, for exchanges of the chain.
pub(crate) struct Core {
    shared: Rc<Shared>,
    ctx: Rc<dyn ReactorCtx>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    in_flight: usize,
    participant: Option<Participant>,
    /// Lookups that tables in memory answered. Only this queue counts here.
    hits: Arc<AtomicU64>,
    scratch: Vec<(u64, IoResult)>,
    timings: Rc<Timings>,
    /// Pieces and tasks in flight. `room` is how many of them the lists of ends have room for: all may end at once.
    on_the_way: usize,
    room: usize,
    /// Whether the top layer may reserve space ahead, and whether this queue does.
    reserves_ahead: bool,
    is_reserving: bool,
    /// Reads of compressed clusters that are at work, and those that wait for their turn.
    unpacking: Unpacking,
    /// Requests that completed without the sink.
    ready: Vec<Completion>,
    generation: u32,
    /// Held while the queue may have requests on its chain.
    lease: Option<Arc<Lease>>,
    formers: Vec<Former>,
    /// Whether new requests wait for the next chain.
    holds: bool,
    held: Vec<(Instant, Tag, Op)>,
    is_abandoned: bool,
    /// Whether the queue drops its lease when nothing is in flight.
    until_quiet: bool,
    prepared: Vec<(Arc<Layer>, OpenFiles)>,
    /// Dropped with the queue, which tells its attendant.
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
            // Something was announced meanwhile, and this queue has not heard of it: it looks again.
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
            reserves_ahead: shared.chain.reserves_ahead(),
            is_reserving: false,
            unpacking: Unpacking::default(),
            ready: Vec::new(),
            generation: 0,
            lease: None,
            formers: Vec::new(),
            holds: false,
            held: Vec::new(),
            is_abandoned: false,
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

    /// Lets the top layer reserve space for requests that come. It is nobody's request: none waits for it, and no space that
    /// is freed meanwhile does. An exchange of the chain does.
    #[cold]
    fn reserve_ahead(&mut self) {
        self.is_reserving = true;
        let index = self.add_slot(None, None);
        self.spawn(index, Slow::ReserveAhead);
        self.piece_ended(index, Ok(()));
    }

    /// Makes the lists of ends longer when more is in flight than ever before, rather than when much happens to end at
    /// once.
    #[cold]
    fn make_room(&mut self) {
        // With one more for work of the queue itself.
        let most = self.on_the_way.max(self.slots.len()).saturating_add(1);
        self.room = most.next_power_of_two().max(LEAST_ROOM);
        self.slots.reserve(self.room.saturating_sub(self.slots.len()));
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
        self.in_flight = self.in_flight.saturating_add(1);
        self.add_slot(Some(tag), ticket)
    }

    fn add_slot(&mut self, tag: Option<Tag>, ticket: Option<Ticket>) -> usize {
        let slot = Slot { tag, pending: 1, generation: self.generation, result: Ok(()), ticket };
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

    /// Counts one more piece of the request as in flight.
    fn count(&mut self, index: usize) -> Done {
        self.count_only(index);
        self.done(index)
    }

    fn count_only(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.pending = slot.pending.saturating_add(1);
        }
        self.on_the_way = self.on_the_way.saturating_add(1);
        if self.on_the_way > self.room {
            self.make_room();
        }
    }

    /// Returns how a piece that was counted tells its end.
    fn done(&self, index: usize) -> Done {
        Done::Sink { sink: Rc::clone(&self.shared.sink), token: index as u64 }
    }

    /// Notes the end of a piece, of a task, or of the splitting.
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
        match slot.tag {
            Some(tag) => self.ready.push(Completion { tag, result: slot.result }),
            None => self.is_reserving = false,
        }
    }

    fn push(&mut self, index: usize, layer: usize, op: FileOp, priority: Priority) -> IoResult {
        let file = Rc::clone(self.shared.files.get(layer).ok_or(IoError::EIO)?);
        let done = self.count(index);
        file.push(FileIo { op, priority, done });
        Ok(())
    }

    /// Hands the rest of a request to a task.
    fn spawn(&mut self, index: usize, slow: Slow) {
        self.count_only(index);
        self.spawn_counted(index, slow, Rc::clone(&self.shared), None);
    }

    /// As `spawn`, for a piece that is counted, on the chain of `shared`.
    fn spawn_counted(&mut self, index: usize, slow: Slow, shared: Rc<Shared>, at_work: Option<AtWork>) {
        let done = self.done(index);
        let Some(tag) = self.slots.get(index).map(|slot| slot.tag) else { return };
        // There is only one kind of task: another would take its memory from another place of the pool.
        let (is_timed, timings) = (self.timings.is_to_be_timed(), Rc::clone(&self.timings));
        self.ctx.spawn(Task::new(async move {
            let _at_work = at_work;
            let result = match is_timed {
                true => {
                    let (result, parts) = timed(pin!(slow.run(&shared))).await;
                    tag.into_iter().for_each(|tag| timings.tell(tag, parts));
                    result
                }
                false => {
                    tag.into_iter().for_each(|tag| timings.note(tag, Parts::AS_BEFORE));
                    slow.run(&shared).await
                }
            };
            done.complete(result);
        }));
    }
}

impl DiskQueue for ImageQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let mut core = self.0.borrow_mut();
        match core.holds {
            false => core.begin(tag, op),
            true if core.is_abandoned => core.end_unbegun(tag),
            true => core.held.push((Instant::now(), tag, op)),
        }
    }

    fn submit_map(&mut self, tag: Tag, map: WriteMap) -> IoResult {
        let mut core = self.0.borrow_mut();
        if core.holds {
            drop(core);
            self.submit(tag, map.into_op(OpFlags::NONE)?);
            return Ok(());
        }
        if !core.shared.chain.owns(&map) {
            // The map is in memory, or an exchange of the chain has come between.
            let op = map.into_op(OpFlags::NONE)?;
            let index = core.take_slot(tag);
            let result = core.start(index, op);
            core.piece_ended(index, result);
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

    fn abandon(&mut self) {
        let mut core = self.0.borrow_mut();
        core.is_abandoned = true;
        for (_, tag, _) in std::mem::take(&mut core.held) {
            core.end_unbegun(tag);
        }
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        self.0.borrow().timings.take(timings);
    }
}

impl Core {
    /// Ends a request that never began, since nobody waits for it.
    fn end_unbegun(&mut self, tag: Tag) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.ready.push(Completion { tag, result: Err(IoError::EIO) });
    }

    /// Notes which pieces and tasks have ended.
    fn take_ends(&mut self) {
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
            self.unpack_more();
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        self.take_ends();
        let count = self.ready.len();
        done.append(&mut self.ready);
        self.in_flight = self.in_flight.saturating_sub(count);
        if self.reserves_ahead && count > 0 && !self.is_reserving && !self.holds && self.shared.chain.is_short() {
            self.reserve_ahead();
        }
        if self.until_quiet {
            self.look_whether_quiet();
        }
        count
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // Requests in flight hold the sink. It keeps their places in the images' epochs and their leases until they
        // end.
        let formers = std::mem::take(&mut self.formers);
        self.shared.sink.keep(Box::new((self.participant.take(), self.lease.take(), formers)));
    }
}
