//! A disk that this process serves to its own guest, the driver, over a vhost-user socket, so that both sides' counters
//! can be read.

use super::guest::ServerOptions;
use crate::output::usage;
use crate::scratch;
use anyhow::Context;
use block::{Disk, DiskInfo, DiskQueue, ReactorCtx};
use daemon::{Daemon, DaemonConfig};
use drive::{DiskOptions, DriveOptions};
use driver::{Driver, DriverOptions};
use engine::ReactorStats;
use load::Hooks;
use serde::Serialize;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

pub(super) struct Served {
    daemon: Arc<Daemon>,
    /// The guest's disk, and the second one.
    drivers: Vec<Arc<Driver>>,
    _directory: TempDir,
}

/// A pool of request contexts at the end of a run. All of this process count: the server's and its guest's.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Pool {
    name: &'static str,
    /// Contexts that were made since the process began.
    made: u64,
    /// Contexts that were given back to the allocator.
    freed: u64,
    /// Contexts that exist and are not in use.
    spare: u64,
    peak_in_flight: u64,
    context_bytes: u64,
}

impl Pool {
    /// Describes it in one line.
    pub(super) fn line(&self) -> String {
        let Self { name, made, freed, spare, peak_in_flight, context_bytes } = self;
        format!(
            "pool of {name}: {made} contexts made ({context_bytes} bytes each), {freed} freed, {spare} spare, \
             {peak_in_flight} in use at the most"
        )
    }
}

/// Two disks side by side: a queue on each in turn.
struct Pair {
    drivers: Vec<Arc<Driver>>,
    turn: AtomicUsize,
}

impl Disk for Pair {
    fn info(&self) -> DiskInfo {
        let infos = self.drivers.iter().map(|driver| driver.info());
        infos.min_by_key(|info| info.size_bytes).unwrap_or_else(|| self.drivers[0].info())
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.drivers[turn % self.drivers.len()].open_queue(ctx)
    }
}

impl Served {
    /// Serves `drive` with one reactor for each of the guest's queues. The drive's options for queues, queue size,
    /// socket and poll-max-us apply. With a second file (`server.beside`), a second disk with the same options is served, and
    /// the guest's queues belong to both disks in turn.
    pub(super) fn start(drive: &DriveOptions, server: &ServerOptions, guest: DriverOptions) -> anyhow::Result<Self> {
        if let Some(offered) = drive.export.queues.filter(|offered| *offered < guest.queues) {
            return Err(usage(format!("--queues {}: the drive says queues={offered}", guest.queues)));
        }
        if server.beside.is_some() && guest.queues < 2 {
            return Err(usage("server.beside: the second disk has every second queue: give --queues 2 or more"));
        }
        let directory = scratch::socket_directory()?;
        let socket = drive.export.socket.clone().unwrap_or_else(|| directory.path().join("disk.sock"));
        let queues = guest.queues;
        let queue_size = drive.export.queue_size.unwrap_or(guest.queue_size);
        let config = DaemonConfig::default().with(|config| {
            config.reactors = usize::from(queues);
            config.poll_max_us = drive.export.poll_max_us;
            config.harvest_after_submit = server.harvest_after_submit;
        });
        let daemon = Daemon::start(config)?;
        let mut drive = drive.clone();
        drive.export.queues = drive.export.queues.or(Some(queues));
        drive.export.queue_size = Some(queue_size);
        drive.export.socket = Some(socket.clone());
        let guest = guest.with(|options| options.queue_size = queue_size);
        let mut drivers = Vec::new();
        for (number, file) in std::iter::once(None).chain(server.beside.as_deref().map(Some)).enumerate() {
            if let Some(file) = file {
                drive.disk = beside(&drive.disk, file);
                drive.export.socket = Some(directory.path().join(format!("{number}.sock")));
            }
            daemon.add(&drive)?;
            let socket = drive.export.socket.as_ref().unwrap_or(&socket);
            drivers.push(Arc::new(Driver::connect(socket, guest.clone())?));
        }
        Ok(Self { daemon: Arc::new(daemon), drivers, _directory: directory })
    }

