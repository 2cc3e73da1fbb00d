//! What a real monitor has from KVM: a guest with memory, and the event descriptors of its ring. This guest is a few
//! calls of the ring's driver half.

use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{read, write};
use std::{error::Error, os::fd::OwnedFd, sync::Arc};
use virtio::blk::{RequestHeader, request_type};
use virtio::driver_ring::{Buffer, DriverRing};
use virtio::ring_access::{RingAddresses, SplitAreas};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const MEMORY_BYTES: usize = 1 << 20;

/// Where the guest has put its ring, and its length.
pub(crate) const RING: RingAddresses = RingAddresses { table: 0, avail: 0x1000, used: 0x2000 };
pub(crate) const RING_ENTRIES: u16 = 64;

/// Where it puts the parts of its requests.
const HEADER: u64 = 0x3000;
const STATUS: u64 = 0x3010;
const DATA: u64 = 0x4000;

pub(crate) struct Guest {
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
    driver: DriverRing,
    /// Wakes the device (KVM: ioeventfd).
    pub(crate) kick: OwnedFd,
    /// Interrupts the guest (KVM: irqfd).
    pub(crate) interrupt: OwnedFd,
}

impl Guest {
    pub(crate) fn new() -> Result<Self> {
        let (_file, mapping) = Mapping::anonymous_file(c"guest", MEMORY_BYTES)?;
        let mapping = Arc::new(mapping);
        let spec = RegionSpec::new(0, MEMORY_BYTES as u64);
        let region = GuestRegion::of_mapping(spec, Arc::clone(&mapping), 0).ok_or("the region does not fit")?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        let areas = SplitAreas::at_guest_addresses(Arc::clone(&memory), RING, RING_ENTRIES)?;
        let driver = DriverRing::new(areas, true, None)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self { mapping, memory, driver, kick: event()?, interrupt: event()? })
    }

    pub(crate) fn memory(&self) -> Arc<GuestMemory> {
        Arc::clone(&self.memory)
    }

    /// Reads a sector of the disk, as a driver does.
    pub(crate) fn read_sector(&mut self, sector: u64) -> Result<Vec<u8>> {
        let header = RequestHeader { kind: request_type::IN, priority: 0, sector };
        self.at(HEADER, 16)?.whole().copy_from_slice(0, &header.to_bytes());
        let part = |address, length_bytes, device_writes| Buffer { address, length_bytes, device_writes };
        self.driver.add(&[part(HEADER, 16, false), part(DATA, 512, true), part(STATUS, 1, true)])?;
        let sleeps = !self.driver.enable_callbacks();
        if self.driver.publish() {
            write(&self.kick, &1_u64.to_ne_bytes())?;
        }
        if sleeps {
            poll(&mut [PollFd::new(&self.interrupt, PollFlags::IN)], None)?;
            read(&self.interrupt, &mut [0; 8])?;
        }
        self.driver.pop_used()?.ok_or("the request has not ended")?;
        match self.at(STATUS, 1)?.whole().to_vec()[..] {
            [0] => Ok(self.at(DATA, 512)?.whole().to_vec()),
            _ => Err("the disk cannot read this sector".into()),
        }
    }

    fn at(&self, address: u64, length_bytes: usize) -> Result<IoBuf> {
        let address = usize::try_from(address)?;
        Ok(IoBuf::in_mapping(&self.mapping, address, length_bytes, Box::new(())).ok_or("outside the memory")?)
    }
}
