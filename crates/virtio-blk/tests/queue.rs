//! A queue on a reactor, without any session above it.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
#[path = "../../export-vhost-user/tests/support/reactor.rs"]
mod reactor;

use block::{Completion, Disk, DiskInfo, DiskQueue, IoError, Op, Part, Poller, ReactorCtx, Tag, run_and_wait};
use model::any::AnyDriver;
use model::{Driver, Guest};
use reactor::TestReactor;
use ringdisk_virtio_blk::{Device, DeviceOptions, QueueSetup, RunningQueue, StoppedQueue, Transport, open_poller};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio::PackedDeviceRing;
use virtio::blk::{RangeSegment, RequestHeader, features, request_type};
use virtio::ring_access::{RingAddresses, RingAreas, RingLayout};

const SIZE: u16 = 16;
/// Far longer than anything here takes.
const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// A driver that is not told of anything, and that may have a way to kick.
struct Wires {
    kick: Option<OwnedFd>,
}

impl Transport for Wires {
    fn notify(&self) -> bool {
        false
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(AsFd::as_fd)
    }
}

/// The tests of `packed.rs` are these, over packed rings.
const PACKED: bool = matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"packed");

/// Where a new ring begins.
const BASE: u32 = if PACKED { PackedDeviceRing::NEW } else { 0 };

fn driver(guest: &Guest) -> AnyDriver<'_> {
    AnyDriver::new(guest, SIZE, PACKED)
}

fn setup(guest: &Guest, kick: Option<OwnedFd>) -> QueueSetup<Wires> {
    setup_at(guest, kick, driver(guest).addresses(), PACKED)
}

fn setup_at(guest: &Guest, kick: Option<OwnedFd>, [table, avail, used]: [u64; 3], packed: bool) -> QueueSetup<Wires> {
    let layout = if packed { RingLayout::Packed } else { RingLayout::Split };
    let at = RingAddresses { table, avail, used };
    let disk = Arc::new(image::NullDisk::new(1 << 20, String::new()));
    let device = Device::new(disk, DeviceOptions::default()).unwrap();
    // It flushes itself.
    device.negotiated(features::FLUSH);
    let areas = RingAreas::at_guest_addresses(layout, Arc::clone(&guest.memory), at, SIZE).unwrap();
    QueueSetup::new(device, areas, 0, Wires { kick })
}

#[test]
fn when_a_queue_has_stopped_its_reactor_holds_the_guests_memory_no_more() {
    let reactor = TestReactor::start("reactor");
    let guest = Guest::new();
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let queue = RunningQueue::start(&reactor.handle(), setup(&guest, Some(kick))).unwrap();
    assert!(Arc::strong_count(&guest.memory) > 1);
    let stopped = queue.begin_stop().wait();
    assert_eq!(Arc::strong_count(&guest.memory), 1, "the reactor would have to unmap it");
    assert_eq!(stopped, Some(StoppedQueue { base: BASE, halt: None }));
}

