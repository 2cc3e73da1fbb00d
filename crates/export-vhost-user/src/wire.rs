//! The protocol's messages. Only this file names the `vhost` crate, whose interface changes often. Other files see
//! [`Backend`] and [`Connection`].

use crate::notifier::{check_channel, seal};
use crate::own_messages::{self, Content, OwnMessage};
use block::{Error, ErrorKind, LogLimit, Result};
use memory::RegionSpec;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as WireError, GpuBackend, Result as WireResult, VhostUserBackendReqHandlerMut,
};
use virtio::ring_access::RingAddresses;

/// Serves the messages.
pub(crate) trait Backend {
    /// Returns the offered virtio features.
    fn features(&self) -> u64;
    /// Takes the peer's choice among the features.
    fn set_features(&mut self, features: u64) -> Result<()>;
    /// Replaces the peer's memory.
    fn set_memory(&mut self, regions: Vec<(RegionSpec, OwnedFd)>) -> Result<()>;
    /// Adds a region.
    fn add_memory(&mut self, region: RegionSpec, file: OwnedFd) -> Result<()>;
    /// Removes a region.
    fn remove_memory(&mut self, region: RegionSpec) -> Result<()>;
    /// Returns how many regions a peer may have.
    fn memory_slots(&self) -> u64;
    /// Sets a ring's number of entries.
    fn set_ring_size(&mut self, ring: u32, size: u32) -> Result<()>;
    /// Sets the addresses of a ring in the peer's address space.
    fn set_ring_addresses(&mut self, ring: u32, addresses: RingAddresses) -> Result<()>;
    /// Sets the position of a ring. For a split ring that is an entry of the available ring.
    fn set_ring_base(&mut self, ring: u32, base: u32) -> Result<()>;
    /// Stops a ring. Returns the position at which it goes on.
    fn stop_ring(&mut self, ring: u32) -> Result<u32>;
    /// Starts a ring, with the descriptor that notifies us of new requests. Without one, the ring is polled.
    fn set_ring_kick(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()>;
    /// Sets the descriptor that is notified of ended requests.
    fn set_ring_call(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()>;
    /// Sets the descriptor that is notified of faults.
    fn set_ring_err(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()>;
    /// Sets whether a started ring is served.
    fn enable_ring(&mut self, ring: u32, enabled: bool) -> Result<()>;
    /// Returns how many rings can be set up.
    fn queue_count(&self) -> u64;
    /// Returns bytes of the configuration space.
    fn config(&mut self, offset: u32, length_bytes: u32) -> Result<Vec<u8>>;
    /// Writes to the configuration space.
    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()>;
    /// Stops all rings.
    fn stop_all(&mut self) -> Result<()>;
    /// Resets to the state at the beginning of the session.
    fn reset(&mut self) -> Result<()>;
    /// Called after each message. Returns whether the peer must be told of the configuration, because it may have an old
    /// one and listens from now on.
    fn owes_news(&mut self) -> bool;
}

/// What to do after one message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// More may come.
    Message,
    /// The peer has disconnected.
    Disconnected,
}

/// One peer's connection, and the backend that serves it.
pub(crate) struct Connection<B: Backend> {
    handler: BackendReqHandler<Mutex<Adaptor<B>>>,
    adaptor: Arc<Mutex<Adaptor<B>>>,
}

impl<B: Backend> Connection<B> {
    pub(crate) fn new(stream: UnixStream, backend: B) -> Self {
        let adaptor =
            Adaptor { backend, refused: None, harmless: false, replies: false, peer_channel: None, owes_news: false };
        let adaptor = Arc::new(Mutex::new(adaptor));
        Self { handler: BackendReqHandler::from_stream(stream, Arc::clone(&adaptor)), adaptor }
    }

    /// Receives and serves one message from `stream`, which is the connection. Waits for the whole message. An error
    /// ends the session.
    pub(crate) fn serve_one(&mut self, stream: BorrowedFd<'_>) -> Result<Served> {
        let served = self.answer_one(stream)?;
        let mut adaptor = self.lock();
        if adaptor.backend.owes_news() {
            adaptor.owes_news = true;
            adaptor.tell_of_config();
        }
        drop(adaptor);
        Ok(served)
    }

    fn answer_one(&mut self, stream: BorrowedFd<'_>) -> Result<Served> {
        if let Some(message) = own_messages::receive(stream)? {
            return self.serve_own(stream, message);
        }
        let served = self.handler.handle_request();
        let mut adaptor = self.lock();
        let refused = adaptor.refused.take();
        let harmless = std::mem::take(&mut adaptor.harmless);
        match served {
            Ok(()) | Err(WireError::SocketRetry(_)) => Ok(Served::Message),
            Err(WireError::Disconnected | WireError::SocketBroken(_)) => Ok(Served::Disconnected),
            Err(WireError::ReqHandlerError(_)) if harmless => {
                if let Some(error) = refused {
                    tracing::debug!("a message was refused: {error}");
                }
                Ok(Served::Message)
            }
            Err(error) => Err(refused
                .unwrap_or_else(|| Error::with_source(ErrorKind::Protocol, "the peer broke the protocol", error))),
        }
    }

    fn serve_own(&mut self, stream: BorrowedFd<'_>, message: OwnMessage) -> Result<Served> {
        let mut adaptor = self.lock();
        let replies = message.needs_reply && adaptor.replies;
        let kind = message.kind();
        let taken = match message.content {
            Content::Memory(regions) => adaptor.backend.set_memory(regions),
            Content::PeerChannel(channel) => check_channel(&channel).map(|()| {
                seal(&channel);
                adaptor.peer_channel = Some(channel);
                adaptor.tell_of_config();
            }),
        };
        if replies {
            OwnMessage::reply(kind, stream, taken.is_ok())?;
        }
        taken.map(|()| Served::Message)
    }

    /// Tells the peer that the configuration space has changed, at once or when it opens its channel. A peer without a
    /// channel is not told.
    pub(crate) fn config_changed(&self) {
        let mut adaptor = self.lock();
        adaptor.owes_news = true;
        adaptor.tell_of_config();
    }

    /// Accesses the backend between messages.
    pub(crate) fn with_backend<T>(&self, look: impl FnOnce(&mut B) -> T) -> T {
        look(&mut self.lock().backend)
    }

    fn lock(&self) -> MutexGuard<'_, Adaptor<B>> {
        self.adaptor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Turns the crate's calls into [`Backend`]'s.
struct Adaptor<B> {
    backend: B,
    /// The reason why the message was refused: the crate's errors carry no text of ours.
    refused: Option<Error>,
    /// The refusal must not end the session.
    harmless: bool,
    /// Messages that ask for an answer get one (REPLY_ACK).
    replies: bool,
    /// The channel for our own messages to the peer.
    peer_channel: Option<OwnedFd>,
    /// A change of the configuration space since the session began that the peer has not been sent.
    owes_news: bool,
}

impl<B: Backend> Adaptor<B> {
    fn tell_of_config(&mut self) {
        let Some(channel) = self.peer_channel.as_ref().filter(|_| self.owes_news) else { return };
        self.owes_news = false;
        if let Err(error) = own_messages::send_config_change(channel.as_fd()) {
            static TIMES: LogLimit = LogLimit::new();
            if let Some(times) = TIMES.admit() {
                tracing::warn!(times, "the peer could not be told of the new configuration: {error}");
            }
        }
    }

    fn told<T>(&mut self, result: Result<T>) -> WireResult<T> {
        result.map_err(|error| {
            let for_peer = std::io::Error::other(error.to_string());
            self.refused = Some(error);
            WireError::ReqHandlerError(for_peer)
        })
    }
}

fn spec(region: &VhostUserMemoryRegion) -> RegionSpec {
    RegionSpec::new(region.guest_phys_addr, region.memory_size).with(|spec| {
        spec.user_address = region.user_addr;
        spec.file_offset = region.mmap_offset;
    })
}

fn not_offered<T>() -> WireResult<T> {
    Err(WireError::InvalidOperation("it was not offered"))
}

impl<B: Backend> VhostUserBackendReqHandlerMut for Adaptor<B> {
    fn set_owner(&mut self) -> WireResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> WireResult<()> {
        let result = self.backend.stop_all();
        self.told(result)
    }

    fn reset_device(&mut self) -> WireResult<()> {
        let result = self.backend.reset();
        self.told(result)
    }

    fn get_features(&mut self) -> WireResult<u64> {
        Ok(self.backend.features())
    }

    fn set_features(&mut self, features: u64) -> WireResult<()> {
        let result = self.backend.set_features(features);
        self.told(result)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> WireResult<Option<Vec<u64>>> {
        // The crate has checked that there are as many files as regions.
        let regions = regions.iter().zip(files).map(|(region, file)| (spec(region), file.into())).collect();
        let result = self.backend.set_memory(regions);
        self.told(result).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> WireResult<()> {
        let result = self.backend.set_ring_size(index, num);
        self.told(result)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> WireResult<()> {
        let addresses = RingAddresses { table: descriptor, avail: available, used };
        let result = self.backend.set_ring_addresses(index, addresses);
        self.told(result)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> WireResult<()> {
        let result = self.backend.set_ring_base(index, base);
        self.told(result)
    }

    fn get_vring_base(&mut self, index: u32) -> WireResult<VhostUserVringState> {
        let result = self.backend.stop_ring(index);
        self.told(result).map(|base| VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> WireResult<()> {
        let result = self.backend.set_ring_kick(u32::from(index), fd.map(OwnedFd::from));
        self.told(result)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> WireResult<()> {
        let result = self.backend.set_ring_call(u32::from(index), fd.map(OwnedFd::from));
        self.told(result)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> WireResult<()> {
        let result = self.backend.set_ring_err(u32::from(index), fd.map(OwnedFd::from));
        self.told(result)
    }

    fn get_protocol_features(&mut self) -> WireResult<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> WireResult<()> {
        self.replies = features & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0;
        Ok(())
    }

    fn get_queue_num(&mut self) -> WireResult<u64> {
        Ok(self.backend.queue_count())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> WireResult<()> {
        let result = self.backend.enable_ring(index, enable);
        self.told(result)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> WireResult<Vec<u8>> {
        // The crate answers an error with an empty configuration; the session goes on.
        let result = self.backend.config(offset, size);
        let result = self.told(result);
        self.refused = None;
        result
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> WireResult<()> {
        let result = self.backend.set_config(offset, bytes);
        // A monitor may pass on any write of its guest, so the session goes on.
        self.harmless = result.is_err();
        self.told(result)
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> WireResult<()> {
        not_offered()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> WireResult<File> {
        not_offered()
    }

    fn get_inflight_fd(&mut self, _inflight: &VhostUserInflight) -> WireResult<(VhostUserInflight, File)> {
        not_offered()
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> WireResult<()> {
        not_offered()
    }

    fn get_max_mem_slots(&mut self) -> WireResult<u64> {
        Ok(self.backend.memory_slots())
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> WireResult<Option<u64>> {
        let result = self.backend.add_memory(spec(region), fd.into());
        self.told(result).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> WireResult<()> {
        let result = self.backend.remove_memory(spec(region));
        self.told(result)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> WireResult<Option<File>> {
        not_offered()
    }

    fn check_device_state(&mut self) -> WireResult<()> {
        not_offered()
    }

    fn get_shmem_config(&mut self) -> WireResult<VhostUserShMemConfig> {
        not_offered()
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> WireResult<()> {
        not_offered()
    }
}