    pub(super) fn disk(&self) -> Arc<dyn Disk> {
        match self.drivers.as_slice() {
            [only] => Arc::clone(only) as _,
            all => Arc::new(Pair { drivers: all.to_vec(), turn: AtomicUsize::new(0) }),
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        self.drivers.iter().any(|driver| driver.is_disconnected())
    }

    /// Returns the pools of contexts that were used.
    pub(super) fn pools(&self) -> Vec<Pool> {
        let mut pools = Vec::new();
        for (name, stats) in self.daemon.pools() {
            if stats.created > 0 {
                pools.push(Pool {
                    name,
                    made: stats.created,
                    freed: stats.freed,
                    spare: stats.total.saturating_sub(stats.in_flight),
                    peak_in_flight: stats.peak_in_flight,
                    context_bytes: stats.context_bytes,
                });
            }
        }
        pools
    }

    /// Returns hooks with the drivers' counters, followed by the server's.
    pub(super) fn hooks(&self) -> Hooks<'static> {
        let all: Vec<_> = self.drivers.iter().map(load::driver_hooks).collect();
        let guests: Vec<_> = all.iter().filter_map(|hooks| hooks.counters.clone()).collect();
        let hooks = all.into_iter().next().unwrap_or_default().with(|hooks| {
            if self.drivers.len() > 1 {
                // Memory of one driver is not the other's.
                hooks.alloc = None;
            }
        });
        let daemon = Arc::clone(&self.daemon);
        let counters = move || {
            let mut all = Vec::new();
            guests.iter().for_each(|counters| add(&mut all, counters()));
            all.extend(server_counters(&daemon));
            all
        };
        let daemon = Arc::clone(&self.daemon);
        hooks.with(|hooks| {
            hooks.counters = Some(Arc::new(counters));
            hooks.harvests = Some(Arc::new(move || daemon.harvest_lengths()));
        })
    }

    pub(super) fn close(self) -> anyhow::Result<()> {
        for driver in &self.drivers {
            driver.disconnect()?;
        }
        let daemon = Arc::into_inner(self.daemon).context("the server is still asked for its counters")?;
        Ok(daemon.shutdown()?)
    }
}

/// Adds a guest's counters to those of others by their names.
fn add(all: &mut Vec<(&'static str, u64)>, more: Vec<(&'static str, u64)>) {
    for (name, count) in more {
        match all.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => *sum += count,
            None => all.push((name, count)),
        }
    }
}

fn server_counters(daemon: &Daemon) -> Vec<(&'static str, u64)> {
    let (reactors, disks, exports) = (daemon.reactors(), daemon.disks(), daemon.exports());
    let of_reactors = |count: fn(&ReactorStats) -> u64| reactors.iter().map(|(_, stats)| count(stats)).sum();
    let rings = || exports.iter().flat_map(|export| &export.rings);
    let mut counters = vec![
        ("server_batches", rings().map(|ring| ring.batches).sum()),
        ("server_system_calls", of_reactors(|stats| stats.system_calls)),
        ("server_worker_calls", of_reactors(|stats| stats.worker_calls)),
        ("server_harvests", of_reactors(|stats| stats.harvests)),
        ("server_sleeps", of_reactors(|stats| stats.sleeps)),
        ("server_yields", of_reactors(|stats| stats.yields)),
        ("server_notifications", rings().map(|ring| ring.notifications).sum()),
    ];
    let pools = daemon.pools();
    counters.push(("contexts_made", pools.iter().map(|(_, pool)| pool.created).sum()));
    counters.push(("context_bytes_made", pools.iter().map(|(_, pool)| pool.created * pool.context_bytes).sum()));
    let tables: Vec<_> = disks.iter().filter_map(|disk| disk.tables).collect();
    if !tables.is_empty() {
        counters.push(("table_hits", tables.iter().map(|tables| tables.hits).sum()));
        counters.push(("table_misses", tables.iter().map(|tables| tables.misses).sum()));
    }
    counters
}

/// Returns the options of a second disk that differs from the first one in its file.
pub(super) fn beside(disk: &DiskOptions, file: &Path) -> DiskOptions {
    let mut disk = disk.clone();
    (disk.file, disk.name) = (Some(file.into()), None);
    disk
}