#[test]
fn a_queue_without_kicks_lets_its_reactor_sleep_and_wakes_it_to_look() {
    let reactor = TestReactor::start("reactor");
    let guest = Arc::new(Guest::new());
    let theirs = Arc::clone(&guest);
    let test = move |ctx: &_| {
        let queue = open_poller(ctx, setup(&theirs, None)).unwrap();
        let mut queue = queue.borrow_mut();
        for turn in 0..3 {
            assert!(!queue.poll(), "there is nothing to do");
            assert!(!queue.arm(), "turn {turn}: the reactor must not sleep");
            let timer = queue.wake_fd().unwrap();
            let mut fds = [PollFd::from_borrowed_fd(timer, PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&PATIENCE)), Ok(1), "turn {turn}: nobody wakes the reactor");
            queue.disarm();
        }
        let mut driver = driver(&theirs);
        let header = RequestHeader { kind: request_type::FLUSH, priority: 0, sector: 0 };
        theirs.write(0x2_0000, &header.to_bytes());
        driver.put_chain(&[0, 1], &[(0x2_0000, 16, false), (0x2_0010, 1, true)]);
        driver.offer(0);
        driver.publish();
        assert!(queue.poll());
        assert_eq!(driver.take_used(), [(0, 1)]);
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

/// A disk that ends nothing by itself.
#[derive(Default)]
struct Held {
    pins_memory: bool,
}

thread_local! {
    /// Its queues, in the order in which they were opened.
    static QUEUES: RefCell<Vec<Rc<RefCell<HeldOps>>>> = RefCell::default();
}

#[derive(Default)]
struct HeldOps {
    held: Vec<(Tag, Op)>,
    ended: Vec<Completion>,
}

struct HeldQueue(Rc<RefCell<HeldOps>>);

impl Disk for Held {
    fn info(&self) -> DiskInfo {
        DiskInfo { volatile_cache: true, write_zeroes: true, ..image::NullDisk::new(1 << 20, String::new()).info() }
    }

    fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        let ops = Rc::default();
        QUEUES.with_borrow_mut(|all| all.push(Rc::clone(&ops)));
        Ok(Box::new(HeldQueue(ops)))
    }

    fn may_pin_memory(&self) -> bool {
        self.pins_memory
    }
}

impl DiskQueue for HeldQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        self.0.borrow_mut().held.push((tag, op));
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let ended = &mut self.0.borrow_mut().ended;
        let count = ended.len();
        done.append(ended);
        count
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().held.len()
    }
}

/// Which of a queue's operations are held.
fn held(queue: usize) -> String {
    let letter = |op: &Op| match op {
        Op::Flush => 'f',
        Op::Write { flags, .. } | Op::WriteZeroes { flags, .. } if flags.is_fua() => 'W',
        Op::Write { .. } | Op::WriteZeroes { .. } => 'w',
        Op::Read { .. } => 'r',
        _ => '?',
    };
    QUEUES.with_borrow(|all| all[queue].borrow().held.iter().map(|(_, op)| letter(op)).collect())
}

/// Ends the held operations of a queue for which `which` says so.
fn end(queue: usize, result: Result<(), IoError>, which: impl Fn(&Op) -> bool) {
    QUEUES.with_borrow(|all| {
        let mut ops = all[queue].borrow_mut();
        let (ends, held) = std::mem::take(&mut ops.held).into_iter().partition::<Vec<_>, _>(|(_, op)| which(op));
        ops.held = held;
        ops.ended.extend(ends.into_iter().map(|(tag, _)| Completion { tag, result }));
    });
}

/// A queue over the held disk, and its guest's driver.
struct Served<'a> {
    queue: Rc<RefCell<dyn Poller>>,
    driver: AnyDriver<'a>,
    next_head: u16,
}

impl<'a> Served<'a> {
    fn new(ctx: &Rc<dyn ReactorCtx>, guest: &'a Guest, device: &Arc<Device>, index: u16) -> Self {
        let setup = setup(guest, None).with(|setup| (setup.device, setup.index) = (Arc::clone(device), index));
        Self { queue: open_poller(ctx, setup).unwrap(), driver: driver(guest), next_head: 0 }
    }

    /// Sends a read or a write of the first sector, or a write of zeros there.
    fn send(&mut self, kind: u32) {
        self.send_at(kind, 0);
    }

    fn send_at(&mut self, kind: u32, sector: u64) {
        let (header, data) = (0x2_0000, 0x3_0000);
        let guest = self.driver.guest();
        guest.write(header, &RequestHeader { kind, priority: 0, sector }.to_bytes());
        guest.write(data, &[0; 512]);
        let range_bytes = match kind {
            request_type::WRITE_ZEROES => {
                guest.write(data, &RangeSegment { sector, sector_count: 1, flags: 0 }.to_bytes());
                virtio::blk::RANGE_SEGMENT_BYTES as u32
            }
            _ => 512,
        };
        let head = self.next_head;
        self.next_head = (head + 3) % (SIZE - 1);
        let indices = [head, head + 1, head + 2];
        let chain = [(header, 16, false), (data, range_bytes, kind == request_type::IN), (0x2_0010, 1, true)];
        self.driver.put_chain(&indices, &chain);
        self.driver.offer(head);
        self.driver.publish();
        self.queue.borrow_mut().poll();
    }

