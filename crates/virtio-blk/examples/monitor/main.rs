//! A monitor gives its guest a disk without any socket.
//!
//! ```sh
//! cargo run -p ringdisk-virtio-blk --example monitor -- disk.raw
//! ```
//!
//! `guest.rs` takes the place of what a real monitor has: a guest, its memory, and its notifications.

mod guest;

use block::{Disk, File};
use engine::{OpenOptions, Reactor, ReactorConfig};
use guest::Guest;
use image::{FileName, Format, ImageOptions, Role};
use ringdisk_virtio_blk::{Device, DeviceOptions, EventFds, QueueSetup, RunningQueue};
use std::{error::Error, path::Path, sync::Arc};
use virtio::ring_access::SplitAreas;

/// Serves a raw image to a guest. Returns the bytes of the sector that the guest reads.
fn run(path: &Path, sector: u64) -> Result<Vec<u8>, Box<dyn Error>> {
    let options = ImageOptions::new(path).with(|options| options.format = Some(Format::Raw));
    let disk = Arc::new(image::open(&options, &open_file)?);
    let device = Device::new(Arc::clone(&disk) as Arc<dyn Disk>, DeviceOptions::default())?;
    let reactor = Reactor::spawn(ReactorConfig::default())?;
    let mut guest = Guest::new()?;

    // A real guest writes its choice of features, and where its ring lies, into registers. This one takes all features.
    let features = device.features();
    device.negotiated(features);
    let ring = SplitAreas::at_guest_addresses(guest.memory(), guest::RING, guest::RING_ENTRIES)?;
    let events = EventFds { kick: guest.kick.try_clone()?, interrupt: guest.interrupt.try_clone()? };
    let queue = RunningQueue::start(&reactor.handle(), QueueSetup::new(device, ring.into(), features, events))?;

    let bytes = guest.read_sector(sector)?;

    queue.begin_stop().wait();
    disk.close()?;
    reactor.stop()?;
    Ok(bytes)
}

/// Opens the files that an image consists of.
fn open_file(name: &FileName, role: Role) -> block::Result<Arc<dyn File>> {
    let mut options = OpenOptions::default();
    options.read_only = role != Role::Writable;
    engine::open(&name.look_at(), &options)
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("name a raw image")?;
    println!("the guest reads {:?}", String::from_utf8_lossy(&run(path.as_ref(), 0)?));
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guest_reads_what_the_image_holds() {
        let image = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(image.path(), [[0; 512], [0x5a; 512]].concat()).unwrap();
        assert_eq!(super::run(image.path(), 1).unwrap(), [0x5a; 512]);
    }
}
