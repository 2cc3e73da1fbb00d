//! Another project's driver on our device: the crate `virtio-driver`, over split and packed rings.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use memory::{IoBuf, Mapping};
use ringdisk_export_vhost_user::ExportOptions;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use support::Server;
use support::disk::{DISK_BYTES, MemDisk};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags, virtio_blk_max_queues};

const BLOCK: usize = 4096;
const DEPTH: usize = 8;
/// Requests fit into none of the rings twice, so that all of them wrap.
const SIZE: u16 = 32;
const ROUNDS: u64 = 60;
/// FLUSH and WRITE_ZEROES.
const BLK_FEATURES: u64 = 1 << 9 | 1 << 14;

/// Carries a byte for each block that reads must find.
struct Story<'a> {
    queue: VirtioBlkQueue<'a, usize>,
    kick: Box<dyn virtio_driver::QueueNotifier>,
    call: Arc<virtio_driver::EventFd>,
    mapping: Arc<Mapping>,
    expected: Vec<u8>,
}

impl Story<'_> {
    fn slot(&self, slot: usize) -> IoBuf {
        IoBuf::in_mapping(&self.mapping, slot * BLOCK, BLOCK, Box::new(())).unwrap()
    }

    fn address(&self, slot: usize) -> *mut u8 {
        self.mapping.as_ptr().as_ptr().wrapping_add(slot * BLOCK)
    }

    /// Submits one request for block `block` with the memory of `slot`.
    fn submit(&mut self, choice: u64, slot: usize, block: usize) {
        let (offset, address) = ((block * BLOCK) as u64, self.address(slot));
        let fill = (choice >> 8) as u8;
        match choice % 5 {
            0 | 1 => {
                self.slot(slot).whole().fill(fill);
                self.expected[block] = fill;
                // SAFETY: the mapping holds the slot until the test's end.
                unsafe { self.queue.write_raw(offset, address, BLOCK, slot) }.unwrap();
            }
            2 => {
                self.expected[block] = 0;
                self.queue.write_zeroes(offset, BLOCK as u64, true, slot).unwrap();
            }
            3 => self.queue.flush(slot).unwrap(),
            _ => {
                self.slot(slot).whole().fill(!self.expected[block]);
                // SAFETY: as above; nobody looks at the slot before the request has ended.
                unsafe { self.queue.read_raw(offset, address, BLOCK, slot) }.unwrap();
            }
        }
    }

    fn wait(&mut self, mut left: usize) -> Vec<i32> {
        let mut results = vec![i32::MIN; DEPTH];
        self.kick.notify().unwrap();
        while left > 0 {
            for done in self.queue.completions() {
                results[done.context] = done.ret;
                left -= 1;
            }
            if left > 0 {
                self.call.read().unwrap();
            }
        }
        results
    }

    fn run(&mut self, what: &str) {
        let blocks = DISK_BYTES as usize / BLOCK;
        for round in 0..ROUNDS {
            let choices: Vec<u64> = (0..DEPTH as u64).map(|slot| mix(round * 100 + slot)).collect();
            for (slot, choice) in choices.iter().enumerate() {
                // Requests of a round touch blocks of their own.
                self.submit(*choice, slot, (round as usize * 3 + slot) % blocks);
            }
            let results = self.wait(DEPTH);
            assert_eq!(results, [0; DEPTH], "{what}, round {round}");
            for (slot, _) in choices.iter().enumerate().filter(|(_, choice)| **choice % 5 == 4) {
                let block = (round as usize * 3 + slot) % blocks;
                let expected = vec![self.expected[block]; BLOCK];
                assert!(self.slot(slot).whole().to_vec() == expected, "{what}, round {round}, block {block}");
            }
        }
    }
}

/// Numbers that look random.
fn mix(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 16
}

fn carries_data(features: VirtioFeatureFlags) {
    let mut options = ExportOptions::default();
    options.packed = true;
    let server = Server::start_with(MemDisk::new(), options);
    let what = format!("{features:?}");
    let mut transport: Box<VirtioBlkTransport> =
        Box::new(VhostUser::new(server.socket.to_str().unwrap(), features.bits() | BLK_FEATURES).unwrap());
    assert_eq!(virtio_blk_max_queues(transport.as_ref()).unwrap(), 1, "it does not ask for several queues");
    let config = transport.get_config().unwrap();
    assert_eq!(u64::from(config.capacity), DISK_BYTES / 512);
    let mut queue = VirtioBlkQueue::<usize>::setup_queues(transport.as_mut(), 1, SIZE).unwrap().remove(0);
    queue.set_used_notif_enabled(true);
    let (file, mapping) = Mapping::anonymous_file(c"independent", DEPTH * BLOCK).unwrap();
    let address = mapping.as_ptr().as_ptr().addr();
    transport.map_mem_region(address, DEPTH * BLOCK, file.as_raw_fd(), 0).unwrap();
    let (kick, call) = (transport.get_submission_notifier(0), transport.get_completion_fd(0));
    let expected = vec![0; DISK_BYTES as usize / BLOCK];
    let mut story = Story { queue, kick, call, mapping: Arc::new(mapping), expected };
    story.run(&what);
    // Past the end: an error of that request alone. Over packed rings that driver wants failed reads to be as long as good
    // ones, and would panic: the device rightly says that it wrote nothing.
    if !features.contains(VirtioFeatureFlags::RING_PACKED) {
        let address = story.address(0);
        // SAFETY: as above.
        unsafe { story.queue.read_raw(DISK_BYTES, address, BLOCK, 0) }.unwrap();
        story.queue.flush(1).unwrap();
        let results = story.wait(2);
        assert!(results[0] < 0 && results[1] == 0, "{what}: {results:?}");
    }
    let bytes = server.disk.bytes.lock().unwrap();
    for (block, expected) in story.expected.iter().enumerate() {
        assert!(bytes[block * BLOCK..][..BLOCK].iter().all(|byte| byte == expected), "{what}, block {block}");
    }
}

#[test]
fn a_driver_of_another_project_reads_what_it_wrote_over_every_kind_of_ring() {
    use VirtioFeatureFlags as F;
    for layout in [F::empty(), F::RING_PACKED] {
        for ring in [F::empty(), F::RING_EVENT_IDX, F::RING_INDIRECT_DESC, F::RING_EVENT_IDX | F::RING_INDIRECT_DESC] {
            carries_data(F::VERSION_1 | layout | ring);
        }
    }
}
