//! `ringdisk nbd`: serves disks to NBD clients until a signal ends it.

use crate::nbd_options::TlsArgs;
use crate::output::{self, usage};
use crate::signals;
use anyhow::Context as _;
use block::{DirtyBitmaps, Disk, ReactorHandle};
use control::api::AddTls;
use daemon::{NbdAddress, Pidfile};
use drive::{DriveOptions, OpenedDisk, ParsedDrive, human_size, open_disk};
use engine::{Reactor, ReactorConfig, ReactorThread};
use export_nbd::{Credentials, NbdBitmap, NbdExport, NbdListener, NbdServer, ServerOptions, Tls};
use export_vhost_user::ListenSocket;
use image::{BackingPolicy, FileName, Image, options_without_secrets};
use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

/// Serve disks to NBD clients, over a Unix or a TCP socket.
///
/// SIGTERM, SIGINT and SIGHUP end it cleanly: requests in flight end, images are flushed and closed, and the socket is
/// removed.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("place").required(true))]
pub(crate) struct Args {
    /// The image to serve.
    #[arg(value_name = "IMAGE")]
    image: Option<PathBuf>,
    /// Another disk, with options as of serve. Its export has the disk's name (name=). May be repeated.
    #[arg(long, value_name = "OPTIONS")]
    drive: Vec<String>,
    /// Listen at this Unix socket, for this user only.
    #[arg(long, value_name = "PATH", group = "place")]
    socket: Option<PathBuf>,
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
    description: String,
    bitmaps: Vec<String>,
}

pub(crate) fn run(args: &Args, lock_timeout_s: Option<u32>) -> anyhow::Result<()> {
    let mut asked = match asked(args)? {
        Ok(asked) => asked,
        Err(help) => return output::print(&format!("{help}\n")),
    };
    for disk in asked.iter_mut().map(|asked| &mut asked.drive.disk) {
        disk.lock_timeout_s = disk.lock_timeout_s.or(lock_timeout_s);
    }
    let allow_backing: BackingPolicy = args.allow_backing.parse()?;
    // From here on a signal causes an orderly end, so that no socket stays behind.
    let mut signals = signals::orderly()?;
    let mut disks = Vec::new();
    let served = serve(args, &asked, allow_backing, &mut disks);
    let ended = served.and_then(|Serving { server, socket, reactors }| {
        let pidfile = args.pidfile.as_deref().map(Pidfile::create).transpose()?;
        output::print(&announcement(args, &asked, &disks))?;
        daemon::notify("READY=1");
        let signal = signals.forever().next();
        tracing::info!(signal, "stopping");
        daemon::notify("STOPPING=1");
        server.stop();
        drop((socket, pidfile));
        Ok(reactors)
    });
    // All disks are closed, even if one fails.
    let mut closed = Ok(());
    for disk in &disks {
        closed = closed.and(disk.close());
    }
    for reactor in ended? {
        closed = closed.and(reactor.stop());
    }
    Ok(closed?)
}

fn asked(args: &Args) -> anyhow::Result<Result<Vec<Asked>, String>> {
    let mut asked = Vec::new();
    if let Some(image) = &args.image {
        let mut drive = DriveOptions::of_file(FileName::parse(image)?);
        drive.disk.read_only = args.read_only;
        drive.disk.name = Some(args.export_name.clone());
        asked.push(Asked { drive, description: args.description.clone(), bitmaps: args.bitmap.clone() });
    }
    for text in &args.drive {
        match DriveOptions::parse(text)
            .map_err(|error| error.in_context(format!("--drive {}", options_without_secrets(text))))?
        {
            ParsedDrive::Drive(drive) => {
                asked.push(Asked { drive: *drive, description: String::new(), bitmaps: Vec::new() });
            }
            ParsedDrive::Help(help) => return Ok(Err(help)),
        }
    }
    match asked.is_empty() {
        true => Err(usage("nothing to serve: name an IMAGE or give --drive file=PATH,...")),
        false => Ok(Ok(asked)),
    }
}

struct Serving {
    server: NbdServer,
    /// Its drop removes the file.
    socket: Option<ListenSocket>,
    reactors: Vec<ReactorThread>,
}

