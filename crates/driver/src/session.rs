//! A negotiated connection, over any transport.

use crate::DriverOptions;
use crate::queue_fds::QueueFds;
use crate::transport::{Link, QueueSetup, SharedMemory, Transport};
use block::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use virtio::blk::{BlkConfig, CONFIG_WRITEBACK_OFFSET, features};

/// A connection whose features are negotiated.
pub(crate) struct Session {
    transport: Box<dyn Transport>,
    pub(crate) link: Arc<Link>,
    pub(crate) features: u64,
    config: Mutex<BlkConfig>,
}

impl Session {
    /// Negotiates and reads the configuration space.
    pub(crate) fn open(transport: Box<dyn Transport>, options: &DriverOptions) -> Result<Self> {
        let link = Arc::new(Link::default());
        transport.attach(&link)?;
        let mut session = Self { transport, link, features: 0, config: Mutex::default() };
        session.negotiate(options)?;
        Ok(session)
    }

    fn negotiate(&mut self, options: &DriverOptions) -> Result<()> {
        let offered = self.transport.offered_features()?;
        if offered & features::VERSION_1 == 0 {
            return Err(self.error("the server does not offer VERSION_1, which this driver needs".into()));
        }
        self.features = offered & wanted_features(options);
        let queues = self.transport.queues_max()?;
        let config = self.transport.read_config()?;
        let named = if self.has(features::MQ) { u64::from(config.num_queues.max(1)) } else { 1 };
        let usable = queues.min(named.max(1));
        if u64::from(options.queues) > usable {
            let message = format!("{} queues asked for, the server has {usable}", options.queues);
            return Err(Error::new(ErrorKind::BadOption, format!("'{}': {message}", self.name())));
        }
        self.transport.choose_features(self.features)?;
        // The device may answer differently once features are chosen (writeback without CONFIG_WCE).
        *self.lock_config() = self.transport.read_config()?;
        Ok(())
    }

    /// Reads the configuration space again. Only fields that may change are taken over: queues rely on the rest.
    pub(crate) fn read_config(&self) -> Result<BlkConfig> {
        let BlkConfig { capacity_sectors, writeback, .. } = self.transport.read_config()?;
        let mut config = self.lock_config();
        (config.capacity_sectors, config.writeback) = (capacity_sectors, writeback);
        Ok(*config)
    }

    fn lock_config(&self) -> MutexGuard<'_, BlkConfig> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the `writeback` field, and reads it back.
    pub(crate) fn set_writeback(&self, writeback: bool) -> Result<()> {
        self.transport
            .write_config(CONFIG_WRITEBACK_OFFSET, &[u8::from(writeback)])
            .map_err(|error| error.in_context("switching its cache"))?;
        self.read_config().map(|_| ())
    }

    pub(crate) fn share_memory(&self, memory: SharedMemory<'_>) -> Result<()> {
        self.transport.share_memory(memory)
    }

    pub(crate) fn start_ring(&self, index: usize, queue: &QueueSetup, fds: &QueueFds) -> Result<()> {
        self.transport.start_queue(index, queue, fds.events())
    }

    /// Stops ring `index`. When this returns, the device is done with what was in flight.
    pub(crate) fn stop_ring(&self, index: usize) -> Result<()> {
        self.transport.stop_queue(index)
    }

    /// Ends the connection.
    pub(crate) fn hang_up(&self) {
        self.transport.hang_up();
        self.link.end();
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.link.is_gone()
    }

    pub(crate) fn error(&self, what: String) -> Error {
        Error::new(ErrorKind::Protocol, format!("'{}': {what}", self.name()))
    }

    pub(crate) fn name(&self) -> String {
        self.transport.name()
    }

    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub(crate) fn config(&self) -> BlkConfig {
        *self.lock_config()
    }
}

fn wanted_features(options: &DriverOptions) -> u64 {
    let mut wanted = features::VERSION_1
        | features::FLUSH
        | features::RO
        | features::MQ
        | features::SIZE_MAX
        | features::SEG_MAX
        | features::GEOMETRY
        | features::BLK_SIZE
        | features::TOPOLOGY
        | features::DISCARD
        | features::WRITE_ZEROES
        | features::SECURE_ERASE
        | features::LIFETIME
        | features::CONFIG_WCE;
    if options.event_idx {
        wanted |= features::EVENT_IDX;
    }
    if options.indirect {
        wanted |= features::INDIRECT_DESC;
    }
    if options.packed {
        wanted |= features::RING_PACKED;
    }
    wanted & !options.without_features | features::VERSION_1
}
