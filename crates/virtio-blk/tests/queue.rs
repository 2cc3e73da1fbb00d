//! A queue on a reactor, without any session above it.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
#[path = "../../export-vhost-user/tests/support/reactor.rs"]
mod reactor;

use block::{Poller, run_and_wait};
use model::{Driver, Guest};
use reactor::TestReactor;
use ringdisk_virtio_blk::{Device, DeviceOptions, DeviceQueue, QueueSetup, RunningQueue, StoppedQueue, Transport};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use virtio::blk::{RequestHeader, request_type};
use virtio::ring_access::{RingAddresses, SplitAreas};

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

fn setup(guest: &Guest, kick: Option<OwnedFd>) -> QueueSetup<Wires> {
    let driver = Driver::new(guest, SIZE);
    let at = RingAddresses { table: driver.table, avail: driver.avail, used: driver.used };
    let disk = Arc::new(image::NullDisk::new(1 << 20, String::new()));
    QueueSetup {
        device: Device::new(disk, DeviceOptions::default()).unwrap(),
        index: 0,
        areas: SplitAreas::at_guest_addresses(Arc::clone(&guest.memory), at, SIZE).unwrap(),
        features: 0,
        next_available: 0,
        register_memory: false,
        transport: Wires { kick },
    }
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
    assert_eq!(stopped, Some(StoppedQueue { next_available: 0, halt: None }));
}

#[test]
fn a_queue_without_kicks_lets_its_reactor_sleep_and_wakes_it_to_look() {
    let reactor = TestReactor::start("reactor");
    let guest = Arc::new(Guest::new());
    let theirs = Arc::clone(&guest);
    let test = move |ctx: &_| {
        let mut queue = DeviceQueue::new(ctx, setup(&theirs, None)).unwrap();
        for turn in 0..3 {
            assert!(!queue.poll(), "there is nothing to do");
            assert!(!queue.arm(), "turn {turn}: the reactor must not sleep");
            let timer = queue.wake_fd().unwrap();
            let mut fds = [PollFd::from_borrowed_fd(timer, PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&PATIENCE)), Ok(1), "turn {turn}: nobody wakes the reactor");
            queue.disarm();
        }
        let mut driver = Driver::new(&theirs, SIZE);
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
