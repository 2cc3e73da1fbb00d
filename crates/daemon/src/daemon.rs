//! The daemon: reactors' threads, the disks that they serve, and the sockets at which guests come in.

use crate::attach::Attachment;
use crate::front::Front;
use crate::hang::{HOPELESS_PATIENCE, Patience, close_hopeless};
use crate::host_memory::default_buffer_memory;
use crate::jobs::Jobs;
use crate::nbd::{NbdOptions, Servers};
use crate::place::Place;
use crate::status::{DiskStatus, ExportId, ExportStatus, NodeId};
use crate::table::{Found, Table};
use block::{Error, ErrorKind, ReactorHandle, Result};
use drive::{DiskOptions, DriveOptions, EngineOpener, ExportOptions, ShownOptions, open_disk_with};
use engine::{Reactor, ReactorConfig, ReactorStats, ReactorThread};
use export_nbd::Limits;
use export_vhost_user::{ExportOptions as VhostUserOptions, Geometry, Overrides, QueueLatency};
use image::{BackingPolicy, HoldControl, TableCacheStats, ThrottleMember};
use memory::{BudgetStats, BufferBudget, PoolStats};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

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
    /// How much memory requests may take for buffers of their own, over all disks; where not given, a sixteenth of what the
    /// host or the control group has, but at least 16 MiB and at most 256 MiB.
    pub buffer_memory_bytes: Option<usize>,
    /// As [`ReactorConfig::harvest_after_submit`].
    pub harvest_after_submit: bool,
    /// How long a disk that is removed, or the daemon that ends, waits for requests that the storage does not end.
    pub give_up_after: Duration,
}

/// What [`DaemonConfig::give_up_after`] is where nobody says otherwise: longer than any request that ends should take.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(20);

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            reactors: 1,
            poll_max_us: None,
            allow_backing: BackingPolicy::default(),
            listed: Vec::new(),
            buffer_memory_bytes: None,
            harvest_after_submit: true,
            give_up_after: GIVE_UP_AFTER,
        }
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

/// Reactors, disks, exports of disks, and jobs on disks.
///
/// Disks, exports and jobs come and go while others run. Each call may be made by any thread, at any time: what takes long
/// (opening, awaiting requests, closing) holds up nobody but its caller, and no reactor. A disk can have several exports,
/// each at a socket of its own.
///
/// Dropping a daemon without [`Daemon::shutdown`] shuts it down too, but only logs errors.
pub struct Daemon {
    pub(crate) config: DaemonConfig,
    reactors: Vec<ReactorThread>,
    buffers: BufferBudget,
    pub(crate) table: Arc<Table>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) servers: Arc<Servers>,
    /// Requests were given up: their storage may never end them.
    pub(crate) has_given_up: Arc<AtomicBool>,
}

/// Queues that an export offers where nobody says how many: one a CPU, within reason.
const DEFAULT_QUEUES_MAX: usize = 16;
/// How long reactors get to end where requests were given up.
const REACTOR_PATIENCE: Duration = Duration::from_secs(2);
/// What a busy reactor gets to look for its oldest request.
const OLDEST_PATIENCE: Duration = Duration::from_micros(300);
/// Permissions of a socket that has a group of its own, where nobody says otherwise.
const GROUP_SOCKET_MODE: u32 = 0o660;

impl Daemon {
    /// Starts the reactors' threads; serves nothing yet.
    pub fn start(config: DaemonConfig) -> Result<Self> {
        let mut reactors = Vec::new();
        for index in 0..config.reactors.max(1) {
            let defaults = ReactorConfig::default().with(|config| config.name = format!("reactor-{index}"));
            let poll_max_us = config.poll_max_us.unwrap_or(defaults.poll_max_us);
            let harvest_after_submit = config.harvest_after_submit;
            reactors.push(Reactor::spawn(defaults.with(|config| {
                (config.poll_max_us, config.harvest_after_submit) = (poll_max_us, harvest_after_submit);
            }))?);
        }
        let buffers = BufferBudget::new(config.buffer_memory_bytes.unwrap_or_else(default_buffer_memory));
        Ok(Self {
            config,
            reactors,
            buffers,
            table: Arc::default(),
            jobs: Arc::default(),
            servers: Arc::default(),
            has_given_up: Arc::default(),
        })
    }

