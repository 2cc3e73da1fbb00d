//! Clients whose requests wait for limits when their daemon ends in order, or their monitor stops the ring: all get their
//! answers, and nobody gets an error.

mod common;
#[path = "hostile/ground.rs"]
#[allow(dead_code)]
mod ground;
#[path = "../../../fuzz/src/nbd/peer.rs"]
#[allow(dead_code)]
mod peer;
#[path = "hostile/wire.rs"]
#[allow(dead_code)]
mod wire;

use common::{PATIENCE, start};
use drive::{DriveFormat, DriveOptions, FilterOptions, ThrottleOptions};
use ground::{Desc, Ground, INDIRECT, Ring, chained, header};
use image::{Rate, ThrottleLimits};
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use nbd_wire::request::Request;
use ringdisk_daemon::{Daemon, NbdAddress, NbdOptions};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::{Wire, code, words32};

const SECTOR: usize = 512;
const SIZE: u16 = 256;
const READ: u32 = 0;

/// What a sector of the disk holds.
fn sector(index: u64) -> Vec<u8> {
    index.to_le_bytes().repeat(SECTOR / 8)
}

/// A raw disk and its socket, with a filter.
fn disk(dir: &Path, filter: Option<FilterOptions>) -> DriveOptions {
    let path = dir.join("disk");
    std::fs::write(&path, (0..u64::from(SIZE)).flat_map(sector).collect::<Vec<u8>>()).unwrap();
    let mut drive = DriveOptions::of_file(path);
    (drive.disk.format, drive.disk.filters) = (Some(DriveFormat::Raw), filter.into_iter().collect());
    (drive.export.queues, drive.export.socket) = (Some(1), Some(socket(dir)));
    drive
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("socket")
}

/// Waits until the guest's requests, or those of NBD clients, have reached the disk.
fn wait_for_requests(daemon: &Daemon, count: u64) {
    let deadline = Instant::now() + PATIENCE;
    while daemon.exports().iter().flat_map(|export| &export.rings).map(|ring| ring.requests).sum::<u64>() < count {
        assert!(Instant::now() < deadline, "the daemon does not take the requests");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A guest with one ring, full of reads, one of each sector.
struct Guest {
    ground: Ground,
    ring: Ring,
}

impl Guest {
    fn place(head: u16) -> u64 {
        (1 << 20) + u64::from(head) * 0x800
    }

    fn new() -> Self {
        let (ground, mut ring) = (Ground::new(4 << 20), Ring::new(0, SIZE, 0));
        for head in 0..SIZE {
            let at = Self::place(head);
            ground.write(at, &header(READ, head.into()));
            ground.write(at + 0x40, &[0xff]);
            ground.write(at + 0x80, &chained(&[(at, 16, false), (at + 0x100, 512, true), (at + 0x40, 1, true)]));
            ring.put(&ground, head, Desc { address: at + 0x80, length: 48, flags: INDIRECT, next: 0 });
            ring.offer(&ground, head);
        }
        Self { ground, ring }
    }

    fn used(&self) -> u16 {
        self.ground.read_u16(self.ring.used + 2)
    }

    fn connect(&mut self, dir: &Path) -> Wire {
        let wire = Wire::connect(&socket(dir)).unwrap();
        wire.negotiate(0).unwrap();
        self.ground.share(&wire).unwrap();
        let offered = std::mem::take(&mut self.ring.avail_index);
        self.ring.start(&wire).unwrap();
        self.ring.avail_index = offered;
        self.ring.kick(&self.ground);
        wire
    }

    /// Waits for all answers, which are to be right.
    fn finish(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.used() < SIZE {
            assert!(Instant::now() < deadline, "{} answers", self.used());
            self.ring.wait(1);
        }
        let mut heads = self.ring.take_used(&self.ground);
        heads.sort_unstable();
        assert!(heads.iter().copied().eq(0..SIZE), "each request is answered once");
        for head in heads {
            let at = Self::place(head);
            assert_eq!(self.ground.read(at + 0x40, 1), [0], "read {head} failed");
            assert!(self.ground.read(at + 0x100, SECTOR) == sector(head.into()), "read {head}");
        }
    }
}

fn one_a_second() -> FilterOptions {
    let limits = ThrottleLimits::default().with(|limits| limits.total.requests = Rate::of(1));
    FilterOptions::Throttle(ThrottleOptions::of_limits(limits))
}

#[test]
fn a_guest_whose_requests_wait_for_limits_gets_its_answers_when_the_daemon_ends() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    daemon.add(&disk(dir.path(), Some(one_a_second()))).unwrap();
    let mut guest = Guest::new();
    let wire = guest.connect(dir.path());
    wait_for_requests(&daemon, SIZE.into());
    daemon.shutdown().unwrap();
    assert_eq!(guest.used(), SIZE, "requests without an answer");
    guest.finish();
    drop(wire);
}

/// A guest that resets its device must not pass its limits so. An operator ends the wait.
#[test]
fn a_monitor_that_stops_a_ring_waits_for_its_limits_until_they_are_set_to_none() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let (node, _) = daemon.add(&disk(dir.path(), Some(one_a_second()))).unwrap();
    let mut guest = Guest::new();
    let wire = guest.connect(dir.path());
    wait_for_requests(&daemon, SIZE.into());
    let base = std::thread::scope(|scope| {
        let asking = scope.spawn(|| wire.ask(code::GET_VRING_BASE, &words32(&[0, 0])).unwrap());
        for throttle in daemon.throttles(node).unwrap() {
            throttle.group().set_limits(ThrottleLimits::default());
        }
        asking.join().unwrap()
    });
    assert_eq!(base, words32(&[0, SIZE.into()]), "the ring goes on after all that it has taken");
    guest.finish();
    drop(wire);
    daemon.shutdown().unwrap();
}

#[test]
fn an_nbd_client_whose_requests_wait_for_limits_gets_its_answers_when_the_daemon_ends() {
    const REQUESTS: u64 = 64;
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let node = daemon.add_disk(&disk(dir.path(), Some(one_a_second())).disk).unwrap();
    daemon.add_nbd_export(node, &NbdOptions::at(NbdAddress::Unix(socket(dir.path())))).unwrap();
    let mut stream = UnixStream::connect(socket(dir.path())).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    peer::choose(&mut stream, Style::Simple).unwrap();
    for cookie in 0..REQUESTS {
        let mut said = Vec::new();
        let offset = cookie * SECTOR as u64;
        Request { flags: 0, command: command::READ, cookie, offset, length_bytes: SECTOR as u64 }.put(&mut said, false);
        stream.write_all(&said).unwrap();
    }
    wait_for_requests(&daemon, REQUESTS);
    let ending = std::thread::spawn(move || daemon.shutdown());
    for _ in 0..REQUESTS {
        let (mut head, mut data) = ([0; 16], [0; SECTOR]);
        stream.read_exact(&mut head).unwrap();
        assert_eq!(head[4..8], [0; 4], "a read failed");
        stream.read_exact(&mut data).unwrap();
        let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
        assert!(data[..] == sector(cookie)[..], "read {cookie}");
    }
    ending.join().unwrap().unwrap();
}