    fn ended(&mut self) -> usize {
        self.queue.borrow_mut().poll();
        self.driver.take_used().len()
    }
}

/// A guest in write-through takes each completed write for a promise that all before it is durable, too. What was written
/// before the switch may lie in a cache; each queue makes that good before its first write ends, whatever others do.
#[test]
fn after_a_switch_to_write_through_no_write_of_any_queue_ends_before_a_flush_has() {
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let (one, two) = (Guest::new(), Guest::new());
        let device = Device::new(Arc::new(Held::default()), DeviceOptions::default()).unwrap();
        device.negotiated(features::FLUSH | features::CONFIG_WCE);
        let mut queues = [Served::new(ctx, &one, &device, 0), Served::new(ctx, &two, &device, 1)];
        queues[0].send(request_type::OUT);
        assert_eq!(held(0), "w", "write-back");
        end(0, Ok(()), |_| true);
        assert_eq!(queues[0].ended(), 1);
        device.write_config(32, &[0]).unwrap();
        let is_flush = |op: &Op| matches!(op, Op::Flush);
        for (number, queue) in queues.iter_mut().enumerate() {
            queue.send(request_type::OUT);
            queue.send(request_type::OUT);
            queue.send(request_type::WRITE_ZEROES);
            assert_eq!(held(number), "fWfWWf", "queue {number}");
            end(number, Ok(()), |op| !is_flush(op));
            assert_eq!(queue.ended(), 0, "queue {number}: nothing is durable yet");
        }
        // A flush that failed settles nothing.
        end(0, Err(IoError::EIO), is_flush);
        assert_eq!(queues[0].ended(), 3);
        queues[0].send(request_type::OUT);
        assert_eq!(held(0), "fW");
        end(0, Ok(()), |_| true);
        assert_eq!(queues[0].ended(), 1);
        queues[0].send(request_type::OUT);
        assert_eq!(held(0), "W", "it is settled");
        queues[1].send(request_type::OUT);
        assert_eq!(held(1), "ffffW", "not on this queue");
        end(1, Ok(()), |_| true);
        assert_eq!(queues[1].ended(), 4);
        // The same again after the next switch, and where a driver comes that cannot flush.
        device.write_config(32, &[1]).unwrap();
        device.write_config(32, &[0]).unwrap();
        queues[1].send(request_type::OUT);
        assert_eq!(held(1), "fW");
        device.write_config(32, &[1]).unwrap();
        device.negotiated(0);
        queues[1].send(request_type::OUT);
        assert_eq!(held(1), "fWfW");
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

/// A flush that nobody waits for would end a request that has ended, or another one in its place.
#[test]
fn zeros_that_are_refused_or_need_not_be_durable_take_no_flush_along() {
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let guest = Guest::new();
        let device = Device::new(Arc::new(Held::default()), DeviceOptions::default()).unwrap();
        device.negotiated(features::FLUSH | features::CONFIG_WCE);
        device.write_config(32, &[0]).unwrap();
        let mut queue = Served::new(ctx, &guest, &device, 0);
        // The queue's own flush.
        end(0, Ok(()), |_| true);
        queue.send_at(request_type::WRITE_ZEROES, 1 << 20);
        assert_eq!((held(0).as_str(), queue.ended()), ("", 1), "behind the end of the disk");
        device.write_config(32, &[1]).unwrap();
        queue.send(request_type::WRITE_ZEROES);
        assert_eq!(held(0), "w", "write-back");
        end(0, Ok(()), |_| true);
        assert_eq!((held(0).as_str(), queue.ended()), ("", 1));
        device.write_config(32, &[0]).unwrap();
        queue.send(request_type::WRITE_ZEROES);
        assert_eq!(held(0), "Wf", "write-through");
        end(0, Ok(()), |_| true);
        assert_eq!((held(0).as_str(), queue.ended()), ("", 1));
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

/// A process that was killed may have left writes in a cache. A guest in write-through takes what it reads for durable.
#[test]
fn a_queue_of_a_guest_in_write_through_takes_nothing_before_a_flush_of_its_own_has_ended() {
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let guests = [(); 4].map(|()| Guest::new());
        let device = Device::new(Arc::new(Held::default()), DeviceOptions::default()).unwrap();
        device.negotiated(0);
        let mut queue = Served::new(ctx, &guests[0], &device, 0);
        queue.send(request_type::IN);
        assert_eq!((held(0).as_str(), queue.ended()), ("f", 0), "the read waits");
        assert!(device.latency().oldest_ns > 0 && device.stats()[0].own_flush_ns > 0, "nobody sees what it waits for");
        assert_eq!(device.latency().kinds[2].whole.count(), 0);
        end(0, Ok(()), |_| true);
        assert_eq!((queue.ended(), held(0).as_str()), (0, "r"));
        let flushes = &device.latency().kinds[2];
        assert_eq!((flushes.kind, flushes.whole.count()), ("flush", 1));
        assert_eq!(flushes.parts[Part::Metadata as usize].count(), 1);
        assert_eq!(device.stats()[0].own_flush_ns, 0);
        end(0, Ok(()), |_| true);
        assert_eq!(queue.ended(), 1);
        queue.send(request_type::OUT);
        assert_eq!(held(0), "W", "what was before is durable");

        let mut other = Served::new(ctx, &guests[1], &device, 1);
        other.send(request_type::IN);
        other.send(request_type::OUT);
        assert_eq!(held(1), "rW", "one flush is enough for all queues");

        // Reads are served although it failed, and no write ends without a flush that succeeded.
        let device = Device::new(Arc::new(Held::default()), DeviceOptions::default()).unwrap();
        device.negotiated(0);
        let mut queue = Served::new(ctx, &guests[2], &device, 0);
        end(2, Err(IoError::EIO), |_| true);
        queue.send(request_type::IN);
        queue.send(request_type::OUT);
        assert_eq!(held(2), "rfW");

        // A guest that flushes does so itself.
        let device = Device::new(Arc::new(Held::default()), DeviceOptions::default()).unwrap();
        device.negotiated(features::FLUSH);
        let mut queue = Served::new(ctx, &guests[3], &device, 0);
        queue.send(request_type::IN);
        assert_eq!(held(3), "r");
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

#[test]
fn a_queue_that_stops_waits_for_its_own_flush_and_takes_nothing_after_it() {
    let reactor = TestReactor::start("reactor");
    let guest = Guest::new();
    let device = Device::new(Arc::new(Held::default()), DeviceOptions::default()).unwrap();
    device.negotiated(0);
    let mut driver = driver(&guest);
    guest.write(0x2_0000, &RequestHeader { kind: request_type::FLUSH, priority: 0, sector: 0 }.to_bytes());
    driver.put_chain(&[0, 1], &[(0x2_0000, 16, false), (0x2_0010, 1, true)]);
    driver.offer(0);
    driver.publish();
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let setup = setup(&guest, Some(kick)).with(|setup| setup.device = device);
    let mut stopping = RunningQueue::start(&reactor.handle(), setup).unwrap().begin_stop();
    assert!(!stopping.is_drained_within(Duration::from_millis(20)), "its flush has not ended");
    run_and_wait(reactor.handle().as_ref(), |_: &_| end(0, Ok(()), |_| true)).unwrap();
    assert_eq!(stopping.wait(), Some(StoppedQueue { base: BASE, halt: None }));
    assert_eq!(driver.take_used(), []);
}

/// The guest uses the memory of a request again once it has an answer, whatever the answer is. A device that holds the
/// memory then reads what lies there: foreign data would get onto the disk.
#[test]
fn a_request_that_is_given_up_gets_no_answer_while_a_device_may_hold_its_memory() {
    let reactor = TestReactor::start("reactor");
    for (pins_memory, registers) in [(false, false), (true, false), (false, true)] {
        let guest = Guest::new();
        let device = Device::new(Arc::new(Held { pins_memory }), DeviceOptions::default()).unwrap();
        device.negotiated(features::FLUSH);
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let setup = setup(&guest, Some(kick)).with(|setup| {
            (setup.device, setup.register_memory) = (device, registers);
        });
        let mut driver = driver(&guest);
        let kinds = [request_type::IN, request_type::OUT, request_type::FLUSH, request_type::WRITE_ZEROES];
        for (kind, number) in kinds.into_iter().zip(0_u16..) {
            let (header, data) = (0x2_0000 + 0x100 * u64::from(number), 0x3_0000 + 0x1000 * u64::from(number));
            guest.write(header, &RequestHeader { kind, priority: 0, sector: 0 }.to_bytes());
            guest.write(data, &RangeSegment { sector: 0, sector_count: 1, flags: 0 }.to_bytes());
            let data = match kind {
                request_type::FLUSH => None,
                request_type::WRITE_ZEROES => Some((data, virtio::blk::RANGE_SEGMENT_BYTES as u32, false)),
                _ => Some((data, 512, kind == request_type::IN)),
            };
            let chain: Vec<_> =
                [Some((header, 16, false)), data, Some((header + 16, 1, true))].into_iter().flatten().collect();
            driver.put_chain(&[3 * number, 3 * number + 1, 3 * number + 2][..chain.len()], &chain);
            driver.offer(3 * number);
        }
        driver.publish();
        let queue = RunningQueue::start(&reactor.handle(), setup).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let taken = |_: &_| QUEUES.with_borrow(|all| all.last().map_or(0, |queue| queue.borrow().held.len()));
        while run_and_wait(reactor.handle().as_ref(), taken).unwrap() < kinds.len() {
            assert!(Instant::now() < deadline, "the requests are not taken");
        }
        let stopping = queue.begin_stop();
        assert!(stopping.give_up().is_some());
        stopping.abandon();
        let used: Vec<u32> = driver.take_used().into_iter().map(|(head, _)| head / 3).collect();
        let may_be_held = pins_memory || registers;
        assert_eq!(used, if may_be_held { vec![2, 3] } else { vec![0, 1, 2, 3] }, "{pins_memory} {registers}");
        for head in used {
            assert_eq!(guest.read(0x2_0010 + 0x100 * u64::from(head), 1), [1], "{head} has an error");
        }
    }
}

#[test]
fn a_turn_takes_a_bounded_number_of_pieces_of_memory() {
    if PACKED {
        // All of its requests share one table, which only a split ring can say so simply.
        return;
    }
    let reactor = TestReactor::start("reactor");
    let guest = Arc::new(Guest::new());
    let theirs = Arc::clone(&guest);
    let test = move |ctx: &_| {
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let setup = setup(&theirs, Some(kick)).with(|setup| setup.features = features::INDIRECT_DESC);
        let queue = open_poller(ctx, setup).unwrap();
        let mut queue = queue.borrow_mut();
        let mut driver = Driver::new(&theirs, SIZE);
        let header = RequestHeader { kind: request_type::IN, priority: 0, sector: 0 };
        theirs.write(0x2_0000, &header.to_bytes());
        for (pieces, a_turn) in [(1024_u64, 1), (600, 2), (5, 15)] {
            // All but the last two pieces of data have one byte.
            let mut buffers = vec![(0x2_0000, 16, false)];
            buffers.extend((0..pieces - 3).map(|piece| (0x3_0000 + piece, 1, true)));
            buffers.push((0x4_0000, (1024 - (pieces as u32 - 3)).max(1), true));
            buffers.push((0x2_0010, 1, true));
            driver.put_indirect(0, 0x5_0000, &buffers);
            let entry = theirs.read(driver.table, 16);
            for head in 0..15 {
                theirs.write(driver.table + 16 * head, &entry);
                driver.offer(head as u16);
            }
            driver.publish();
            assert!(queue.poll());
            assert_eq!(driver.take_used().len(), a_turn, "requests of {pieces} pieces in a turn");
            while queue.poll() {}
            assert_eq!(driver.take_used().len(), 15 - a_turn);
        }
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}