/// Opens the disks, which go into `disks` even if something fails later, and serves them.
fn serve(
    args: &Args,
    asked: &[Asked],
    allow_backing: BackingPolicy,
    disks: &mut Vec<OpenedDisk>,
) -> anyhow::Result<Serving> {
    let named = asked.iter().filter_map(|asked| asked.drive.disk.file.as_ref()?.path().map(PathBuf::from));
    let listed: Vec<PathBuf> = named.chain(args.backing.iter().cloned()).collect();
    let mut exports = Vec::new();
    for Asked { drive, description, bitmaps } in asked {
        let opened = open_disk(&drive.disk, allow_backing.clone(), &listed)?;
        let (disk, image): (Arc<dyn Disk>, _) = (Arc::clone(&opened.disk), opened.image.clone());
        disks.push(opened);
        let bitmaps = bitmaps.iter().map(|name| bitmap(image.as_ref(), name)).collect::<anyhow::Result<_>>()?;
        exports.push(NbdExport::new(drive.disk.name.clone().unwrap_or_default(), disk).with(|export| {
            export.description.clone_from(description);
            export.read_only = drive.export.read_only;
            export.bitmaps = bitmaps;
        }));
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let count = args.reactors.map_or(cpus.min(usize::from(args.shared)), usize::from);
    let spawn = |index| {
        Reactor::spawn(ReactorConfig::default().with(|config| {
            config.name = format!("reactor-{index}");
            // There are no rings that would have to wait.
            config.inline_bytes = INLINE_BYTES;
        }))
    };
    let reactors = (0..count).map(spawn).collect::<block::Result<Vec<ReactorThread>>>()?;
    let tls = args.tls.asked().map(|AddTls { credentials, required, verify_peer }| {
        Tls::new(&Credentials::in_directory(&credentials), required, verify_peer)
    });
    let tls = tls.transpose()?;
    let (listener, socket) = listen(args)?;
    let options = ServerOptions::default().with(|options| {
        options.limits.connections = args.shared.into();
        options.tls = tls;
    });
    let handles: Vec<Arc<dyn ReactorHandle>> = reactors.iter().map(ReactorThread::handle).collect();
    Ok(Serving { server: NbdServer::start(listener, exports, handles, options)?, socket, reactors })
}

/// Returns a bitmap of the image; fails if there is none of this name.
fn bitmap(image: Option<&Arc<Image>>, name: &str) -> anyhow::Result<NbdBitmap> {
    let image = image.with_context(|| format!("there is no bitmap '{name}': a null disk has none"))?;
    image.dirty_bitmap(name)?;
    Ok(NbdBitmap { name: name.to_owned(), source: Arc::clone(image) as Arc<dyn DirtyBitmaps> })
}

/// The longest transfer of a file in memory that a reactor carries out itself.
const INLINE_BYTES: usize = 1 << 20;

/// Only this user can connect.
const SOCKET_MODE: u32 = 0o600;

fn listen(args: &Args) -> anyhow::Result<(NbdListener, Option<ListenSocket>)> {
    match (&args.socket, &args.listen) {
        (Some(path), _) => {
            let socket = ListenSocket::of_mode(path, SOCKET_MODE)?;
            let listener = socket.listener().try_clone().context("cannot duplicate the socket")?;
            Ok((NbdListener::Unix(listener), Some(socket)))
        }
        (None, address) => {
            let address = address.as_deref().unwrap_or_default();
            let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at '{address}'"))?;
            Ok((NbdListener::Tcp(listener), None))
        }
    }
}

fn announcement(args: &Args, asked: &[Asked], disks: &[OpenedDisk]) -> String {
    let mut text = String::new();
    for (Asked { drive, .. }, disk) in asked.iter().zip(disks) {
        let (info, name) = (disk.disk.info(), drive.disk.name.as_deref().unwrap_or_default());
        let mode = if info.read_only || drive.export.read_only { ", read-only" } else { "" };
        let address = match (&args.socket, &args.listen) {
            (Some(path), _) => NbdAddress::Unix(path.clone()),
            (None, address) => NbdAddress::Tcp(address.clone().unwrap_or_default()),
        };
        let place = address.uri(name, args.tls.tls_creds.is_some());
        let size = human_size(info.size_bytes);
        let _ = writeln!(text, "serving {} ({size}{mode}) at {place}", drive.disk.display_name());
        for layer in disk.layers() {
            let _ = writeln!(text, "  {layer}");
        }
    }
    text + "ready\n"
}