    /// How many queues an export offers: what it says, or one a CPU.
    #[must_use]
    pub fn queues_of(export: &ExportOptions) -> u16 {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        export.queues.unwrap_or(cpus.min(DEFAULT_QUEUES_MAX) as u16)
    }

    /// The polling limit of reactors that are to serve `drives`; `otherwise` is what drives have that do not say.
    ///
    /// An export's queues are spread over all reactors, so the longest limit holds for all of them. It is set when the
    /// daemon starts.
    #[must_use]
    pub fn poll_max_us_of<'a>(
        drives: impl IntoIterator<Item = &'a DriveOptions>,
        otherwise: Option<u32>,
    ) -> Option<u32> {
        let otherwise = otherwise.unwrap_or(ReactorConfig::default().poll_max_us);
        drives.into_iter().map(|drive| drive.export.poll_max_us.unwrap_or(otherwise)).max()
    }

    /// Opens a drive's disk and serves it. When this returns, its socket can be connected to.
    pub fn add(&self, drive: &DriveOptions) -> Result<(NodeId, ExportId)> {
        // Before the image is opened, which a wrong option should not need.
        let image = drive.disk.file.as_ref().and_then(|file| file.path());
        let place = Place::of(&drive.export, image, &drive.disk.display_name())?;
        let node = self.add_disk(&drive.disk)?;
        match self.table.find(node).and_then(|found| self.export_at(place, &found, &drive.export)) {
            Ok(export) => Ok((node, export)),
            Err(error) => {
                // The caller has to know why it is not served.
                if let Err(error) = self.remove_disk(node, true) {
                    tracing::error!("{error}");
                }
                Err(error)
            }
        }
    }

    /// Opens a disk. It is served as soon as it gets an export. A name that another disk has is refused.
    pub fn add_disk(&self, options: &DiskOptions) -> Result<NodeId> {
        let id = self.table.reserve_node(options)?;
        let opener = EngineOpener::of_disk(options).with_buffers(self.buffers.account());
        match open_disk_with(&opener, options, self.config.allow_backing.clone(), &self.config.listed) {
            Ok(opened) => {
                self.table.node_is_here(id, opened);
                Ok(id)
            }
            Err(error) => {
                self.table.forget_node(id);
                Err(self.explain_lock(options, error))
            }
        }
    }

    /// Serves a disk at a socket: beside its image where `options` name none. When this returns, the socket can be
    /// connected to. A disk can have any number of exports, for writing too: what guests do to each other's data then is
    /// their affair.
    pub fn add_export(&self, node: NodeId, options: &ExportOptions) -> Result<ExportId> {
        let found = self.table.find(node)?;
        let place = Place::of(options, found.path.as_deref(), &found.file)?;
        self.export_at(place, &found, options)
    }

    fn export_at(&self, place: Place, found: &Found, options: &ExportOptions) -> Result<ExportId> {
        let mut vhost = VhostUserOptions::default();
        vhost.max_queues = Self::queues_of(options);
        vhost.queue_size = options.queue_size.unwrap_or(vhost.queue_size);
        vhost.read_only = options.read_only;
        vhost.packed = options.packed;
        vhost.overrides = overrides(&options.shown);
        vhost.fixed_buffers = options.fixed_buffers;
        vhost.group = options.socket_group;
        // A group of its own without permissions for it would be of no use.
        let mode = if vhost.group.is_some() { GROUP_SOCKET_MODE } else { vhost.mode };
        vhost.mode = options.socket_mode.unwrap_or(mode);
        let attachment = Attachment { socket: place.shown(), queues: vhost.max_queues, queue_size: vhost.queue_size };
        let read_only = options.read_only || found.disk.disk.info().read_only;
        let (id, has_others) = self.table.reserve_export(found.id, read_only, attachment, place.inode())?;
        let name = found.name_in_logs();
        vhost.name = if has_others { format!("{name}.{id}") } else { name };
        // Each begins with another reactor, so that exports of one queue spread too.
        vhost.first_reactor = usize::try_from(id.0).unwrap_or(0) % self.reactors.len().max(1);
        let begun = place.serve(Arc::clone(&found.disk.disk), self.reactor_handles(), vhost);
        self.begin(id, found, begun.map(Front::VhostUser))
    }

    /// An export at an NBD server.
    pub(crate) fn begin_nbd(
        &self,
        found: &Found,
        options: &NbdOptions,
        begin: impl FnOnce() -> Result<Front>,
    ) -> Result<ExportId> {
        let limits = Limits::default();
        let count = |most: usize| u16::try_from(most).unwrap_or(u16::MAX);
        let attachment = Attachment {
            socket: options.address.to_string().into(),
            queues: options.connections.unwrap_or(count(limits.connections)),
            queue_size: count(limits.requests),
        };
        let read_only = options.read_only || found.disk.disk.info().read_only;
        let (id, _) = self.table.reserve_export(found.id, read_only, attachment, None)?;
        self.begin(id, found, begin())
    }

    /// An export of which room was made in the table has begun, or has not.
    fn begin(&self, id: ExportId, found: &Found, begun: Result<Front>) -> Result<ExportId> {
        let begun = begun.map_err(|error| error.in_context(&found.file)).and_then(|front| {
            self.table.export_is_here(id, front).map_err(|front| {
                front.stop();
                Error::new(ErrorKind::Locked, format!("the disk of '{}' was removed meanwhile", found.file))
            })
        });
        if begun.is_err() {
            self.table.forget_export(id);
        }
        begun.map(|()| id)
    }

    pub(crate) fn reactor_handles(&self) -> Vec<Arc<dyn ReactorHandle>> {
        self.reactors.iter().map(ReactorThread::handle).collect()
    }

    /// Stops serving at one socket: its guest is disconnected when its requests in flight have ended. The disk stays, and
    /// so do its other exports.
    pub fn remove_export(&self, id: ExportId) -> Result<()> {
        let node = self.table.exports().iter().find(|export| export.id == id).map(|export| export.node);
        let found = node.and_then(|node| self.table.find(node).ok());
        let _held = found.as_ref().and_then(|found| found.disk.hold.as_ref()).map(HoldControl::give_up);
        self.table.take_export(id)?.stop();
        self.table.forget_export(id);
        Ok(())
    }

    /// Flushes and closes a disk. One that has exports or jobs is refused, unless `force` says that exports are
    /// to be removed and jobs to be cancelled first. Requests that the storage does not end in time are given up
    /// ([`DaemonConfig::give_up_after`]): their guests get errors, and so does the caller. The disk is gone all the same.
    pub fn remove_disk(&self, id: NodeId, force: bool) -> Result<()> {
        let (found, exports) = self.table.take_node(id, force)?;
        self.be_patient_with_jobs_of(id);
        let _held = found.disk.hold.as_ref().map(HoldControl::give_up);
        let given_up = Arc::new(AtomicBool::new(false));
        let surrenders = exports.iter().map(|(_, export)| export.surrender()).collect();
        let patience = Patience::with_requests(self.config.give_up_after, &found, surrenders, &given_up);
        for (export, running) in exports {
            running.stop();
            self.table.forget_export(export);
        }
        self.table.wait_for_exports(id);
        drop(patience);
        // A job that takes a layer back takes as long as it takes.
        let patience = Patience::with_jobs(&found);
        let limit = given_up.load(Ordering::Acquire).then_some(HOPELESS_PATIENCE);
        self.table.wait_for_works(id, limit);
        self.jobs.wait_for_all_of(id, limit);
        drop(patience);
        let patience = Patience::with_end(&found);
        // Its locks go with it: whoever finds the name free finds the image free, too.
        let closed = match given_up.load(Ordering::Acquire) || self.table.has_left_works(id) {
            true => {
                self.has_given_up.store(true, Ordering::Release);
                close_hopeless(found, close)
            }
            false => {
                let closed = close(&found);
                drop(found);
                closed
            }
        };
        drop(patience);
        self.table.forget_node(id);
        closed
    }

    /// The number of the disk of this name.
    #[must_use]
    pub fn disk_named(&self, name: &str) -> Option<NodeId> {
        self.table.id_of(name)
    }

    /// The disks, in the order in which they were added.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskStatus> {
        let status = |Found { id, name, file, disk, .. }| DiskStatus {
            id,
            name,
            file,
            info: disk.disk.info(),
            layers: disk.layers(),
            tables: disk.table_cache_stats(),
            throttled: disk.throttles.iter().map(|throttle| throttle.waited()).sum(),
            held: disk.hold.as_ref().and_then(|hold| hold.held()),
        };
        self.table.nodes().into_iter().map(status).collect()
    }

    /// The filters `throttle` of a disk, the nearest to the guest first.
    pub fn throttles(&self, node: NodeId) -> Result<Vec<Arc<ThrottleMember>>> {
        Ok(self.table.find(node)?.disk.throttles.clone())
    }

    /// What holds requests of a disk that the storage fails, if its options ask for that.
    pub fn hold(&self, node: NodeId) -> Result<Option<Arc<HoldControl>>> {
        Ok(self.table.find(node)?.disk.hold.clone())
    }

    /// A number for an export that could not begin, by which whoever keeps it can name it.
    #[must_use]
    pub fn spare_export_id(&self) -> ExportId {
        self.table.spare_export_id()
    }

    /// The exports of all disks, in the order in which they were added.
    #[must_use]
    pub fn exports(&self) -> Vec<ExportStatus> {
        self.table.exports()
    }

    /// How long the requests of each disk take, over all its exports. No reactor waits for this; it takes a fraction of a
    /// millisecond, in which those that are awake say which of their requests is the oldest.
    #[must_use]
    pub fn latencies(&self) -> BTreeMap<NodeId, QueueLatency> {
        self.table.latencies(OLDEST_PATIENCE)
    }

    /// Counters of each reactor, with its name.
    #[must_use]
    pub fn reactors(&self) -> Vec<(String, ReactorStats)> {
        self.reactors.iter().map(|reactor| (reactor.handle().name().to_owned(), reactor.stats())).collect()
    }

    /// How many harvests of all reactors gave how many completions; see [`ReactorThread::harvest_lengths`].
    #[must_use]
    pub fn harvest_lengths(&self) -> Vec<u64> {
        let mut sum = Vec::new();
        for lengths in self.reactors.iter().map(ReactorThread::harvest_lengths) {
            sum.resize(lengths.len().max(sum.len()), 0);
            sum.iter_mut().zip(lengths).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// Names of the reactors that do not answer within `time`: one that is stuck serves no guest any more. Waits as long.
    #[must_use]
    pub fn stuck_reactors(&self, time: Duration) -> Vec<String> {
        let deadline = Instant::now() + time;
        let asked = self.reactors.iter().map(|reactor| {
            let (sender, answer) = std::sync::mpsc::sync_channel(1);
            // Whoever asked may be gone when a late answer comes.
            let begun = reactor.handle().run(Box::new(move |_| sender.send(()).unwrap_or(())));
            (reactor.handle(), begun.map(|()| answer))
        });
        let asked: Vec<_> = asked.collect();
        let has_answered = |answer: &std::sync::mpsc::Receiver<()>| {
            answer.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok()
        };
        let stuck = asked.into_iter().filter_map(|(reactor, begun)| match begun {
            Ok(answer) if has_answered(&answer) => None,
            _ => Some(reactor.name().to_owned()),
        });
        stuck.collect()
    }

    /// The memory that requests of all disks take for buffers of their own.
    #[must_use]
    pub fn buffer_stats(&self) -> BudgetStats {
        self.buffers.stats()
    }

    /// Counters of the pools that requests' contexts come from, by name. They are the whole process's: threads trade
    /// contexts with each other.
    #[must_use]
    pub fn pools(&self) -> Vec<(&'static str, PoolStats)> {
        memory::pools()
    }

    /// Stops accepting, cancels jobs, lets requests in flight end, flushes and closes the images, removes the sockets, ends the
    /// threads. Goes on after an error and returns that of the disk that was added first.
    pub fn shutdown(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let mut first = self.end_disks();
        for reactor in self.reactors.drain(..) {
            let stopped = match self.has_given_up.load(Ordering::Acquire) {
                true => reactor.stop_within(REACTOR_PATIENCE).inspect_err(|error| tracing::error!("{error}")),
                false => reactor.stop(),
            };
            first = first.and(stopped);
        }
        // The process may live on.
        memory::trim_pools();
        first
    }

    /// Ends disks side by side: one whose storage hangs must not keep the others from being closed. Failures are logged at
    /// once, because the last disk may never end.
    fn end_disks(&self) -> Result<()> {
        // Not the disks themselves: whoever holds one keeps its file locked.
        let nodes: Vec<NodeId> = self.table.nodes().iter().map(|node| node.id).collect();
        let end = |id: NodeId| self.remove_disk(id, true).inspect_err(|error| tracing::error!("{error}"));
        let panicked = |_| Err(Error::new(ErrorKind::Io, "the end of a disk panicked: look at its image with check"));
        std::thread::scope(|scope| {
            let spawn = |id: &NodeId| {
                let id = *id;
                std::thread::Builder::new().name("closing".into()).spawn_scoped(scope, move || end(id))
            };
            let threads: Vec<_> = nodes.iter().map(spawn).collect();
            // Where no thread could be had, this one does it.
            let ended = |(thread, id): (std::io::Result<ScopedJoinHandle<'_, _>>, &NodeId)| match thread {
                Ok(thread) => thread.join().unwrap_or_else(panicked),
                Err(_) => end(*id),
            };
            threads.into_iter().zip(&nodes).map(ended).fold(Ok(()), Result::and)
        })
    }

    /// An image that is in use may be so by this daemon.
    fn explain_lock(&self, options: &DiskOptions, error: Error) -> Error {
        let canonical = |path: &Path| path.canonicalize().ok();
        let path = options.file.as_ref().and_then(|file| file.path()).filter(|_| error.kind() == ErrorKind::Locked);
        let Some((path, wanted)) = path.and_then(|path| Some((path, canonical(path)?))) else { return error };
        let open = self.table.open_paths();
        match open.iter().find(|(_, path)| canonical(path).as_ref() == Some(&wanted)) {
            Some((name, _)) => {
                let message = format!("'{}' is served by this daemon already, as '{name}'", path.display());
                Error::new(ErrorKind::Locked, message)
            }
            None => error,
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already logged.
        let _ = self.end();
    }
}

fn close(found: &Found) -> Result<()> {
    let Found { file, disk, .. } = found;
    if let Some(TableCacheStats { hits, misses, evictions, used_bytes, limit_bytes }) = disk.table_cache_stats() {
        tracing::info!(hits, misses, evictions, used_bytes, limit_bytes, "tables in memory of '{file}'");
    }
    disk.close()
}

/// What the user wants a guest to be told, in the device's words.
fn overrides(shown: &ShownOptions) -> Overrides {
    let mut overrides = Overrides::default();
    // All three or none.
    if let (Some(cylinders), Some(heads), Some(sectors)) = (shown.cylinders, shown.heads, shown.sectors) {
        overrides.geometry = Some(Geometry { cylinders, heads, sectors });
    }
    overrides.logical_block_bytes = shown.logical_block_bytes;
    overrides.physical_block_bytes = shown.physical_block_bytes;
    overrides.alignment_offset_bytes = shown.alignment_offset_bytes;
    overrides.minimum_io_bytes = shown.minimum_io_bytes;
    overrides.optimal_io_bytes = shown.optimal_io_bytes;
    overrides.discard_granularity_bytes = shown.discard_granularity_bytes;
    overrides.size_max_bytes = shown.size_max_bytes;
    overrides.seg_max = shown.seg_max;
    overrides.secure_erase = shown.secure_erase;
    overrides.write_cache = shown.write_cache;
    overrides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reactor_that_does_not_answer_is_named() {
        let daemon = Daemon::start(DaemonConfig::default().with(|config| config.reactors = 2)).unwrap();
        assert_eq!(daemon.stuck_reactors(Duration::from_secs(60)), Vec::<String>::new());
        let (sender, release) = std::sync::mpsc::channel::<()>();
        let held = daemon.reactors[1].handle();
        held.run(Box::new(move |_| release.recv().unwrap_or(()))).unwrap();
        assert_eq!(daemon.stuck_reactors(Duration::from_millis(100)), [held.name()]);
        drop(sender);
        assert_eq!(daemon.stuck_reactors(Duration::from_secs(60)), Vec::<String>::new());
        daemon.shutdown().unwrap();
    }
}
