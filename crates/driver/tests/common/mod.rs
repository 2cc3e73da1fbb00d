//! A device that the test plays by hand, behind a real socket, and a reactor that turns when the test says so.
//!
//! The handshake runs on a thread of its own and answers GET_ID; then the test takes the rings.

#![allow(dead_code, unreachable_pub, unused_imports)]

mod setup;

pub use setup::{Setup, pattern, read, setup, setup_dummy, small, write};

use block::{Poller, PollerId, ReactorCtx, Task, Timers, Work};
use memory::{GuestMemory, GuestRegion, RegionSpec};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};
use virtio::blk::{BlkConfig, features};
use virtio::ring_access::{PackedPosition, RingAddresses, RingAreas, RingLayout};
use virtio::{BlkQueue, DeviceRing, PackedDeviceRing, Request, RequestLimits, RingFeatures, SplitDeviceRing};

/// A device of whichever layout the driver chose.
pub type Device = BlkQueue<Box<dyn DeviceRing>>;

/// What the fake device says that it is.
#[derive(Clone)]
pub struct Character {
    pub features: u64,
    pub config: BlkConfig,
    pub serial: String,
    pub queues: u64,
}

impl Default for Character {
    fn default() -> Self {
        let config = BlkConfig::default().with(|config| {
            (config.capacity_sectors, config.blk_size_bytes) = (8192, 512);
            (config.seg_max, config.num_queues) = (126, 1);
            (config.max_discard_sectors, config.max_discard_seg) = (64, 1);
            (config.max_write_zeroes_sectors, config.max_write_zeroes_seg) = (64, 1);
            (config.max_secure_erase_sectors, config.max_secure_erase_seg) = (64, 1);
            config.secure_erase_sector_alignment = 8;
        });
        let features = features::FLUSH
            | features::SEG_MAX
            | features::BLK_SIZE
            | features::DISCARD
            | features::WRITE_ZEROES
            | features::SECURE_ERASE
            | features::EVENT_IDX
            | features::INDIRECT_DESC
            | features::RING_PACKED;
        Self { features, config, serial: "fake-0001".into(), queues: 1 }
    }
}

/// A ring as the handshake leaves it.
pub struct Started {
    pub memory: Arc<GuestMemory>,
    pub at: RingAddresses,
    pub size: u16,
    pub features: u64,
    /// Where the ring goes on: see `DeviceRing::base`.
    pub base: u32,
    pub kick: File,
    pub call: File,
    pub error: File,
}

impl Started {
    /// The ring's bare memory, for devices that misbehave.
    pub fn areas(&self) -> RingAreas {
        let layout = RingLayout::from_bits(self.features);
        RingAreas::at_user_addresses(layout, Arc::clone(&self.memory), self.at, self.size).unwrap()
    }

    /// A device that keeps to the rules.
    pub fn queue(&self) -> Device {
        let features = RingFeatures::from_bits(self.features);
        let ring: Box<dyn DeviceRing> = match self.areas() {
            RingAreas::Split(areas) => Box::new(SplitDeviceRing::new(areas, features, self.base as u16)),
            RingAreas::Packed(areas) => Box::new(PackedDeviceRing::new(areas, features, self.base).unwrap()),
        };
        let limits = RequestLimits::NONE.with_ranges(8, 1 << 20).with_erases(8, 100).with_lifetime();
        BlkQueue::new(ring, Arc::clone(&self.memory), limits)
    }

    /// Says that the device is done with `id`, the `turn`-th time that this ring says so. Not shown before
    /// [`Started::show_used`].
    pub fn put_used(&self, turn: u16, id: u16, written: u32) {
        match self.areas() {
            RingAreas::Split(areas) => areas.set_used_entry(self.base as u16 + turn, id.into(), written),
            RingAreas::Packed(areas) => areas.set_used(self.used_at(turn).index, id, written),
        }
    }

    /// Shows that `count` requests were used. In a packed ring, they took a descriptor each.
    pub fn show_used(&self, count: u16) {
        match self.areas() {
            RingAreas::Split(areas) => areas.publish_used_index((self.base as u16).wrapping_add(count)),
            RingAreas::Packed(areas) => (0..count.min(self.size)).for_each(|turn| {
                let at = self.used_at(turn);
                areas.publish_flags(at.index, at.used_flags());
            }),
        }
    }

