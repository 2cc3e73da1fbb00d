//! A target, and one measurement of it: a server's socket, or a disk opened or served in this process.

use super::guest::{GuestOptions, ServerOptions};
use super::served::{Pool, Served, beside};
use crate::output::usage;
use block::{Disk, ReactorHandle};
use drive::{DiskOptions, DriveFormat, DriveOptions, OpenedDisk, ParsedDrive, open_disk};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use image::BackingPolicy;
use load::{BenchReport, BenchSpec, Hooks, Moment, Progress};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// The kinds of targets, as `--compare` writes them.
const KINDS: [&str; 5] = ["socket", "image", "host", "drive", "serve"];
/// The longest ring that vhost-user servers take.
const QUEUE_SIZE_MAX: u16 = 1024;

/// A target, as the user described it.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Its name in tables.
    pub(super) name: String,
    /// As the user wrote it, without the name.
    pub(super) text: String,
    /// Processes whose CPU time counts as its own.
    pub(super) server_pids: Vec<u32>,
    /// How long idle threads of the client look before they sleep.
    pub(super) poll_max_us: u32,
    /// The options of its guest.
    pub(super) guest: GuestOptions,
    /// The options of a server of this process.
    server: ServerOptions,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Socket(PathBuf),
    Drive(Box<DriveOptions>),
    /// A disk that this process serves to its own guest.
    Serve(Box<DriveOptions>),
}

/// A target, or the answer to a question about drive options.
#[derive(Debug)]
pub(super) enum Parsed {
    Target(Target),
    Help(String),
}

impl Target {
    /// Reads `[NAME=]KIND:VALUE`; without a name, `default_name` applies.
    pub(super) fn parse(text: &str, default_name: &str) -> anyhow::Result<Parsed> {
        let kind_of = |text: &str| text.split_once(':').is_some_and(|(kind, _)| KINDS.contains(&kind));
        let (name, rest) = match text.split_once('=') {
            Some((name, rest)) if !kind_of(text) && kind_of(rest) => (name, rest),
            _ => (default_name, text),
        };
        let Some((kind, value)) = rest.split_once(':').filter(|(kind, _)| KINDS.contains(kind)) else {
            return Err(usage(format!(
                "'{text}' is not a target: write [NAME=]socket:PATH, image:FILE, host:FILE, drive:OPTIONS or serve:OPTIONS"
            )));
        };
        if name.is_empty() || value.is_empty() {
            let what = if name.is_empty() { "name" } else { "value" };
            return Err(usage(format!("the target '{text}' has an empty {what}")));
        }
        Self::of_kind(name, kind, OsStr::new(value))
    }

    /// Makes a target of one of [`KINDS`].
    pub(super) fn of_kind(name: &str, kind: &str, value: &OsStr) -> anyhow::Result<Parsed> {
        let file = |format| {
            let mut drive = DriveOptions::of_file(value);
            drive.disk.format = format;
            drive
        };
        let text = value.to_string_lossy();
        let has_guest = matches!(kind, "socket" | "serve") && text.contains("guest.");
        let (text, guest) = match has_guest {
            true => GuestOptions::split(&text).map(|(rest, guest)| (rest.into(), guest))?,
            false => (text, GuestOptions::default()),
        };
        let written = text.clone();
        let (text, server) = match kind == "serve" && text.contains("server.") {
            true => ServerOptions::split(&text).map(|(rest, server)| (rest.into(), server))?,
            false => (text, ServerOptions::default()),
        };
        let kind_of_target = match kind {
            "socket" if has_guest => Kind::Socket(PathBuf::from(text.as_ref())),
            "socket" => Kind::Socket(PathBuf::from(value)),
            "image" => Kind::Drive(Box::new(file(None))),
            "host" => Kind::Drive(Box::new(file(Some(DriveFormat::Raw)))),
            _ => match DriveOptions::parse(&text).map_err(|error| error.in_context(format!("drive {text}")))? {
                ParsedDrive::Drive(drive) if kind == "serve" => Kind::Serve(drive),
                ParsedDrive::Drive(drive) => Kind::Drive(drive),
                ParsedDrive::Help(help) => return Ok(Parsed::Help(help)),
            },
        };
        Ok(Parsed::Target(Self {
            name: name.to_owned(),
            text: format!("{kind}:{written}"),
            server_pids: Vec::new(),
            poll_max_us: ReactorConfig::default().poll_max_us,
            guest,
            server,
            kind: kind_of_target,
        }))
    }

    /// Returns the options of the disk that this process opens; `None` for a server's.
    pub(super) fn disk_options(&self) -> Option<&DiskOptions> {
        match &self.kind {
            Kind::Socket(_) => None,
            Kind::Drive(drive) | Kind::Serve(drive) => Some(&drive.disk),
        }
    }

