//! `ringdisk nbd`: serves disks to NBD clients until a signal ends it.

mod exports;

use crate::arguments::{buffer_memory, memory_size};
use crate::nbd_options::{TlsArgs, passed_word, socket_mode};
use crate::output::{self, usage};
use crate::signals;
use control::api::AddTls;
use daemon::{Daemon, DaemonConfig, NbdAddress, NbdOptions, NbdTls, NodeId, Pidfile, SocketAccess};
use drive::{DiskOptions, DriveOptions, ParsedDrive, PassedDescriptors, human_size};
use exports::Export;
use image::{BackingPolicy, ErrorPolicy, FileName, options_without_secrets};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

/// Serve disks to NBD clients, over a Unix or a TCP socket.
///
/// SIGTERM, SIGINT and SIGHUP end it cleanly: requests in flight end, images are flushed and closed, and the socket is
/// removed.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("place"))]
pub(crate) struct Args {
    /// The image to serve.
    #[arg(value_name = "IMAGE")]
    image: Option<PathBuf>,
    /// Another disk, with options as of serve, except those for guests, and nothing that waits for "ctl resume". Its
    /// export has the disk's name (name=). May be repeated.
    #[arg(long, value_name = "OPTIONS")]
    drive: Vec<String>,
    /// How clients see a disk: disk=NAME,name=EXPORT,description=TEXT,bitmap=BITMAP,readonly=on. A disk that is named has
    /// these exports only; others have one under their name. bitmap= may be repeated, and so may the option, also for
    /// one disk.
    #[arg(long, value_name = "OPTIONS")]
    export: Vec<String>,
    /// Listen at this Unix socket. fd:NAME or fd:NUMBER is a socket that a service manager passed, Unix or TCP [default:
    /// the only one that was passed].
    #[arg(long, value_name = "PATH", group = "place")]
    socket: Option<PathBuf>,
    /// The socket's permissions, in octal [default: 0600, or 0660 with --socket-group].
    #[arg(long, value_name = "MODE", value_parser = socket_mode)]
    socket_mode: Option<String>,
    /// The socket's group: a name or a number.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Listen at this TCP address. Everybody who can reach it can read and write the disks.
    #[arg(long, value_name = "ADDRESS:PORT", group = "place")]
    listen: Option<String>,
    /// The export name of IMAGE. Clients that name no export get it, too.
    #[arg(long, value_name = "NAME", default_value = "")]
    export_name: String,
    /// The description of IMAGE for clients.
    #[arg(long, value_name = "TEXT", default_value = "")]
    description: String,
    /// Open IMAGE read-only.
    #[arg(short, long)]
    read_only: bool,
    /// Connections at once; others wait.
    #[arg(short = 'e', long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    shared: u16,
    /// Threads that serve requests [default: one for each CPU, at most one for each connection].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    reactors: Option<u16>,
    /// Memory for requests' own buffers, over all disks: for direct I/O with misaligned memory, for clusters that are
    /// copied or decompressed, and for data of NBD servers and Ceph clusters. Data on their way to and from clients may
    /// take as much again [default: a 16th of the memory of the host or control group, at least 16M and at most 256M].
    #[arg(long, value_name = "SIZE", value_parser = buffer_memory)]
    buffer_memory: Option<usize>,
    /// Memory for the indexes of kept overlays (keep=), as for serve.
    #[arg(long, value_name = "SIZE", value_parser = memory_size)]
    index_memory: Option<usize>,
    /// How long the end waits while the storage ends no request, and at most three times as long while it ends some.
    /// Then requests in flight are given up, and clients are disconnected.
    #[arg(long, value_name = "SECONDS", default_value_t = daemon::GIVE_UP_AFTER.as_secs().try_into().unwrap_or(20))]
    give_up_after: u32,
    /// Which backing files an image may open: deny, same-dir, listed, any, anywhere (files of servers, too).
    #[arg(long, value_name = "POLICY", default_value = "same-dir")]
    allow_backing: String,
    /// A file, or a file on a server (https://, nbd://, rbd:), that images may use as a backing file. May be repeated.
    #[arg(long, value_name = "FILE")]
    backing: Vec<PathBuf>,
    /// A persistent bitmap of IMAGE that clients can ask for, as qemu:dirty-bitmap:NAME. May be repeated.
    #[arg(short = 'B', long, value_name = "NAME")]
    bitmap: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Write the process id to PATH once ready. The file is removed at the end.
    #[arg(long, value_name = "PATH")]
    pidfile: Option<PathBuf>,
}

/// A disk, and how it is exported.
struct Asked {
    drive: DriveOptions,
    export_name: String,
    description: String,
    bitmaps: Vec<String>,
}

