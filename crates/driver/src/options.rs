//! The options of a connection.

use block::{Error, ErrorKind, Result};
use std::str::FromStr;

/// How requests get from a queue to the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriverPath {
    /// Directly: each operation is in the ring when its submission returns. The least work for a fast device.
    #[default]
    Bio,
    /// Queued until the reactor's turn ends, sorted, and merged with neighbours. Fewer requests for a slow device.
    Request,
}

impl DriverPath {
    /// The names of the paths.
    pub const NAMES: [&'static str; 2] = ["bio", "request"];
}

impl FromStr for DriverPath {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "bio" => Ok(Self::Bio),
            "request" => Ok(Self::Request),
            _ => {
                let message = format!("'{text}' is no path of the driver: bio, request");
                Err(Error::new(ErrorKind::BadOption, message))
            }
        }
    }
}

/// How the driver attaches to a server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DriverOptions {
    /// Queues to set up: the i-th [`block::Disk::open_queue`] gets the i-th.
    pub queues: u16,
    /// Entries of each ring, a power of two.
    pub queue_size: u16,
    /// Bytes of shared memory for [`crate::Driver::alloc`]; rings and bounce buffers come on top.
    pub memory_bytes: usize,
    /// Bytes of bounce buffers for each queue, for requests whose memory is not shared.
    pub bounce_bytes: usize,
    /// How requests get to the ring.
    pub path: DriverPath,
    /// Leave callbacks on even while completions are being taken. This is slower; it is for measurements.
    pub keep_callbacks: bool,
    /// Use EVENT_IDX if it is offered.
    pub event_idx: bool,
    /// Use indirect descriptors if they are offered.
    pub indirect: bool,
    /// Use packed rings if they are offered.
    pub packed: bool,
    /// Do not ask for the serial number; the disk then has none.
    pub without_serial: bool,
    /// Features ([`virtio::blk::features`]) that are not used though they are offered. VERSION_1 is always used.
    pub without_features: u64,
    /// How long to wait for the socket to appear and accept.
    pub wait_for_socket_ms: u64,
    /// How long the server may take to answer a message. If it waits for requests in flight, their time counts, too.
    pub answer_timeout_ms: u64,
    /// How long a queue may have requests in flight without any end. After that the device counts as broken, and they
    /// fail. Time in which this process is stopped does not count. Zero waits for ever.
    pub request_timeout_ms: u64,
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 128,
            memory_bytes: 64 << 20,
            bounce_bytes: 4 << 20,
            path: DriverPath::Bio,
            keep_callbacks: false,
            event_idx: true,
            indirect: true,
            packed: true,
            without_serial: false,
            without_features: 0,
            wait_for_socket_ms: 0,
            answer_timeout_ms: 10_000,
            request_timeout_ms: 60_000,
        }
    }
}

/// The smallest ring that holds a header, one buffer and a status.
const MIN_QUEUE_SIZE: u16 = 4;
/// The largest that vhost-user back ends serve.
const MAX_QUEUE_SIZE: u16 = 1024;

impl DriverOptions {
    /// Changes some options: `DriverOptions::default().with(|options| options.queues = 4)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::BadOption, message));
        if self.queues == 0 {
            return bad("a driver needs at least one queue".into());
        }
        let in_range = (MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(&self.queue_size);
        if !in_range || !self.queue_size.is_power_of_two() {
            return bad(format!(
                "queue size {}: it must be a power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}",
                self.queue_size
            ));
        }
        if self.bounce_bytes < crate::layout::BOUNCE_BYTES {
            let least = crate::layout::BOUNCE_BYTES;
            return bad(format!("{} bytes of bounce buffers a queue: at least {least}", self.bounce_bytes));
        }
        Ok(())
    }
}
