//! The daemon: reactors' threads, the disks that they serve, and the sockets at which guests come in.

use crate::attach::{Attachment, absolute};
use block::{DiskInfo, Error, ErrorKind, Result};
use drive::{DriveOptions, OpenedDisk, open_disk};
use engine::{Reactor, ReactorConfig, ReactorStats, ReactorThread};
use export_vhost_user::{Export, ExportOptions, RingStats};
use image::{BackingPolicy, TableCacheStats};
use memory::PoolStats;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

/// How to start a daemon.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DaemonConfig {
    /// Threads that serve requests, at least one.
    pub reactors: usize,
    /// How long an idle reactor goes on looking before it sleeps; the engine's default where not given.
    pub poll_max_us: Option<u32>,
    /// Which backing files images may open.
    pub allow_backing: BackingPolicy,
    /// Files that the user named, besides the disks themselves.
    pub listed: Vec<PathBuf>,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self { reactors: 1, poll_max_us: None, allow_backing: BackingPolicy::default(), listed: Vec::new() }
    }
}

impl DaemonConfig {
    /// Changes some of them: `DaemonConfig::default().with(|config| config.reactors = 4)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Names a disk as long as the daemon runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskId(pub u64);

/// What a served disk is and how it is doing.
#[derive(Debug, Clone)]
pub struct DiskStatus {
    /// Its name in this daemon.
    pub id: DiskId,
    /// The file's name, or what stands for it.
    pub name: String,
    /// Size, flags, serial.
    pub info: DiskInfo,
    /// One line a layer: format, file, engine and why.
    pub layers: Vec<String>,
    /// What a monitor has to know.
    pub attachment: Attachment,
    /// Counters of each of its rings.
    pub rings: Vec<RingStats>,
    /// The tables in memory of an image that has some.
    pub tables: Option<TableCacheStats>,
}

struct Served {
    id: DiskId,
    name: String,
    file: Option<PathBuf>,
    opened: OpenedDisk,
    attachment: Attachment,
    export: Export,
}

/// Reactors, disks and exports. Dropping it without [`Daemon::shutdown`] shuts it down too, but only logs errors.
pub struct Daemon {
    config: DaemonConfig,
    reactors: Vec<ReactorThread>,
    disks: Vec<Served>,
    next_id: u64,
}

/// Queues that a disk offers where nobody says how many: one a CPU, within reason.
const DEFAULT_QUEUES_MAX: usize = 16;

impl Daemon {
    /// Starts the reactors' threads; serves nothing yet.
    pub fn start(config: DaemonConfig) -> Result<Self> {
        let mut reactors = Vec::new();
        for index in 0..config.reactors.max(1) {
            let defaults = ReactorConfig::default().with(|config| config.name = format!("reactor-{index}"));
            let poll_max_us = config.poll_max_us.unwrap_or(defaults.poll_max_us);
            reactors.push(Reactor::spawn(defaults.with(|config| config.poll_max_us = poll_max_us))?);
        }
        Ok(Self { config, reactors, disks: Vec::new(), next_id: 0 })
    }

    /// How many queues a drive offers: what it says, or one a CPU.
    #[must_use]
    pub fn queues_of(drive: &DriveOptions) -> u16 {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        drive.export.queues.unwrap_or(cpus.min(DEFAULT_QUEUES_MAX) as u16)
    }

    /// The polling limit of reactors that are to serve `drives`; `otherwise` is what drives have that do not say.
    ///
    /// A disk's queues are spread over all reactors, so the longest limit holds for all of them. It is set when the
    /// daemon starts.
    #[must_use]
    pub fn poll_max_us_of(drives: &[DriveOptions], otherwise: Option<u32>) -> Option<u32> {
        let otherwise = otherwise.unwrap_or(ReactorConfig::default().poll_max_us);
        drives.iter().map(|drive| drive.export.poll_max_us.unwrap_or(otherwise)).max()
    }

    /// Opens a drive and serves it. When this returns, its socket can be connected to.
    pub fn add(&mut self, drive: &DriveOptions) -> Result<DiskId> {
        let socket = drive.socket().ok_or_else(|| {
            Error::new(
                ErrorKind::BadOption,
                format!("{} has no path to put a socket beside: give --socket PATH", drive.disk.display_name()),
            )
        })?;
        let in_context = |error: Error| error.in_context(drive.disk.display_name());
        let opened = open_disk(&drive.disk, self.config.allow_backing.clone(), &self.config.listed)
            .map_err(|error| self.explain_lock(drive, error))?;
        let id = DiskId(self.next_id);
        let mut options = ExportOptions::default();
        options.name = format!("disk{}", id.0);
        options.max_queues = Self::queues_of(drive);
        options.queue_size = drive.export.queue_size.unwrap_or(options.queue_size);
        // Each disk begins with another reactor, so that disks of one queue spread too.
        options.first_reactor = usize::try_from(id.0).unwrap_or(0) % self.reactors.len().max(1);
        options.fixed_buffers = drive.export.fixed_buffers;
        let (queues, queue_size) = (options.max_queues, options.queue_size);
        let reactors = self.reactors.iter().map(ReactorThread::handle).collect();
        let export = Export::listen(&socket, Arc::clone(&opened.disk), reactors, options).map_err(in_context)?;
        self.next_id += 1;
        let attachment = Attachment { socket: absolute(&socket), queues, queue_size };
        let (name, file) = (drive.disk.display_name(), path_of(drive));
        self.disks.push(Served { id, name, file, opened, attachment, export });
        Ok(id)
    }

