//! The built-in driver as the guest.

use super::Plan;
use super::measure::{BUFFERS_BYTES, CELLS, Part, Side, median};
use super::table::{self, Row};
use crate::output::Bar;
use crate::threads::load_threads;
use block::{Disk, ReactorHandle};
use daemon::Daemon;
use drive::{human_size, open_disk};
use driver::{Driver, DriverOptions};
use engine::ReactorThread;
use image::BackingPolicy;
use load::{Hooks, VerifyState};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How often each workload is measured on each side, in turn.
const ROUNDS: u32 = 3;
/// Where measuring starts and ends on the progress bar.
const MEASURING_STARTS: f64 = 0.25;
const MEASURING_ENDS: f64 = 0.95;

const MEASURED_SEED: u64 = 0x7269_6e67;
const KEPT_SEED: u64 = 0x6469_736b;
const HOST_SEED: u64 = 0x686f_7374;

pub(super) fn run(plan: &Plan, bar: &Bar) -> anyhow::Result<String> {
    let threads = load_threads("guest", 1)?;
    let reactors: Vec<Arc<dyn ReactorHandle>> = threads.iter().map(ReactorThread::handle).collect();
    let (rows, layers, kept) = measured_by_driver(plan, &reactors, bar)?;
    bar.say("looking for the data after a restart");
    find_again(plan, &reactors, kept)?;
    for thread in threads {
        thread.stop()?;
    }
    Ok(format!(
        "guest: the built-in virtio-blk driver, one queue, over vhost-user\n{}\n\
         {} written and verified; {} found again after the disk was closed\n{}",
        layers.join("\n"),
        human_size(plan.size_bytes),
        human_size(kept_part(plan).length_bytes),
        table::render(&rows)
    ))
}

/// Connects the driver to the socket.
fn connect(socket: &Path) -> anyhow::Result<Driver> {
    let options = DriverOptions::default().with(|options| {
        options.queues = 1;
        options.memory_bytes = BUFFERS_BYTES;
    });
    Ok(Driver::connect(socket, options)?)
}

fn measured_part(plan: &Plan) -> Part {
    Part { offset_bytes: 0, length_bytes: plan.size_bytes }
}

fn kept_part(plan: &Plan) -> Part {
    Part { offset_bytes: plan.size_bytes, length_bytes: super::kept_bytes(plan.size_bytes) }
}

/// Measures and verifies while the daemon runs.
fn measured_by_driver(
    plan: &Plan,
    reactors: &[Arc<dyn ReactorHandle>],
    bar: &Bar,
) -> anyhow::Result<(Vec<Row>, Vec<String>, VerifyState)> {
    let daemon = Daemon::start(plan.daemon_config(1))?;
    let mut drive = plan.guest_drive.clone();
    drive.export.queues = Some(1);
    daemon.add(&drive)?;
    let layers = daemon.disks().into_iter().flat_map(|disk| disk.layers).collect();
    let driver = Arc::new(connect(&plan.socket())?);
    let guest = side(plan, "guest", Arc::clone(&driver) as Arc<dyn Disk>, reactors, load::driver_hooks(&driver));
    let opened = open_disk(&plan.host_disk, BackingPolicy::Deny, &[])?;
    let host = side(plan, "host", Arc::clone(&opened.disk), reactors, Hooks::default());

    bar.say("writing and verifying through the guest path");
    let measured = measured_part(plan);
    let state = guest.write_pattern(measured, MEASURED_SEED)?;
    guest.check_pattern(measured, MEASURED_SEED, state)?;
    let kept = guest.write_pattern(kept_part(plan), KEPT_SEED)?;
    bar.set(MEASURING_STARTS / 2.0);
    bar.say("writing the host's file");
    host.write_pattern(measured, HOST_SEED)?;
    let rows = measure(plan, &guest, &host, bar)?;

    drop((guest, host));
    driver.disconnect()?;
    opened.close()?;
    daemon.shutdown()?;
    Ok((rows, layers, kept))
}

fn side<'a>(
    plan: &Plan,
    name: &'static str,
    disk: Arc<dyn Disk>,
    reactors: &'a [Arc<dyn ReactorHandle>],
    hooks: Hooks<'static>,
) -> Side<'a> {
    Side { name, disk, reactors, hooks, cancel: Arc::clone(&plan.cancel) }
}

/// Measures guest and host in turn, so that slow spells of the machine hit both.
fn measure(plan: &Plan, guest: &Side<'_>, host: &Side<'_>, bar: &Bar) -> anyhow::Result<Vec<Row>> {
    let slices = ROUNDS * CELLS.len() as u32 * 2;
    let time = Duration::from_secs_f64(plan.seconds / f64::from(slices));
    let mut rates = CELLS.map(|_| [Vec::new(), Vec::new()]);
    let mut done = 0;
    for _ in 0..ROUNDS {
        for (cell, rates) in CELLS.iter().zip(&mut rates) {
            for (side, rates) in [guest, host].into_iter().zip(rates) {
                bar.say(&format!("{}, {}", cell.label, side.name));
                bar.set(MEASURING_STARTS + (MEASURING_ENDS - MEASURING_STARTS) * f64::from(done) / f64::from(slices));
                rates.push(side.rate(cell, plan.size_bytes, time)?);
                done += 1;
            }
        }
    }
    let rows = CELLS.into_iter().zip(&mut rates);
    Ok(rows
        .map(|(cell, [guest, host])| Row { cell, guest: median(guest), host: median(host), ceiling: None })
        .collect())
}

/// Checks that data written before the daemon ended are in the image.
fn find_again(plan: &Plan, reactors: &[Arc<dyn ReactorHandle>], kept: VerifyState) -> anyhow::Result<()> {
    let mut disk = plan.guest_drive.disk.clone();
    disk.read_only = true;
    let opened = open_disk(&disk, BackingPolicy::Deny, &[])?;
    let again = side(plan, "reopened", Arc::clone(&opened.disk), reactors, Hooks::default());
    again.check_pattern(kept_part(plan), KEPT_SEED, kept)?;
    Ok(opened.close()?)
}
