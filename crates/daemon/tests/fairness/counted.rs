//! The same without a clock: a guest fills its queue, and when the first of its requests has ended, another guest asks for
//! something. How many more requests of the first end before the other has its answer? What a busy machine adds to that
//! counts against no attempt: only the best of several has to be good.

use super::ground::{Desc, Ground, INDIRECT, Ring, chained, header};
use super::wire::{Wire, code, words64};
use super::{GROUND_BYTES, QUEUE_SIZE, READ, Setup, area, one_table};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Of the whole queue, a turn takes much less than this.
const ENDED_MAX: u16 = QUEUE_SIZE / 8;
const ATTEMPTS: usize = 50;
const PATIENCE: Duration = Duration::from_secs(60);

/// A guest with one ring.
struct Guest {
    ground: Ground,
    ring: Ring,
    _wire: Wire,
}

impl Guest {
    fn new(socket: &Path, set_up: impl FnOnce(&Wire, &Ground)) -> Self {
        let wire = Wire::connect(socket).unwrap();
        wire.negotiate(0).unwrap();
        let ground = Ground::new(GROUND_BYTES);
        ground.share(&wire).unwrap();
        set_up(&wire, &ground);
        let ring = Ring::new(0, QUEUE_SIZE, 0);
        ring.start(&wire).unwrap();
        Self { ground, ring, _wire: wire }
    }

    /// How many requests have ended since the last count, once `enough` says so.
    fn ended(&mut self, enough: impl Fn(u16) -> bool) -> u16 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let count = self.ground.read_u16(self.ring.used + 2).wrapping_sub(self.ring.used_index);
            if enough(count) {
                return count;
            }
            assert!(Instant::now() < deadline, "{count} requests have ended");
            std::hint::spin_loop();
        }
    }
}

/// The fewest requests of a full queue that end before the other guest has its answer.
fn fewest(socket: &Path, quiet: &Path, set_up: impl FnOnce(&Wire, &Ground), put: impl Fn(&Ground, &Ring, u16)) -> u16 {
    let mut nasty = Guest::new(socket, set_up);
    let mut quiet = Guest::new(quiet, |_, _| {});
    let at = area(0);
    quiet.ground.write(at, &header(READ, 0));
    quiet.ground.write(at + 0x300, &chained(&[(at, 16, false), (at + 0x1000, 512, true), (at + 0x80, 1, true)]));
    quiet.ring.put(&quiet.ground, 0, Desc { address: at + 0x300, length: 48, flags: INDIRECT, next: 0 });
    let mut fewest = QUEUE_SIZE;
    for _ in 0..ATTEMPTS {
        for head in 0..QUEUE_SIZE {
            put(&nasty.ground, &nasty.ring, head);
            nasty.ring.offer(&nasty.ground, head);
        }
        nasty.ring.kick(&nasty.ground);
        let before = nasty.ended(|count| count > 0);
        quiet.ring.offer(&quiet.ground, 0);
        quiet.ring.kick(&quiet.ground);
        quiet.ended(|count| count == 1);
        fewest = fewest.min(nasty.ended(|_| true).max(before));
        nasty.ended(|count| count == QUEUE_SIZE);
        nasty.ring.take_used(&nasty.ground);
        quiet.ring.take_used(&quiet.ground);
        if fewest <= ENDED_MAX {
            break;
        }
    }
    fewest
}

#[test]
fn few_requests_of_a_guest_end_before_another_guest_has_its_answer() {
    const REGIONS: u64 = 250;
    let far = |index: u64| (1 << 40) + (index << 21);
    let setup = Setup::new(64 << 10);
    let add = |wire: &Wire, ground: &Ground| {
        for index in 0..REGIONS {
            let mut body = words64(&[0]);
            body.extend(words64(&[far(index), 4096, far(index), GROUND_BYTES / 2 + 4096 * index]));
            wire.tell(code::ADD_MEM_REG, &body, &[ground.file.as_fd()]).unwrap();
        }
    };
    let scattered = fewest(&setup.nasty, &setup.quiet, add, |ground, ring, head| {
        let at = area(0);
        ground.write(at, &header(READ, 0));
        let mut buffers = vec![(at, 16, false)];
        buffers.extend((0..1021).map(|index| (far(index * 97 % REGIONS) + index, 1, true)));
        buffers.extend([(at + 32, 3, true), (at + 64, 1, true)]);
        one_table(ground, ring, head, &buffers);
    });
    assert!(scattered <= ENDED_MAX, "{scattered} requests of 1,024 pieces ended first");
    setup.daemon.shutdown().unwrap();
}
