//! What the device's half costs: a read of three descriptors, taken, filled in by nobody, and given back, in batches of
//! 32; beside it `virtio-queue` with the same ring. Then both halves together, split and packed. Run with
//! `cargo bench -p ringdisk-virtio`.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/model/mod.rs"]
mod model;

use model::{Driver, GUEST_BYTES, Guest};
use ringdisk_virtio::blk::{RequestHeader, Status, request_type};
use ringdisk_virtio::driver_ring::{Buffer, DriverRing, IndirectLayout};
use ringdisk_virtio::ring_access::{PackedAreas, RingAddresses, RingAreas, RingLayout, SplitAreas};
use ringdisk_virtio::{BlkQueue, DeviceRing, PackedDeviceRing, RequestLimits, RingFeatures, SplitDeviceRing};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const SIZE: u16 = 256;
const BATCH: u16 = 32;
const ROUNDS: u32 = 20_000;

/// Puts a ring of reads up; with `indirect`, each in a table of its own.
fn set_up(driver: &mut Driver<'_>, indirect: bool) {
    for request in 0..BATCH {
        let at = 0x2_0000 + u64::from(request) * 0x2000;
        driver.guest.write(at, &RequestHeader { kind: request_type::IN, priority: 0, sector: 8 }.to_bytes());
        let buffers = [(at, 16, false), (at + 0x1000, 4096, true), (at + 16, 1, true)];
        let head = request * 3;
        match indirect {
            true => driver.put_indirect(head, at + 0x100, &buffers),
            false => driver.put_chain(&[head, head + 1, head + 2], &buffers),
        }
    }
    for slot in 0..SIZE {
        driver.offer((slot % BATCH) * 3);
    }
}

/// Shows the device another batch.
fn show_batch(driver: &mut Driver<'_>) {
    driver.avail_index = driver.avail_index.wrapping_add(BATCH);
    driver.publish();
}

fn report(name: &str, mut costs: Vec<Duration>) {
    costs.sort_unstable();
    let each = |cost: Duration| cost.as_nanos() as f64 / f64::from(ROUNDS / 20 * u32::from(BATCH));
    println!("{name}: {:.1} ns a request (least {:.1}, most {:.1})", each(costs[10]), each(costs[0]), each(costs[19]));
}

const FEATURES: RingFeatures = RingFeatures { indirect: true, event_idx: true };
const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(16, 1 << 21);

/// A driver and a device in one thread: a batch added, published, served, published and popped.
fn both_halves(layout: RingLayout, indirect: bool) -> Vec<Duration> {
    let guest = Guest::new();
    let at = RingAddresses { table: 0, avail: 0x4000, used: 0x5000 };
    let memory = || Arc::clone(&guest.memory);
    let areas = RingAreas::at_guest_addresses(layout, memory(), at, SIZE).unwrap();
    let tables = IndirectLayout { address: 0x8000, stride_bytes: 64, entries: 3 };
    let mut driver = DriverRing::new(areas, true, indirect.then_some(tables)).unwrap();
    match layout {
        RingLayout::Split => {
            let areas = SplitAreas::at_guest_addresses(memory(), at, SIZE).unwrap();
            let ring = SplitDeviceRing::new(areas, FEATURES, 0);
            pass_batches(&guest, &mut driver, BlkQueue::new(ring, memory(), LIMITS))
        }
        RingLayout::Packed => {
            let areas = PackedAreas::at_guest_addresses(memory(), at, SIZE).unwrap();
            let ring = PackedDeviceRing::new(areas, FEATURES, PackedDeviceRing::NEW).unwrap();
            pass_batches(&guest, &mut driver, BlkQueue::new(ring, memory(), LIMITS))
        }
    }
}

