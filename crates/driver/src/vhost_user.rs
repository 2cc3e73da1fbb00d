//! The vhost-user messages: features, configuration space, memory, rings. All of it is slow path.

use crate::DriverOptions;
use crate::news::News;
use crate::queue_fds::QueueEvents;
use crate::transport::{Link, QueueSetup, SharedMemory, Transport};
use crate::watch::Watch;
use block::{Error, ErrorKind, Result};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio::blk::{BlkConfig, CONFIG_BYTES, features};

/// The configuration space up to the write-zeroes fields. Every device in use has that much, and some refuse to return
/// more than they have. A device that offers secure erases has the fields behind, too.
const CONFIG_READ_BYTES: usize = 60;
/// The most rings that the vhost crate lets us name before the server has said how many there are.
const MAX_QUEUES: u64 = 256;
/// Pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(20);

/// A device behind a socket.
pub(crate) struct VhostUser {
    path: PathBuf,
    frontend: Mutex<Frontend>,
    answer_timeout: Duration,
    request_timeout: Option<Duration>,
    socket: UnixStream,
    watch: OnceLock<Watch>,
    news: Mutex<Option<News>>,
    /// Rings that the server has.
    queues: OnceLock<u64>,
    /// The features that the server offers.
    offered: OnceLock<u64>,
}

impl VhostUser {
    /// Connects. Sends no message yet.
    pub(crate) fn connect(path: &Path, options: &DriverOptions) -> Result<Self> {
        let socket = connect(path, Duration::from_millis(options.wait_for_socket_ms))?;
        let duplicate = socket.try_clone().map_err(|error| Error::io("cannot duplicate a socket", error))?;
        Ok(Self {
            path: path.to_owned(),
            frontend: Mutex::new(Frontend::from_stream(socket, MAX_QUEUES)),
            answer_timeout: Duration::from_millis(options.answer_timeout_ms),
            request_timeout: (options.request_timeout_ms > 0)
                .then(|| Duration::from_millis(options.request_timeout_ms)),
            socket: duplicate,
            watch: OnceLock::new(),
            news: Mutex::default(),
            queues: OnceLock::new(),
            offered: OnceLock::new(),
        })
    }

    fn negotiate_protocol(&self) -> Result<()> {
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
            let link = self.watch.get().map(|watch| Arc::downgrade(watch.link()));
            let news = link.map(|link| News::start(ours, link)).transpose()?;
            *self.news.lock().unwrap_or_else(PoisonError::into_inner) = news;
        }
        let queues = match protocol.contains(mq) {
            true => self.call("reading its queue count", |frontend| frontend.get_queue_num())?,
            false => 1,
        };
        // Negotiated once, so the first answer stays.
        let _ = self.queues.set(queues);
        Ok(())
    }

    fn call<T>(&self, what: &str, exchange: impl FnOnce(&mut Frontend) -> vhost::Result<T>) -> Result<T> {
        let mut frontend = self.frontend.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(watch) = self.watch.get() else {
            return Err(self.error(format!("{what}: nobody watches the connection")));
        };
        watch.limit(self.answer_timeout, || exchange(&mut frontend)).map_err(|error| {
            if watch.timed_out() {
                let waited = self.answer_timeout.as_millis();
                return self.error(format!("{what}: no answer within {waited} ms; is another client connected?"));
            }
            self.error(format!("{what}: {error}"))
        })
    }

    fn error(&self, what: String) -> Error {
        Error::new(ErrorKind::Protocol, format!("'{}': {what}", self.path.display()))
    }
}

impl Transport for VhostUser {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn attach(&self, link: &Arc<Link>) -> Result<()> {
        let socket = self.socket.try_clone().map_err(|error| Error::io("cannot duplicate a socket", error))?;
        // Attached once. A second watch would be dropped, and so end, at once.
        let _ = self.watch.set(Watch::start(socket, Arc::clone(link), self.request_timeout)?);
        Ok(())
    }

    fn offered_features(&self) -> Result<u64> {
        let protocol_bit = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let offered = self.call("reading its features", |frontend| frontend.get_features())?;
        if offered & protocol_bit == 0 {
            return Err(self.error("the server does not offer PROTOCOL_FEATURES, which this driver needs".into()));
        }
        self.negotiate_protocol()?;
        // Asked once, so the first answer stays.
        let _ = self.offered.set(offered);
        Ok(offered)
    }

    fn choose_features(&self, features: u64) -> Result<()> {
        let chosen = features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.call("choosing features", |frontend| frontend.set_features(chosen))
    }

    fn queues_max(&self) -> Result<u64> {
        Ok(self.queues.get().copied().unwrap_or(1))
    }

    fn read_config(&self) -> Result<BlkConfig> {
        let erases = self.offered.get().is_some_and(|offered| offered & features::SECURE_ERASE != 0);
        let length = if erases { CONFIG_BYTES } else { CONFIG_READ_BYTES };
        let (buffer, flags) = ([0; CONFIG_BYTES], VhostUserConfigFlags::empty());
        let buffer = buffer.get(..length).unwrap_or(&buffer);
        let (_, bytes) = self
            .call("reading its configuration", |frontend| frontend.get_config(0, buffer.len() as u32, flags, buffer))?;
        Ok(BlkConfig::from_bytes(&bytes))
    }

    fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        // No flag: an ordinary write by the driver (the crate's WRITABLE is the specification's "live migration").
        let flags = VhostUserConfigFlags::empty();
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.call("writing its configuration", |frontend| frontend.set_config(offset, flags, bytes))
    }

    fn share_memory(&self, memory: SharedMemory<'_>) -> Result<()> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: memory.guest_address,
            memory_size: memory.length_bytes,
            userspace_addr: memory.user_address,
            mmap_offset: 0,
            mmap_handle: memory.file.as_raw_fd(),
        };
        self.call("sharing memory", |frontend| frontend.set_mem_table(&[region]).map(|_| ()))
    }

    fn start_queue(&self, index: usize, queue: &QueueSetup, events: QueueEvents<'_>) -> Result<()> {
        let at = queue.user_addresses;
        let addresses = VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: 0,
            desc_table_addr: at.table,
            used_ring_addr: at.used,
            avail_ring_addr: at.avail,
            log_addr: None,
        };
        self.call(&format!("starting ring {index}"), |frontend| {
            frontend.set_vring_num(index, queue.size)?;
            frontend.set_vring_base(index, queue.first_position)?;
            frontend.set_vring_addr(index, &addresses)?;
            frontend.set_vring_call(index, events.call)?;
            frontend.set_vring_err(index, events.error)?;
            frontend.set_vring_kick(index, events.kick)?;
            frontend.set_vring_enable(index, true)
        })
    }

    fn stop_queue(&self, index: usize) -> Result<()> {
        self.call(&format!("stopping ring {index}"), |frontend| frontend.get_vring_base(index).map(|_| ()))
    }

    fn hang_up(&self) {
        if let Some(watch) = self.watch.get() {
            watch.hang_up();
        }
    }
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