    /// An image that is in use may be so by ourselves.
    fn explain_lock(&self, drive: &DriveOptions, error: Error) -> Error {
        let canonical = |path: &PathBuf| path.canonicalize().ok();
        let wanted = path_of(drive).as_ref().and_then(canonical);
        let is_ours = |disk: &Served| wanted.is_some() && disk.file.as_ref().and_then(canonical) == wanted;
        match self.disks.iter().find(|disk| is_ours(disk)) {
            Some(disk) if error.kind() == ErrorKind::Locked => {
                let message = format!("'{}' is served by this daemon already, as disk {}", disk.name, disk.id.0);
                Error::new(ErrorKind::Locked, message)
            }
            _ => error,
        }
    }

    /// Stops serving a disk: its guest is disconnected, what is in flight ends, the image is flushed and closed.
    pub fn remove(&mut self, id: DiskId) -> Result<()> {
        let Some(index) = self.disks.iter().position(|disk| disk.id == id) else {
            return Err(Error::new(ErrorKind::BadOption, format!("there is no disk {}", id.0)));
        };
        self.disks.remove(index).end()
    }

    /// The disks, in the order in which they were added.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskStatus> {
        self.disks.iter().map(Served::status).collect()
    }

    /// Counters of each reactor, with its name.
    #[must_use]
    pub fn reactors(&self) -> Vec<(String, ReactorStats)> {
        self.reactors.iter().map(|reactor| (reactor.handle().name().to_owned(), reactor.stats())).collect()
    }

    /// Counters of the pools that requests' contexts come from, by name. They are the whole process's: threads trade
    /// contexts with each other.
    #[must_use]
    pub fn pools(&self) -> Vec<(&'static str, PoolStats)> {
        memory::pools()
    }

    /// Stops accepting, lets requests in flight end, flushes and closes the images, removes the sockets, ends the
    /// threads. Goes on after an error and returns that of the disk that was added first.
    pub fn shutdown(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let mut first = end_all(self.disks.drain(..).collect());
        for reactor in self.reactors.drain(..) {
            first = first.and(reactor.stop());
        }
        // The process may live on.
        memory::trim_pools();
        first
    }
}

/// The path of a drive's image.
fn path_of(drive: &DriveOptions) -> Option<PathBuf> {
    drive.disk.file.as_ref()?.path().map(Path::to_owned)
}

/// Ends disks side by side: one whose storage hangs must not keep the others from being closed. What fails is logged at
/// once, because the last may never end.
fn end_all(disks: Vec<Served>) -> Result<()> {
    let disks: Vec<Mutex<Option<Served>>> = disks.into_iter().map(|disk| Mutex::new(Some(disk))).collect();
    let end = |disk: &Mutex<Option<Served>>| {
        let disk = disk.lock().unwrap_or_else(PoisonError::into_inner).take();
        disk.map_or(Ok(()), Served::end).inspect_err(|error| tracing::error!("{error}"))
    };
    let panicked = |_| Err(Error::new(ErrorKind::Io, "the end of a disk panicked: look at its image with check"));
    std::thread::scope(|scope| {
        let spawn = |disk| std::thread::Builder::new().name("closing".into()).spawn_scoped(scope, move || end(disk));
        let threads: Vec<_> = disks.iter().map(spawn).collect();
        // Where no thread could be had, this one does it.
        let ended = |(thread, disk): (std::io::Result<ScopedJoinHandle<'_, _>>, _)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(panicked),
            Err(_) => end(disk),
        };
        threads.into_iter().zip(&disks).map(ended).fold(Ok(()), Result::and)
    })
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already logged.
        let _ = self.end();
    }
}

impl Served {
    fn status(&self) -> DiskStatus {
        DiskStatus {
            id: self.id,
            name: self.name.clone(),
            info: self.opened.disk.info(),
            layers: self.opened.layers(),
            attachment: self.attachment.clone(),
            rings: self.export.stats(),
            tables: self.opened.table_cache_stats(),
        }
    }

    fn end(self) -> Result<()> {
        self.export.stop();
        if let Some(TableCacheStats { hits, misses, evictions, used_bytes, limit_bytes }) =
            self.opened.table_cache_stats()
        {
            let name = &self.name;
            tracing::info!(hits, misses, evictions, used_bytes, limit_bytes, "tables in memory of '{name}'");
        }
        self.opened.close()
    }
}
