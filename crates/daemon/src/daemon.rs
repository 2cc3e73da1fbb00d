//! The daemon: reactors' threads, the disks that they serve, and the sockets for guests.

use crate::fronts::front::Front;
use crate::fronts::servers::Servers;
use crate::hang::{CLOSE_PATIENCE, HOPELESS_PATIENCE, Patience, close_within};
use crate::jobs::list::Jobs;
use crate::state::attach::Attachment;
use crate::state::host_memory::{default_buffer_memory, default_index_memory};
use crate::state::nbd_options::NbdOptions;
use crate::state::place::{GROUP_SOCKET_MODE, Place};
use crate::state::status::{DiskStatus, ExportId, ExportStatus, NodeId};
use crate::table::{Found, Table};
use block::{Error, ErrorKind, ReactorHandle, Result};
use drive::{DiskOptions, DriveOptions, EngineOpener, ExportOptions, ShownOptions, open_disk_with};
use engine::{Reactor, ReactorConfig, ReactorStats, ReactorThread};
use export_nbd::Limits;
use export_vhost_user::{ExportOptions as VhostUserOptions, Geometry, Overrides, QueueLatency};
use image::{BackingPolicy, Hold, HoldControl, TableCacheStats, ThrottleMember};
use memory::{BudgetStats, BufferBudget, PoolStats};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// The configuration of a daemon.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DaemonConfig {
    /// Threads that serve requests, at least one.
    pub reactors: usize,
    /// How long an idle reactor spins before it sleeps, in microseconds; by default the engine's value.
    pub poll_max_us: Option<u32>,
    /// Which backing files images may open.
    pub allow_backing: BackingPolicy,
    /// Files that the user named, besides the disks themselves.
    pub listed: Vec<PathBuf>,
    /// How much memory requests may take for buffers of their own, over all disks. By default a sixteenth of the host's
    /// or the control group's memory, but at least 16 MiB and at most 256 MiB. The payload of NBD clients' requests may
    /// take as much again.
    pub buffer_memory_bytes: Option<usize>,
    /// Memory that the indexes of kept overlays may take, over all disks of the process. By default a quarter of the
    /// host's or the control group's memory.
    pub index_memory_bytes: Option<usize>,
    /// As [`ReactorConfig::inline_bytes`]; by default the engine's value.
    pub inline_bytes: Option<usize>,
    /// As [`ReactorConfig::harvest_after_submit`].
    pub harvest_after_submit: bool,
    /// How long the removal of a disk, or the end of the daemon, waits while no request in flight ends (three times as
    /// long in all), and for cancelled jobs and calls that make no progress.
    pub give_up_after: Duration,
}

/// The default of [`DaemonConfig::give_up_after`]: longer than a request should take on storage that works.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(20);

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            reactors: 1,
            poll_max_us: None,
            allow_backing: BackingPolicy::default(),
            listed: Vec::new(),
            buffer_memory_bytes: None,
            index_memory_bytes: None,
            inline_bytes: None,
            harvest_after_submit: true,
            give_up_after: GIVE_UP_AFTER,
        }
    }
}

impl DaemonConfig {
    /// Changes some fields: `DaemonConfig::default().with(|config| config.reactors = 4)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Reactors, disks, exports of disks, and jobs on disks.
///
/// Disks, exports and jobs come and go while others run. Any thread may make any call at any time. What takes long
/// (opening, awaiting requests, closing) holds up only its caller, and no reactor. A disk can have several exports,
/// each at an address of its own or, for NBD, under a name of its own.
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

/// The most queues that an export offers by default, which is one for each CPU.
const DEFAULT_QUEUES_MAX: usize = 16;
/// How long reactors get to end if requests were given up.
const REACTOR_PATIENCE: Duration = Duration::from_secs(2);
/// How long a busy reactor gets to look for its oldest request.
const OLDEST_PATIENCE: Duration = Duration::from_micros(300);

impl Daemon {
    /// Starts the reactors' threads; serves nothing yet.
    pub fn start(config: DaemonConfig) -> Result<Self> {
        let mut reactors = Vec::new();
        for index in 0..config.reactors.max(1) {
            let defaults = ReactorConfig::default().with(|config| config.name = format!("reactor-{index}"));
            let poll_max_us = config.poll_max_us.unwrap_or(defaults.poll_max_us);
            let (inline_bytes, harvest_after_submit) = (config.inline_bytes, config.harvest_after_submit);
            reactors.push(Reactor::spawn(defaults.with(|config| {
                (config.poll_max_us, config.harvest_after_submit) = (poll_max_us, harvest_after_submit);
                config.inline_bytes = inline_bytes.unwrap_or(config.inline_bytes);
            }))?);
        }
        image::limit_index_memory(config.index_memory_bytes.unwrap_or_else(default_index_memory) as u64);
        let buffer_bytes = config.buffer_memory_bytes.unwrap_or_else(default_buffer_memory);
        let buffers = BufferBudget::new(buffer_bytes);
        Ok(Self {
            config,
            reactors,
            buffers,
            table: Arc::default(),
            jobs: Arc::default(),
            servers: Arc::new(Servers::new(buffer_bytes)),
            has_given_up: Arc::default(),
        })
    }

