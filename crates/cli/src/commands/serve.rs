//! `ringdisk serve`: serves disks at vhost-user sockets until a signal ends it.

mod announcement;
mod drives;

use self::drives::{Asked, drives};
use crate::arguments::{buffer_memory, memory_size};
use crate::nbd_options::socket_mode;
use crate::output;
use crate::signals;
use anyhow::Context as _;
use control::api::Reloaded;
use control::{Config, Configured, ControlServer, Manager, Settings};
use daemon::{Daemon, DaemonConfig, Pidfile};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Serve disks to virtual machines at vhost-user sockets.
///
/// SIGTERM, SIGINT and SIGHUP end it cleanly: requests in flight end, images are flushed and closed, and sockets are
/// removed. With --config, SIGHUP makes it read that file again.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Images to serve with default options.
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// A disk with options, for example file=disk.qcow2,cache=none. "help" lists the options, and format=? the values of one.
    /// May be repeated.
    #[arg(long, value_name = "OPTIONS")]
    drive: Vec<String>,
    /// The socket of a disk, instead of IMAGE.sock: first for each IMAGE in order, then for each --drive without one. May be
    /// repeated. A socket that a service manager passes belongs to the disk of its name.
    #[arg(long, value_name = "PATH")]
    socket: Vec<PathBuf>,
    /// Also serve the disks named here to NBD clients, under their names (name=, or disk0, disk1...), at this Unix
    /// socket, TCP address, or passed socket (fd:NAME). Without TLS, everybody who can reach it can use the disks. May be
    /// repeated.
    #[arg(long, value_name = "SOCKET|ADDRESS:PORT")]
    nbd: Vec<String>,
    /// Serve NBD clients with TLS, which they must use. DIRECTORY has ca-cert.pem, server-cert.pem and server-key.pem, and
    /// clients need a certificate of the same authority. Or it has only a keys.psk, and they need a key of it.
    #[arg(long, value_name = "DIRECTORY", requires = "nbd")]
    nbd_tls_creds: Option<PathBuf>,
    /// The permissions of NBD sockets, in octal [default: 0600, or 0660 with --nbd-socket-group].
    #[arg(long, value_name = "MODE", requires = "nbd", value_parser = socket_mode)]
    nbd_socket_mode: Option<String>,
    /// The group of NBD sockets: a name or a number.
    #[arg(long, value_name = "GROUP", requires = "nbd")]
    nbd_socket_group: Option<String>,
    /// Threads that serve requests [default: one for each CPU, at most one for each queue].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    reactors: Option<u16>,
    /// Request queues that each disk offers its guest [default: one for each CPU, at most 16].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: Option<u16>,
    /// How long an idle thread looks for work before it sleeps, in microseconds; 0 means not at all [default: 100]. It
    /// looks for a shorter time if that gains nothing. A disk can set its own (poll-max-us=). Each thread serves queues
    /// of all disks, so the largest value counts.
    #[arg(long, value_name = "US")]
    poll_max_us: Option<u32>,
    /// Memory for requests' own buffers, over all disks: for direct I/O with misaligned memory, for clusters that are
    /// copied or decompressed, and for data of NBD servers and Ceph clusters. Requests wait for room; each disk has a
    /// fair share. Data on their way to and from NBD clients may take as much again [default: a 16th of the memory of
    /// the host or control group, at least 16M and at most 256M].
    #[arg(long, value_name = "SIZE", value_parser = buffer_memory)]
    buffer_memory: Option<usize>,
    /// Memory for the indexes of kept overlays (keep=), over all disks: 1M for each 1G that is written. Beyond that,
    /// writes to new places fail as on a full disk. No index takes more than it leaves [default: a quarter of the
    /// memory of the host or control group].
    #[arg(long, value_name = "SIZE", value_parser = memory_size)]
    index_memory: Option<usize>,
    /// How long removing a disk by force, or the end of the daemon, waits while the storage ends no request, and at most
    /// three times as long while it ends some. Then requests in flight are given up, and guests get errors.
    #[arg(long, value_name = "SECONDS", default_value_t = daemon::GIVE_UP_AFTER.as_secs().try_into().unwrap_or(20))]
    give_up_after: u32,
    /// Write the process id to PATH once ready. The file is removed at the end.
    #[arg(long, value_name = "PATH")]
    pidfile: Option<PathBuf>,
    /// Which backing files an image may open: deny (none), same-dir (in the image's directory or below it, and files
    /// named here), listed (only files named here), any, anywhere (files and disks of servers, too) [default:
    /// same-dir].
    #[arg(long, value_name = "POLICY")]
    allow_backing: Option<String>,
    /// A file, or a file on a server (https://, nbd://, rbd:), that images may use as a backing file. May be repeated.
    #[arg(long, value_name = "FILE")]
    backing: Vec<PathBuf>,
    /// What to print once the sockets accept connections: human also says how to attach each monitor, json is one line.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Take commands at this Unix socket, from this user only ("ringdisk ctl", or HTTP and JSON). Disks can be added
    /// there, so none has to be named here.
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Record what is served in this directory. A daemon that is started with it again serves the same disks with the
    /// same layers, including disks that were added by commands.
    #[arg(long, value_name = "DIRECTORY")]
    state_dir: Option<PathBuf>,
    /// Read disks, exports and settings of the daemon from this TOML file; the command line overrides it. SIGHUP and
    /// "ctl reload" read it again and apply the differences, while other disks run.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The name of the machine that the disks belong to. Metrics with the names of libvirt's exporters have it as their
    /// label "domain".
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

