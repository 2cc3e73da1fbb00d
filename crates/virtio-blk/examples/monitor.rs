//! A monitor serves a disk to its guest without any socket: what it needs is the guest's memory and where a ring lies.
//! To run by itself, the example is its own guest, too: it reads a sector through the driver's half of the ring.

use block::{Disk, File, ReactorHandle};
use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec};
use ringdisk_virtio_blk::{Device, DeviceOptions, QueueSetup, RunningQueue, Transport};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use virtio::blk::{RequestHeader, request_type};
use virtio::driver_ring::{Buffer, DriverRing};
use virtio::ring_access::{RingAddresses, SplitAreas};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ENTRIES: u16 = 64;

/// How the monitor and the device tell each other something; a real monitor has these from KVM (ioeventfd, irqfd).
struct Wires {
    kick: OwnedFd,
    interrupt: OwnedFd,
}

impl Transport for Wires {
    fn notify(&self) -> bool {
        rustix::io::write(&self.interrupt, &1_u64.to_ne_bytes()).is_ok()
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.kick.as_fd())
    }
}

/// All that a monitor does: a device over the disk, and a queue of it on a reactor.
fn serve(
    disk: Arc<dyn Disk>,
    reactor: &Arc<dyn ReactorHandle>,
    memory: &Arc<GuestMemory>,
    ring: RingAddresses,
    transport: Wires,
) -> Result<RunningQueue<Wires>> {
    let device = Device::new(disk, DeviceOptions::default())?;
    // What the guest takes of `features` comes back through the transport's registers; this one takes all.
    let features = device.features();
    device.negotiated(features);
    let areas = SplitAreas::at_guest_addresses(Arc::clone(memory), ring, ENTRIES)?.into();
    Ok(RunningQueue::start(reactor, QueueSetup::new(device, areas, features, transport))?)
}

fn main() -> Result<()> {
    let image = tempfile::NamedTempFile::new()?;
    std::fs::write(image.path(), vec![0x5a; 1 << 20])?;
    let format = Some(image::Format::Raw);
    let disk = image::open(&image::ImageOptions::new(image.path()).with(|options| options.format = format), &Files)?;

    let (_file, mapping) = Mapping::anonymous_file(c"guest", 1 << 20)?;
    let mapping = Arc::new(mapping);
    let spec = RegionSpec::new(0, 1 << 20);
    let region = GuestRegion::of_mapping(spec, Arc::clone(&mapping), 0).ok_or("the region does not fit")?;
    let memory = Arc::new(GuestMemory::new(vec![region])?);
    let ring = RingAddresses { table: 0, avail: 0x1000, used: 0x2000 };
    let event = || eventfd(0, EventfdFlags::CLOEXEC);
    let (kick, interrupt) = (event()?, event()?);
    let wires = Wires { kick: kick.try_clone()?, interrupt: interrupt.try_clone()? };

    let mut guest = DriverRing::new(SplitAreas::at_guest_addresses(Arc::clone(&memory), ring, ENTRIES)?, true, None)?;
    let reactor = engine::Reactor::spawn(engine::ReactorConfig::default())?;
    let queue = serve(Arc::new(disk), &reactor.handle(), &memory, ring, wires)?;

    let at = |address, length| IoBuf::in_mapping(&mapping, address, length, Box::new(())).ok_or("outside the memory");
    let header = RequestHeader { kind: request_type::IN, priority: 0, sector: 7 };
    at(0x3000, 16)?.whole().copy_from_slice(0, &header.to_bytes());
    let buffer = |address, length_bytes, device_writes| Buffer { address, length_bytes, device_writes };
    guest.add(&[buffer(0x3000, 16, false), buffer(0x4000, 512, true), buffer(0x3010, 1, true)])?;
    let sleeps = !guest.enable_callbacks();
    if guest.publish() {
        rustix::io::write(&kick, &1_u64.to_ne_bytes())?;
    }
    if sleeps {
        rustix::io::read(&interrupt, &mut [0; 8])?;
    }
    assert_eq!(guest.pop_used()?.map(|used| used.written_bytes), Some(513));
    assert_eq!((at(0x3010, 1)?.whole().to_vec(), at(0x4000, 512)?.whole().to_vec()), (vec![0], vec![0x5a; 512]));

    queue.begin_stop().wait();
    Ok(reactor.stop()?)
}

/// Opens the files of images as they are.
struct Files;

impl image::Opener for Files {
    fn open(&self, name: &image::FileName, role: image::Role) -> block::Result<Arc<dyn File>> {
        let mut options = engine::OpenOptions::default();
        options.read_only = !matches!(role, image::Role::Writable);
        engine::open(name.to_string().as_ref(), &options)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guest_reads_what_the_image_holds() {
        super::main().unwrap();
    }
}
