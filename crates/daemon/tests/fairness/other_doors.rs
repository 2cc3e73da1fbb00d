//! Nasty guests of other kinds: with a packed ring, a client of NBD, and images whose clusters are compressed, on a file
//! of this host and at an NBD server.

#[path = "../../../../fuzz/src/nbd/peer.rs"]
#[allow(dead_code)]
mod peer;

use super::ground::{Ground, INDIRECT, WRITE as WRITABLE, chained, header};
use super::wire::{Wire, code, words32, words64};
use super::{Desc, GROUND_BYTES, NASTY_BYTES, QUEUE_SIZE, READ, Setup, add_quiet, area, keep_full, start};
use drive::{DriveFormat, DriveOptions};
use image::FileName;
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use nbd_wire::request::Request;
use peer::choose;
use ringdisk_daemon::{Daemon, NbdAddress, NbdOptions};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Descriptor flags of a packed ring.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// One packed ring whose requests are one descriptor each.
struct PackedRing {
    index: u32,
    at: u64,
    avail: (u16, bool),
    used: (u16, bool),
    kick: OwnedFd,
    call: OwnedFd,
}

impl PackedRing {
    fn start(index: u32, at: u64, wire: &Wire) -> Self {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let ring = Self { index, at, avail: (0, true), used: (0, true), kick: event(), call: event() };
        let driver_event = at + 16 * u64::from(QUEUE_SIZE);
        wire.tell(code::SET_VRING_NUM, &words32(&[index, u32::from(QUEUE_SIZE)]), &[]).unwrap();
        wire.tell(code::SET_VRING_BASE, &words32(&[index, 0x8000_8000]), &[]).unwrap();
        let mut body = words32(&[index, 0]);
        body.extend(words64(&[at, driver_event + 4, driver_event, 0]));
        wire.tell(code::SET_VRING_ADDR, &body, &[]).unwrap();
        let index = words64(&[u64::from(ring.index)]);
        wire.tell(code::SET_VRING_CALL, &index, &[ring.call.as_fd()]).unwrap();
        wire.tell(code::SET_VRING_KICK, &index, &[ring.kick.as_fd()]).unwrap();
        wire.tell(code::SET_VRING_ENABLE, &words32(&[ring.index, 1]), &[]).unwrap();
        ring
    }

    fn next((index, odd): (u16, bool)) -> (u16, bool) {
        if index + 1 == QUEUE_SIZE { (0, !odd) } else { (index + 1, odd) }
    }

    /// Offers the request that the table describes, as `id`.
    fn offer(&mut self, ground: &Ground, table: u64, length: u32, id: u16) {
        let at = self.at + 16 * u64::from(self.avail.0);
        let mut bytes = table.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        ground.write(at, &bytes);
        // The flags say that the rest is there.
        fence(Ordering::SeqCst);
        ground.write(at + 14, &(INDIRECT | if self.avail.1 { AVAIL } else { USED }).to_le_bytes());
        self.avail = Self::next(self.avail);
    }

    /// The ids that have come back.
    fn take_used(&mut self, ground: &Ground) -> Vec<u16> {
        let mut ids = Vec::new();
        while ids.len() < usize::from(QUEUE_SIZE) {
            let at = self.at + 16 * u64::from(self.used.0);
            let flags = ground.read_u16(at + 14);
            if (flags & AVAIL != 0) != self.used.1 || (flags & USED != 0) != self.used.1 {
                break;
            }
            ids.push(ground.read_u16(at + 12));
            self.used = Self::next(self.used);
        }
        ids
    }

    fn kick(&self) {
        // Full if nobody reads it, which has told them already.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    fn wait(&self) {
        let limit = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let _ = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&limit));
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }
}

#[test]
fn a_guest_with_a_packed_ring_full_of_long_reads_does_not_hold_up_another() {
    let setup = Setup::with(64 << 10, |nasty| nasty.export.shown.packed = Some(true));
    setup.compare("packed long reads", |socket, stop| {
        let wire = Wire::connect(socket).unwrap();
        assert!(wire.negotiate(0).unwrap() & 1 << 34 != 0, "packed rings are not on offer");
        let ground = Ground::new(GROUND_BYTES);
        ground.share(&wire).unwrap();
        let at = area(0);
        ground.write(at, &header(READ, 0));
        // The same memory again and again: 256 MiB a request.
        let mut buffers = vec![(at, 16, 0)];
        buffers.extend((0..64).map(|_| (GROUND_BYTES / 2, (GROUND_BYTES / 2) as u32, WRITABLE)));
        buffers.push((at + 32, 1, WRITABLE));
        let entry = |(address, length, flags): &(u64, u32, u16)| {
            let id_and_flags = [0_u16.to_le_bytes(), flags.to_le_bytes()].concat();
            [&address.to_le_bytes()[..], &length.to_le_bytes(), &id_and_flags].concat()
        };
        let table: Vec<u8> = buffers.iter().flat_map(entry).collect();
        ground.write(at + 0x8_0000, &table);
        let mut ring = PackedRing::start(0, 0, &wire);
        let mut free: Vec<u16> = (0..QUEUE_SIZE).collect();
        while !stop.load(Ordering::Relaxed) {
            match free.is_empty() {
                true => ring.wait(),
                false => {
                    for id in free.drain(..) {
                        ring.offer(&ground, at + 0x8_0000, table.len() as u32, id);
                    }
                    ring.kick();
                }
            }
            free = ring.take_used(&ground);
        }
    });
}