pub(crate) fn run(args: &Args, lock_timeout_s: Option<u32>) -> anyhow::Result<()> {
    let passed = PassedDescriptors::of_this_process()?;
    let mut asked = match asked(args, &passed)? {
        Ok(asked) => asked,
        Err(help) => return output::print(&format!("{help}\n")),
    };
    for disk in asked.iter_mut().map(|asked| &mut asked.drive.disk) {
        disk.lock_timeout_s = disk.lock_timeout_s.or(lock_timeout_s);
    }
    let exports = exports::of(&args.export, &asked)?;
    let place = Place { address: address(args, &passed)?, access: access(args)? };
    // From here on a signal causes an orderly end, so that no socket stays behind.
    let mut signals = signals::orderly()?;
    let daemon = Daemon::start(daemon_config(args, &asked)?)?;
    let ended = serve(args, &asked, &exports, &place, &daemon).and_then(|nodes| {
        let pidfile = args.pidfile.as_deref().map(Pidfile::create).transpose()?;
        let served = || asked.iter().zip(&exports).zip(&nodes);
        output::print(&announcement(args, served(), &place, &daemon))?;
        daemon::notify("READY=1");
        let signal = signals.forever().next();
        tracing::info!(signal, "stopping");
        daemon::notify("STOPPING=1");
        drop(pidfile);
        Ok(())
    });
    // All disks are closed, even if one fails.
    let closed = daemon.shutdown();
    ended?;
    Ok(closed?)
}

fn asked(args: &Args, passed: &PassedDescriptors) -> anyhow::Result<Result<Vec<Asked>, String>> {
    let mut asked = Vec::new();
    if let Some(image) = &args.image {
        let mut drive = DriveOptions::of_file(FileName::parse(image)?);
        drive.disk.read_only = args.read_only;
        drive.disk.name = Some(args.export_name.clone()).filter(|name| !name.is_empty());
        let (export_name, description) = (args.export_name.clone(), args.description.clone());
        asked.push(Asked { drive, export_name, description, bitmaps: args.bitmap.clone() });
    }
    refuse_what_is_for_the_image(args)?;
    for text in &args.drive {
        let in_context = |error: block::Error| error.in_context(format!("--drive {}", options_without_secrets(text)));
        match DriveOptions::parse_with(text, passed).map_err(in_context)? {
            ParsedDrive::Drive(drive) => {
                refuse_keys_for_guests(&DriveOptions::keys_for_guests(text, passed).map_err(in_context)?)?;
                refuse_to_hold(&drive.disk)?;
                let export_name = drive.disk.name.clone().unwrap_or_default();
                asked.push(Asked { drive: *drive, export_name, description: String::new(), bitmaps: Vec::new() });
            }
            ParsedDrive::Help(help) => return Ok(Err(help)),
        }
    }
    match asked.is_empty() {
        true => Err(usage("nothing to serve: name an IMAGE or give --drive file=PATH,...")),
        false => Ok(Ok(asked)),
    }
}

/// Refuses options of IMAGE where none is given: a disk would be served under another name, for writing, or without what
/// clients are to see.
fn refuse_what_is_for_the_image(args: &Args) -> anyhow::Result<()> {
    let message = match args.image {
        Some(_) => return Ok(()),
        None if !args.export_name.is_empty() => {
            "--export-name is for IMAGE: the export of a --drive has the disk's name (name=)"
        }
        None if args.read_only => "--read-only is for IMAGE: give the --drive readonly=on",
        None if !args.description.is_empty() => {
            "--description is for IMAGE: write --export disk=NAME,description=TEXT for a --drive"
        }
        None if !args.bitmap.is_empty() => "--bitmap is for IMAGE: write --export disk=NAME,bitmap=NAME for a --drive",
        None => return Ok(()),
    };
    Err(usage(message))
}

/// Refuses keys that would do nothing here.
fn refuse_keys_for_guests(keys: &[String]) -> anyhow::Result<()> {
    let Some(key) = keys.first() else { return Ok(()) };
    Err(usage(match key.as_str() {
        "socket" | "fd" => {
            format!("--drive: {key}= names the socket of a guest: NBD clients are served at --socket or --listen")
        }
        "socket-mode" | "socket-group" => format!("--drive: {key}= is for the socket of a guest: give --{key}"),
        _ => format!("--drive: {key}= is for guests, and NBD clients do not see it: leave it out"),
    }))
}

/// Refuses to hold requests that the storage fails: without a control socket, nobody could resume them.
fn refuse_to_hold(disk: &DiskOptions) -> anyhow::Result<()> {
    let policies = [("on-error", disk.on_error), ("on-no-space", disk.on_no_space)];
    let Some((key, _)) = policies.iter().find(|(_, policy)| *policy == ErrorPolicy::Hold) else { return Ok(()) };
    Err(usage(format!(
        "--drive: {key}=hold waits for 'ctl resume', which cannot reach this command: leave it out, or use 'serve' \
         with --nbd and --control"
    )))
}

