//! The device's half of a ring, split or packed, with a driver that does anything.
//!
//! An input is a series of the driver's actions: descriptors that are right, nearly right or noise, offers, and bytes
//! changed while requests are in flight. The checks: no panic, no byte outside the guest's memory is touched, no head
//! is in flight twice, and nothing happens after a fault.

use arbitrary::{Result, Unstructured};
use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec};
use std::sync::Arc;
use virtio::blk::{RequestHeader, Status};
use virtio::ring_access::{PackedAreas, RingAddresses, SplitAreas};
use virtio::{BlkQueue, DeviceRing, PackedDeviceRing, Request, RequestLimits, RingFeatures, SplitDeviceRing};

const REGION_BYTES: u64 = 128 << 10;
/// The second region touches the first, the third does not.
const REGIONS: [u64; 3] = [0, REGION_BYTES, 4 * REGION_BYTES];
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
const TABLES: u64 = 0x4000;
const HEADERS: u64 = 0x8000;
const STEPS_MAX: usize = 64;

const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(4, 1000).with_erases(4, 100).with_lifetime();

struct Guest {
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
}

impl Guest {
    fn new() -> Option<Self> {
        let bytes = REGION_BYTES as usize;
        let mapping = Arc::new(Mapping::anonymous_file(c"fuzz", bytes * REGIONS.len()).ok()?.1);
        let region = |(index, guest_address): (usize, &u64)| {
            let file_offset = (index * bytes) as u64;
            let spec = RegionSpec::new(*guest_address, REGION_BYTES).with(|spec| spec.file_offset = file_offset);
            GuestRegion::of_mapping(spec, Arc::clone(&mapping), index * bytes)
        };
        let regions = REGIONS.iter().enumerate().map(region).collect::<Option<Vec<_>>>()?;
        Some(Self { memory: Arc::new(GuestMemory::new(regions).ok()?), mapping })
    }

    /// Writes to the first two regions, which are adjacent here, too.
    fn write(&self, address: u64, bytes: &[u8]) {
        if address + bytes.len() as u64 <= 2 * REGION_BYTES
            && let Some(place) = IoBuf::in_mapping(&self.mapping, address as usize, bytes.len(), Box::new(()))
        {
            place.whole().copy_from_slice(0, bytes);
        }
    }
}

/// The part that differs between the layouts: how a driver writes a descriptor and offers it.
struct Driver<'a> {
    guest: &'a Guest,
    packed: bool,
    size: u16,
    /// The number of offers so far, or of descriptors made available.
    position: u32,
}

impl Driver<'_> {
    fn descriptor(&self, at: u64, address: u64, length: u32, flags: u16, link: u16) {
        let (third, fourth) = if self.packed { (link, flags) } else { (flags, link) };
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(third.to_le_bytes());
        bytes.extend(fourth.to_le_bytes());
        self.guest.write(at, &bytes);
    }

    /// Makes the next descriptor available; its link is the buffer's id.
    fn put_packed(&mut self, address: u64, length: u32, flags: u16, id: u16) {
        let (index, turn) = (self.position % u32::from(self.size), self.position / u32::from(self.size));
        let available = if turn.is_multiple_of(2) { 1 << 7 } else { 1 << 15 };
        self.descriptor(16 * u64::from(index), address, length, flags ^ available, id);
        self.position += 1;
    }

    /// Puts `head` into the available ring and shows it.
    fn offer_split(&mut self, head: u16) {
        let slot = u64::from(self.position % u32::from(self.size));
        self.guest.write(AVAIL + 4 + 2 * slot, &head.to_le_bytes());
        self.position += 1;
        self.guest.write(AVAIL + 2, &(self.position as u16).to_le_bytes());
    }
}

fn address(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=9)? {
        0 => u.arbitrary()?,
        1 => REGION_BYTES - u.int_in_range(0..=600)?,
        2 => 2 * REGION_BYTES - u.int_in_range(0..=600)?,
        3 => REGIONS[2] + REGION_BYTES - u.int_in_range(0..=600)?,
        4 => u.int_in_range(0..=0x2000)?,
        5 => TABLES + 16 * u.int_in_range(0..=64)?,
        _ => HEADERS + 16 * u.int_in_range(0..=8)?,
    })
}

fn length(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(match u.int_in_range(0..=5)? {
        0 => u.arbitrary()?,
        1 => 16 * u.int_in_range(0..=70)?,
        2 => 512 * u.int_in_range(0..=4)?,
        3 => u.int_in_range(0..=20)?,
        _ => 16,
    })
}

