//! What the device's half costs: a read of three descriptors, taken, filled in by nobody, and given back, in batches of
//! 32; beside it `virtio-queue` with the same ring. Run with `cargo bench -p ringdisk-virtio`.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/model/mod.rs"]
mod model;

use model::{Driver, GUEST_BYTES, Guest};
use ringdisk_virtio::blk::{RequestHeader, Status, request_type};
use ringdisk_virtio::ring_access::{RingAddresses, SplitAreas};
use ringdisk_virtio::{BlkQueue, DeviceRing, RequestLimits, RingFeatures, SplitDeviceRing};
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

fn ours(indirect: bool) -> Vec<Duration> {
    let guest = Guest::new();
    let mut driver = Driver::new(&guest, SIZE);
    set_up(&mut driver, indirect);
    driver.avail_index = 0;
    let at = RingAddresses { table: driver.table, avail: driver.avail, used: driver.used };
    let areas = SplitAreas::at_guest_addresses(Arc::clone(&guest.memory), at, SIZE).unwrap();
    let features = RingFeatures { indirect: true, event_idx: true };
    let limits = RequestLimits { discard: true, write_zeroes: true, max_ranges: 16, max_range_sectors: 1 << 21 };
    let mut queue = BlkQueue::new(SplitDeviceRing::new(areas, features, 0), Arc::clone(&guest.memory), limits);
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
    report("virtio-queue, direct  ", theirs(false));
    report("virtio-queue, indirect", theirs(true));
}