    /// Returns the options of the second disk that this process serves, if there is one.
    pub(super) fn second_disk_options(&self) -> Option<DiskOptions> {
        Some(beside(self.disk_options()?, self.server.beside.as_deref()?))
    }

    /// Returns the socket of another server, if it is one.
    pub(super) fn socket(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Socket(socket) => Some(socket),
            Kind::Drive(_) | Kind::Serve(_) => None,
        }
    }

    /// Adds a process of its server.
    pub(super) fn add_server(&mut self, pid: u32) -> anyhow::Result<()> {
        if !Path::new(&format!("/proc/{pid}")).exists() {
            return Err(usage(format!("--server-pid {pid}: there is no such process")));
        }
        self.server_pids.push(pid);
        Ok(())
    }

    /// Opens it, runs `spec` on threads made for it, and closes it.
    pub(super) fn measure(
        &self,
        spec: &BenchSpec,
        cancel: &Arc<AtomicBool>,
        progress: &dyn Fn(f64),
    ) -> anyhow::Result<Measured> {
        let spec = spec.clone().with(|spec| spec.server_pids = self.server_pids.clone());
        let opened = Opened::open(self, &spec)?;
        let reactors = Arc::new(self.reactors(spec.queues)?);
        let handles: Vec<Arc<dyn ReactorHandle>> = reactors.iter().map(ReactorThread::handle).collect();
        // When the connection ends, every request fails. Stop then, because the rest would measure errors.
        let stop = Arc::new(AtomicBool::new(false));
        let tell = |told: Progress| {
            progress(told.fraction);
            if cancel.load(Ordering::Relaxed) || opened.is_gone() {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let hooks = opened.hooks(&reactors).with(|hooks| {
            hooks.progress = Some(&tell);
            hooks.cancel = Some(Arc::clone(&stop));
        });
        let measured = load::run(&opened.disk(), &handles, &spec, &hooks);
        drop(hooks);
        for reactor in Arc::into_inner(reactors).unwrap_or_default() {
            reactor.stop()?;
        }
        let server_gone = opened.is_gone();
        let pools = opened.pools();
        // Close it also after an error: an image that is not closed has inconsistent bitmaps.
        let closed = opened.close();
        let load::Outcome { report, moments, begun, .. } = measured?;
        closed?;
        Ok(Measured { report, moments, begun, pools, server_gone })
    }

    fn reactors(&self, count: u32) -> anyhow::Result<Vec<ReactorThread>> {
        let defaults = ReactorConfig::default();
        let poll_max_us = match &self.kind {
            Kind::Drive(drive) => drive.export.poll_max_us.unwrap_or(self.poll_max_us),
            Kind::Socket(_) | Kind::Serve(_) => self.poll_max_us,
        };
        let config = |index| {
            defaults.clone().with(|config| {
                config.name = format!("bench-{index}");
                config.poll_max_us = poll_max_us;
            })
        };
        (0..count).map(|index| Ok(Reactor::spawn(config(index))?)).collect()
    }
}

/// The result of one run.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) report: BenchReport,
    /// Latency over time, if it was asked for.
    pub(super) moments: Vec<Moment>,
    /// When the measurement began.
    pub(super) begun: SystemTime,
    /// The pools of contexts, of a server of this process.
    pub(super) pools: Vec<Pool>,
    /// Whether the server ended the connection.
    pub(super) server_gone: bool,
}

/// Returns the size of a ring that holds all requests in flight, if servers have such rings. With a shorter ring they
/// would wait in the driver, and the server would not see the requested depth.
fn queue_size(depth: u32) -> u16 {
    let usual = DriverOptions::default().queue_size;
    let enough = depth.checked_next_power_of_two().and_then(|size| u16::try_from(size).ok());
    enough.unwrap_or(QUEUE_SIZE_MAX).clamp(usual, QUEUE_SIZE_MAX)
}

/// An open target.
enum Opened {
    Driver(Arc<Driver>),
    Disk(OpenedDisk),
    Served(Served),
}