    fn used_at(&self, turn: u16) -> PackedPosition {
        PackedPosition::from_bits((self.base >> 16) as u16).advance(turn, self.size)
    }

    /// How often the driver kicked since the last look.
    pub fn kicks(&self) -> u64 {
        count(&self.kick)
    }

    pub fn call(&self) {
        (&self.call).write_all(&1u64.to_ne_bytes()).unwrap();
    }

    pub fn give_up(&self) {
        (&self.error).write_all(&1u64.to_ne_bytes()).unwrap();
    }
}

fn count(event: &File) -> u64 {
    let mut bytes = [0; 8];
    match (&*event).read_exact(&mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        Err(_) => 0,
    }
}

/// The fake server; dropping it closes the connection.
pub struct Server {
    pub path: PathBuf,
    pub started: Receiver<Started>,
    changed: Receiver<Arc<Mutex<Handler>>>,
    socket: Receiver<std::os::unix::net::UnixStream>,
    connection: RefCell<Option<std::os::unix::net::UnixStream>>,
    _directory: tempfile::TempDir,
}

impl Server {
    pub fn new(character: Character) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fake.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (sender, started) = channel();
        let (socket_sender, socket) = channel();
        let (handler_sender, changed) = channel();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            socket_sender.send(stream.try_clone().unwrap()).unwrap();
            let (memory, rings) = (None, BTreeMap::new());
            let handler = Handler { character, sender, memory, rings, features: 0, knows_serial: false };
            let handler = Arc::new(Mutex::new(handler));
            handler_sender.send(Arc::clone(&handler)).unwrap();
            let mut session = BackendReqHandler::from_stream(stream, handler);
            while session.handle_request().is_ok() {}
        });
        Self { path, started, changed, socket, connection: RefCell::new(None), _directory: directory }
    }

    /// The next ring that the driver started.
    pub fn ring(&self) -> Started {
        self.started.recv_timeout(Duration::from_secs(20)).expect("the driver starts a ring")
    }

    /// Makes the device another one, once.
    pub fn change(&self, change: impl FnOnce(&mut Character)) {
        let handler = self.changed.recv_timeout(Duration::from_secs(20)).expect("the driver connects");
        change(&mut handler.lock().unwrap().character);
    }

    pub fn hang_up(&self) {
        let mut connection = self.connection.borrow_mut();
        let stream = connection.get_or_insert_with(|| self.socket.recv().unwrap());
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    }
}

#[derive(Default)]
struct Ring {
    at: RingAddresses,
    size: u16,
    base: u32,
    kick: Option<File>,
    call: Option<File>,
    error: Option<File>,
}

struct Handler {
    character: Character,
    sender: Sender<Started>,
    memory: Option<Arc<GuestMemory>>,
    rings: BTreeMap<u32, Ring>,
    features: u64,
    /// The driver asks for the serial once.
    knows_serial: bool,
}

const NO: Error = Error::InvalidOperation("not in this test");

