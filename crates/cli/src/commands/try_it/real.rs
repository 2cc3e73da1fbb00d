//! A real Linux guest.

use super::Plan;
use super::measure::{CELLS, Cell, Part, Side, median};
use super::table::{self, Row};
use crate::output::Bar;
use crate::threads::load_threads;
use anyhow::{Context, bail};
use block::ReactorHandle;
use daemon::Daemon;
use drive::{DriveOptions, ParsedDrive, human_size, open_disk};
use engine::ReactorThread;
use guestlab::{DiskReport, GuestKind, GuestOptions, GuestReport, GuestWork, ImageFormat};
use image::{BackingPolicy, FileName};
use load::Hooks;
use std::sync::Arc;
use std::time::Duration;

/// How much each of fio's writers in the guest writes and verifies, in MiB.
const FIO_MIB: u32 = 16;
const HOST_SEED: u64 = 0x686f_7374;

pub(super) fn run(plan: &Plan, kind: GuestKind, bar: &Bar) -> anyhow::Result<String> {
    let threads = load_threads("host", 1)?;
    let reactors: Vec<Arc<dyn ReactorHandle>> = threads.iter().map(ReactorThread::handle).collect();
    let host = Host::open(plan, &reactors)?;
    // Half of the host's measurements come before the guest's, half after.
    bar.say("measuring the host");
    let before = host.rates(plan)?;
    let report = served_to(plan, kind, bar)?;
    bar.say("measuring the host again");
    let after = host.rates(plan)?;
    host.close()?;
    for thread in threads {
        thread.stop()?;
    }
    bar.say("checking the image");
    let file = plan.guest_drive.disk.file.as_ref().and_then(FileName::path).context("the guest's disk has no file")?;
    guestlab::verify_image(file, ImageFormat::Qcow2)?;
    let [disk, null_disk] = report.disks.as_slice() else { bail!("the guest reported {} disks", report.disks.len()) };
    let rate = |disk: &DiskReport, cell: &Cell| {
        disk.measured.iter().find(|job| job.name == cell.name).map_or(0.0, |job| job.bytes_per_second)
    };
    let rows = CELLS.into_iter().zip(before.into_iter().zip(after)).map(|(cell, (before, after))| {
        let ceiling = Some(rate(null_disk, &cell));
        Row { cell, guest: rate(disk, &cell), host: median(&mut [before, after]), ceiling }
    });
    let rows: Vec<Row> = rows.collect();
    Ok(format!("{}{}", summary(&report), table::render(&rows)))
}

/// Formats a number with its noun: "1 CPU", "4 CPUs".
fn counted(number: u32, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn summary(report: &GuestReport) -> String {
    let (cpus, seconds) = (counted(report.cpus, "CPU"), report.time.as_secs_f64());
    let mut text = format!("guest: Linux {} with {cpus}, up for {seconds:.1} s\n", report.kernel);
    if report.kvm_failed {
        text += "KVM failed on this host: the guest ran without it, by translation, which is slow\n";
    }
    for disk in report.disks.iter().take(1) {
        let fio = disk.fio.as_ref().map_or(0, |fio| fio.written_bytes);
        text += &format!(
            "{}: {}, {}; ext4 with {} files read back whole {} times, {} written and verified by fio; \
             image and file system clean afterwards\n",
            disk.name,
            human_size(disk.size_bytes),
            counted(disk.queues, "queue"),
            disk.files,
            disk.checks,
            human_size(fio),
        );
    }
    text
}

/// Serves the disks and boots the guest.
fn served_to(plan: &Plan, kind: GuestKind, bar: &Bar) -> anyhow::Result<GuestReport> {
    // The second disk has no storage: it shows the highest rate of this guest.
    let null_socket = plan.socket().with_file_name("null.sock");
    let mut options = GuestOptions::new(kind, vec![plan.socket(), null_socket.clone()]);
    options.only_measured = 1;
    options.stop = Arc::clone(&plan.cancel);
    options.kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    options.work = GuestWork::Fill {
        measure_seconds: slice(plan).as_secs_f64().ceil() as u32,
        measure_mib: (plan.size_bytes >> 20) as u32,
        fio_mib: FIO_MIB,
    };
    let daemon = Daemon::start(plan.daemon_config(options.queues.min(2) as usize))?;
    let mut drive = plan.guest_drive.clone();
    drive.export.queues = Some(options.queues as u16);
    daemon.add(&drive)?;
    let mut null = null_drive(plan.size_bytes)?;
    (null.export.queues, null.export.socket) = (drive.export.queues, Some(null_socket));
    null.export.guest_memory = drive.export.guest_memory;
    daemon.add(&null)?;
    if kind == GuestKind::Qemu && !options.kvm {
        bar.note("/dev/kvm cannot be opened: QEMU emulates the processor, which takes some minutes");
    }
    bar.step("booting the guest");
    let ended = guestlab::run(&options, &mut |step| bar.step(step));
    // A guest that was killed on cancellation has no report.
    plan.check_cancelled()?;
    let report = ended?;
    daemon.shutdown()?;
    Ok(report)
}

fn null_drive(size_bytes: u64) -> anyhow::Result<DriveOptions> {
    match DriveOptions::parse(&format!("format=null,size={size_bytes}"))? {
        ParsedDrive::Drive(drive) => Ok(*drive),
        ParsedDrive::Help(_) => bail!("a null disk is a drive"),
    }
}

/// Returns how long a workload is measured. The guest gets two thirds of the time, on two disks.
fn slice(plan: &Plan) -> Duration {
    Duration::from_secs_f64(plan.seconds / (CELLS.len() as f64 * 3.0))
}

/// The host's own file.
struct Host<'a> {
    side: Side<'a>,
    opened: drive::OpenedDisk,
}

impl<'a> Host<'a> {
    fn open(plan: &Plan, reactors: &'a [Arc<dyn ReactorHandle>]) -> anyhow::Result<Self> {
        let opened = open_disk(&plan.host_disk, BackingPolicy::Deny, &[])?;
        let (disk, cancel) = (Arc::clone(&opened.disk), Arc::clone(&plan.cancel));
        let side = Side { name: "host", disk, reactors, hooks: Hooks::default(), cancel };
        side.write_pattern(Part { offset_bytes: 0, length_bytes: plan.size_bytes }, HOST_SEED)?;
        Ok(Self { side, opened })
    }

    fn rates(&self, plan: &Plan) -> anyhow::Result<Vec<f64>> {
        CELLS.iter().map(|cell| self.side.rate(cell, plan.size_bytes, slice(plan) / 2)).collect()
    }

    fn close(self) -> anyhow::Result<()> {
        drop(self.side);
        Ok(self.opened.close()?)
    }
}
