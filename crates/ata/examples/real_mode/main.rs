//! A monitor in miniature: KVM runs a few bytes of real-mode code that copy a sector with `rep insw` and `rep outsd`.
//!
//! ```sh
//! cargo run --example real_mode -- disk.raw
//! ```
//!
//! It copies sector 1 of a raw image to sector 2. The guest's ports are a [`pio::Bus`] with an [`ringdisk_ata::Channel`].

mod guest;
mod machine;

use anyhow::{Context as _, Result};
use engine::{Reactor, ReactorConfig};
use machine::Machine;
use pio::Bus;
use ringdisk_ata::{Channel, ChannelPorts, DiskSectors, Drive};

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("name a raw image with at least three sectors")?;
    let Some(mut machine) = Machine::new(&guest::copy_sector(1, 2))? else {
        println!("skipped: /dev/kvm cannot be opened");
        return Ok(());
    };
    let drive::ParsedDrive::Drive(options) = drive::DriveOptions::parse(&format!("file={path},format=raw"))? else {
        anyhow::bail!("'{path}' asks for help");
    };
    let opened = drive::open_disk(&options.disk, image::BackingPolicy::Deny, &[])?;
    let thread = Reactor::spawn(ReactorConfig::default())?;
    let drive = Drive::new(DiskSectors::open(opened.disk.clone(), thread.handle())?)?;
    let mut bus = Bus::new();
    let channel = bus.attach(Box::new(Channel::new(Some(drive), None)), &ChannelPorts::PRIMARY.regions())?;
    let exits = machine.run(&mut bus)?;
    println!("copied sector 1 to 2: {exits} exits of the guest, {} calls of the device", bus.device_calls(channel));
    drop(bus);
    thread.stop()?;
    opened.close()?;
    Ok(())
}