/// Keeps `in_flight` reads of an NBD export in flight, until it is told to stop.
fn keep_reading(socket: &Path, stop: &AtomicBool, in_flight: u64, length_bytes: u64) {
    let mut stream = UnixStream::connect(socket).unwrap();
    choose(&mut stream, Style::Simple).unwrap();
    let ask = |stream: &mut UnixStream, cookie: u64| {
        let offset = cookie * length_bytes % (NASTY_BYTES - length_bytes);
        let mut said = Vec::new();
        Request { flags: 0, command: command::READ, cookie, offset, length_bytes }.put(&mut said, false);
        stream.write_all(&said).unwrap();
    };
    (0..in_flight).for_each(|cookie| ask(&mut stream, cookie));
    let mut part = vec![0; 1 << 20];
    let mut asked = in_flight;
    while !stop.load(Ordering::Relaxed) {
        let mut head = [0; 16];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(head[4..8], [0; 4], "a read failed");
        let mut left = length_bytes as usize;
        while left > 0 && !stop.load(Ordering::Relaxed) {
            let step = left.min(part.len());
            stream.read_exact(&mut part[..step]).unwrap();
            left -= step;
        }
        if left == 0 {
            ask(&mut stream, asked);
            asked += 1;
        }
    }
}

#[test]
fn an_nbd_client_with_many_long_reads_in_flight_does_not_hold_up_a_guest() {
    Setup::new(64 << 10).with_nbd().compare("NBD client", |socket, stop| keep_reading(socket, stop, 256, 32 << 20));
}

#[test]
fn an_nbd_client_with_many_short_reads_in_flight_does_not_hold_up_a_guest() {
    Setup::new(64 << 10).with_nbd().compare("NBD client, short", |socket, stop| keep_reading(socket, stop, 1024, 512));
}

/// The compressed image's disk, and its clusters.
pub(super) const PACKED_BYTES: u64 = 16 << 20;
pub(super) const PACKED_CLUSTER: u64 = 256 << 10;

/// Makes a compressed image of large clusters; `None` where nothing can make one.
fn packed_image(directory: &Path) -> Option<PathBuf> {
    let (raw, packed) = (directory.join("raw"), directory.join("packed"));
    // It shrinks to a third, and takes the processor long.
    let mut state = 1_u64;
    let word = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 60) as u8) * 7
    };
    std::fs::write(&raw, (0..PACKED_BYTES).map(word).collect::<Vec<u8>>()).unwrap();
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=256k"]).args([&raw, &packed]);
    match convert.status() {
        Ok(status) => assert!(status.success(), "qemu-img: {status}"),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "qemu-img: {error}; install the package qemu-utils");
            testkit::skipped("a compressed image takes qemu-img");
            return None;
        }
    }
    Some(packed)
}

/// A null disk, and one of compressed clusters in this file.
fn setup_of_packed(dir: tempfile::TempDir, file: FileName) -> Setup {
    let at = |name: &str| dir.path().join(name);
    let daemon = start(1);
    add_quiet(&daemon, &at("quiet.sock"));
    let mut nasty = DriveOptions::of_file(file);
    (nasty.disk.format, nasty.disk.read_only) = (Some(DriveFormat::Qcow2), true);
    (nasty.export.queues, nasty.export.socket) = (Some(super::QUEUES as u16), Some(at("nasty.sock")));
    let (node, _) = daemon.add(&nasty).unwrap();
    let (quiet, nasty) = (at("quiet.sock"), at("nasty.sock"));
    Setup { daemon, node, quiet, nasty, _device: None, dir }
}

/// Each request reads a little of another cluster, which is decompressed for it.
fn read_packed(socket: &Path, stop: &AtomicBool) {
    let mut turn = 0_u64;
    keep_full(
        socket,
        stop,
        |_, _| {},
        |ground, ring, head| {
            turn += 1;
            let at = area(ring.index) + u64::from(head % 256) * 0x800;
            ground.write(at, &header(READ, turn * PACKED_CLUSTER % PACKED_BYTES / 512));
            let buffers = [(at, 16, false), (GROUND_BYTES / 2, 4096, true), (at + 0x80, 1, true)];
            ground.write(at + 0x300, &chained(&buffers));
            ring.put(ground, head, Desc { address: at + 0x300, length: 48, flags: INDIRECT, next: 0 });
        },
    );
}

/// A compressed image on this host.
pub(super) fn setup_of_local() -> Option<Setup> {
    let dir = tempfile::tempdir().unwrap();
    let packed = packed_image(dir.path())?;
    Some(setup_of_packed(dir, packed.into()))
}

/// The same at an NBD server.
pub(super) fn setup_of_remote() -> Option<(Setup, Daemon)> {
    let dir = tempfile::tempdir().unwrap();
    let packed = packed_image(dir.path())?;
    let socket = dir.path().join("server");
    let server: Daemon = start(1);
    let mut file = DriveOptions::of_file(packed);
    (file.disk.format, file.disk.read_only) = (Some(DriveFormat::Raw), true);
    let node = server.add_disk(&file.disk).unwrap();
    server.add_nbd_export(node, &NbdOptions::at(NbdAddress::Unix(socket.clone()))).unwrap();
    let name = FileName::parse(format!("nbd+unix:///?socket={}", socket.display())).unwrap();
    Some((setup_of_packed(dir, name), server))
}

// `counted` has these two without a clock.
#[test]
#[ignore = "its workers need the processor: for a quiet machine"]
fn a_guest_that_reads_compressed_clusters_does_not_hold_up_another() {
    let Some(setup) = setup_of_local() else { return };
    setup.compare("compressed", read_packed);
}

#[test]
#[ignore = "its workers need the processor: for a quiet machine"]
fn a_guest_that_reads_compressed_clusters_at_an_nbd_server_does_not_hold_up_another() {
    let Some((setup, server)) = setup_of_remote() else { return };
    setup.compare("compressed at a server", read_packed);
    server.shutdown().unwrap();
}