    /// Returns how many queues an export offers: its option, or one for each CPU.
    #[must_use]
    pub fn queues_of(export: &ExportOptions) -> u16 {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        export.queues.unwrap_or(cpus.min(DEFAULT_QUEUES_MAX) as u16)
    }

    /// Returns the polling limit of reactors that will serve `drives`. `otherwise` is the limit for drives without
    /// their own.
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
        // A wrong option is found before the image is opened.
        let image = drive.disk.file.as_ref().and_then(|file| file.path());
        let place = Place::of(&drive.export, image, &drive.disk.display_name())?;
        let node = self.add_disk(&drive.disk)?;
        match self.table.find(node).and_then(|found| self.export_at(place, &found, &drive.export)) {
            Ok(export) => Ok((node, export)),
            Err(error) => {
                // The caller gets the first error: why the disk is not served.
                if let Err(error) = self.remove_disk(node, true) {
                    tracing::error!("{error}");
                }
                Err(error)
            }
        }
    }

    /// Opens a disk. It is served as soon as it gets an export. Fails if another disk has the name.
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

    /// Serves a disk at a socket; by default beside its image. When this returns, the socket can be connected to. A
    /// disk can have any number of exports, even for writing. Guests can then destroy each other's data.
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
        let read_only = options.read_only || found.disk.disk.info().read_only;
        let shown = options.shown.or_of(&found.options.shown, options.read_only);
        vhost.packed = shown.packed.unwrap_or(vhost.packed);
        vhost.overrides = overrides(&shown);
        vhost.fixed_buffers = options.fixed_buffers;
        vhost.guest_memory = options.guest_memory;
        vhost.guest_memory_max_bytes = options.guest_memory_max_bytes;
        vhost.group = options.socket_group;
        // Without permissions, a group would be of no use.
        let mode = if vhost.group.is_some() { GROUP_SOCKET_MODE } else { vhost.mode };
        vhost.mode = options.socket_mode.unwrap_or(mode);
        let attachment = Attachment { socket: place.shown(), queues: vhost.max_queues, queue_size: vhost.queue_size };
        let (id, has_others) = self.table.reserve_export(found.id, read_only, attachment, place.passed_socket())?;
        let name = found.name_in_logs();
        vhost.name = if has_others { format!("{name}.{id}") } else { name };
        // Each export begins with another reactor, so that exports of one queue spread too.
        vhost.first_reactor = usize::try_from(id.0).unwrap_or(0) % self.reactors.len().max(1);
        let (disk, hold) = found.disk.for_export();
        let begun = place.serve(disk, self.reactor_handles(), vhost);
        self.begin(id, found, hold, begun.map(Front::VhostUser))
    }

    /// Makes an export at an NBD server.
    pub(crate) fn begin_nbd(
        &self,
        found: &Found,
        options: &NbdOptions,
        hold: Option<Hold>,
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
        let (id, _) = self.table.reserve_export(found.id, read_only, attachment, options.address.passed_socket())?;
        self.begin(id, found, hold, begin())
    }

    /// Enters an export that has begun into the table, or removes its reservation if it has not.
    fn begin(&self, id: ExportId, found: &Found, hold: Option<Hold>, begun: Result<Front>) -> Result<ExportId> {
        let begun = begun.map_err(|error| error.in_context(&found.file)).and_then(|front| {
            self.table.export_is_here(id, front, hold).map_err(|front| {
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

    /// Removes an export. Its guest is disconnected when its requests in flight have ended. The disk and its other
    /// exports stay. Requests that the storage does not end in time are given up ([`DaemonConfig::give_up_after`]):
    /// their guest gets errors.
    pub fn remove_export(&self, id: ExportId) -> Result<()> {
        let (node, front, hold) = self.table.take_export(id)?;
        // Guests of other exports go on waiting.
        let _held = hold.as_ref().map(Hold::give_up);
        let limits: Vec<_> = self.throttles(node).unwrap_or_default().iter().map(ThrottleMember::lift).collect();
        let (table, has_given_up) = (Arc::clone(&self.table), Arc::clone(&self.has_given_up));
        let patience = Patience::with_export(self.config.give_up_after, id, front.surrender(), move || {
            has_given_up.store(true, Ordering::Release);
            table.has_given_up_requests(node);
        });
        let figures = front.stop_counted();
        drop((patience, limits));
        self.table.forget_export_but_for(id, figures);
        Ok(())
    }

    /// Flushes and closes a disk, with the exports at which nobody is connected. Fails if somebody is, or if it has
    /// jobs; with `force`, guests are disconnected and jobs cancelled first. Requests and calls that the storage does
    /// not end in time are given up ([`DaemonConfig::give_up_after`]): their guests get errors, and so does the caller.
    /// The disk is gone all the same.
    pub fn remove_disk(&self, id: NodeId, force: bool) -> Result<()> {
        let (found, exports) = self.table.take_node(id, force)?;
        let _going = self.table.going(id);
        self.be_patient_with_jobs_of(id);
        let _held = found.disk.hold.as_deref().map(HoldControl::give_up);
        let limits: Vec<_> = found.disk.throttles.iter().map(ThrottleMember::lift).collect();
        let given_up = Arc::new(AtomicBool::new(false));
        let surrenders = exports.iter().map(|(_, export)| export.surrender()).collect();
        let patience = Patience::with_requests(self.config.give_up_after, &found, surrenders, &given_up);
        for (export, running) in exports {
            running.stop();
            self.table.forget_export(export);
        }
        self.table.wait_for_exports(id);
        found.disk.image.iter().for_each(|image| image.ends());
        drop((patience, limits));
        // A job that takes a layer back may take long.
        let patience = Patience::with_jobs(&found, self.jobs.moved_bytes_by(id));
        let limit = given_up.load(Ordering::Acquire).then_some(HOPELESS_PATIENCE);
        self.jobs.wait_for_all_of(id, limit);
        drop(patience);
        if !self.wait_for_calls(&found, limit) {
            given_up.store(true, Ordering::Release);
        }
        let patience = Patience::with_end(&found);
        // Closing releases the image's locks: when the name is free, the image is, too.
        let hopeless = given_up.load(Ordering::Acquire) || self.table.has_left_works(id);
        // The storage may answer again by now.
        let doubtful = || self.table.gave_up_requests(id).then_some(CLOSE_PATIENCE + HOPELESS_PATIENCE);
        let closed = match hopeless.then_some(HOPELESS_PATIENCE).or_else(doubtful) {
            Some(limit) => {
                self.has_given_up.store(true, Ordering::Release);
                // A call that changes the image ends before.
                let table = Arc::clone(&self.table);
                close_within(limit, found, move |found| {
                    table.wait_for_works(id, None);
                    close(found)
                })
            }
            None => {
                let closed = close(&found);
                drop(found);
                closed
            }
        };
        drop(patience);
        closed
    }

    /// Returns the number of the disk with this name.
    #[must_use]
    pub fn disk_named(&self, name: &str) -> Option<NodeId> {
        self.table.id_of(name)
    }

    /// Returns the names of the disks. Unlike [`Daemon::disks`], it asks no disk.
    #[must_use]
    pub fn disk_names(&self) -> Vec<String> {
        self.table.nodes().into_iter().map(|found| found.name).collect()
    }

    /// Returns the disks, in the order in which they were added.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskStatus> {
        let status = |Found { id, name, file, disk, past, .. }| DiskStatus {
            id,
            name,
            file,
            info: disk.disk.info(),
            layers: disk.layers(),
            tables: disk.table_cache_stats(),
            throttled: disk.throttles.iter().map(|throttle| throttle.waited()).sum(),
            held: disk.hold.as_ref().and_then(|hold| hold.held()),
            past,
        };
        self.table.nodes().into_iter().map(status).collect()
    }

    /// Returns the `throttle` filters of a disk, the one nearest to the guest first.
    pub fn throttles(&self, node: NodeId) -> Result<Vec<Arc<ThrottleMember>>> {
        Ok(self.table.find(node)?.disk.throttles.clone())
    }

    /// Returns the control of the filter that holds requests which the storage fails, if the disk's options ask for
    /// one.
    pub fn hold(&self, node: NodeId) -> Result<Option<Arc<HoldControl>>> {
        Ok(self.table.find(node)?.disk.hold.clone())
    }

    /// Returns a number for an export that could not begin, so that it can be named.
    #[must_use]
    pub fn spare_export_id(&self) -> ExportId {
        self.table.spare_export_id()
    }

    /// Returns the exports of all disks, in the order in which they were added.
    #[must_use]
    pub fn exports(&self) -> Vec<ExportStatus> {
        self.table.exports()
    }

    /// Returns how long the requests of each disk take, over all its exports. No reactor waits for this. The call takes
    /// a fraction of a millisecond, in which reactors that are awake note their oldest requests.
    #[must_use]
    pub fn latencies(&self) -> BTreeMap<NodeId, QueueLatency> {
        self.table.latencies(OLDEST_PATIENCE)
    }

    /// Returns the counters of each reactor, with its name.
    #[must_use]
    pub fn reactors(&self) -> Vec<(String, ReactorStats)> {
        self.reactors.iter().map(|reactor| (reactor.handle().name().to_owned(), reactor.stats())).collect()
    }

    /// Returns the harvests of all reactors, counted by their completions; see [`ReactorThread::harvest_lengths`].
    #[must_use]
    pub fn harvest_lengths(&self) -> Vec<u64> {
        let mut sum = Vec::new();
        for lengths in self.reactors.iter().map(ReactorThread::harvest_lengths) {
            sum.resize(lengths.len().max(sum.len()), 0);
            sum.iter_mut().zip(lengths).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// Returns the names of the reactors that do not answer within `time`. A stuck reactor serves no guest. Waits for
    /// `time` at most.
    #[must_use]
    pub fn stuck_reactors(&self, time: Duration) -> Vec<String> {
        let deadline = Instant::now() + time;
        let asked = self.reactors.iter().map(|reactor| {
            let (sender, answer) = std::sync::mpsc::sync_channel(1);
            // The caller may be gone when a late answer comes.
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

    /// Returns how much memory requests of all disks take for buffers of their own.
    #[must_use]
    pub fn buffer_stats(&self) -> BudgetStats {
        self.buffers.stats()
    }

    /// Returns the counters of the pools of requests' contexts, by name. They are for the whole process, because
    /// threads trade contexts with each other.
    #[must_use]
    pub fn pools(&self) -> Vec<(&'static str, PoolStats)> {
        memory::pools()
    }

    /// Stops accepting, cancels jobs, waits for requests in flight, flushes and closes the images, removes the sockets,
    /// and ends the threads. Goes on after an error. Returns the error of the disk that was added first.
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

    /// Removes all disks by force, side by side, so that one whose storage hangs does not keep the others from being
    /// closed. Failures are logged at once, because the last disk may never end. Returns the error of the disk that was
    /// added first.
    pub fn end_disks(&self) -> Result<()> {
        // Only the numbers: holding a disk would keep its file locked.
        let nodes: Vec<NodeId> = self.table.nodes().iter().map(|node| node.id).collect();
        let end = |id: NodeId| self.remove_disk(id, true).inspect_err(|error| tracing::error!("{error}"));
        let panicked = |_| Err(Error::new(ErrorKind::Io, "the end of a disk panicked: look at its image with check"));
        let ended = std::thread::scope(|scope| {
            let spawn = |id: &NodeId| {
                let id = *id;
                std::thread::Builder::new().name("closing".into()).spawn_scoped(scope, move || end(id))
            };
            let threads: Vec<_> = nodes.iter().map(spawn).collect();
            // If no thread can be started, this one ends the disk.
            let ended = |(thread, id): (std::io::Result<ScopedJoinHandle<'_, _>>, &NodeId)| match thread {
                Ok(thread) => thread.join().unwrap_or_else(panicked),
                Err(_) => end(*id),
            };
            threads.into_iter().zip(&nodes).map(ended).fold(Ok(()), Result::and)
        });
        // A call may be closing another.
        self.table.wait_for_those_going();
        ended
    }

    /// Explains a locked image that this daemon itself uses.
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

/// Turns the user's options for what a guest is told into the device's overrides.
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
    overrides.secure_erase = shown.secure_erase.unwrap_or(false);
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
