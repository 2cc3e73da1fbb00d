//! A disk, reactors and an export; and a peer that speaks the protocol with the `vhost` crate's front end and drives
//! its rings with a driver written from the specification.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)]

pub mod disk;
pub mod reactor;

use super::model::any::AnyDriver;
use super::model::{GUEST_BYTES, Guest};
use block::ReactorHandle;
use disk::{MemDisk, Shared};
use reactor::TestReactor;
use ringdisk_export_vhost_user::{Export, ExportOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio::blk::{BlkConfig, CONFIG_BYTES, RequestHeader, features as f};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const QUEUES: u16 = 2;
pub const SIZE: u16 = 64;
/// The tests of `export_packed.rs` are those of `export.rs`, over packed rings.
pub const PACKED: bool = matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"export_packed");

/// Everything on the server's side. Fields drop in order: the export first.
pub struct Server {
    pub export: Option<Export>,
    pub disk: Arc<MemDisk>,
    pub reactors: Vec<TestReactor>,
    pub socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    pub fn start(disk: Arc<MemDisk>) -> Self {
        Self::start_with(disk, ExportOptions::default())
    }

    pub fn start_with(disk: Arc<MemDisk>, mut options: ExportOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("disk.sock");
        let reactors: Vec<_> = ["reactor-0", "reactor-1"].map(TestReactor::start).into();
        let handles: Vec<Arc<dyn ReactorHandle>> = reactors.iter().map(TestReactor::handle).collect();
        (options.name, options.max_queues) = ("test".into(), QUEUES);
        options.packed |= PACKED;
        let export = Export::listen(&socket, Arc::new(Shared(Arc::clone(&disk))), handles, options).unwrap();
        Self { export: Some(export), disk, reactors, socket, _dir: dir }
    }

    pub fn export(&self) -> &Export {
        self.export.as_ref().unwrap()
    }

    /// Holds completions back, or lets them go.
    pub fn hold(&self, hold: bool) {
        self.disk.hold.store(hold, Ordering::SeqCst);
        if !hold {
            for reactor in &self.reactors {
                reactor.handle().run(Box::new(|_| {})).unwrap();
            }
        }
    }

    /// Waits until the disk holds `count` requests in all.
    pub fn wait_submitted(&self, count: usize) {
        while self.disk.submitted.load(Ordering::SeqCst) < count {
            std::thread::yield_now();
        }
    }
}

/// A peer with one connection.
pub struct Client {
    pub frontend: Frontend,
    /// The same connection, for messages that the front end would not send.
    pub stream: UnixStream,
}

/// One queue of a peer.
pub struct Queue<'a> {
    pub driver: AnyDriver<'a>,
    pub index: usize,
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
    /// What the headers of its requests say.
    pub priority: u32,
    buffers: u64,
}

impl Client {
    /// Connects and negotiates all that is offered but `without`.
    pub fn connect(server: &Server, without: u64) -> Self {
        Self::connect_to(&server.socket, without)
    }

    pub fn connect_to(socket: &Path, without: u64) -> Self {
        Self::over(UnixStream::connect(socket).unwrap(), without)
    }

    /// The same over a connection that somebody else has made.
    pub fn over(stream: UnixStream, without: u64) -> Self {
        let mut frontend = Frontend::from_stream(stream.try_clone().unwrap(), u64::from(QUEUES));
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        frontend.set_features(offered & !without).unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        // From here on each message is answered, so that what follows finds it done.
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(protocol.contains(VhostUserProtocolFeatures::MQ));
        assert_eq!(frontend.get_queue_num().unwrap(), u64::from(QUEUES));
        Self { frontend, stream }
    }

    pub fn share(&self, guest: &Guest) {
        self.frontend.set_mem_table(&[region(guest)]).unwrap();
    }