pub(crate) fn run(args: &Args, lock_timeout_s: Option<u32>) -> anyhow::Result<()> {
    let file = args.config.as_deref().map(Config::read).transpose()?;
    let mut settings = file.as_ref().map_or_else(Settings::default, |file| file.settings.clone());
    put_over(args, &mut settings)?;
    let without = settings.control.is_some() || settings.state_dir.is_some() || file.is_some();
    let configured = file.as_ref().map(|file| file.drives.as_slice()).unwrap_or_default();
    let mut drives = match drives(args, without, configured)? {
        Asked::Drives(drives) => drives,
        Asked::Help(help) => return output::print(&format!("{help}\n")),
    };
    drives.extend(file.iter().flat_map(|file| file.drives.iter().cloned()));
    for disk in drives.iter_mut().map(|given| &mut given.drive.disk).filter(|disk| disk.file.is_some()) {
        disk.lock_timeout_s = disk.lock_timeout_s.or(lock_timeout_s);
    }
    // From here on a signal causes an orderly end, so that no socket stays behind.
    let mut signals = signals::orderly()?;
    allow_all_descriptors();
    let manager = Arc::new(Manager::start(daemon_config(args, &settings, &drives), settings.state_dir.as_deref())?);
    settings.domain.iter().for_each(|domain| manager.is_of_domain(domain));
    manager.restore(&drives)?;
    if let (Some(path), Some(file)) = (&args.config, file) {
        manager.is_configured_by(drive::absolute(path), file);
    }
    let server = settings.control.as_deref().map(|socket| ControlServer::listen(socket, Arc::clone(&manager)));
    let server = server.transpose()?;
    let pidfile = settings.pidfile.as_deref().map(Pidfile::create).transpose()?;
    output::print(&match args.output {
        Output::Human => announcement::human(manager.daemon(), settings.control.as_deref()),
        Output::Json => announcement::json(manager.daemon()),
    })?;
    daemon::notify("READY=1");
    let signal = wait_for_the_end(&manager, &mut signals)?;
    tracing::info!(signal, "stopping");
    daemon::notify("STOPPING=1");
    end(server, manager, Duration::from_secs(args.give_up_after.into()) + CALLS_PATIENCE)?;
    drop(pidfile);
    Ok(())
}

/// How much longer than their storage calls in progress are waited for.
const CALLS_PATIENCE: Duration = Duration::from_secs(5);
/// How long they are waited for if the disks have taken all of that time.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Ends everything. A call may hang with the storage of a disk. So the disks end first: that ends the call, and one disk
/// that hangs does not keep the others from being closed.
fn end(mut server: Option<ControlServer>, manager: Arc<Manager>, patience: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    let left = || deadline.saturating_duration_since(Instant::now()).max(LAST_PATIENCE);
    server.iter_mut().for_each(ControlServer::close);
    let ended = manager.daemon().end_disks();
    let stopped = server.map_or(Ok(()), |server| server.stop_within(left()));
    // A call may have added one meanwhile.
    let ended = ended.and(manager.daemon().end_disks()).and(stopped);
    let Some(manager) = alone_with(manager, left()) else {
        ended?;
        anyhow::bail!("a call still waits for storage that hangs; all disks are closed");
    };
    let shut_down = manager.shutdown();
    Ok(ended.and(shut_down)?)
}

