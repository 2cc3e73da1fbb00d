//! The vhost-user conversation: features, configuration space, memory, rings. All of it is slow path.

use crate::DriverOptions;
use crate::layout::{GUEST_BASE, QueueLayout};
use crate::watch::{QueueFds, Watch};
use block::{Error, ErrorKind, Result};
use memory::{Mapping, duplicate_fd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio::blk::{BlkConfig, CONFIG_WRITEBACK_OFFSET, features};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The configuration space up to the write-zeroes fields: every device in use has that much, and some refuse to show
/// more than they have.
const CONFIG_READ_BYTES: u32 = 60;
/// Rings that the vhost crate lets us name before the server has said how many there are.
const MAX_QUEUES: u64 = 256;
/// Between two tries to connect.
const RETRY: Duration = Duration::from_millis(20);

/// A connection whose features are negotiated.
pub(crate) struct Session {
    path: PathBuf,
    frontend: Mutex<Frontend>,
    answer_timeout: Duration,
    pub(crate) watch: Watch,
    pub(crate) features: u64,
    pub(crate) config: Mutex<BlkConfig>,
    /// Our end of the channel for the server's own messages, where it has any.
    channel: Option<UnixStream>,
}

impl Session {
    /// Connects, negotiates and reads the configuration space.
    pub(crate) fn open(path: &Path, options: &DriverOptions) -> Result<Self> {
        let socket = connect(path, Duration::from_millis(options.wait_for_socket_ms))?;
        let duplicate = socket.try_clone().map_err(|error| Error::io("cannot duplicate a socket", error))?;
        let mut session = Self {
            path: path.to_owned(),
            frontend: Mutex::new(Frontend::from_stream(socket, MAX_QUEUES)),
            answer_timeout: Duration::from_millis(options.answer_timeout_ms),
            watch: Watch::start(duplicate)?,
            features: 0,
            config: Mutex::default(),
            channel: None,
        };
        session.negotiate(options)?;
        Ok(session)
    }

    fn negotiate(&mut self, options: &DriverOptions) -> Result<()> {
        let protocol_bit = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let offered = self.call("reading its features", |frontend| frontend.get_features())?;
        for (bit, name) in [(features::VERSION_1, "VERSION_1"), (protocol_bit, "PROTOCOL_FEATURES")] {
            if offered & bit == 0 {
                return Err(self.error(format!("the server does not offer {name}, which this driver needs")));
            }
        }
        let protocol = self.call("reading its protocol features", |frontend| frontend.get_protocol_features())?;
        let (mq, config, ack) =
            (VhostUserProtocolFeatures::MQ, VhostUserProtocolFeatures::CONFIG, VhostUserProtocolFeatures::REPLY_ACK);
        if !protocol.contains(config) {
            return Err(self.error("the server does not show a configuration space: is it a block device?".into()));
        }
        let channel = protocol & VhostUserProtocolFeatures::BACKEND_REQ;
        self.call("choosing protocol features", |f| f.set_protocol_features(protocol & (mq | config | ack) | channel))?;
        if protocol.contains(ack) {
            self.call("asking for replies", |frontend| {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                Ok(())
            })?;
        }
        self.call("taking ownership", |frontend| frontend.set_owner())?;
        if !channel.is_empty() {
            let pair = UnixStream::pair().map_err(|error| Error::io("cannot make a pair of sockets", error));
            let (ours, theirs) = pair?;
            self.call("opening its channel", |frontend| frontend.set_backend_request_fd(&theirs))?;
            self.channel = Some(ours);
        }
        self.features = offered & wanted_features(options);
        let queues = match protocol.contains(mq) {
            true => self.call("reading its queue count", |frontend| frontend.get_queue_num())?,
            false => 1,
        };
        let config = self.read_config()?;
        let named = if self.features & features::MQ != 0 { u64::from(config.num_queues.max(1)) } else { 1 };
        let usable = queues.min(named.max(1));
        if u64::from(options.queues) > usable {
            let message = format!("{} queues asked for, the server has {usable}", options.queues);
            return Err(Error::new(ErrorKind::BadOption, format!("'{}': {message}", self.path.display())));
        }
        let chosen = self.features | protocol_bit;
        self.call("choosing features", |frontend| frontend.set_features(chosen))?;
        // The device may answer differently once features are chosen (writeback without CONFIG_WCE).
        self.read_config().map(|_| ())
    }

    pub(crate) fn read_config(&self) -> Result<BlkConfig> {
        let (length, flags) = (CONFIG_READ_BYTES, VhostUserConfigFlags::empty());
        let buffer = [0; CONFIG_READ_BYTES as usize];
        let (_, bytes) =
            self.call("reading its configuration", |frontend| frontend.get_config(0, length, flags, &buffer))?;
        let config = BlkConfig::from_bytes(&bytes);
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(config)
    }

    /// Writes the `writeback` field and reads back what became of it.
    pub(crate) fn set_writeback(&self, writeback: bool) -> Result<()> {
        // No flag: an ordinary write by the driver (the crate's WRITABLE is the specification's "live migration").
        let (offset, flags) = (CONFIG_WRITEBACK_OFFSET as u32, VhostUserConfigFlags::empty());
        let byte = [u8::from(writeback)];
        self.call("switching its cache", |frontend| frontend.set_config(offset, flags, &byte))?;
        self.read_config().map(|_| ())
    }

    /// Tells the server where the shared memory is.
    pub(crate) fn share(&self, file: &OwnedFd, mapping: &Mapping) -> Result<()> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: mapping.length_bytes() as u64,
            userspace_addr: mapping.as_ptr().as_ptr().addr() as u64,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.call("sharing memory", |frontend| frontend.set_mem_table(&[region]).map(|_| ()))
    }

    /// Sets ring `index` up and starts it; gives its descriptors.
    pub(crate) fn start_ring(
        &self,
        index: usize,
        size: u16,
        layout: &QueueLayout,
        mapping: &Mapping,
    ) -> Result<Arc<QueueFds>> {
        let at = layout.ring(mapping.as_ptr().as_ptr().addr() as u64);
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: at.table,
            used_ring_addr: at.used,
            avail_ring_addr: at.avail,
            log_addr: None,
        };
        let event = || {
            let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
            let fd = duplicate_fd(&event)?;
            Ok((event, fd))
        };
        let no_event = |error: io::Error| Error::io("cannot make an event descriptor", error);
        let (kick, kick_fd) = event().map_err(no_event)?;
        let (call, call_fd) = event().map_err(no_event)?;
        let (error, error_fd) = event().map_err(no_event)?;
        self.call(&format!("starting ring {index}"), |frontend| {
            frontend.set_vring_num(index, size)?;
            frontend.set_vring_base(index, 0)?;
            frontend.set_vring_addr(index, &addresses)?;
            frontend.set_vring_call(index, &call)?;
            frontend.set_vring_err(index, &error)?;
            frontend.set_vring_kick(index, &kick)?;
            frontend.set_vring_enable(index, true)
        })?;
        Ok(QueueFds::new(kick_fd, call_fd, error_fd))
    }

    /// Stops ring `index`: when this returns the device is done with what was in flight.
    pub(crate) fn stop_ring(&self, index: usize) -> Result<()> {
        self.call(&format!("stopping ring {index}"), |frontend| frontend.get_vring_base(index).map(|_| ()))
    }

    fn call<T>(&self, what: &str, exchange: impl FnOnce(&mut Frontend) -> vhost::Result<T>) -> Result<T> {
        let mut frontend = self.frontend.lock().unwrap_or_else(PoisonError::into_inner);
        self.watch.limit(self.answer_timeout, || exchange(&mut frontend)).map_err(|error| {
            if self.watch.timed_out() {
                let waited = self.answer_timeout.as_millis();
                return self.error(format!("{what}: no answer within {waited} ms; is another client connected?"));
            }
            self.error(format!("{what}: {error}"))
        })
    }

    pub(crate) fn take_channel(&mut self) -> Option<UnixStream> {
        self.channel.take()
    }

    pub(crate) fn error(&self, what: String) -> Error {
        Error::new(ErrorKind::Protocol, format!("'{}': {what}", self.path.display()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub(crate) fn config(&self) -> BlkConfig {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wanted_features(options: &DriverOptions) -> u64 {
    let mut wanted = features::VERSION_1
        | features::FLUSH
        | features::RO
        | features::MQ
        | features::SIZE_MAX
        | features::SEG_MAX
        | features::BLK_SIZE
        | features::TOPOLOGY
        | features::DISCARD
        | features::WRITE_ZEROES
        | features::CONFIG_WCE;
    if options.event_idx {
        wanted |= features::EVENT_IDX;
    }
    if options.indirect {
        wanted |= features::INDIRECT_DESC;
    }
    wanted
}

fn connect(path: &Path, wait: Duration) -> Result<UnixStream> {
    let until = Instant::now() + wait;
    loop {
        match UnixStream::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(error) => {
                let later = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
                if !later || Instant::now() >= until {
                    return Err(Error::io(format!("cannot connect to '{}'", path.display()), error));
                }
                std::thread::sleep(RETRY);
            }
        }
    }
}