impl Handler {
    fn ring(&mut self, index: u32) -> &mut Ring {
        self.rings.entry(index).or_default()
    }
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn get_features(&mut self) -> Result<u64> {
        Ok(self.character.features | features::VERSION_1 | 1 << 30)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.features = features;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let known = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG;
        Ok(known | VhostUserProtocolFeatures::REPLY_ACK)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.character.queues)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let bytes = self.character.config.to_bytes();
        Ok(bytes[offset as usize..(offset + size) as usize].to_vec())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        assert_eq!((offset, bytes.len()), (32, 1));
        self.character.config.writeback = bytes[0];
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let map = |(region, file): (&VhostUserMemoryRegion, &File)| {
            let spec = RegionSpec::new(region.guest_phys_addr, region.memory_size).with(|spec| {
                spec.user_address = region.user_addr;
                spec.file_offset = region.mmap_offset;
            });
            GuestRegion::map(spec, file.as_fd()).unwrap()
        };
        let regions = regions.iter().zip(&files).map(map).collect();
        self.memory = Some(Arc::new(GuestMemory::new(regions).unwrap()));
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<()> {
        self.ring(index).size = size as u16;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        table: u64,
        used: u64,
        avail: u64,
        _: u64,
    ) -> Result<()> {
        self.ring(index).at = RingAddresses { table, avail, used };
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.ring(index).base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        Ok(VhostUserVringState::new(index, 0))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into()).kick = fd;
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into()).call = fd;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into()).error = fd;
        Ok(())
    }

    fn set_vring_enable(&mut self, index: u32, _: bool) -> Result<()> {
        let ring = self.rings.remove(&index).unwrap();
        let mut started = Started {
            memory: self.memory.clone().unwrap(),
            at: ring.at,
            size: ring.size,
            features: self.features,
            base: ring.base,
            kick: ring.kick.unwrap(),
            call: ring.call.unwrap(),
            error: ring.error.unwrap(),
        };
        let (serial, sender) = (self.character.serial.clone(), self.sender.clone());
        let asks = index == 0 && !std::mem::replace(&mut self.knows_serial, true);
        // The driver asks for the serial on the first ring once the handshake is over.
        std::thread::spawn(move || {
            if asks {
                let mut queue = started.queue();
                let head = loop {
                    match queue.pop().unwrap() {
                        Some((head, Request::GetId)) => break head,
                        Some(other) => panic!("{other:?}"),
                        None => std::thread::sleep(Duration::from_millis(1)),
                    }
                };
                queue.complete_id(head, &serial);
                if queue.publish() {
                    started.call();
                }
                started.kicks();
                started.base = queue.ring().base();
            }
            // The test may not care about its rings.
            let _ = sender.send(started);
        });
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        Err(NO)
    }
    fn reset_device(&mut self) -> Result<()> {
        Err(NO)
    }
    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(NO)
    }
    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(NO)
    }
    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(NO)
    }
    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        Err(NO)
    }
    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(NO)
    }
    fn add_mem_region(&mut self, _: &VhostUserSingleMemoryRegion, _: File, _: Option<bool>) -> Result<Option<u64>> {
        Err(NO)
    }
    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(NO)
    }
    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(NO)
    }
    fn check_device_state(&mut self) -> Result<()> {
        Err(NO)
    }
    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(NO)
    }
    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(NO)
    }
}

/// A reactor without a thread.
#[derive(Default)]
pub struct HandReactor {
    pollers: RefCell<BTreeMap<PollerId, Rc<RefCell<dyn Poller>>>>,
    next: Cell<u64>,
}

impl HandReactor {
    pub fn new() -> (Rc<Self>, Rc<dyn ReactorCtx>) {
        let reactor = Rc::new(Self::default());
        (Rc::clone(&reactor), reactor)
    }

    /// One turn; returns whether anything happened.
    pub fn turn(&self) -> bool {
        let pollers: Vec<_> = self.pollers.borrow().values().cloned().collect();
        pollers.iter().fold(false, |any, poller| poller.borrow_mut().poll() | any)
    }

    /// What a reactor does before it sleeps; returns whether it must not.
    pub fn arm(&self) -> bool {
        let pollers: Vec<_> = self.pollers.borrow().values().cloned().collect();
        pollers.iter().fold(false, |any, poller| poller.borrow_mut().arm() | any)
    }

    pub fn disarm(&self) {
        let pollers: Vec<_> = self.pollers.borrow().values().cloned().collect();
        pollers.iter().for_each(|poller| poller.borrow_mut().disarm());
    }

    pub fn pollers(&self) -> usize {
        self.pollers.borrow().len()
    }
}

impl ReactorCtx for HandReactor {
    fn spawn(&self, _: Task) {
        unimplemented!("the driver has no tasks");
    }

    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> block::Result<PollerId> {
        let id = PollerId(self.next.replace(self.next.get() + 1));
        self.pollers.borrow_mut().insert(id, poller);
        Ok(id)
    }

    fn remove_poller(&self, id: PollerId) {
        self.pollers.borrow_mut().remove(&id);
    }

    fn timers(&self) -> &Rc<Timers> {
        unimplemented!("the driver has no timers");
    }

    fn run_aside(&self, _turn: u64, work: Work) {
        work();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