/// Waits until nobody else has the manager.
fn alone_with(mut manager: Arc<Manager>, limit: Duration) -> Option<Manager> {
    let deadline = Instant::now() + limit;
    loop {
        manager = match Arc::try_unwrap(manager) {
            Ok(manager) => return Some(manager),
            Err(_) if Instant::now() >= deadline => return None,
            Err(manager) => manager,
        };
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Overrides the file's settings with those of the command line.
fn put_over(args: &Args, settings: &mut Settings) -> block::Result<()> {
    let over = |given: &Option<PathBuf>, setting: &mut Option<PathBuf>| {
        if given.is_some() {
            setting.clone_from(given);
        }
    };
    over(&args.control, &mut settings.control);
    over(&args.state_dir, &mut settings.state_dir);
    over(&args.pidfile, &mut settings.pidfile);
    if args.domain.is_some() {
        settings.domain.clone_from(&args.domain);
    }
    settings.backing.extend(args.backing.iter().cloned());
    if let Some(policy) = &args.allow_backing {
        settings.allow_backing = Some(policy.parse()?);
    }
    Ok(())
}

fn daemon_config(args: &Args, settings: &Settings, drives: &[Configured]) -> DaemonConfig {
    let queues = drives.iter().map(|given| usize::from(Daemon::queues_of(&given.drive.export))).sum::<usize>();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let named = drives.iter().filter_map(|given| given.drive.disk.file.as_ref()?.path().map(PathBuf::from));
    let poll_max_us = args.poll_max_us.or(settings.poll_max_us);
    let bytes = |setting: Option<u64>| setting.and_then(|bytes| usize::try_from(bytes).ok());
    let (buffer_memory, index_memory) = (bytes(settings.buffer_memory_bytes), bytes(settings.index_memory_bytes));
    DaemonConfig::default().with(|config| {
        // Disks that are added later have queues of their own.
        let has_clients = drives.iter().any(|given| !given.exports.is_empty());
        let comes = settings.control.is_some() || settings.state_dir.is_some() || args.config.is_some();
        let may_grow = comes || has_clients;
        let queues = if may_grow { cpus } else { queues };
        config.reactors = args.reactors.or(settings.reactors).map_or(cpus.min(queues), usize::from);
        config.poll_max_us = Daemon::poll_max_us_of(drives.iter().map(|given| &given.drive), poll_max_us);
        config.allow_backing = settings.allow_backing.clone().unwrap_or_default();
        config.buffer_memory_bytes = args.buffer_memory.or(buffer_memory);
        config.index_memory_bytes = args.index_memory.or(index_memory);
        config.give_up_after = Duration::from_secs(args.give_up_after.into());
        config.listed = named.chain(settings.backing.iter().cloned()).collect();
    })
}

/// Waits for a signal, or for a command that asks for the end; returns the signal. Meanwhile it tells a service
/// manager's watchdog that all reactors respond, as long as they do.
fn wait_for_the_end(manager: &Arc<Manager>, signals: &mut Signals) -> anyhow::Result<Option<i32>> {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let handle = signals.handle();
    let reloading = begin_reloading(manager)?;
    let signal = std::thread::scope(|scope| {
        scope.spawn(|| {
            manager.wait_until_asked_to_end();
            handle.close();
        });
        if let Some(interval) = daemon::watchdog_interval() {
            scope.spawn(move || watchdog(manager.daemon(), interval, &stopped));
        }
        let signal = signals.forever().find(|signal| {
            let reloads = *signal == SIGHUP && manager.has_configuration();
            if reloads {
                // If another one waits, it will read the file as it is now.
                let _ = reloading.try_send(());
            }
            !reloads
        });
        drop(stop);
        manager.ask_to_end();
        signal
    });
    Ok(signal)
}

/// Starts the thread that reads the configuration again when it is told to. Storage may keep it, but not the signals.
fn begin_reloading(manager: &Arc<Manager>) -> anyhow::Result<SyncSender<()>> {
    let (sender, wanted) = sync_channel::<()>(1);
    let manager = Arc::downgrade(manager);
    let work = move || {
        while let (Ok(()), Some(manager)) = (wanted.recv(), manager.upgrade()) {
            reload(&manager);
        }
    };
    std::thread::Builder::new().name("reload".into()).spawn(work).context("cannot start a thread")?;
    Ok(sender)
}

/// Reads the configuration again. Failures are logged and leave the rest unchanged.
fn reload(manager: &Manager) {
    daemon::notify("RELOADING=1");
    match manager.reload() {
        Ok(Reloaded { added, removed, changed, reopened, failed, .. }) => {
            tracing::info!(?added, ?removed, ?changed, ?reopened, failed = failed.len(), "configuration read again");
        }
        Err(error) => tracing::error!("the configuration stays as it was: {error}"),
    }
    daemon::notify("READY=1");
}

fn watchdog(daemon: &Daemon, interval: Duration, stopped: &Receiver<()>) {
    // The reactors are asked and answer within three quarters of the interval.
    while stopped.recv_timeout(interval / 2) == Err(RecvTimeoutError::Timeout) {
        match daemon.stuck_reactors(interval / 4).as_slice() {
            [] => daemon::notify("WATCHDOG=1"),
            stuck => {
                tracing::error!("no answer from {}: the service manager is not told that we live", stuck.join(", "));
            }
        }
    }
}

/// Raises the limit of open descriptors. Each queue of a guest takes half a dozen, and its peer passes more: a few
/// disks use up the usual soft limit, which is low for programs that call select().
fn allow_all_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("cannot raise the limit of open descriptors ({:?}): {error}", limit.current);
    }
}