fn pass_batches<R: DeviceRing>(guest: &Guest, driver: &mut DriverRing, mut queue: BlkQueue<R>) -> Vec<Duration> {
    let requests: Vec<_> = (0..u64::from(BATCH))
        .map(|request| {
            let at = 0x2_0000 + request * 0x2000;
            guest.write(at, &RequestHeader { kind: request_type::IN, priority: 0, sector: 8 }.to_bytes());
            let buffer = |address, length_bytes, device_writes| Buffer { address, length_bytes, device_writes };
            [buffer(at, 16, false), buffer(at + 0x1000, 4096, true), buffer(at + 16, 1, true)]
        })
        .collect();
    let mut heads = Vec::with_capacity(usize::from(BATCH));
    (0..20)
        .map(|_| {
            let begun = Instant::now();
            for _ in 0..ROUNDS / 20 {
                for request in &requests {
                    driver.add(request).unwrap();
                }
                std::hint::black_box(driver.publish());
                while let Some((head, request)) = queue.pop().unwrap() {
                    drop(std::hint::black_box(request));
                    heads.push(head);
                }
                for head in heads.drain(..) {
                    queue.complete(head, Status::Ok);
                }
                std::hint::black_box(queue.publish());
                while let Some(used) = driver.pop_used().unwrap() {
                    std::hint::black_box(used);
                }
                assert_eq!(driver.in_flight(), 0);
            }
            begun.elapsed()
        })
        .collect()
}

fn ours(indirect: bool) -> Vec<Duration> {
    let guest = Guest::new();
    let mut driver = Driver::new(&guest, SIZE);
    set_up(&mut driver, indirect);
    driver.avail_index = 0;
    let at = RingAddresses { table: driver.table, avail: driver.avail, used: driver.used };
    let areas = SplitAreas::at_guest_addresses(Arc::clone(&guest.memory), at, SIZE).unwrap();
    let mut queue = BlkQueue::new(SplitDeviceRing::new(areas, FEATURES, 0), Arc::clone(&guest.memory), LIMITS);
    let mut heads = Vec::with_capacity(usize::from(BATCH));
    (0..20)
        .map(|_| {
            let mut cost = Duration::ZERO;
            for _ in 0..ROUNDS / 20 {
                show_batch(&mut driver);
                let begun = Instant::now();
                while let Some((head, request)) = queue.pop().unwrap() {
                    drop(std::hint::black_box(request));
                    heads.push(head);
                }
                for head in heads.drain(..) {
                    queue.complete(head, Status::Ok);
                }
                std::hint::black_box(queue.publish());
                cost += begun.elapsed();
                assert_eq!(queue.ring().in_flight(), 0);
            }
            cost
        })
        .collect()
}

fn theirs(indirect: bool) -> Vec<Duration> {
    let guest = Guest::new();
    let mut driver = Driver::new(&guest, SIZE);
    set_up(&mut driver, indirect);
    driver.avail_index = 0;
    let file = std::fs::File::from(guest.file.try_clone().unwrap());
    let range = (GuestAddress(0), GUEST_BYTES, Some(FileOffset::new(file, 0)));
    let memory: GuestMemoryMmap<()> = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_size(SIZE);
    queue.set_desc_table_address(Some(driver.table as u32), Some(0));
    queue.set_avail_ring_address(Some(driver.avail as u32), Some(0));
    queue.set_used_ring_address(Some(driver.used as u32), Some(0));
    queue.set_event_idx(true);
    queue.set_ready(true);
    (0..20)
        .map(|_| {
            let mut cost = Duration::ZERO;
            for _ in 0..ROUNDS / 20 {
                show_batch(&mut driver);
                let begun = Instant::now();
                while let Some(mut chain) = queue.pop_descriptor_chain(&memory) {
                    let head = chain.head_index();
                    let header = chain.next().unwrap();
                    std::hint::black_box(memory.read_obj::<u128>(header.addr()).unwrap());
                    let data = chain.next().unwrap();
                    std::hint::black_box((data.addr(), data.len()));
                    let status = chain.next().unwrap();
                    memory.write_obj(0_u8, status.addr()).unwrap();
                    queue.add_used(&memory, head, 4097).unwrap();
                }
                std::hint::black_box(queue.needs_notification(&memory).unwrap());
                cost += begun.elapsed();
            }
            cost
        })
        .collect()
}

fn main() {
    report("ours, direct          ", ours(false));
    report("ours, indirect        ", ours(true));
    report("both, split, direct   ", both_halves(RingLayout::Split, false));
    report("both, split, indirect ", both_halves(RingLayout::Split, true));
    report("both, packed, direct  ", both_halves(RingLayout::Packed, false));
    report("both, packed, indirect", both_halves(RingLayout::Packed, true));
    report("virtio-queue, direct  ", theirs(false));
    report("virtio-queue, indirect", theirs(true));
}
