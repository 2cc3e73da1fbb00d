//! `ringdisk serve`: disks at vhost-user sockets, until a signal says stop.

use crate::output::{self, usage};
use crate::signals;
use daemon::{Attachment, Daemon, DaemonConfig, Pidfile};
use drive::{DriveOptions, ParsedDrive};
use image::{BackingPolicy, FileName};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fmt::Write as _;
use std::path::PathBuf;

/// Serve disks to virtual machines at vhost-user sockets.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Images to serve with every option at its default.
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// A disk with options: file=PATH,format=qcow2,engine=auto,cache=none,... ("help" lists the keys, key=? the values;
    /// a comma in a value is written ",,"). May be repeated.
    #[arg(long, value_name = "OPTIONS")]
    drive: Vec<String>,
    /// Socket of a disk, one each: the first for the first IMAGE, and so on, then for each --drive without socket=.
    /// By default IMAGE.sock.
    #[arg(long, value_name = "PATH")]
    socket: Vec<PathBuf>,
    /// Threads that serve requests [default: one a CPU, at most one a queue].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    reactors: Option<u16>,
    /// Request queues that each disk offers its guest [default: one a CPU, at most 16].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: Option<u16>,
    /// How long an idle thread goes on looking for work at most before it sleeps, in microseconds; 0 never [default: 100].
    /// It looks less where that gains nothing. A disk can have its own with --drive poll-max-us=US; as every thread
    /// serves queues of all disks, the longest of all disks holds for all threads.
    #[arg(long, value_name = "US")]
    poll_max_us: Option<u32>,
    /// Write the process id to PATH once ready; removed at the end.
    #[arg(long, value_name = "PATH")]
    pidfile: Option<PathBuf>,
    /// Which backing files images may make us open: deny, same-dir (the image's directory, below it, and files named
    /// here), listed (files named here), any.
    #[arg(long, value_name = "POLICY", default_value = "same-dir")]
    allow_backing: String,
    /// A file that images may use as a backing file. May be repeated.
    #[arg(long, value_name = "FILE")]
    backing: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let drives = match drives(args)? {
        Asked::Drives(drives) => drives,
        Asked::Help(help) => return output::print(&format!("{help}\n")),
    };
    let allow_backing: BackingPolicy = args.allow_backing.parse()?;
    // From here on a signal means an orderly end, so that no socket stays behind.
    let mut signals = signals::orderly()?;
    allow_all_descriptors();
    let queues = drives.iter().map(|drive| usize::from(Daemon::queues_of(&drive.export))).sum::<usize>();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let named = drives.iter().filter_map(|drive| drive.disk.file.as_ref()?.path().map(PathBuf::from));
    let daemon = Daemon::start(DaemonConfig::default().with(|config| {
        config.reactors = args.reactors.map_or(cpus.min(queues), usize::from);
        config.poll_max_us = Daemon::poll_max_us_of(&drives, args.poll_max_us);
        config.allow_backing = allow_backing;
        config.listed = named.chain(args.backing.iter().cloned()).collect();
    }))?;
    for drive in &drives {
        daemon.add(drive)?;
    }
    let pidfile = args.pidfile.as_deref().map(Pidfile::create).transpose()?;
    output::print(&announcement(&daemon))?;
    daemon::notify("READY=1");
    let signal = signals.forever().next();
    tracing::info!(signal, "stopping");
    daemon::notify("STOPPING=1");
    daemon.shutdown()?;
    drop(pidfile);
    Ok(())
}

/// Each queue of a guest takes half a dozen descriptors, and its peer passes more: a few disks use up the usual soft limit,
/// which is that low for the sake of programs that call select().
fn allow_all_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("cannot raise the limit of open descriptors ({:?}): {error}", limit.current);
    }
}

enum Asked {
    Drives(Vec<DriveOptions>),
    Help(String),
}

/// The disks in the order of the command line, each with its socket and queues.
fn drives(args: &Args) -> anyhow::Result<Asked> {
    let named = args.images.iter().map(|image| Ok(DriveOptions::of_file(FileName::parse(image)?)));
    let mut drives = named.collect::<block::Result<Vec<DriveOptions>>>()?;
    for text in &args.drive {
        match DriveOptions::parse(text).map_err(|error| error.in_context(format!("--drive {text}")))? {
            ParsedDrive::Drive(drive) => drives.push(*drive),
            ParsedDrive::Help(help) => return Ok(Asked::Help(help)),
        }
    }
    if drives.is_empty() {
        return Err(usage("nothing to serve: name an IMAGE or give --drive file=PATH,..."));
    }
    let mut sockets = args.socket.iter();
    for drive in &mut drives {
        drive.export.queues = drive.export.queues.or(args.queues);
        if drive.export.socket.is_none() {
            drive.export.socket = sockets.next().cloned().or_else(|| drive.disk.default_socket());
        }
    }
    if let Some(left_over) = sockets.next() {
        return Err(usage(format!(
            "--socket {} belongs to no disk: there are more sockets than disks",
            left_over.display()
        )));
    }
    Ok(Asked::Drives(drives))
}

fn announcement(daemon: &Daemon) -> String {
    let (disks, exports) = (daemon.disks(), daemon.exports());
    let mut text = String::new();
    for export in &exports {
        let Some(disk) = disks.iter().find(|disk| disk.id == export.node) else { continue };
        let size = drive::human_size(disk.info.size_bytes);
        let mode = if export.read_only { ", read-only" } else { "" };
        let _ = writeln!(text, "serving {} ({size}{mode}) at {}", disk.file, export.attachment.socket.display());
        for layer in &disk.layers {
            let _ = writeln!(text, "  {layer}");
        }
    }
    let attachments: Vec<Attachment> = exports.into_iter().map(|export| export.attachment).collect();
    let _ = writeln!(text, "ready\n\nAttach with:\n{}", daemon::attach_flags(&attachments));
    text
}