/// Where clients connect.
struct Place {
    address: NbdAddress,
    access: SocketAccess,
}

fn address(args: &Args, passed: &PassedDescriptors) -> anyhow::Result<NbdAddress> {
    match (&args.socket, &args.listen) {
        (Some(path), _) => match passed_word(path) {
            Some(word) => Ok(NbdAddress::passed(passed.number_of(word)?)?),
            None => Ok(NbdAddress::Unix(drive::absolute(path))),
        },
        (None, Some(address)) => Ok(NbdAddress::parse_tcp(address)?),
        (None, None) => match passed.sockets().map(|(number, _)| number).collect::<Vec<_>>().as_slice() {
            [number] => Ok(NbdAddress::passed(*number)?),
            [] => Err(usage("where to serve? Give --socket PATH or --listen ADDRESS:PORT")),
            _ => Err(usage("several sockets were passed: say which one is for NBD clients (--socket fd:NAME)")),
        },
    }
}

fn access(args: &Args) -> block::Result<SocketAccess> {
    Ok(SocketAccess {
        mode: args.socket_mode.as_deref().map(drive::parse_socket_mode).transpose()?,
        group: args.socket_group.as_deref().map(drive::parse_socket_group).transpose()?,
    })
}

/// The longest transfer of a file in memory that a reactor carries out itself: there are no rings that would have to wait.
const INLINE_BYTES: usize = 1 << 20;

fn daemon_config(args: &Args, asked: &[Asked]) -> block::Result<DaemonConfig> {
    let named = asked.iter().filter_map(|asked| asked.drive.disk.file.as_ref()?.path().map(PathBuf::from));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let allow_backing: BackingPolicy = args.allow_backing.parse()?;
    Ok(DaemonConfig::default().with(|config| {
        config.reactors = args.reactors.map_or(cpus.min(usize::from(args.shared)), usize::from);
        config.poll_max_us = Daemon::poll_max_us_of(asked.iter().map(|asked| &asked.drive), None);
        config.inline_bytes = Some(INLINE_BYTES);
        config.allow_backing = allow_backing;
        config.listed = named.chain(args.backing.iter().cloned()).collect();
        config.buffer_memory_bytes = args.buffer_memory;
        config.index_memory_bytes = args.index_memory;
        config.give_up_after = Duration::from_secs(args.give_up_after.into());
    }))
}

/// Opens the disks, then serves them. The first is what clients get that name none.
fn serve(
    args: &Args,
    asked: &[Asked],
    exports: &[Vec<Export>],
    place: &Place,
    daemon: &Daemon,
) -> anyhow::Result<Vec<NodeId>> {
    let nodes = asked.iter().map(|asked| daemon.add_disk(&asked.drive.disk)).collect::<block::Result<Vec<_>>>()?;
    let tls = args.tls.asked().map(|AddTls { credentials, required, verify_peer }| {
        let mut tls = NbdTls::new(credentials);
        (tls.is_required, tls.verifies_peers) = (required, verify_peer);
        tls
    });
    for (node, of_disk) in nodes.iter().zip(exports) {
        for export in of_disk {
            let mut options = NbdOptions::at(place.address.clone());
            options.access = place.access;
            options.name = Some(export.name.clone());
            options.description.clone_from(&export.description);
            options.read_only = export.read_only;
            options.bitmaps.clone_from(&export.bitmaps);
            options.connections = Some(args.shared);
            options.tls.clone_from(&tls);
            daemon.add_nbd_export(*node, &options)?;
        }
    }
    Ok(nodes)
}

/// What is served where: a line for each export, with the layers of its disk below the first.
fn announcement<'a>(
    args: &Args,
    served: impl Iterator<Item = ((&'a Asked, &'a Vec<Export>), &'a NodeId)>,
    place: &Place,
    daemon: &Daemon,
) -> String {
    let (mut text, disks) = (String::new(), daemon.disks());
    for ((Asked { drive, .. }, exports), node) in served {
        let Some(disk) = disks.iter().find(|disk| disk.id == *node) else { continue };
        for (index, export) in exports.iter().enumerate() {
            let mode = if disk.info.read_only || export.read_only { ", read-only" } else { "" };
            let uri = place.address.uri(&export.name, args.tls.tls_creds.is_some());
            let size = human_size(disk.info.size_bytes);
            let _ = writeln!(text, "serving {} ({size}{mode}) at {uri}", drive.disk.display_name());
            let layers = if index == 0 { disk.layers.as_slice() } else { &[] };
            layers.iter().for_each(|layer| _ = writeln!(text, "  {layer}"));
        }
    }
    text + "ready\n"
}