impl Opened {
    fn open(target: &Target, spec: &BenchSpec) -> anyhow::Result<Self> {
        let how = &target.guest;
        let guest = || {
            DriverOptions::default().with(|options| {
                options.queues = spec.queues as u16;
                options.queue_size = queue_size(spec.queue_depth);
                options.memory_bytes = spec.buffers_bytes();
                how.apply(options);
            })
        };
        // A measurement that only reads opens the file read-only, and shares it with other readers.
        let for_load = |drive: &DriveOptions| {
            let mut drive = drive.clone();
            drive.disk.read_only |= spec.read_percent == 100 && drive.disk.file.is_some();
            drive
        };
        Ok(match &target.kind {
            Kind::Socket(socket) => {
                let driver = Driver::connect(socket, guest())?;
                how.check(&driver)?;
                Self::Driver(Arc::new(driver))
            }
            Kind::Drive(drive) => Self::Disk(open_disk(&for_load(drive).disk, BackingPolicy::default(), &[])?),
            Kind::Serve(drive) => {
                let mut drive = for_load(drive);
                if how.wants_packed() {
                    drive.disk.shown.packed = Some(true);
                }
                Self::Served(Served::start(&drive, &target.server, guest())?)
            }
        })
    }

    fn disk(&self) -> Arc<dyn Disk> {
        match self {
            Self::Driver(driver) => Arc::clone(driver) as Arc<dyn Disk>,
            Self::Disk(opened) => Arc::clone(&opened.disk),
            Self::Served(served) => served.disk(),
        }
    }

    /// Returns hooks for the counters: the driver's kicks and wake-ups, those of our own server, or those of the
    /// engines on our own reactors.
    fn hooks(&self, reactors: &Arc<Vec<ReactorThread>>) -> Hooks<'static> {
        match self {
            Self::Driver(driver) => load::driver_hooks(driver),
            Self::Served(served) => served.hooks(),
            Self::Disk(opened) => {
                let reactors = Arc::clone(reactors);
                let image = opened.image.clone();
                let counters = move || {
                    let stats: Vec<_> = reactors.iter().map(ReactorThread::stats).collect();
                    let system_calls = stats.iter().map(|stats| stats.system_calls).sum();
                    let worker_calls = stats.iter().map(|stats| stats.worker_calls).sum();
                    let sleeps = stats.iter().map(|stats| stats.sleeps).sum();
                    let mut counters =
                        vec![("system_calls", system_calls), ("worker_calls", worker_calls), ("sleeps", sleeps)];
                    // A raw image has no tables.
                    let tables = image.as_ref().map(|image| image.cache_stats());
                    if let Some(tables) = tables.filter(|tables| tables.limit_bytes > 0) {
                        counters.push(("table_hits", tables.hits));
                        counters.push(("table_misses", tables.misses));
                        counters.push(("table_evictions", tables.evictions));
                    }
                    counters
                };
                Hooks::default().with(|hooks| hooks.counters = Some(Arc::new(counters)))
            }
        }
    }

    /// Whether the server ended the connection.
    fn is_gone(&self) -> bool {
        match self {
            Self::Driver(driver) => driver.is_disconnected(),
            Self::Disk(_) => false,
            Self::Served(served) => served.is_gone(),
        }
    }

    fn pools(&self) -> Vec<Pool> {
        match self {
            Self::Served(served) => served.pools(),
            Self::Driver(_) | Self::Disk(_) => Vec::new(),
        }
    }

    fn close(self) -> anyhow::Result<()> {
        match self {
            Self::Driver(driver) => Ok(driver.disconnect()?),
            Self::Disk(opened) => Ok(opened.close()?),
            Self::Served(served) => served.close(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        match Target::parse(text, "A").unwrap() {
            Parsed::Target(target) => target,
            Parsed::Help(help) => panic!("{text}: {help}"),
        }
    }

    #[test]
    fn a_name_may_stand_before_the_kind_and_equals_signs_in_values_are_no_names() {
        for (text, name, rest) in [
            ("socket:/a=b.sock", "A", "socket:/a=b.sock"),
            ("qemu=socket:/a=b.sock", "qemu", "socket:/a=b.sock"),
            ("drive:format=null,size=1M", "A", "drive:format=null,size=1M"),
            ("x=drive:file=./host:y", "x", "drive:file=./host:y"),
        ] {
            let target = target(text);
            assert_eq!((target.name.as_str(), target.text.as_str()), (name, rest), "{text}");
        }
    }

    #[test]
    fn what_is_no_target_says_what_one_looks_like() {
        for text in ["/a.sock", "sock:/a", "x=file:/a", "socket", ""] {
            let message = Target::parse(text, "A").unwrap_err().to_string();
            assert!(message.contains("socket:PATH") && message.contains("drive:OPTIONS"), "{message}");
        }
        for (text, part) in [("=host:x", "empty name"), ("host:", "empty value"), ("drive:size=1M", "file=PATH")] {
            let message = format!("{:#}", Target::parse(text, "A").unwrap_err());
            assert!(message.contains(part), "{text}: {message}");
        }
        assert!(matches!(Target::parse("drive:format=?", "A").unwrap(), Parsed::Help(_)));
    }
}
