//! A disk that this process serves to its own guest, the driver, over a vhost-user socket, so that both sides' counters
//! can be read.

use crate::output::usage;
use crate::scratch;
use anyhow::Context;
use block::Disk;
use daemon::{Daemon, DaemonConfig};
use drive::DriveOptions;
use driver::{Driver, DriverOptions};
use engine::ReactorStats;
use load::Hooks;
use std::sync::Arc;
use tempfile::TempDir;

pub(super) struct Served {
    daemon: Arc<Daemon>,
    driver: Arc<Driver>,
    _directory: TempDir,
}

impl Served {
    /// Serves `drive` with one reactor for each of the guest's queues. The drive's options for queues, queue size,
    /// socket and poll-max-us apply.
    pub(super) fn start(
        drive: &DriveOptions,
        guest: DriverOptions,
        harvest_after_submit: bool,
    ) -> anyhow::Result<Self> {
        if let Some(offered) = drive.export.queues.filter(|offered| *offered < guest.queues) {
            return Err(usage(format!("--queues {}: the drive says queues={offered}", guest.queues)));
        }
        let directory = scratch::socket_directory()?;
        let socket = drive.export.socket.clone().unwrap_or_else(|| directory.path().join("disk.sock"));
        let queues = guest.queues;
        let queue_size = drive.export.queue_size.unwrap_or(guest.queue_size);
        let config = DaemonConfig::default().with(|config| {
            config.reactors = usize::from(queues);
            config.poll_max_us = drive.export.poll_max_us;
            config.harvest_after_submit = harvest_after_submit;
        });
        let daemon = Daemon::start(config)?;
        let mut drive = drive.clone();
        drive.export.queues = drive.export.queues.or(Some(queues));
        drive.export.queue_size = Some(queue_size);
        drive.export.socket = Some(socket.clone());
        daemon.add(&drive)?;
        let driver = Driver::connect(&socket, guest.with(|options| options.queue_size = queue_size))?;
        Ok(Self { daemon: Arc::new(daemon), driver: Arc::new(driver), _directory: directory })
    }

    pub(super) fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.driver) as _
    }

    pub(super) fn is_gone(&self) -> bool {
        self.driver.is_disconnected()
    }

    /// Returns hooks with the driver's counters, followed by the server's.
    pub(super) fn hooks(&self) -> Hooks<'static> {
        let hooks = load::driver_hooks(&self.driver);
        let (guests, daemon) = (hooks.counters.clone(), Arc::clone(&self.daemon));
        let counters = move || {
            let mut all = guests.as_ref().map(|counters| counters()).unwrap_or_default();
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
        self.driver.disconnect()?;
        let daemon = Arc::into_inner(self.daemon).context("the server is still asked for its counters")?;
        Ok(daemon.shutdown()?)
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