fn link(u: &mut Unstructured<'_>, size: u16) -> Result<u16> {
    if u.ratio(1u8, 12)? { u.arbitrary() } else { u.int_in_range(0..=size.saturating_sub(1)) }
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn flags(u: &mut Unstructured<'_>) -> Result<u16> {
    Ok(match u.int_in_range(0..=7)? {
        0 => u.arbitrary()?,
        1 => INDIRECT,
        2 | 3 => WRITE,
        4 => WRITE | NEXT,
        5 => 0,
        _ => NEXT,
    })
}

/// Makes a valid request: header, data, status.
fn good_request(u: &mut Unstructured<'_>, driver: &mut Driver<'_>) -> Result<()> {
    let (kind, slot) = (u.int_in_range(0..=14)?, u.int_in_range(0..=8)?);
    let header = HEADERS + 16 * slot;
    driver.guest.write(header, &RequestHeader { kind, priority: 0, sector: u.int_in_range(0..=100)? }.to_bytes());
    let in_flag = if matches!(kind, 0 | 8) { WRITE } else { 0 };
    let parts = [(header, 16, NEXT), (0x1_0000, 512, in_flag | NEXT), (0x9000 + slot, 1, WRITE)];
    let id = link(u, driver.size)?;
    match driver.packed {
        true => parts.into_iter().for_each(|(address, length, flags)| driver.put_packed(address, length, flags, id)),
        false => {
            for (step, (address, length, flags)) in (0..).zip(parts) {
                let [at, next] = [step, step + 1].map(|step| id.wrapping_add(step) % driver.size);
                driver.descriptor(16 * u64::from(at), address, length, flags, next);
            }
            driver.offer_split(id % driver.size);
        }
    }
    Ok(())
}

fn act(u: &mut Unstructured<'_>, driver: &mut Driver<'_>) -> Result<()> {
    let size = driver.size;
    match u.int_in_range(0..=5)? {
        0 | 1 => good_request(u, driver)?,
        // A descriptor in the ring, or in a table.
        2 => {
            let (address, length, flags, link) = (address(u)?, length(u)?, flags(u)?, link(u, size)?);
            match driver.packed {
                true => driver.put_packed(address, length, flags, link),
                false => driver.descriptor(16 * u64::from(link % size), address, length, flags, link),
            }
        }
        3 => {
            let at = TABLES + 16 * u.int_in_range(0..=64)?;
            driver.descriptor(at, address(u)?, length(u)?, flags(u)?, link(u, 70)?);
        }
        4 if !driver.packed => driver.offer_split(link(u, size)?),
        _ => {
            let at = u.int_in_range(0..=USED + 0x400)?;
            driver.guest.write(at, &[u.arbitrary()?]);
        }
    }
    Ok(())
}

pub(crate) fn chains(u: &mut Unstructured<'_>) -> Result<()> {
    let Some(guest) = Guest::new() else { return Ok(()) };
    let features = RingFeatures { indirect: u.ratio(7u8, 8)?, event_idx: u.arbitrary()? };
    let at = RingAddresses { table: 0, avail: AVAIL, used: USED };
    let memory = || Arc::clone(&guest.memory);
    if u.arbitrary()? {
        let size = u.int_in_range(1..=40)?;
        let Ok(areas) = PackedAreas::at_guest_addresses(memory(), at, size) else { return Ok(()) };
        let Ok(ring) = PackedDeviceRing::new(areas, features, PackedDeviceRing::NEW) else { return Ok(()) };
        let driver = Driver { guest: &guest, packed: true, size, position: 0 };
        let end = serve(u, BlkQueue::new(ring, memory(), LIMITS), driver);
        if let Ok(base) = end {
            assert!(base >> 16 == base & 0xffff, "nothing is in flight, and the positions are apart: {base:#x}");
        }
    } else {
        let size = 1 << u.int_in_range(0..=5)?;
        let Ok(areas) = SplitAreas::at_guest_addresses(memory(), at, size) else { return Ok(()) };
        let driver = Driver { guest: &guest, packed: false, size, position: 0 };
        serve(u, BlkQueue::new(SplitDeviceRing::new(areas, features, 0), memory(), LIMITS), driver)?;
    }
    Ok(())
}

/// Lets driver and device act in turn. Returns the position of the ring once everything has ended.
fn serve<R: DeviceRing>(u: &mut Unstructured<'_>, mut queue: BlkQueue<R>, mut driver: Driver<'_>) -> Result<u32> {
    let mut in_flight: Vec<u16> = Vec::new();
    let mut faulted = false;
    for _ in 0..u.int_in_range(1..=STEPS_MAX)? {
        act(u, &mut driver)?;
        for _ in 0..u.int_in_range(0..=3)? {
            match queue.pop() {
                Ok(Some((head, request))) => {
                    assert!(!faulted, "a request after a fault");
                    assert!(head < driver.size && !in_flight.contains(&head), "{head} is in flight twice");
                    // Every byte that a request names is touched: one that lies outside would crash.
                    match &request {
                        Request::Read { data, .. } => data.fill(0x5a),
                        Request::Write { data, .. } => drop(data.to_vec()),
                        _ => {}
                    }
                    in_flight.push(head);
                }
                Ok(None) => break,
                Err(_) => faulted = true,
            }
        }
        if u.arbitrary()? && !in_flight.is_empty() {
            let head = in_flight.swap_remove(u.choose_index(in_flight.len())?);
            queue.complete(head, if u.arbitrary()? { Status::Ok } else { Status::IoErr });
            // The request has ended already: nothing happens.
            queue.complete(head, Status::Ok);
        }
        match u.int_in_range(0..=3)? {
            0 => drop(queue.ring_mut().enable_notifications()),
            1 => queue.ring_mut().disable_notifications(),
            2 => drop(queue.publish()),
            _ => assert!(queue.ring().waiting() <= driver.size),
        }
        assert_eq!(usize::from(queue.ring().in_flight()), in_flight.len());
    }
    in_flight.drain(..).for_each(|head| queue.complete(head, Status::Ok));
    queue.publish();
    assert_eq!(queue.ring().in_flight(), 0);
    Ok(queue.ring().base())
}