    /// Shares memory as User Mode Linux does: one region in a message with room for two. Returns the server's answer.
    pub fn share_in_long_message(&self, guest: &Guest, files: usize) -> u64 {
        let words = [5_u32, 1 | 8, 8 + 2 * 32, 1, 0];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        for word in [0, GUEST_BYTES as u64, 0, 0, 0, 0, 0, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        let fds = vec![guest.file.as_fd(); files];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
        let mut answer = [0; 20];
        std::io::Read::read_exact(&mut &self.stream, &mut answer).map_or(u64::MAX, |()| {
            assert_eq!(answer[..8], [5, 0, 0, 0, 5, 0, 0, 0]);
            u64::from_ne_bytes(answer[12..].try_into().unwrap())
        })
    }

    /// Sets up and starts queue `index`: its ring lies at a quarter of guest memory that is its own.
    pub fn queue<'a>(&mut self, guest: &'a Guest, index: usize) -> Queue<'a> {
        let quarter = (index * GUEST_BYTES / 4) as u64;
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let queue = Queue {
            driver: AnyDriver::at(guest, SIZE, quarter, PACKED),
            index,
            kick: event(),
            call: event(),
            err: event(),
            priority: 0,
            buffers: quarter + 0x1_0000,
        };
        self.start(&queue, 0);
        queue
    }

    pub fn start(&mut self, queue: &Queue<'_>, base: u16) {
        let index = queue.index;
        // A new packed ring begins with both wrap counters set.
        let base = if PACKED && base == 0 { 0x8000 } else { base };
        self.frontend.set_vring_num(index, SIZE).unwrap();
        self.frontend.set_vring_base(index, base).unwrap();
        self.frontend.set_vring_addr(index, &addresses(&queue.driver)).unwrap();
        self.frontend.set_vring_call(index, &queue.call).unwrap();
        self.frontend.set_vring_err(index, &queue.err).unwrap();
        self.frontend.set_vring_kick(index, &queue.kick).unwrap();
        self.frontend.set_vring_enable(index, true).unwrap();
    }
}

/// The configuration space, as the server shows it.
pub fn read_config(client: &mut Client) -> BlkConfig {
    let flags = VhostUserConfigFlags::WRITABLE;
    let (_, bytes) = client.frontend.get_config(0, CONFIG_BYTES as u32, flags, &[0; CONFIG_BYTES]).unwrap();
    BlkConfig::from_bytes(&bytes)
}

pub fn addresses(driver: &AnyDriver<'_>) -> VringConfigData {
    let [desc_table_addr, avail_ring_addr, used_ring_addr] = driver.addresses();
    VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr,
        used_ring_addr,
        avail_ring_addr,
        log_addr: None,
    }
}

pub fn region(guest: &Guest) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: GUEST_BYTES as u64,
        userspace_addr: 0,
        mmap_offset: 0,
        mmap_handle: guest.file.as_raw_fd(),
    }
}

pub fn is_readable(fd: &EventFd, seconds: i64) -> bool {
    let fd = memory::duplicate_fd(fd).unwrap();
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).unwrap() == 1
}

/// Far longer than anything here takes: a test that hits it hangs.
pub const PATIENCE_SECONDS: i64 = 20;

impl Queue<'_> {
    /// Offers a request in descriptors `slot * 3` on, and kicks. Its data lie in a page of the slot's own.
    pub fn send(&mut self, slot: u16, kind: u32, sector: u64, out: &[u8], in_bytes: u32) {
        let guest = self.driver.guest();
        let page = self.page(slot);
        guest.write(page, &RequestHeader { kind, priority: self.priority, sector }.to_bytes());
        guest.write(page + 16, &[0xff]);
        guest.write(page + 0x1000, out);
        let mut buffers = vec![(page, 16, false)];
        if !out.is_empty() {
            buffers.push((page + 0x1000, out.len() as u32, false));
        }
        if in_bytes > 0 {
            buffers.push((page + 0x1000, in_bytes, true));
        }
        buffers.push((page + 16, 1, true));
        let first = slot * 3;
        self.driver.put_chain(&[first, first + 1, first + 2], &buffers);
        self.driver.offer(first);
        self.driver.publish();
        self.kick.write(1).unwrap();
    }

    fn page(&self, slot: u16) -> u64 {
        self.buffers + u64::from(slot) * 0x4000
    }

    /// Waits for the next used entries, sleeping on the call descriptor as a guest does.
    pub fn wait(&mut self) -> Vec<(u32, u32)> {
        loop {
            self.driver.want_next();
            let used = self.driver.take_used();
            if !used.is_empty() {
                return used;
            }
            assert!(is_readable(&self.call, PATIENCE_SECONDS), "no notification");
            self.call.read().unwrap();
        }
    }

    pub fn status(&self, slot: u16) -> u8 {
        self.driver.guest().read(self.page(slot) + 16, 1)[0]
    }

    pub fn data(&self, slot: u16, length: usize) -> Vec<u8> {
        self.driver.guest().read(self.page(slot) + 0x1000, length)
    }

    /// One request from beginning to end: its status and what it read.
    pub fn request(&mut self, kind: u32, sector: u64, out: &[u8], in_bytes: u32) -> (u8, Vec<u8>) {
        self.send(0, kind, sector, out, in_bytes);
        assert_eq!(self.wait().len(), 1);
        (self.status(0), self.data(0, in_bytes as usize))
    }
}

/// What a guest leaves out that knows nothing of caches.
pub const NO_CACHE: u64 = f::FLUSH | f::CONFIG_WCE;
